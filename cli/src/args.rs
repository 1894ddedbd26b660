//! The command line.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use gradwire_bench::args::Bench;
use gradwire_launcher::args::{ElasticOptions, JobOptions, SettingsOptions};
use gradwire_settings::StopSignal;

use crate::{
    algorithms, demo, doctor, explain, join, lab, progress, replay, report, role::Role, status,
    trace, why,
};

/// Gradient synchronisation for distributed training.
#[derive(Debug, Parser)]
#[command(name = "gradwire", version = gradwire_proto::VERSION, max_term_width = 80)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a program as the ranks of a job, on one or several hosts.
    #[command(after_help = "Example: gradwire run -np 4 -H node1:2,node2:2 -- python train.py")]
    Run(Box<Run>),
    /// Train a small network on four ranks, to see that Gradwire works here.
    #[command(after_help = "Example: gradwire demo --kill")]
    Demo(demo::Options),
    /// Make a job of the tasks of srun or mpirun, or of the hosts of Kubernetes or BytePS.
    #[command(after_help = "Example: gradwire join -- ./train, as in srun -n 8 gradwire join …")]
    Join(join::Options),
    /// Print the completions of a shell.
    #[command(after_help = "Example: gradwire completions bash >> ~/.bash_completion")]
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Make a secret for jobs that several hosts join.
    #[command(after_help = "Example: gradwire secret ~/.gradwire-secret")]
    Secret {
        /// A new file, which only you can read [default: print the secret].
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// Measure collectives and check every result.
    #[command(subcommand, after_help = "Example: gradwire bench allreduce -np 4 --end 64M")]
    Bench(Measurement),
    /// Show settings.
    #[command(subcommand, after_help = "Example: gradwire config show --explain")]
    Config(Config),
    /// List the algorithms, or count their messages on a cluster.
    #[command(after_help = "Example: gradwire algorithms --nodes 8 --racks 2")]
    Algorithms(algorithms::Options),
    /// Show which algorithms a job or a cluster uses, and why.
    #[command(after_help = "Example: gradwire explain --nodes 8")]
    Explain(explain::Options),
    /// Check whether hosts and their network are fit for a job.
    #[command(after_help = "Example: gradwire doctor -H node1:4,node2:4")]
    Doctor(doctor::Options),
    /// Measure the links between hosts, like every job at its start (gradwire-lab).
    Probe(lab::Words),
    /// Simulate a cluster, or reproduce published results (gradwire-lab).
    Simulate(lab::Words),
    /// Show the state of a running job.
    #[command(after_help = "Example: gradwire status --watch")]
    Status(status::Options),
    /// Explain what a running job waits for: which ranks are missing, and what they do.
    #[command(after_help = "Example: gradwire why")]
    Why(why::Options),
    /// Explain what happened first, from the flight recordings of a job.
    #[command(after_help = "Example: gradwire report /shared/recordings")]
    Report(report::Options),
    /// Watch a running job: hosts, ranks, links, stragglers.
    #[command(after_help = "Example: gradwire top")]
    Top {
        /// The job [default: your job on this host].
        ///
        /// Its id if you started it on this host.
        ///
        /// Otherwise the address of its coordinator or status page.
        #[arg(value_name = "JOB")]
        address: Option<String>,
    },
    /// Let the ranks of a host leave an elastic job at their next commit.
    #[command(after_help = "Example: gradwire drain node2")]
    Drain {
        /// The host, as the job names it.
        host: String,
        /// The job [default: your job on this host].
        ///
        /// Its id. You must have started it on this host.
        #[arg(value_name = "JOB")]
        job: Option<String>,
    },
    /// Record a running job in a trace file for Perfetto or Chrome.
    #[command(after_help = "Example: gradwire trace --seconds 5 -o trace.json")]
    Trace(trace::Options),
    /// Run one recorded rank alone, with the results of the recorded job.
    #[command(after_help = "Example: gradwire replay DIR --rank 3 -- python -m pdb train.py")]
    Replay(replay::Options),
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
    #[command(after_help = "Example: gradwire config show --set data.lanes=4")]
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
        /// Print JSON.
        ///
        /// With meaning, unit, range and variable of each setting.
        #[arg(long, conflicts_with = "explain")]
        json: bool,
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
    /// Show the progress of the job in one line, which is rewritten.
    ///
    /// It has steps, time per step, share of the exchange and the slowest rank.
    ///
    /// auto: if standard error is a terminal.
    #[arg(long, value_name = "WHEN", value_enum, default_value = "auto", num_args = 0..=1,
        require_equals = true, default_missing_value = "auto")]
    pub progress: progress::When,
    /// Set a variable for the ranks.
    ///
    /// They get the variables of the launcher in any case. A setting of Gradwire applies to the
    /// whole job. Can be repeated.
    #[arg(short = 'x', long = "variable", visible_alias = "env", value_name = "NAME=VALUE",
        value_parser = variable)]
    pub variables: Vec<(String, Option<String>)>,
    /// Signal that makes should_stop() true [default: SIGTERM].
    ///
    /// SIGTERM, SIGUSR1 or SIGUSR2, such as the one of Slurm's --signal.
    ///
    /// The launcher passes it on to all ranks, which can write a checkpoint.
    #[arg(long, value_name = "SIGNAL", value_parser = stop_signal)]
    pub stop_signal: Option<StopSignal>,
    /// Folder in which ranks run, on all hosts [default: this one].
    #[arg(long, value_name = "DIR")]
    pub wdir: Option<PathBuf>,
    /// Bind each rank to its share of a host's cores, or to one NUMA node.
    ///
    /// none: the system chooses a core at any time.
    #[arg(long, value_name = "WHAT", value_parser = ["none", "core", "numa"])]
    pub bind_to: Option<String>,
    /// Begin each line of output with the time (UTC).
    #[arg(long)]
    pub timestamp_output: bool,
    /// The program is a module of Python: run it with python3 -m.
    #[arg(short = 'm', long)]
    pub module: bool,
    /// Show what would be started, and start nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// A folder of the process that starts this one; removed at the end if that is gone.
    #[arg(long, value_name = "DIR", hide = true)]
    pub folder_of_caller: Option<PathBuf>,
    /// Show what this build has, and which frameworks python3 finds.
    #[arg(long)]
    pub check_build: bool,
    /// What is recorded.
    #[command(flatten)]
    pub record: replay::RecordOptions,
    /// How its membership may change.
    #[command(flatten)]
    pub elastic: ElasticOptions,
    /// The program and its arguments.
    #[arg(
        required_unless_present = "check_build",
        trailing_var_arg = true,
        value_name = "PROGRAM"
    )]
    pub command: Vec<OsString>,
}

/// A signal for `should_stop()`, with or without `SIG`.
fn stop_signal(name: &str) -> Result<StopSignal, String> {
    StopSignal::named(name)
        .ok_or_else(|| format!("expected one of {}", StopSignal::NAMES.join(", ")))
}

/// The name of a variable, and its value if it has a new one.
fn variable(text: &str) -> Result<(String, Option<String>), &'static str> {
    let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
    if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
        return Err("expected NAME=VALUE, and a name without spaces");
    }
    Ok((name.to_owned(), value.map(str::to_owned)))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    /// The visible commands that this program runs itself, with their words.
    fn commands(parent: &clap::Command, words: &str, found: &mut Vec<(String, clap::Command)>) {
        for command in parent.get_subcommands().filter(|command| !command.is_hide_set()) {
            let is_other = command.get_arguments().any(|arg| arg.get_id() == "words");
            if !is_other && command.get_name() != "help" {
                let words = format!("{words} {}", command.get_name());
                commands(command, &words, found);
                found.push((words, command.clone()));
            }
        }
    }

    fn all() -> Vec<(String, clap::Command)> {
        let (mut cli, mut found) = (Cli::command(), Vec::new());
        cli.build();
        commands(&cli, "gradwire", &mut found);
        assert!(found.len() > 15, "{}", found.len());
        found
    }

    #[test]
    fn every_help_fits_into_80_columns() {
        for (words, _) in all() {
            for option in ["-h", "--help"] {
                let line = format!("{words} {option}");
                let help = Cli::try_parse_from(line.split(' ')).unwrap_err().to_string();
                let wide = help.lines().find(|line| line.chars().count() > 80);
                assert_eq!(wide, None, "{line}");
            }
        }
    }

    #[test]
    fn every_command_has_an_example() {
        for (words, mut command) in all() {
            // The measurements have one in common.
            if !words.starts_with("gradwire bench ") {
                let help = command.render_help().to_string();
                assert!(help.contains("\nExample: gradwire "), "{help}");
            }
        }
    }

    #[test]
    fn one_option_means_the_same_everywhere() {
        let mut meanings: std::collections::BTreeMap<String, (String, String)> = [].into();
        for (words, command) in all() {
            for option in command.get_arguments() {
                let (Some(long), Some(help)) = (option.get_long(), option.get_help()) else {
                    continue;
                };
                // They differ: a count of nodes, and names of hosts; a flag, and a file; defaults.
                let differs = ["help", "op", "servers", "json", "steps", "nodes", "np"];
                if differs.contains(&long) {
                    continue;
                }
                let meaning = format!("{help} {:?}", option.get_value_names());
                let (first, known) =
                    meanings.entry(long.to_owned()).or_insert((words.clone(), meaning.clone()));
                assert_eq!(*known, meaning, "--{long} of {first} and {words}");
            }
        }
    }

    #[test]
    fn commands_that_print_have_json() {
        for name in ["status", "explain", "algorithms", "doctor", "show"] {
            let all = all();
            let (_, command) = all.iter().find(|(_, it)| it.get_name() == name).unwrap();
            let json = command.get_arguments().find(|arg| arg.get_long() == Some("json"));
            assert!(json.is_some_and(|json| !json.get_action().takes_values()), "{name}");
        }
    }

    #[test]
    fn a_wrong_option_is_an_error_with_its_reason() {
        for (line, expected) in [
            ("gradwire run --np 0 x", "expected the number of ranks, from 1 to 1048576"),
            ("gradwire run --np gpu x", "-N auto counts devices"),
            ("gradwire run -N 2 --host-discovery-script s x", "cannot be used with"),
            ("gradwire run -N gpu x", "expected a number from 1 to 1048576, or auto"),
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
