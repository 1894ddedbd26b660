//! `gradwire simulate`: how long operations take on a cluster that a file describes, published
//! results, simulated again, and how a model's training step scales.

mod model;
mod options;
mod output;
mod paper;
mod plan;
mod plot;
mod run;
mod step;

use std::process::ExitCode;

use clap::Subcommand;
use gradwire_launcher::error::CommandError;

pub use self::{options::RunOptions, paper::PaperOptions, plan::PlanOptions};

/// What to simulate.
#[derive(Debug, Subcommand)]
pub enum Simulate {
    /// Simulate a cluster, and a job on it, that a file describes. The exit code is 1 if the job
    /// can't end.
    Run(RunOptions),
    /// Simulate published results, and show them next to the published figures. The exit code is 1
    /// if one is out of its bounds.
    Paper(PaperOptions),
    /// Show how long a training step takes on a cluster as it grows, by each algorithm. Takes up to
    /// two minutes.
    Plan(PlanOptions),
}

/// Simulates, prints, and writes the files of `--out`. Returns the exit code: 1 if a result is out
/// of its bounds, or if a job can't end.
///
/// # Errors
/// [`CommandError`] with the file, the line and what is accepted, or with what can't be written.
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
    // What was simulated is printed even if a disk is full.
    print(&output.text)?;
    output.write()?;
    Ok(ExitCode::from(u8::from(!output.holds)))
}
