//! Measures the time of a training step of ResNet-50 (161 tensors, 97.5 MiB of gradients) with
//! random images:
//!
//! ```text
//! gradwire run -H node1:1,node2:1 -- step_time --steps 10
//! ```
//!
//! Rank 0 prints the medians of the step and of the backward pass with the exchange.

use std::time::Instant;

use clap::Parser;
use gradwire_tch::{DistributedOptimizer, broadcast_parameters};
use gradwire_worker::Session;
use tch::{
    Device, Kind, Tensor,
    nn::{self, ModuleT, OptimizerConfig},
};

#[derive(Debug, Parser)]
struct Args {
    /// Steps to measure, after two warm-up steps.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Images on each rank.
    #[arg(long, default_value_t = 2)]
    batch: i64,
    /// Height and width of an image.
    #[arg(long, default_value_t = 64)]
    pixels: i64,
    /// Threads of a rank.
    #[arg(long, default_value_t = 1)]
    threads: i32,
}

/// A convolution with batch normalization.
fn convolution(
    path: &nn::Path<'_>,
    (from, to): (i64, i64),
    size: i64,
    stride: i64,
) -> nn::SequentialT {
    let config = nn::ConvConfig { stride, padding: size / 2, bias: false, ..Default::default() };
    nn::seq_t().add(nn::conv2d(path / "conv", from, to, size, config)).add(nn::batch_norm2d(
        path / "norm",
        to,
        Default::default(),
    ))
}

/// Three convolutions with a skip connection (He et al. 2015).
#[derive(Debug)]
struct Bottleneck {
    inside: nn::SequentialT,
    around: Option<nn::SequentialT>,
}

impl ModuleT for Bottleneck {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let around = self.around.as_ref().map(|around| around.forward_t(x, train));
        (self.inside.forward_t(x, train) + around.as_ref().unwrap_or(x)).relu()
    }
}

fn resnet50(path: &nn::Path<'_>) -> nn::SequentialT {
    let mut net = convolution(&(path / "first"), (3, 64), 7, 2)
        .add_fn(Tensor::relu)
        .add_fn(|x| x.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false));
    let mut inputs = 64;
    for (stage, (blocks, width)) in [(3, 64), (4, 128), (6, 256), (3, 512)].into_iter().enumerate()
    {
        for block in 0..blocks {
            let path = path / format!("layer{stage}") / block;
            let stride = if stage > 0 && block == 0 { 2 } else { 1 };
            let inside = nn::seq_t()
                .add(convolution(&(&path / "a"), (inputs, width), 1, 1))
                .add_fn(Tensor::relu)
                .add(convolution(&(&path / "b"), (width, width), 3, stride))
                .add_fn(Tensor::relu)
                .add(convolution(&(&path / "c"), (width, 4 * width), 1, 1));
            let around = (block == 0)
                .then(|| convolution(&(&path / "around"), (inputs, 4 * width), 1, stride));
            net = net.add(Bottleneck { inside, around });
            inputs = 4 * width;
        }
    }
    net.add_fn(|x| x.adaptive_avg_pool2d([1, 1]).flatten(1, -1)).add(nn::linear(
        path / "last",
        inputs,
        1000,
        Default::default(),
    ))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    tch::set_num_threads(args.threads);
    let session = Session::from_env()?;
    let store = nn::VarStore::new(Device::Cpu);
    let net = resnet50(&store.root());
    broadcast_parameters(&session, &store, 0)?;
    let inner = nn::Sgd::default().build(&store, 1e-6)?;
    let mut optimizer = DistributedOptimizer::new(&session, inner, &store, Default::default())?;
    tch::manual_seed(i64::from(session.rank()));
    let given =
        Tensor::randn([args.batch, 3, args.pixels, args.pixels], (Kind::Float, Device::Cpu));
    let (mut steps, mut exchanges) = (Vec::new(), Vec::new());
    for at in 0..args.steps.max(1) + 2 {
        session.barrier()?;
        let begin = Instant::now();
        let loss = net.forward_t(&given, true).square().mean(Kind::Float);
        let forward = begin.elapsed();
        optimizer.backward_step(&loss)?;
        let whole = begin.elapsed();
        if at >= 2 {
            steps.push(whole.as_secs_f64() * 1e3);
            exchanges.push((whole - forward).as_secs_f64() * 1e3);
        }
    }
    if session.rank() == 0 {
        println!(
            "step {:.1} ms, of it after the forward pass {:.1} ms",
            median(steps),
            median(exchanges)
        );
    }
    session.shutdown()?;
    Ok(())
}
