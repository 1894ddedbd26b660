//! The command line.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use gradwire_bench::args::Bench;
use gradwire_launcher::args::{JobOptions, SettingsOptions};

use crate::{algorithms, doctor, explain, lab, role::Role, status, trace};

/// Gradient synchronisation for distributed training.
#[derive(Debug, Parser)]
#[command(name = "gradwire", version = gradwire_proto::VERSION, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program as the ranks of a job, on one or several hosts.
    Run(Run),
    /// Measure collectives and check every result.
    #[command(subcommand)]
    Bench(Measurement),
    /// Show settings.
    #[command(subcommand)]
    Config(Config),
    /// List the algorithms, or count their messages on a cluster.
    Algorithms(algorithms::Options),
    /// Show which algorithms a job or a cluster uses, and why.
    Explain(explain::Options),
    /// Check whether hosts and their network are fit for a job.
    Doctor(doctor::Options),
    /// Measure the links between hosts, like every job at its start (gradwire-lab).
    Probe(lab::Words),
    /// Simulate a cluster, or reproduce published results (gradwire-lab).
    Simulate(lab::Words),
    /// Show the state of a running job.
    Status(status::Options),
    /// Watch a running job: hosts, ranks, links, stragglers.
    Top {
        /// The job [default: your job on this host].
        ///
        /// Its id if you started it on this host.
        ///
        /// Otherwise the address of its coordinator or status page.
        #[arg(value_name = "JOB")]
        address: Option<String>,
    },
    /// Record a running job in a trace file for Perfetto or Chrome.
    Trace(trace::Options),
    /// The processes that a job consists of.
    #[command(flatten)]
    Role(Role),
}

/// The measurements.
#[derive(Debug, Subcommand)]
pub enum Measurement {
    /// Measurements by the ranks of a job.
    #[command(flatten)]
    Job(Box<Bench>),
    /// Measure what the coordinator needs to agree on a step (gradwire-lab).
    Negotiation(lab::Words),
    /// Measure the processor time, memory and system calls of a job (gradwire-lab).
    Resources(lab::Words),
}

/// Show settings.
#[derive(Debug, Subcommand)]
pub enum Config {
    /// Show each setting with its value and its origin.
    Show {
        /// Where settings come from.
        #[command(flatten)]
        settings: SettingsOptions,
        /// Also show settings that users rarely change.
        #[arg(long)]
        all: bool,
        /// Also show meaning, unit, range and variable.
        #[arg(long)]
        explain: bool,
    },
}

/// Run a program as the ranks of a job.
#[derive(Debug, Args)]
pub struct Run {
    /// Where it runs.
    #[command(flatten)]
    pub at: JobOptions,
    /// Save output to files.
    ///
    /// The files of ranks are DIR/rank.00/stdout and stderr, and so on.
    ///
    /// The logs of daemons are DIR/daemon.HOST/stderr.
    #[arg(long, visible_alias = "output-filename", value_name = "DIR")]
    pub output_dir: Option<PathBuf>,
    /// Tell Prometheus where the metrics are.
    ///
    /// While the job runs, a file in DIR lists its daemons (file_sd).
    #[arg(long, value_name = "DIR")]
    pub metrics_sd: Option<PathBuf>,
    /// Trace the job.
    ///
    /// Records the whole job for Perfetto or Chrome, up to 1 GiB.
    ///
    /// `gradwire trace` traces a job that already runs.
    #[arg(long, visible_alias = "timeline-filename", value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Show what would be started, and start nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub command: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_wrong_option_is_an_error_with_its_reason() {
        for (line, expected) in [
            ("gradwire run --np 0 x", "0 is not in 1.."),
            ("gradwire run --np two x", "invalid value 'two'"),
            ("gradwire run --np 2", "PROGRAM"),
            ("gradwire run -H a:1 --hostfile f x", "cannot be used with"),
            ("gradwire run --start-timeout 0 x", "must be from 0.1 to 86400 seconds"),
            ("gradwire run --start-timeout nan x", "must be from 0.1 to 86400 seconds"),
            ("gradwire run --verbos x", "--verbose"),
        ] {
            let error = Cli::try_parse_from(line.split(' ')).unwrap_err().to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }
}
