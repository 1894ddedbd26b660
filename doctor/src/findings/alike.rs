//! Properties that all hosts should share: a job is as fast as its slowest rank, and different
//! versions of programs may compute different results.

use std::collections::BTreeMap;

use super::finding::{Check, Finding, Status};
use crate::facts::{Facts, Host, HostFacts, Torch};

/// With a larger difference, logs of several hosts are hard to read together. Gradwire itself does
/// not compare times of different hosts.
const CLOCKS_US: i64 = 500_000;

/// The findings for all hosts together, and for each clock.
pub fn findings(facts: &Facts) -> Vec<Finding> {
    let mut all = clocks(facts);
    all.extend(torch(facts));
    let congestion = |facts: &HostFacts| facts.congestion.clone().ok();
    let remedy = "use the same one on all hosts, or set data.congestion_control";
    all.extend(differs(&facts.hosts, Check::CongestionControl, congestion, remedy));
    let level = |facts: &HostFacts| Some(facts.level.clone());
    let remedy = "all hosts wait for the slowest reductions: use hosts of the same kind";
    all.extend(differs(&facts.hosts, Check::CpuLevel, level, remedy));
    let gpus = |facts: &HostFacts| {
        let mut models = facts.gpus.models.clone();
        models.sort();
        models.dedup();
        Some(match (facts.gpus.models.len(), models.join(", ")) {
            (0, _) => "none".to_owned(),
            (count, models) => format!("{count} × {models}"),
        })
    };
    let remedy = "use hosts with the same GPUs";
    all.extend(differs(with_ranks(facts), Check::Gpus, gpus, remedy));
    all
}

/// The hosts that run the model: all except servers.
fn with_ranks(facts: &Facts) -> impl Iterator<Item = &Host> {
    facts.hosts.iter().filter(|host| host.ranks > 0)
}

/// A warning if hosts differ, with each value and its hosts.
fn differs<'a>(
    hosts: impl IntoIterator<Item = &'a Host>,
    check: Check,
    value: impl Fn(&HostFacts) -> Option<String>,
    remedy: &str,
) -> Option<Finding> {
    let mut by_value: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for Host { name, facts, .. } in hosts {
        if let Some(value) = facts.as_ref().ok().and_then(&value) {
            by_value.entry(value).or_default().push(name);
        }
    }
    if by_value.len() < 2 {
        return None;
    }
    let parts: Vec<_> =
        by_value.iter().map(|(value, hosts)| format!("{value} on {}", hosts.join(", "))).collect();
    Some(
        Finding::pass(check, format!("hosts differ: {}", parts.join("; ")))
            .bad(Status::Warn, remedy),
    )
}

/// Each clock, compared with the first known one.
fn clocks(facts: &Facts) -> Vec<Finding> {
    let known = |host: &Host| Some((host.name.clone(), host.clock?));
    let mut clocks = facts.hosts.iter().filter_map(known);
    let Some((first, zero)) = clocks.next() else { return Vec::new() };
    let finding = |(name, clock): (String, crate::facts::Clock)| {
        let ahead = clock.ahead_us.saturating_sub(zero.ahead_us);
        let wrong_by = clock.wrong_by_us.saturating_add(zero.wrong_by_us);
        let ms = ahead as f64 / 1000.0;
        let found = format!("{ms:+.1} ms from {first}, ±{:.1}", wrong_by as f64 / 1000.0);
        Finding::pass(Check::Clock, found)
            .value(ms, "ms")
            .bad_if(
                ahead.saturating_abs().saturating_sub(wrong_by) > CLOCKS_US,
                Status::Warn,
                "synchronise clocks by NTP (chrony, systemd-timesyncd): times in logs don't match",
            )
            .on(&name)
    };
    let mut all: Vec<_> = clocks.map(finding).collect();
    if all.is_empty() {
        all.push(Finding::pass(Check::Clock, "only one host").on(&first));
    }
    all
}

/// PyTorch on each host with ranks, and whether the versions differ.
fn torch(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    for host in with_ranks(facts) {
        let Ok(known) = &host.facts else { continue };
        let found = match &known.torch {
            Torch::Version(version) => version.clone(),
            Torch::NotInstalled => "not installed".to_owned(),
            Torch::NoPython => "not installed: no Python in PATH".to_owned(),
            Torch::Unknown(why) => format!("unknown: {why}"),
        };
        all.push(Finding::pass(Check::Torch, found).on(&host.name));
    }
    let version = |facts: &HostFacts| match &facts.torch {
        Torch::Version(version) => Some(version.clone()),
        Torch::NotInstalled | Torch::NoPython => Some("not installed".to_owned()),
        Torch::Unknown(_) => None,
    };
    let remedy = "install the same PyTorch on all hosts";
    all.extend(differs(with_ranks(facts), Check::Torch, version, remedy));
    all
}
