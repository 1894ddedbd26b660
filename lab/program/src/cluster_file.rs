//! The cluster that `gradwire probe` describes: what the coordinator measured, refined by the times
//! of calls. `gradwire explain --cluster` and `gradwire simulate run` read its file, and any other
//! description of a cluster.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, Read},
    path::Path,
};

use gradwire_cli::cluster::printable;
use gradwire_collectives::{CostModel, Kind, Pipeline, Rules, select};
use gradwire_launcher::error::CommandError;
use gradwire_proto::pb;
use gradwire_simulator::input::{
    self, Input,
    written::{ClusterFile, Host, Job, Link, Tier, cost_of, rounded},
};

use crate::probe_calls::{Calls, FEW_BYTES};

const MICRO: f64 = 1e-6;
const MEGA: f64 = 1e6;

/// If a line or link carries long calls at less than this part of the rate of short transfers, the
/// reason is not a burst but, for example, the processors.
const SLOWER: f64 = 0.6;

/// If only other processes interfered, short transfers show at least this part of the line's rate.
const ALIKE: f64 = 0.85;

/// The error for a file that does not describe a cluster.
fn refused(path: &Path, what: impl fmt::Display) -> CommandError {
    CommandError::usage(format!("cluster file {}: {what}", path.display()))
}

/// Reads a description of a cluster (BOUND, TRUST).
///
/// # Errors
/// [`CommandError`] with the file, the line, the key and the accepted values, or with why the file
/// can't be read.
pub fn read(path: &Path) -> Result<Input, CommandError> {
    let text = read_text(path)?;
    input::parse(&text).map_err(|error| refused(path, printable(&error.to_string())))
}

fn read_text(path: &Path) -> Result<String, CommandError> {
    let failed = |error: io::Error| {
        refused(path, error).hint("gradwire probe --out FILE writes such a file")
    };
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(input::MAX_BYTES as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() > input::MAX_BYTES {
        let what =
            format!("it has more than {} bytes, the most that is accepted", input::MAX_BYTES);
        return Err(refused(path, what));
    }
    String::from_utf8(bytes).map_err(|_| refused(path, "not UTF-8").hint("save it as UTF-8"))
}

/// Adds the measurements of ranks, whose daemons had these numbers of data threads and of
/// connections per thread and peer.
pub(crate) fn with_calls(
    mut file: ClusterFile,
    calls: &Calls,
    lanes: u32,
    streams: u32,
    status: &pb::StatusResponse,
) -> ClusterFile {
    if let Some(burst) = calls.burst() {
        file.network.burst_bytes = rounded(burst.bytes);
        file.network.burst_mbit = rounded(burst.rate * 8.0 / MEGA);
        // One data thread moved this much, so it is at least this fast.
        if file.network.lane_rate_mbit > 0.0 {
            let fast = file.network.burst_mbit;
            file.network.lane_rate_mbit = file.network.lane_rate_mbit.max(fast);
        }
    }
    // Without bursts, short transfers show the rate of a line.
    let saves_up = file.network.burst_bytes > 0.0;
    if let Some(line) = calls.line().filter(|_| saves_up) {
        set_line(&mut file, line * 8.0 / MEGA);
    }
    if let Some(share) = calls.uplink().filter(|_| saves_up) {
        set_uplinks(&mut file, share * 8.0 / MEGA);
    }
    // The cost model counts the time of its messages with the operation.
    let call = (calls.call - of_messages(&file, status)).max(0.0);
    file.job = status.sizes.as_ref().map(|sizes| Job {
        call_us: rounded(call / MICRO),
        lanes,
        streams,
        chunk_bytes: sizes.chunk_bytes,
        credit_pieces: sizes.credit_pieces,
        piece_bytes: sizes.piece_bytes,
    });
    file
}

/// Seconds that the messages of a few bytes take by the cost model.
fn of_messages(file: &ClusterFile, status: &pb::StatusResponse) -> f64 {
    let Some(costs) = &status.costs else { return 0.0 };
    let cost = CostModel { operation: 0.0, ..cost_of(costs) };
    let (kind, topology, bytes) = (Kind::Allreduce, file.topology(), FEW_BYTES as u64);
    if topology.contributors() < 2 {
        return 0.0;
    }
    let (rule, allowed) = Rules::default().allowed(kind, 0, &topology);
    let alone = Pipeline { pieces: 1, in_flight: 1 };
    select(kind, &topology, bytes, alone, (rule, &allowed), &cost).predicted_seconds
}

/// Gives racks with several hosts uplinks with this share for each host, in Mbit/s, if there is
/// one level of racks.
fn set_uplinks(file: &mut ClusterFile, share: f64) {
    let topology = file.topology();
    let members = topology.members();
    let is_slow = share < SLOWER * file.network.rack_rate_mbit;
    if topology.tiers().len() > 1 || members.len() < 2 || is_slow {
        return;
    }
    // Two racks were measured, with all hosts of the smaller one at work.
    let hosts = members.iter().take(2).map(Vec::len).min().unwrap_or(1);
    let latency_us = (file.network.rack_latency_us - file.network.latency_us).max(0.0);
    let rate_mbit = rounded(share * hosts as f64);
    file.tiers = vec![Tier { rate_mbit, latency_us: rounded(latency_us) }];
}

/// Sets the rate of lines with bursts, in Mbit/s: short transfers showed up to two thirds more
/// than that, or slightly less if other processes interfered. Slower lines stay unchanged.
fn set_line(file: &mut ClusterFile, rate: f64) {
    let racks = file.topology();
    let places: HashMap<&str, u32> =
        file.hosts.iter().map(|host| host.name.as_str()).zip(0..).collect();
    let place = |name: &str| places.get(name).copied();
    let is_near = |link: &Link| match (place(&link.from), place(&link.to)) {
        (Some(from), Some(to)) => racks.same_rack(from, to),
        _ => false,
    };
    let near: Vec<bool> = file.links.iter().map(is_near).collect();
    let of = |is_one: &dyn Fn(&Link) -> bool| {
        let links = file.links.iter().zip(&near).filter(|(link, near)| **near && is_one(link));
        let mut rates: Vec<f64> = links.map(|(link, _)| link.rate_mbit).collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    };
    // Otherwise the measured pair is not typical.
    if !of(&|_| true).is_some_and(|typical| (SLOWER * typical..).contains(&rate)) {
        return;
    }
    let is_alike = |measured: f64| measured > ALIKE * rate;
    let ends_at = |host: &Host, link: &Link| link.from == host.name || link.to == host.name;
    let alike: Vec<bool> = file
        .hosts
        .iter()
        .map(|host| of(&|link| ends_at(host, link)).is_none_or(is_alike))
        .collect();
    let line = rate.round().max(1.0) as u32;
    for (host, _) in file.hosts.iter_mut().zip(alike).filter(|(_, alike)| *alike) {
        host.line_mbit = if host.line_mbit == 0 { line } else { host.line_mbit.min(line) };
    }
    let links = file.links.iter_mut().zip(near).filter(|(_, near)| *near);
    for (link, _) in links.filter(|(link, _)| is_alike(link.rate_mbit)) {
        link.rate_mbit = rounded(rate);
    }
}

#[cfg(test)]
mod tests {
    use gradwire_simulator::input::written::Network;

    use super::*;
    use crate::probe_calls::tests::calls;

    #[test]
    fn long_calls_show_the_rate_of_bursty_lines() {
        let link = |from: &str, to: &str, rate_mbit| Link {
            from: from.into(),
            to: to.into(),
            latency_us: 20.0,
            lane_rate_mbit: 1200.0,
            rate_mbit,
        };
        let host = |name: &str, rack: &str| Host {
            name: name.into(),
            rack: rack.into(),
            line_mbit: 10_000,
            server: false,
        };
        let network = Network { rack_rate_mbit: 300.0, ..Network::default() };
        let file = ClusterFile {
            network,
            hosts: vec![host("a", "r1"), host("b", "r1"), host("c", "r1"), host("d", "r2")],
            // Noise, a burst, a slow link, and one between racks.
            links: vec![
                link("a", "b", 850.0),
                link("a", "c", 1400.0),
                link("b", "c", 200.0),
                link("a", "d", 600.0),
            ],
            ..ClusterFile::default()
        };
        let sizes = Some(pb::Sizes { chunk_bytes: 262_144, ..pb::Sizes::default() });
        let usual = CostModel::default();
        let costs = Some(pb::Costs {
            latency: usual.in_rack.latency,
            per_byte: usual.in_rack.per_byte,
            rack_latency: usual.cross_rack.latency,
            rack_per_byte: usual.cross_rack.per_byte,
            per_message: usual.per_message,
            chunk: usual.chunk,
            operation: 0.1,
            ..pb::Costs::default()
        });
        let status = pb::StatusResponse { sizes, costs, ..pb::StatusResponse::default() };
        let with = |burst| {
            let calls = calls((120e6, burst), 30e6);
            with_calls(file.clone(), &calls, 2, 1, &status)
        };
        let rates = |file: &ClusterFile| -> Vec<f64> {
            file.links.iter().map(|link| link.rate_mbit.round()).collect()
        };
        let found = with(262_144.0);
        assert_eq!(rates(&found), [960.0, 960.0, 200.0, 600.0]);
        assert!(found.hosts.iter().all(|host| host.line_mbit == 960), "{found:?}");
        assert!((found.network.burst_bytes / 262_144.0 - 1.0).abs() < 0.1, "{found:?}");
        // The rack of one host was measured with one pair. The coordinator's costs stay unchanged.
        assert_eq!(found.tiers, [Tier { rate_mbit: 240.0, latency_us: 20.0 }]);
        assert_eq!(found.network.rack_rate_mbit, file.network.rack_rate_mbit);
        // A call of a few bytes, without the time of its messages.
        let call = found.job.unwrap().call_us;
        assert!((100.0..270.0).contains(&call), "{call}");
        // Without a burst, the coordinator's measurements count.
        let found = with(0.0);
        assert_eq!(rates(&found), [850.0, 1400.0, 200.0, 600.0]);
        assert!(found.hosts.iter().all(|host| host.line_mbit == 10_000), "{found:?}");
        assert_eq!(found.tiers, []);
        // Links between racks that are faster than the processors.
        let network = Network { rack_rate_mbit: 20_000.0, ..file.network.clone() };
        let fast = ClusterFile { network, ..file.clone() };
        let found = with_calls(fast, &calls((120e6, 262_144.0), 30e6), 2, 1, &status);
        assert_eq!(found.tiers, []);
    }
}
