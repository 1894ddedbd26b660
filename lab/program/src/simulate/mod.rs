//! `gradwire simulate`: the time of operations on a cluster described by a file, published results
//! reproduced by simulation, and how the training step of a model scales.

mod model;
mod options;
mod output;
mod paper;
mod plan;
mod plot;
mod progress;
mod run;
mod step;

use std::process::ExitCode;

use clap::Subcommand;
use gradwire_launcher::error::CommandError;

pub use self::{options::RunOptions, paper::PaperOptions, plan::PlanOptions};

/// What to simulate.
#[derive(Debug, Subcommand)]
pub enum Simulate {
    /// Simulate a job on a cluster that a file describes. The exit code is 1 if the job can't end.
    Run(RunOptions),
    /// Reproduce published results by simulation, and compare them with the published figures. The
    /// exit code is 1 if a result is out of bounds.
    Paper(PaperOptions),
    /// Show how long a training step takes on a growing cluster, by each algorithm. Takes up to two
    /// minutes.
    Plan(PlanOptions),
}

/// Simulates, prints, and writes the files of `--out`. Returns the exit code: 1 if a result is out
/// of bounds, or if a job can't end.
///
/// # Errors
/// [`CommandError`] with the file, the line and the accepted values, or with the file that can't be
/// written.
pub fn simulate(
    command: &Simulate,
    print: impl FnOnce(&str) -> Result<ExitCode, CommandError>,
) -> Result<ExitCode, CommandError> {
    let output = match command {
        Simulate::Run(options) => {
            let input = options.read()?;
            match &options.model {
                Some(model) => step::step(options, model, &input)?,
                None => run::run(options, &input)?,
            }
        }
        Simulate::Paper(options) => paper::paper(options)?,
        Simulate::Plan(options) => plan::plan(options)?,
    };
    // The result is printed even if the disk is full.
    print(&output.text)?;
    output.write()?;
    Ok(ExitCode::from(u8::from(!output.holds)))
}
