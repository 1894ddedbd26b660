//! `gradwire bench`: the speed of collectives, like nccl-tests, with a baseline for each figure.
//!
//! A measurement is a job like any other, whose ranks are `gradwire bench` itself. `gradwire run`
//! starts them; or `gradwire bench` starts them with the same launcher, if it is not a rank itself.
//! So a measurement shows what a training process gets.
//!
//! Modules, lowest first:
//!
//! - [`stats`], [`size`], [`machine`], [`table`]: times, sizes, this machine, tables and JSON
//! - [`shapes`]: the gradients of published networks
//! - [`element`], [`value`]: the contents of tensors before and after a collective
//! - [`operation`], [`flow`]: the collectives; a new one is an arm of each `match` there
//! - [`measure`]: the timing loop
//! - [`args`]: the options (pure)
//! - [`baseline`]: the same work without Gradwire
//! - [`report`]: the results of a measurement
//! - [`sweep`], [`model`]: the measurements
//! - [`rank`]: a measurement as one of its ranks

#![forbid(unsafe_code)]

pub mod args;
pub mod baseline;
pub mod element;
pub mod flow;
pub mod machine;
pub mod measure;
pub mod model;
pub mod operation;
pub mod rank;
pub mod report;
pub mod shapes;
pub mod size;
pub mod stats;
pub mod sweep;
pub mod table;
pub mod value;

use std::{
    collections::{BTreeMap, HashMap},
    ffi::OsString,
};

use gradwire_settings::{Loaded, Origin};

use self::args::Common;
use gradwire_launcher::{error::CommandError, launch::hosts::Host};

/// The default number of ranks, because a single rank exchanges nothing.
const DEFAULT_RANKS: u32 = 2;

/// Whether this process is already a rank. If not, it has to start ranks.
///
/// # Errors
/// [`CommandError`] if it is a rank but has options for starting ranks.
pub fn is_rank(
    common: &Common,
    environment: &HashMap<String, String>,
) -> Result<bool, CommandError> {
    if common.started.is_some() {
        return Ok(true);
    }
    if !environment.contains_key("GRADWIRE_JOB") {
        return Ok(false);
    }
    let at = &common.at;
    let given = [
        ("-np", at.np.is_some()),
        ("-H", at.hosts.is_some()),
        ("--hostfile", at.hostfile.is_some()),
        ("--servers", at.servers.is_some()),
        ("--start-timeout", at.start_timeout.is_some()),
        ("--set", !at.settings.set.is_empty()),
        ("--ranks-per-node", common.ranks_per_node.is_some()),
        ("--algorithm", common.algorithm.is_some()),
    ];
    match given.iter().find(|(_, given)| *given) {
        None => Ok(true),
        Some((option, _)) => Err(CommandError::usage(format!(
            "{option} has no effect here: this process is a rank of a job that has already started"
        ))
        .hint(if *option == "--algorithm" {
            "give it to gradwire run, as --set negotiation.algorithm=…"
        } else {
            "give it to gradwire run, or start gradwire bench without gradwire run"
        })),
    }
}

/// The settings of the job that the options of a measurement change.
pub fn flags(common: &Common) -> Vec<String> {
    common.algorithm.iter().map(|name| format!("negotiation.algorithm={name}")).collect()
}

/// Sets the ranks of each host except servers. Returns the number of ranks if the hosts do not
/// determine it.
pub fn spread(hosts: &mut [Host], common: &Common) -> Option<u32> {
    let mut with_ranks: Vec<_> = hosts.iter_mut().filter(|host| host.slots > 0).collect();
    if let Some(ranks) = common.ranks_per_node {
        with_ranks.iter_mut().for_each(|host| host.slots = ranks);
    }
    let here = with_ranks.is_empty().then(|| common.ranks_per_node.unwrap_or(DEFAULT_RANKS));
    common.at.np.or(here)
}

/// The arguments of a rank: those of this command, and the changed settings, for the report.
///
/// # Errors
/// [`CommandError`] if an argument is not UTF-8 and so can't be passed to ranks.
pub fn words(
    words: impl Iterator<Item = OsString>,
    settings: &Loaded,
) -> Result<Vec<String>, CommandError> {
    let mut words = words
        .map(|word| {
            word.into_string().map_err(|word| {
                CommandError::usage(format!("'{}' is not UTF-8", word.to_string_lossy()))
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let made = settings.rows.iter().filter(|row| row.origin != Origin::Default);
    let made: BTreeMap<_, _> = made.map(|row| (row.key.name, &row.value)).collect();
    words.push("--started".to_owned());
    words.push(serde_json::to_string(&made).map_err(CommandError::failed)?);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use gradwire_launcher::launch::{
        hosts::{parse_list, parse_servers},
        plan::Plan,
    };
    use gradwire_settings::{Layers, Settings};

    use super::*;
    use crate::args::Bench;

    /// The part of the command line that belongs to the measurement.
    #[derive(Debug, Parser)]
    struct Program {
        #[command(subcommand)]
        bench: Bench,
    }

    fn bench(line: &str) -> Bench {
        Program::try_parse_from(line.split(' ')).unwrap().bench
    }

    #[test]
    fn a_rank_is_one_that_was_started() {
        let none = HashMap::new();
        let job = HashMap::from([("GRADWIRE_JOB".to_owned(), "j".to_owned())]);
        let plain = bench("bench allreduce -b 4");
        assert!(!is_rank(plain.common(), &none).unwrap());
        assert!(is_rank(plain.common(), &job).unwrap());
        assert!(is_rank(bench("bench barrier --np 2 --started {}").common(), &job).unwrap());
        for (words, option) in [
            ("--np 2", "-np"),
            ("-H a", "-H"),
            ("--servers a", "--servers"),
            ("--algorithm ring", "--algo"),
        ] {
            let late = bench(&format!("bench allreduce {words}"));
            assert!(!is_rank(late.common(), &none).unwrap());
            let error = is_rank(late.common(), &job).unwrap_err();
            assert!(error.what.starts_with(option) && !error.hint.is_empty(), "{error}");
        }
    }

    #[test]
    fn ranks_are_given_to_the_hosts() {
        let spread = |line: &str, list: &str| {
            let mut hosts = if list.is_empty() { Vec::new() } else { parse_list(list).unwrap() };
            let np = spread(&mut hosts, bench(line).common());
            (np, hosts.iter().map(|host| host.slots).collect::<Vec<_>>())
        };
        assert_eq!(spread("bench barrier", ""), (Some(2), vec![]));
        assert_eq!(spread("bench barrier --np 4", ""), (Some(4), vec![]));
        assert_eq!(spread("bench barrier --ranks-per-node 3", ""), (Some(3), vec![]));
        let three = "bench barrier --ranks-per-node 3";
        assert_eq!(spread(three, "a:1,b:9"), (None, vec![3, 3]));
        assert_eq!(spread("bench barrier", "a:1,b:2"), (None, vec![1, 2]));
        // Servers have no ranks. If only servers are named, this host has the ranks.
        let spread = |line: &str, list: &str| {
            let mut hosts = parse_servers("s", &parse_list(list).unwrap_or_default()).unwrap();
            let np = super::spread(&mut hosts, bench(line).common());
            let nodes = Plan::nodes(&hosts, np).unwrap();
            nodes.iter().map(|node| (node.host.clone(), node.ranks())).collect::<Vec<_>>()
        };
        let nodes = |all: &[(&str, u32)]| -> Vec<_> {
            all.iter().map(|&(host, ranks)| (host.to_owned(), ranks)).collect()
        };
        assert_eq!(spread(three, "a:1,b:9"), nodes(&[("a", 3), ("b", 3), ("s", 0)]));
        assert_eq!(spread(three, ""), nodes(&[("localhost", 3), ("s", 0)]));
        assert_eq!(spread("bench barrier", ""), nodes(&[("localhost", 2), ("s", 0)]));
    }

    #[test]
    fn a_rank_gets_the_arguments_and_settings() {
        let flags = flags(bench("bench allreduce --algorithm ring").common());
        let loaded = Settings::load(&Layers { flags, ..Layers::default() }).unwrap();
        let own = ["bench", "allreduce", "--np", "2"].map(OsString::from);
        let words = words(own.into_iter(), &loaded).unwrap();
        assert_eq!(words[..4], ["bench", "allreduce", "--np", "2"]);
        assert_eq!(words[4..], ["--started", r#"{"negotiation.algorithm":"ring"}"#]);
        let again = bench(&words.join(" "));
        assert_eq!(again.common().started.as_deref(), Some(words[5].as_str()));
    }
}
