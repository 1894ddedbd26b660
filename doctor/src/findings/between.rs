//! The network between two hosts: ports, latency, bandwidth, and the size of packets.

use gradwire_settings::Settings;

use super::finding::{Check, Finding, Status};
use crate::facts::{Facts, Measured, Pair, Purpose};

/// A longer round trip is not inside one data centre. A starting job measures links only up to 50
/// ms.
const FAR_US: u64 = 10_000;

/// A pair is an outlier if its latency is this many times the median, or its rate this many times
/// less.
const OUTLIER: f64 = 4.0;

/// Below this, no latency is an outlier: on a busy machine a process waits that long for a core.
const NEAR_US: f64 = 1000.0;

/// The percentage of `network.rate_mbit` that a pair should reach.
const OF_SET_RATE: f64 = 80.0;

/// The percentage of an interface's rate that a pair should reach. It is low because a short
/// measurement with few connections does not fill a fast line.
const OF_INTERFACE: f64 = 25.0;

/// The largest IP packet, whatever the interface allows.
const LARGEST_PACKET: u32 = 65_535;

/// The findings for all pairs.
pub fn findings(facts: &Facts, settings: &Settings) -> Vec<Finding> {
    let mut all = ports(facts);
    let latency = |pair: &Pair| pair.measured.as_ref().ok().map(|m| m.round_trip_us as f64);
    let middle_us = median(facts.pairs.iter().filter_map(latency));
    let middle_mbit = median(facts.pairs.iter().flat_map(|pair| pair.mbit).flatten());
    for pair in &facts.pairs {
        let [from, to] = [pair.from, pair.to].map(|host| facts.hosts[host].name.as_str());
        match &pair.measured {
            Ok(measured) => {
                all.push(latency_of(measured, middle_us).between(from, to));
                all.push(path_mtu(facts, pair, measured).between(from, to));
                if measured.lost_large.is_none() {
                    let rates = rates(facts, pair, settings, middle_mbit);
                    all.push(rates.between(from, to));
                }
            }
            Err(why) => {
                let found = format!("it can't be measured: {why}");
                let finding = Finding::pass(Check::Latency, found);
                let remedy = "connections can be made, but no data arrives: run it again, and \
                              check both hosts";
                all.push(finding.bad(Status::Fail, remedy).between(from, to));
            }
        }
    }
    all
}

/// Connections in both directions, and to the coordinator.
fn ports(facts: &Facts) -> Vec<Finding> {
    let mut all = Vec::new();
    for dialled in &facts.dialled {
        let [from, to] = [dialled.from, dialled.to].map(|host| facts.hosts[host].name.as_str());
        let (what, status, setting) = match dialled.purpose {
            Purpose::Data => ("data", Status::Fail, "data.listen"),
            // An interface that is not used may be unreachable.
            Purpose::Offer => continue,
            Purpose::Coordinator => ("coordinator", Status::Fail, "coordinator.listen"),
            // A job runs without them, but survives only short outages.
            Purpose::Heartbeats => ("coordinator by UDP", Status::Warn, "coordinator.listen"),
        };
        let finding = match &dialled.failed {
            None => Finding::pass(Check::Ports, format!("{what} can be reached")),
            Some(why) => {
                let found = format!("{what} at {} can't be reached: {why}", dialled.address);
                let allow = match dialled.purpose {
                    Purpose::Data | Purpose::Offer | Purpose::Coordinator => {
                        format!("allow TCP from {from} to {to};")
                    }
                    Purpose::Heartbeats => format!(
                        "allow UDP from {from} to {to}, too: it lets a job survive longer outages;"
                    ),
                };
                let remedy = format!("{allow} a job uses any free port unless {setting} names one");
                Finding::pass(Check::Ports, found).bad(status, remedy)
            }
        };
        all.push(finding.between(from, to));
    }
    all
}

fn latency_of(measured: &Measured, middle: Option<f64>) -> Finding {
    let us = measured.round_trip_us;
    let outlier = OUTLIER * middle.unwrap_or(f64::INFINITY);
    Finding::pass(Check::Latency, format!("round trip {us} µs"))
        .value(us as f64, "µs")
        .bad_if(us > FAR_US, Status::Warn, "the hosts are far apart: small tensors wait")
        .bad_if(
            us as f64 > outlier.max(NEAR_US),
            Status::Warn,
            "other pairs are much faster: check the path between these hosts, and their load",
        )
}

/// The slower direction counts.
fn rates(facts: &Facts, pair: &Pair, settings: &Settings, middle: Option<f64>) -> Finding {
    let check = Check::Bandwidth;
    let [Some(there), Some(back)] = pair.mbit else {
        return Finding::pass(check, "no data arrived")
            .bad(Status::Warn, "the line is slow or full: check what else uses it");
    };
    let slower = there.min(back);
    let set = settings.network.rate_mbit;
    // Like in the coordinator, a value other than the default is what the user knows.
    let set = Some(f64::from(set)).filter(|_| set != Settings::default().network.rate_mbit);
    let of = |host| facts.interface(host)?.mbit;
    let line = of(pair.from).zip(of(pair.to)).map(|(a, b)| f64::from(a.min(b)));
    let below = |rate: Option<f64>, percent| rate.filter(|rate| slower * 100.0 < rate * percent);
    let mut finding =
        Finding::pass(check, format!("{there:.0} Mbit/s, and {back:.0} back at once"))
            .value(slower.round(), "Mbit/s");
    if let Some(rate) = below(set, OF_SET_RATE) {
        let remedy =
            format!("network.rate_mbit is {rate:.0}: check the line, or correct the setting");
        finding = finding.bad(Status::Warn, remedy);
    }
    if let Some(rate) = below(line, OF_INTERFACE).filter(|_| set.is_none()) {
        let remedy = format!(
            "the interfaces have {rate:.0} Mbit/s: more data.lanes or data.streams may help; \
             otherwise check the switch, the cables, and what else uses the line"
        );
        finding = finding.bad(Status::Warn, remedy);
    }
    finding.bad_if(
        middle.is_some_and(|middle| slower * OUTLIER < middle),
        Status::Warn,
        "other pairs are much faster: check the line between these hosts",
    )
}

fn path_mtu(facts: &Facts, pair: &Pair, measured: &Measured) -> Finding {
    let check = Check::PathMtu;
    let ends = [pair.from, pair.to].map(|host| facts.interface(host)?.mtu);
    let shown = |mtu: Option<u32>| mtu.map_or("unknown".to_owned(), |mtu| mtu.to_string());
    let [from, to] = ends.map(shown);
    if let Some(why) = &measured.lost_large {
        let found = format!("small messages pass, a large one does not: {why}");
        let remedy = format!(
            "packets as large as the interfaces allow ({from}, {to}) are lost on the way: set \
             their MTU to that of the path, or let ICMP \"fragmentation needed\" pass"
        );
        return Finding::pass(check, found).bad(Status::Fail, remedy);
    }
    let found = format!("{}, interfaces {from} and {to}", shown(measured.path_mtu));
    let mut finding = Finding::pass(check, found);
    if let Some(mtu) = measured.path_mtu {
        finding = finding.value(f64::from(mtu), "bytes");
    }
    let smallest = ends.into_iter().flatten().min().map(|mtu| mtu.min(LARGEST_PACKET));
    finding
        .bad_if(
            measured.path_mtu.zip(smallest).is_some_and(|(path, ends)| path < ends),
            Status::Warn,
            "something on the path allows only smaller packets than the interfaces: set the same \
             MTU everywhere",
        )
        .bad_if(
            ends[0] != ends[1] && ends.iter().all(Option::is_some),
            Status::Warn,
            "the interfaces differ: set the same MTU on all hosts",
        )
}

/// The median of at least three values.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    (values.len() >= 3).then(|| values[values.len() / 2])
}
