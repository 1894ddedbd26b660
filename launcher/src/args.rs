//! The options of every command that starts a job or reads settings.

use std::{path::PathBuf, time::Duration};

use clap::Args;

use crate::machine::Machine;

/// The most ranks or slots in an option: a limit against typing errors, not of the protocol.
pub const MAX_RANKS: u32 = 1 << 20;

/// Where settings come from.
#[derive(Debug, Clone, Default, Args)]
pub struct SettingsOptions {
    /// TOML file with settings.
    ///
    /// Without it, GRADWIRE_CONFIG may name one.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Set a setting, such as data.lanes=4.
    ///
    /// May be repeated. `gradwire config show --all` lists all settings.
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// Where the ranks of a job run, and how they are started.
#[derive(Debug, Clone, Default, Args)]
pub struct JobOptions {
    /// Ranks [default: all slots].
    ///
    /// The number of ranks of the job. May also be written -np N.
    #[arg(short = 'n', long = "np", visible_alias = "num-proc", value_name = "N",
          value_parser = parse_ranks)]
    pub np: Option<u32>,
    /// Ranks of each host [default: its slots].
    ///
    /// auto: as many as this machine has GPUs, or else cores.
    #[arg(short = 'N', long, value_name = "N", value_parser = parse_per_host)]
    pub nproc_per_node: Option<u32>,
    /// Hosts and slots [default: this machine].
    ///
    /// Hosts are filled in order. A host without slots takes one rank.
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,…", conflicts_with = "hostfile")]
    pub hosts: Option<String>,
    /// File with hosts and slots, one host per line.
    ///
    /// A line is `host slots=N`, or `host role=server` without ranks.
    ///
    /// The words `rack=LABEL`, `line=RATE` and `interface=NAME` may follow.
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Hosts without ranks that reduce for the others.
    ///
    /// Like hosts with `role=server` in a hostfile.
    #[arg(long, value_name = "HOST,…")]
    pub servers: Option<String>,
    /// Port of ssh on other hosts.
    #[arg(long, value_name = "PORT",
          value_parser = clap::value_parser!(u16).range(1..))]
    pub ssh_port: Option<u16>,
    /// Key for ssh.
    #[arg(long, value_name = "FILE")]
    pub ssh_identity_file: Option<PathBuf>,
    /// Time limit for the start of all ranks.
    ///
    /// By default the setting launch.start_timeout_ms.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub start_timeout: Option<u64>,
    /// Show launch steps and daemon logs.
    ///
    /// The default of the setting log.level becomes info.
    #[arg(short, long)]
    pub verbose: bool,
    /// Where settings come from.
    #[command(flatten)]
    pub settings: SettingsOptions,
}

/// The same, as clap wants it.
const MOST: i64 = MAX_RANKS as i64;

/// How the membership of a job may change.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Elastic jobs")]
pub struct ElasticOptions {
    /// Continue after losses with at least N ranks.
    ///
    /// The ranks that live keep their processes. The default is -np.
    ///
    /// This, --max-np or --host-discovery-script makes a job elastic.
    #[arg(long, visible_alias = "min-num-proc", value_name = "N",
          value_parser = parse_ranks)]
    pub min_np: Option<u32>,
    /// Grow to at most N ranks [default: -np].
    ///
    /// New processes start in free slots, and join at the next commit or step.
    #[arg(long, visible_alias = "max-num-proc", value_name = "N",
          value_parser = parse_ranks)]
    pub max_np: Option<u32>,
    /// Keep N more processes ready to replace lost ranks.
    ///
    /// They wait in init() in slots that the ranks do not need.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=MOST))]
    pub spares: Option<u32>,
    /// Program that prints hosts, run every second.
    ///
    /// A line is `host:slots` or `host`. Comments begin with #.
    ///
    /// Hosts that it no longer prints leave the job.
    #[arg(long, value_name = "FILE", 
          conflicts_with_all = ["hosts", "hostfile", "nproc_per_node"])]
    pub host_discovery_script: Option<PathBuf>,
    /// Slots of a host without a number of slots [default: 1].
    ///
    /// For the hosts of --host-discovery-script.
    #[arg(long, value_name = "N", requires = "host_discovery_script",
          value_parser = clap::value_parser!(u32).range(1..=MOST))]
    pub slots_per_host: Option<u32>,
    /// Time limit for continuing after a loss or change.
    ///
    /// By default the setting elastic.timeout_ms: 600 seconds.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub elastic_timeout: Option<u64>,
    /// Continue after at most N losses and changes.
    #[arg(long, value_name = "N")]
    pub reset_limit: Option<u32>,
    /// Quarantine of a slot after a loss [default: 1 60].
    ///
    /// The first time in seconds, and the longest: it doubles with each loss.
    #[arg(long, value_names = ["MIN", "MAX"], num_args = 2, value_parser = parse_pause)]
    pub blacklist_cooldown_range: Option<Vec<Duration>>,
}

impl ElasticOptions {
    /// Whether these make a job elastic.
    pub fn is_elastic(&self) -> bool {
        self.min_np.is_some() || self.max_np.is_some() || self.host_discovery_script.is_some()
    }

    /// An option that was given and changes nothing unless the job is elastic.
    pub fn only_elastic(&self) -> Option<&'static str> {
        let given = [
            (self.spares.is_some(), "--spares"),
            (self.elastic_timeout.is_some(), "--elastic-timeout"),
            (self.reset_limit.is_some(), "--reset-limit"),
            (self.blacklist_cooldown_range.is_some(), "--blacklist-cooldown-range"),
        ];
        given.into_iter().find_map(|(is_given, option)| is_given.then_some(option))
    }
}

/// A number of ranks of each host.
fn parse_per_host(text: &str) -> Result<u32, String> {
    match text {
        "auto" => Ok(Machine::here().ranks()),
        _ => {
            let number = text.parse().ok().filter(|ranks| (1..=MAX_RANKS).contains(ranks));
            number.ok_or_else(|| format!("expected a number from 1 to {MAX_RANKS}, or auto"))
        }
    }
}

/// A number of ranks.
fn parse_ranks(text: &str) -> Result<u32, String> {
    let expected = format!("expected the number of ranks, from 1 to {MAX_RANKS}");
    match text {
        // Values of torchrun.
        "auto" | "cpu" | "gpu" => Err(format!("{expected}; -N auto counts devices")),
        _ => text.parse().ok().filter(|np| (1..=MAX_RANKS).contains(np)).ok_or(expected),
    }
}

/// Seconds from none to a day, which may have a fraction.
fn parse_pause(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.0..=86_400.0).contains(&seconds) {
        return Err("must be from 0 to 86400 seconds".to_owned());
    }
    Duration::try_from_secs_f64(seconds).map_err(|error| error.to_string())
}

/// Converts seconds, which may have a fraction, to milliseconds.
fn parse_seconds(text: &str) -> Result<u64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err("must be from 0.1 to 86400 seconds".to_owned());
    }
    std::time::Duration::try_from_secs_f64(seconds)
        .map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX))
        .map_err(|error| error.to_string())
}
