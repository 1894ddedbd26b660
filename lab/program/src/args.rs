//! The command line of the laboratory.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use gradwire_cli::role::Role;
use gradwire_launcher::args::SettingsOptions;

use crate::{
    negotiation::args::Negotiation, probe, resources::args::Resources, simulate::Simulate,
};

/// Simulate clusters; measure links, negotiation and resources.
#[derive(Debug, Parser)]
#[command(name = "gradwire-lab", version = gradwire_proto::VERSION, max_term_width = 80)]
pub struct Lab {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Simulate a cluster that a file describes, or published results.
    #[command(subcommand)]
    Simulate(Simulate),
    /// Measure the links between hosts, as every job does when it starts.
    Probe(probe::Options),
    /// Show what the cost model chooses on a cluster that a file describes.
    Explain(Explain),
    /// Measure the coordinator, or the resources of a job.
    #[command(subcommand)]
    Bench(Measurement),
    /// Run the coordinator of a job, which the environment describes.
    #[command(hide = true)]
    Coordinator(SettingsOptions),
    /// What other processes of a job start.
    #[command(flatten)]
    Role(Role),
}

/// What is measured.
#[derive(Debug, Clone, Subcommand)]
pub enum Measurement {
    /// What it costs to agree on a step's tensors: the real coordinator and simulated nodes, here.
    Negotiation(Negotiation),
    /// The resources of a job: processor time while it is idle, memory while it runs for long, and
    /// the system calls and context switches of a step.
    Resources(Resources),
}

/// A cluster, and the settings that the choice depends on.
#[derive(Debug, Args)]
pub struct Explain {
    /// A file that gradwire probe --out has written: hosts, racks and costs.
    #[arg(long, value_name = "FILE")]
    pub cluster: PathBuf,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// The settings network.* and negotiation.* matter.
    #[command(flatten)]
    pub settings: SettingsOptions,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Lab::command().debug_assert();
    }
}
