//! `gradwire doctor`: checks whether hosts and their network are fit for a job.
//!
//! `gradwire-doctor` gathers the facts and derives the findings. This module shows them.
//!
//! - [`matrix`]: which hosts reach each other
//! - [`hostfile`]: the hostfile that `--write-hostfile` writes

pub mod hostfile;
pub mod matrix;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    time::Instant,
};

use clap::Args;
use gradwire_doctor::{
    findings::{self, Check, Finding, Status},
    launch,
};
use gradwire_launcher::{
    args::JobOptions,
    error::CommandError,
    launch::plan::{Node, forwarded},
    signals::Endings,
};
use gradwire_settings::Settings;
use gradwire_viewer::view::count;
use serde::Serialize;

use self::matrix::Connection;
use crate::cluster::{aligned, printable};

/// The version of the JSON output. `docs/doctor.schema.json` describes it.
const FORMAT: u32 = 1;

/// How many different values are shown for a check that all hosts pass.
const MAX_VALUES: usize = 3;

/// How many hosts or pairs are named for the same problem.
const MAX_PLACES: usize = 3;

/// The hosts, and how to show the result.
#[derive(Debug, Args)]
pub struct Options {
    /// Where a job would run.
    #[command(flatten)]
    pub at: JobOptions,
    /// Write a hostfile with the interfaces that reach every host.
    ///
    /// Tries all interfaces of all hosts, and names the fastest that all others reach.
    #[arg(long, value_name = "FILE")]
    pub write_hostfile: Option<PathBuf>,
    /// Print JSON.
    ///
    /// docs/doctor.schema.json describes it.
    #[arg(long)]
    pub json: bool,
}

/// The findings of a check.
#[derive(Debug, Serialize)]
pub struct Report {
    /// [`FORMAT`].
    format: u32,
    /// The release.
    version: &'static str,
    /// The worst of all findings.
    pub status: Status,
    /// How long it took.
    seconds: f64,
    hosts: Vec<String>,
    findings: Vec<Finding>,
    /// The connections for data that were tried; the text shows them if one failed.
    connections: Vec<Connection>,
    /// The hostfile with the interfaces that reach every host, if it was asked for, or why there is
    /// none.
    #[serde(skip)]
    pub hostfile: Option<Result<String, CommandError>>,
}

/// Checks these hosts. With `offers`, it also looks for the interfaces that reach every host. On a
/// signal it ends all agents and returns an error with its exit code.
///
/// # Errors
/// [`CommandError`] if it can't begin, or was interrupted.
pub async fn check(
    nodes: &[Node],
    settings: &Settings,
    environment: &HashMap<String, String>,
    offers: bool,
) -> Result<Report, CommandError> {
    let began = Instant::now();
    let mut endings = Endings::listen().map_err(|error| CommandError::system(&error))?;
    let forwarded = forwarded(environment);
    let facts = tokio::select! {
        facts = launch::run(nodes, settings, &forwarded, offers) => facts?,
        // Dropping the future ends all that it started (CLEAN).
        signal = endings.next() => {
            let mut error = CommandError::failed("the check was interrupted");
            error.code = u8::try_from(128 + signal).unwrap_or(1);
            return Err(error);
        }
    };
    let findings = findings::all(&facts, settings);
    Ok(Report {
        format: FORMAT,
        version: gradwire_proto::VERSION,
        status: findings.iter().map(|finding| finding.status).max().unwrap_or(Status::Pass),
        seconds: (began.elapsed().as_secs_f64() * 1000.0).round() / 1000.0,
        hosts: nodes.iter().map(|node| node.host.clone()).collect(),
        findings,
        connections: matrix::connections(&facts),
        hostfile: offers.then(|| hostfile::write(nodes, &facts)),
    })
}

impl Report {
    /// As JSON.
    ///
    /// # Errors
    /// Never: all values can be represented.
    pub fn to_json(&self) -> Result<String, CommandError> {
        let json = serde_json::to_string_pretty(self).map_err(CommandError::failed)?;
        Ok(format!("{json}\n"))
    }

    /// As a table: a row for each check, and one for each problem.
    pub fn to_text(&self) -> String {
        let mut rows = vec![["status", "check", "where", "found"].map(str::to_owned)];
        let mut by_check: BTreeMap<Check, Vec<&Finding>> = BTreeMap::new();
        for finding in &self.findings {
            by_check.entry(finding.check).or_default().push(finding);
        }
        for (check, all) in by_check {
            let passed: Vec<_> = all.iter().filter(|f| f.status == Status::Pass).collect();
            let row = |status: Status, place: String, found: &str| {
                [status.to_string(), check.to_string(), place, printable(found)]
            };
            match passed[..] {
                [] => {}
                [only] => rows.push(row(Status::Pass, place(only), &only.found)),
                _ => {
                    let pairs = passed.iter().filter(|finding| finding.peer.is_some()).count();
                    let hosts = passed.len() - pairs;
                    let counts = [(hosts, "host"), (pairs, "pair")];
                    let counts = counts.into_iter().filter(|(many, _)| *many > 0);
                    let counts: Vec<_> =
                        counts.map(|(many, what)| count(many as u64, what)).collect();
                    rows.push(row(Status::Pass, counts.join(", "), &summary(&passed)));
                }
            }
            let mut alike: BTreeMap<(Reverse<Status>, &str), Vec<String>> = BTreeMap::new();
            for finding in all.iter().filter(|finding| finding.status != Status::Pass) {
                let key = (Reverse(finding.status), finding.found.as_str());
                alike.entry(key).or_default().push(place(finding));
            }
            for ((status, found), places) in alike {
                rows.push(row(status.0, first_few(places), found));
            }
        }
        let mut text = aligned(&rows);
        let mut remedies: BTreeMap<(Reverse<Status>, Check, &str), Vec<String>> = BTreeMap::new();
        for finding in self.findings.iter().filter(|finding| !finding.remedy.is_empty()) {
            let key = (Reverse(finding.status), finding.check, finding.remedy.as_str());
            remedies.entry(key).or_default().push(place(finding));
        }
        if !remedies.is_empty() {
            text.push_str("\nWhat to do:\n");
        }
        for ((status, check, remedy), places) in remedies {
            let shown = first_few(places);
            text.push_str(&format!("  {} {check}, {shown}:\n", status.0));
            text.push_str(&format!("      {}\n", printable(remedy)));
        }
        if let Some(matrix) = matrix::to_text(&self.connections) {
            text.push_str(&format!("\n{matrix}"));
        }
        let with = |status| self.findings.iter().filter(|f| f.status == status).count();
        text.push_str(&format!(
            "\n{} passed, {}, {} failed; {} in {:.1} s\n",
            with(Status::Pass),
            count(with(Status::Warn) as u64, "warning"),
            with(Status::Fail),
            count(self.hosts.len() as u64, "host"),
            self.seconds
        ));
        text
    }
}

fn place(finding: &Finding) -> String {
    match (&finding.host, &finding.peer) {
        (Some(host), Some(peer)) => printable(&format!("{host} → {peer}")),
        (Some(host), None) => printable(host),
        _ => "all hosts".to_owned(),
    }
}

fn first_few(mut places: Vec<String>) -> String {
    let more = places.len().saturating_sub(MAX_PLACES);
    places.truncate(MAX_PLACES);
    let shown = places.join(", ");
    if more > 0 { format!("{shown}, and {more} more") } else { shown }
}

/// Summarises several hosts or pairs: the range of their numbers, or their texts.
fn summary(findings: &[&&Finding]) -> String {
    let mut texts: Vec<&str> = findings.iter().map(|finding| finding.found.as_str()).collect();
    texts.sort_unstable();
    texts.dedup();
    let numbers: Vec<f64> = findings.iter().filter_map(|finding| finding.value).collect();
    let unit = findings.iter().find_map(|finding| finding.unit);
    if let Some(unit) = unit.filter(|_| texts.len() > 1 && numbers.len() == findings.len()) {
        let least = numbers.iter().copied().fold(f64::INFINITY, f64::min);
        let most = numbers.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        return match least < most {
            true => format!("{least} to {most} {unit}"),
            false => format!("{least} {unit}"),
        };
    }
    if texts.len() <= MAX_VALUES {
        return texts.join("; ");
    }
    let more = texts.len() - MAX_VALUES;
    format!("{}; and {more} more", texts[..MAX_VALUES].join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(findings: Vec<Finding>) -> Report {
        let status = findings.iter().map(|finding| finding.status).max().unwrap();
        let hosts = ["a", "b", "c"].map(str::to_owned).to_vec();
        let (connections, hostfile) = (Vec::new(), None);
        let (format, version, seconds) = (FORMAT, "1", 1.25);
        Report { format, version, status, seconds, hosts, findings, connections, hostfile }
    }

    #[test]
    fn a_table_has_rows_for_checks_and_problems() {
        let latency = |peer, us: f64| {
            let found = format!("round trip {us} µs");
            Finding::pass(Check::Latency, found).value(us, "µs").between("a", peer)
        };
        let files = |host| Finding::pass(Check::OpenFiles, "1024").on(host);
        let cores = |host, ranks: f64| {
            let found = format!("{} cores for {ranks} ranks", 2.0 * ranks);
            Finding::pass(Check::Cores, found).value(2.0, "cores per rank").on(host)
        };
        let mut findings = vec![latency("b", 40.0), latency("c", 41.0), latency("d", 90.0)];
        findings.extend([files("a"), files("b"), cores("a", 2.0), cores("b", 4.0)]);
        findings.push(files("c").bad(Status::Fail, "raise it"));
        let text = report(findings).to_text();
        let expected = "\
status  check      where    found
pass    latency    3 pairs  40 to 90 µs
pass    open_files  2 hosts  1024
fail    open_files  c        1024
pass    cores       2 hosts  2 cores per rank

What to do:
  fail open_files, c:
      raise it

7 passed, 0 warnings, 1 failed; 3 hosts in 1.2 s
";
        let words = |text: &str| {
            let lines =
                text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            lines.collect::<Vec<_>>()
        };
        assert_eq!(words(&text), words(expected), "{text}");
    }

    #[test]
    fn texts_of_hosts_do_not_move_the_cursor() {
        let finding = Finding::pass(Check::Torch, "2.\u{1b}[2J1").on("a\r");
        let text = report(vec![finding.bad(Status::Warn, "x\ny")]).to_text();
        assert!(!text.contains(['\u{1b}', '\r']), "TRUST: {text:?}");
        assert!(text.contains("2.[2J1") && text.contains("      xy\n"), "{text}");
    }
}
