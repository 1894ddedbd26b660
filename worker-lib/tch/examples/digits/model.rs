//! The network: two convolutions and two dense layers, 38,282 parameters.
//!
//! All functions are smooth. With ReLU or max pooling, a difference in the last bit between one
//! rank and four could take another branch, and the losses would differ by 1e-2 instead of 1e-6.

use tch::{
    Kind, Tensor,
    nn::{self, Module},
};

use crate::data::{CLASSES, Images};

/// The batch size for testing.
const TEST_BATCH: i64 = 256;

/// The layers, in the order in which an image passes them.
#[derive(Debug)]
pub(crate) struct Model {
    conv1: nn::Conv2D,
    conv2: nn::Conv2D,
    dense1: nn::Linear,
    dense2: nn::Linear,
}

impl Model {
    /// Creates the layers' parameters under `path`.
    pub(crate) fn new(path: &nn::Path<'_>) -> Self {
        let padded = nn::ConvConfig { padding: 1, ..Default::default() };
        Self {
            conv1: nn::conv2d(path / "conv1", 1, 16, 3, padded),
            conv2: nn::conv2d(path / "conv2", 16, 32, 3, padded),
            dense1: nn::linear(path / "dense1", 32 * 4 * 4, 64, Default::default()),
            dense2: nn::linear(path / "dense2", 64, CLASSES, Default::default()),
        }
    }

    /// Scores of the ten digits: `[n, 1, 8, 8]` to `[n, 10]`.
    fn scores(&self, pixels: &Tensor) -> Tensor {
        let x = self.conv1.forward(pixels).gelu("none");
        let x = self.conv2.forward(&x).gelu("none").avg_pool2d_default(2);
        let x = self.dense1.forward(&x.flatten(1, -1)).gelu("none");
        self.dense2.forward(&x)
    }

    /// The sum of the images' cross entropies, not the mean: the sums of the shares add up to the
    /// sum of the batch, for any sizes of shares.
    pub(crate) fn summed_loss(&self, images: &Images) -> Tensor {
        self.scores(&images.pixels).cross_entropy_loss::<Tensor>(
            &images.digits,
            None,
            tch::Reduction::Sum,
            -100,
            0.0,
        )
    }

    /// The fraction of images whose digit gets the highest score, 0 to 1.
    pub(crate) fn accuracy(&self, images: &Images) -> anyhow::Result<f64> {
        let right = tch::no_grad(|| {
            let parts = images.pixels.split(TEST_BATCH, 0).into_iter();
            let digits = images.digits.split(TEST_BATCH, 0);
            parts
                .zip(digits)
                .map(|(pixels, digits)| {
                    let guess = self.scores(&pixels).argmax(-1, false);
                    i64::try_from(guess.eq_tensor(&digits).sum(Kind::Int64))
                })
                .sum::<Result<i64, _>>()
        })?;
        Ok(right as f64 / images.len() as f64)
    }
}
