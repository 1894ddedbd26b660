//! The images, from the file next to this one. Only the seed determines their split and order, so
//! all ranks, and runs with other numbers of ranks, see the same batches.

use std::{io::Read, ops::Range};

use anyhow::{Context, ensure};
use flate2::read::GzDecoder;
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng, SeedableRng},
};
use tch::{Kind, Tensor};

/// Rows and columns of an image.
pub(crate) const SIDE: usize = 8;
/// The number of different digits.
pub(crate) const CLASSES: i64 = 10;
const PIXELS: usize = SIDE * SIDE;
const BRIGHTEST: u8 = 16;
const TEST_IMAGES: usize = 360;

/// Images and their digits.
#[derive(Debug)]
pub(crate) struct Images {
    /// f32, `[n, 1, 8, 8]`, 0 to 1.
    pub(crate) pixels: Tensor,
    /// i64, `[n]`, 0 to 9.
    pub(crate) digits: Tensor,
}

impl Images {
    fn of(rows: &[[u8; PIXELS + 1]]) -> Self {
        let pixels: Vec<f32> = rows
            .iter()
            .flat_map(|row| row[..PIXELS].iter().map(|&p| f32::from(p) / f32::from(BRIGHTEST)))
            .collect();
        let digits: Vec<i64> = rows.iter().map(|row| i64::from(row[PIXELS])).collect();
        let side = SIDE as i64;
        Self {
            pixels: Tensor::from_slice(&pixels).view([rows.len() as i64, 1, side, side]),
            digits: Tensor::from_slice(&digits),
        }
    }

    /// The number of images.
    pub(crate) fn len(&self) -> usize {
        self.digits.size()[0] as usize
    }

    /// The images with the given numbers, in that order.
    pub(crate) fn select(&self, numbers: &[i64]) -> Self {
        let numbers = Tensor::from_slice(numbers).to_kind(Kind::Int64);
        Self {
            pixels: self.pixels.index_select(0, &numbers),
            digits: self.digits.index_select(0, &numbers),
        }
    }
}

/// Reads the file and splits it into images for training and for testing.
pub(crate) fn load(seed: u64) -> anyhow::Result<(Images, Images)> {
    let mut text = String::new();
    GzDecoder::new(include_bytes!("../../../../python/gradwire/demo/optdigits.csv.gz").as_slice())
        .read_to_string(&mut text)
        .context("optdigits.csv.gz can't be unpacked")?;
    let mut rows = parse(&text)?;
    ensure!(rows.len() > TEST_IMAGES, "optdigits.csv.gz has only {} images", rows.len());
    Random::new(seed, 0).shuffle(&mut rows);
    let (test, train) = rows.split_at(TEST_IMAGES);
    Ok((Images::of(train), Images::of(test)))
}

fn parse(text: &str) -> anyhow::Result<Vec<[u8; PIXELS + 1]>> {
    let mut rows = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let numbers: Vec<u8> = line
            .split(',')
            .map(|field| field.parse().with_context(|| format!("{field:?} is not a number")))
            .collect::<anyhow::Result<_>>()
            .with_context(|| format!("optdigits.csv.gz, line {}", number + 1))?;
        let row: [u8; PIXELS + 1] = numbers.try_into().map_err(|n: Vec<u8>| {
            anyhow::anyhow!("optdigits.csv.gz, line {}: {} fields, not 65", number + 1, n.len())
        })?;
        ensure!(
            row[..PIXELS].iter().all(|&p| p <= BRIGHTEST) && i64::from(row[PIXELS]) < CLASSES,
            "optdigits.csv.gz, line {}: a pixel above 16 or a digit above 9",
            number + 1
        );
        rows.push(row);
    }
    Ok(rows)
}

/// The order of `images` images in an epoch, counted from 1.
pub(crate) fn epoch_order(images: usize, seed: u64, epoch: u32) -> Vec<i64> {
    let mut order: Vec<i64> = (0..images as i64).collect();
    Random::new(seed, u64::from(epoch)).shuffle(&mut order);
    order
}

/// A rank's part of a batch of `images`: consecutive, in rank order, with nearly equal sizes.
pub(crate) fn share(images: usize, rank: usize, size: usize) -> Range<usize> {
    images * rank / size..images * (rank + 1) / size
}

/// Random numbers that do not depend on versions of libraries.
struct Random(SplitMix64);

impl Random {
    fn new(seed: u64, stream: u64) -> Self {
        let seed = seed ^ stream.wrapping_mul(0xd134_2543_de82_ef95);
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}
