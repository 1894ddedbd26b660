//! Trains a small convolutional network on 1,437 images of handwritten digits and tests it with
//! 360 others, in one process or as the ranks of a job.
//!
//! ```text
//! eval "$(scripts/libtorch.sh)"
//! cargo build --release -p gradwire-tch --example digits
//! target/release/examples/digits                           # one process
//! gradwire run -np 4 -- target/release/examples/digits     # four, the same losses within 1e-4
//! ```
//!
//! Both give the same losses because the seed determines split, order and batches; each rank takes
//! its share of every batch and divides the *sum* of its images' losses by the size of the whole
//! batch; and the ranks' gradients are added up. This also works for a shorter last batch.
//!
//! - `data`: the images, their split and order
//! - `model`: the network
//! - `ranks`: one process or a job
//! - `progress`: the progress bar
//! - `report`: the report at the end

mod data;
mod model;
mod progress;
mod ranks;
mod report;

use std::{fs, io, path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context, ensure};
use clap::Parser;
use tch::{
    Device, Kind,
    nn::{self, OptimizerConfig},
};

use crate::{model::Model, ranks::Ranks};

/// Trains a network on handwritten digits.
#[derive(Debug, Parser)]
struct Arguments {
    /// The number of times that each image is seen.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    epochs: u32,
    /// Images per step, over all ranks.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    global_batch: u32,
    /// Learning rate.
    #[arg(long, default_value_t = 0.05)]
    lr: f64,
    /// Determines the split, the initial parameters and the order of the images.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u64).range(..1 << 62))]
    seed: u64,
    /// Rank 0 writes the losses of all steps, the accuracy and the hashes to this file.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match train(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn train(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        arguments.lr.is_finite() && arguments.lr > 0.0,
        "--lr must be a number above 0, but is {}",
        arguments.lr
    );
    // Ranks share the cores of a machine. One thread each also keeps the order of sums fixed.
    tch::set_num_threads(1);
    let ranks = Ranks::from_env()?;
    let (train, test) = data::load(arguments.seed)?;

    tch::manual_seed(arguments.seed as i64);
    let parameters = nn::VarStore::new(Device::Cpu);
    let model = Model::new(&parameters.root());
    ranks.agree_on(&parameters)?;
    let optimizer = nn::sgd(0.9, 0.0, 1e-4, true).build(&parameters, arguments.lr)?;
    let mut stepper = ranks.stepper(optimizer, &parameters)?;

    let start = Instant::now();
    let images = train.len() as u64 * u64::from(arguments.epochs);
    let bar = progress::bar(images, ranks.rank(), ranks.size() > 1);
    let mut losses = Vec::new();
    for epoch in 1..=arguments.epochs {
        bar.set_prefix(format!("epoch {epoch:>2}/{}", arguments.epochs));
        let order = data::epoch_order(train.len(), arguments.seed, epoch);
        for batch in order.chunks(arguments.global_batch as usize) {
            let share = data::share(batch.len(), ranks.rank(), ranks.size());
            let mine = train.select(&batch[share]);
            let loss = model.summed_loss(&mine) / batch.len() as f64;
            stepper.backward_step(&loss)?;
            let loss = ranks.sum("loss", f64::try_from(loss.to_kind(Kind::Double))?)?;
            ensure!(loss.is_finite(), "the loss is {loss} in epoch {epoch}; try a smaller --lr");
            losses.push(loss);
            bar.set_message(format!("loss {loss:.4}"));
            bar.inc(batch.len() as u64);
        }
    }
    bar.finish();
    let seconds = start.elapsed().as_secs_f64();

    let hashes = ranks.gather("parameter hash", report::hash(&parameters)?)?;
    if ranks.rank() == 0 {
        let accuracy = model.accuracy(&test)?;
        let report = report::Report {
            accuracy,
            tested: test.len(),
            seconds,
            images,
            bytes_given: ranks.bytes_given(),
            hashes: &hashes,
        };
        report.write(&mut io::stdout().lock()).context("the report can't be written")?;
        if let Some(path) = &arguments.json {
            let json = report.json(&losses).to_string();
            fs::write(path, json)
                .with_context(|| format!("{} can't be written", path.display()))?;
        }
    }
    ensure!(
        hashes.iter().all(|hash| *hash == hashes[0]),
        "the ranks' parameters differ (hashes {})",
        report::hex(&hashes)
    );
    ranks.leave()?;
    Ok(())
}
