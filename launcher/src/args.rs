//! The options of every command that starts a job or reads settings.

use std::path::PathBuf;

use clap::Args;

/// Where settings come from.
#[derive(Debug, Clone, Default, Args)]
pub struct SettingsOptions {
    /// TOML file with settings.
    #[arg(long, value_name = "FILE", env = "GRADWIRE_CONFIG")]
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
          value_parser = clap::value_parser!(u32).range(1..))]
    pub np: Option<u32>,
    /// Hosts and slots [default: this machine].
    ///
    /// Hosts are filled in order. A host without slots takes one rank.
    #[arg(short = 'H', long, value_name = "HOST:SLOTS,…", conflicts_with = "hostfile")]
    pub hosts: Option<String>,
    /// File with hosts and slots, one host per line.
    ///
    /// A line is `host slots=N`, or `host role=server` without ranks.
    ///
    /// The words `rack=LABEL` and `line=RATE` may follow.
    #[arg(long, value_name = "FILE")]
    pub hostfile: Option<PathBuf>,
    /// Hosts without ranks that reduce for the others.
    ///
    /// Like hosts with `role=server` in a hostfile.
    #[arg(long, value_name = "HOST,…")]
    pub servers: Option<String>,
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
