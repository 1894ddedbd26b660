//! `gradwire probe`: measures the links between hosts, and derives the costs by which algorithms
//! are chosen.
//!
//! It is a job with one idle rank on each host. Its coordinator measures the links as in every job,
//! and rank 0 asks it for the result.

use std::{
    collections::HashMap,
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use clap::Args;
use gradwire_cli::cluster::{aligned, printable};
use gradwire_launcher::{
    args::JobOptions,
    error::{CommandError, print_line},
    launch::hosts::Host,
};
use gradwire_proto::pb::StatusResponse;
use gradwire_settings::{KEYS, Key, Settings};
use gradwire_simulator::input::written::{ClusterFile, Link, Tier};
use gradwire_worker::Session;

use crate::{
    cluster_file::with_calls,
    probe_calls::{self, Calls},
};

/// The hosts, and the form of the result.
#[derive(Debug, Args)]
pub struct Options {
    /// Where the job runs.
    #[command(flatten)]
    pub at: JobOptions,
    /// Also write the result to a file, on the first host; gradwire explain --cluster and gradwire
    /// simulate run read it.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    pub json: bool,
    /// This process is one of the ranks.
    #[arg(long, hide = true)]
    pub started: bool,
    /// Data threads of the daemons, for the ranks.
    #[arg(long, hide = true, default_value_t = Settings::default().data.lanes)]
    pub lanes: u32,
    /// Connections of each data thread with each peer, for the ranks.
    #[arg(long, hide = true, default_value_t = Settings::default().data.streams)]
    pub streams: u32,
}

impl Options {
    /// The command line for the ranks of a job with these settings.
    ///
    /// # Errors
    /// [`CommandError`] if the file's name is not UTF-8 and so can't be passed to ranks.
    pub fn words(&self, settings: &Settings) -> Result<Vec<String>, CommandError> {
        let mut words = vec!["probe".to_owned(), "--started".to_owned()];
        words.extend(["--lanes".to_owned(), settings.data.lanes.to_string()]);
        words.extend(["--streams".to_owned(), settings.data.streams.to_string()]);
        if self.json {
            words.push("--json".to_owned());
        }
        if let Some(path) = &self.out {
            let name = path.to_str().ok_or_else(|| {
                CommandError::usage(format!("--out '{}' is not UTF-8", path.display()))
            })?;
            words.extend(["--out".to_owned(), name.to_owned()]);
        }
        Ok(words)
    }

    /// Leaves one rank on each host.
    ///
    /// # Errors
    /// [`CommandError`] if there are fewer than two hosts, or the number of ranks is given.
    pub fn spread(&self, hosts: &mut [Host]) -> Result<(), CommandError> {
        if self.at.np.is_some() {
            let what = "gradwire probe starts one rank on each host: remove -np";
            return Err(CommandError::usage(what));
        }
        let mut with_ranks: Vec<_> = hosts.iter_mut().filter(|host| host.slots > 0).collect();
        with_ranks.iter_mut().for_each(|host| host.slots = 1);
        // If only servers are named, this machine has a rank.
        let here = usize::from(with_ranks.is_empty());
        if hosts.len() + here < 2 {
            let what = "gradwire probe measures links between hosts, but there is only one host";
            let hint = "name them: -H host1,host2 or --hostfile FILE";
            return Err(CommandError::usage(what).hint(hint));
        }
        Ok(())
    }
}

/// Checks that the result file can be written, before anything is measured. An existing file stays
/// unchanged.
///
/// # Errors
/// [`CommandError`] if it can't.
pub fn check(path: &Path) -> Result<(), CommandError> {
    let is_new = path.symlink_metadata().is_err();
    let opened = OpenOptions::new().append(true).create(true).open(path);
    opened.map_err(|error| refused(path, &error))?;
    if is_new {
        // It is created again with the result.
        let _ = fs::remove_file(path);
    }
    Ok(())
}

fn refused(path: &Path, error: &io::Error) -> CommandError {
    CommandError::failed(format!("--out {} can't be written: {error}", path.display()))
        .hint("FILE is on the first host; a relative path begins in the directory of the command")
}

/// Takes part as a rank. Rank 0 gets the result from `ask`, called with the address of the metrics
/// on the coordinator's host, and prints it.
///
/// # Errors
/// [`CommandError`] if this process is not a rank, or if the result can't be fetched or written.
pub fn rank(
    options: &Options,
    environment: &HashMap<String, String>,
    ask: impl FnOnce(&str) -> Result<StatusResponse, CommandError>,
) -> Result<String, CommandError> {
    let writes = environment.get("GRADWIRE_RANK").is_some_and(|rank| rank == "0");
    options.out.as_deref().filter(|_| writes).map_or(Ok(()), check)?;
    let session = Session::from_env().map_err(CommandError::failed)?;
    // Operations begin after the links are measured.
    session.barrier().map_err(CommandError::failed)?;
    let status = (session.rank() == 0)
        .then(|| ask(environment.get("GRADWIRE_COORDINATOR_METRICS").map_or("", String::as_str)));
    let racks = match &status {
        Some(Ok(status)) => ClusterFile::of_job(status).topology().racks().to_vec(),
        _ => Vec::new(),
    };
    let calls = probe_calls::measure(&session, &racks)?;
    // All ranks end together, whether or not the result could be printed.
    session.shutdown().map_err(CommandError::failed)?;
    status.map_or_else(|| Ok(String::new()), |status| show(options, &status?, &calls))
}

fn show(options: &Options, status: &StatusResponse, calls: &Calls) -> Result<String, CommandError> {
    let network = status.network.as_ref().filter(|network| !network.links.is_empty());
    let network = network.ok_or_else(|| {
        CommandError::failed("no link could be measured within the time limit")
            .hint("can the hosts reach each other's ports? is a round trip more than 50 ms?")
    })?;
    let (lanes, streams) = (options.lanes, options.streams);
    let file = with_calls(ClusterFile::of_job(status), calls, lanes, streams, status);
    if !network.complete {
        print_line("gradwire probe: the time limit ended some measurements");
    }
    if let Some(path) = &options.out {
        fs::write(path, file.to_toml().map_err(CommandError::failed)?)
            .map_err(|error| refused(path, &error))?;
    }
    if options.json {
        let json = serde_json::to_string_pretty(&file).map_err(CommandError::failed)?;
        return Ok(format!("{json}\n"));
    }
    as_text(&file, network.took_seconds)
}

fn as_text(file: &ClusterFile, seconds: f64) -> Result<String, CommandError> {
    let head = ["from", "to", "latency", "one thread", "all threads"].map(str::to_owned);
    let row = |link: &Link| {
        [
            printable(&link.from),
            printable(&link.to),
            format!("{} µs", link.latency_us),
            format!("{} Mbit/s", link.lane_rate_mbit),
            format!("{} Mbit/s", link.rate_mbit),
        ]
    };
    let table: Vec<_> = std::iter::once(head).chain(file.links.iter().map(row)).collect();
    let costs = toml::to_string(&file.network).map_err(CommandError::failed)?;
    // Bursts have no effect on choices.
    let costs = costs.lines().filter(|line| !line.starts_with("burst_b"));
    let costs: String = costs.map(|line| format!("{}{line}\n", section(line))).collect();
    let call = file.job.as_ref().map_or(0.0, |job| job.call_us);
    let burst = match file.network.burst_bytes {
        0.0 => String::new(),
        bytes => format!("\nA line passes bursts of {bytes} bytes after idling."),
    };
    let uplink = |tier: &Tier| format!("\nA rack has {} Mbit/s to other racks.", tier.rate_mbit);
    let uplinks: String = file.tiers.iter().map(uplink).collect();
    Ok(format!(
        "{} between {} hosts measured in {:.2} s. Rates are per direction, with both in use.\n\n\
         {}\nA call takes {call} µs besides moving its bytes.{burst}{uplinks}\n\n\
         The choice of algorithms is based on:\n\n{costs}",
        if file.links.len() == 1 {
            "1 link".to_owned()
        } else {
            format!("{} links", file.links.len())
        },
        file.hosts.len(),
        seconds,
        aligned(&table)
    ))
}

/// `network.` if `name = value` can be a setting; the other costs are only in cluster files.
fn section(line: &str) -> &'static str {
    let is_of = |key: &Key| {
        let rest = key.name.strip_prefix("network.").and_then(|name| line.strip_prefix(name));
        rest.is_some_and(|rest| rest.starts_with(" ="))
    };
    if KEYS.iter().any(is_of) { "network." } else { "" }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gradwire_launcher::launch::hosts::{parse_list, parse_servers};

    use super::*;
    use crate::args::{Command, Lab};

    fn spread(list: &str, servers: &str) -> Result<Vec<u32>, CommandError> {
        let Command::Probe(options) = Lab::parse_from(["gradwire-lab", "probe"]).command else {
            panic!("another command");
        };
        let mut hosts = parse_list(list).unwrap_or_default();
        if !servers.is_empty() {
            hosts = parse_servers(servers, &hosts).unwrap();
        }
        options.spread(&mut hosts)?;
        Ok(hosts.iter().map(|host| host.slots).collect())
    }

    #[test]
    fn only_settings_have_the_name_of_their_section() {
        assert_eq!(section("rate_mbit = 940.0"), "network.");
        assert_eq!(section("queue_bytes = 0"), "");
    }

    #[test]
    fn each_host_but_a_server_gets_one_rank() {
        assert_eq!(spread("a:4,b", "").unwrap(), [1, 1]);
        assert_eq!(spread("a:4", "s,t").unwrap(), [1, 0, 0]);
        // This machine has the rank.
        assert_eq!(spread("", "s").unwrap(), [0]);
        for list in ["", "a:4"] {
            assert!(spread(list, "").unwrap_err().what.contains("there is only one host"));
        }
    }
}
