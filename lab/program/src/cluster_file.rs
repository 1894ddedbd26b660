//! The file that describes a cluster. `gradwire probe --out` writes it as TOML: the costs of links,
//! the hosts, and the measurements of each link. `gradwire explain --cluster` and `gradwire
//! simulate run` read it, like any other description of a cluster, with the simulator's parser.

use std::{
    collections::HashMap,
    fmt,
    fs::File,
    io::{self, Read},
    path::Path,
};

use gradwire_cli::cluster::printable;
use gradwire_collectives::{CostModel, Kind, LinkCost, Pipeline, Rules, Topology, select};
use gradwire_launcher::error::CommandError;
use gradwire_proto::pb;
use gradwire_simulator::input::{self, Input};
use serde::Serialize;

use crate::probe_calls::{Calls, FEW_BYTES};

const MICRO: f64 = 1e-6;
const MEGA: f64 = 1e6;
const PERCENT: f64 = 100.0;

/// If a line or link carries long calls at less than this part of the rate of short transfers, the
/// reason is not a burst but, for example, the processors.
const SLOWER: f64 = 0.6;

/// If only other processes interfered, short transfers show at least this part of the line's rate.
const ALIKE: f64 = 0.85;

/// A cluster with its costs.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ClusterFile {
    /// The hosts by number, from 0, in the order in which a ring visits them, as far as racks stay
    /// together. If empty, hosts are in the order of the file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<u32>,
    /// The costs of links, reductions and messages.
    pub network: Network,
    /// The hosts, in the order of their ranks, the servers last.
    #[serde(rename = "host")]
    pub hosts: Vec<Host>,
    /// The measurements of each link.
    #[serde(rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// The links between racks, for the simulator, if long calls measured them.
    #[serde(rename = "tier", skip_serializing_if = "Vec::is_empty")]
    pub tiers: Vec<Tier>,
    /// The settings of the measured daemons, for the simulator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
}

/// The settings of daemons, and the time of a call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// Microseconds that a call takes besides moving its bytes, from its submission until the rank
    /// continues.
    pub call_us: f64,
    /// `data.lanes`
    pub lanes: u32,
    /// `data.streams`
    pub streams: u32,
    /// `data.chunk_bytes`
    pub chunk_bytes: u64,
    /// `negotiation.credit_pieces`
    pub credit_pieces: u32,
    /// `negotiation.piece_bytes`
    pub piece_bytes: u64,
}

/// The uplink of each rack.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tier {
    /// Its rate in Mbit/s.
    pub rate_mbit: f64,
    /// Microseconds that it adds to the latency of the lines.
    pub latency_us: f64,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its rack.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub rack: String,
    /// The rate of its line in Mbit/s; 0 if it is not known.
    #[serde(skip_serializing_if = "is_zero")]
    pub line_mbit: u32,
    /// Whether it has no ranks and reduces for the others.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// The measurements between two hosts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// The first host.
    pub from: String,
    /// The second host.
    pub to: String,
    /// Latency of a small message, in microseconds.
    pub latency_us: f64,
    /// The rate of one data thread, in both directions at the same time, in Mbit/s.
    pub lane_rate_mbit: f64,
    /// The same of all data threads.
    pub rate_mbit: f64,
}

/// What the cost model knows, in the units of the settings `network.*`, with fractions.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[expect(missing_docs, reason = "the fields of CostModel, with their units")]
pub struct Network {
    pub latency_us: f64,
    pub rate_mbit: f64,
    pub rack_latency_us: f64,
    pub rack_rate_mbit: f64,
    pub reduce_mb_per_s: f64,
    pub chunk_bytes: u64,
    pub message_ns: f64,
    pub burst_loss_percent: f64,
    pub free_senders: u32,
    pub sender_loss_percent: f64,
    pub lane_rate_mbit: f64,
    pub publish_mb_per_s: f64,
    pub operation_us: f64,
    pub queue_bytes: u64,
    pub overflow_us: f64,
    pub rack_paths: u32,
    /// Bytes of a burst that a line passes after idling, and its rate; 0: no bursts.
    #[serde(skip_serializing_if = "is_none")]
    pub burst_bytes: f64,
    #[serde(skip_serializing_if = "is_none")]
    pub burst_mbit: f64,
}

fn is_none(number: &f64) -> bool {
    *number == 0.0
}

impl Default for Network {
    fn default() -> Self {
        Self::from(&CostModel::default())
    }
}

/// Converts seconds per byte to Mbit/s; 0 stays 0.
fn mbit(per_byte: f64) -> f64 {
    if per_byte > 0.0 { 8.0 / per_byte / MEGA } else { 0.0 }
}

/// Converts seconds per byte to MB/s; 0 stays 0.
fn megabytes(per_byte: f64) -> f64 {
    mbit(per_byte) / 8.0
}

/// Rounds to four digits, more than measurements justify.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

impl From<&CostModel> for Network {
    fn from(cost: &CostModel) -> Self {
        Self {
            latency_us: rounded(cost.in_rack.latency / MICRO),
            rate_mbit: rounded(mbit(cost.in_rack.per_byte)),
            rack_latency_us: rounded(cost.cross_rack.latency / MICRO),
            rack_rate_mbit: rounded(mbit(cost.cross_rack.per_byte)),
            reduce_mb_per_s: rounded(megabytes(cost.reduce_per_byte)),
            chunk_bytes: cost.chunk,
            message_ns: rounded(cost.per_message * 1e9),
            burst_loss_percent: rounded(cost.burst_loss * PERCENT),
            free_senders: cost.free_fan_in,
            sender_loss_percent: rounded(cost.incast_loss * PERCENT),
            lane_rate_mbit: rounded(mbit(cost.lane_per_byte)),
            publish_mb_per_s: rounded(megabytes(cost.publish_per_byte)),
            operation_us: rounded(cost.operation / MICRO),
            queue_bytes: cost.queue,
            overflow_us: rounded(cost.overflow / MICRO),
            rack_paths: cost.paths,
            burst_bytes: 0.0,
            burst_mbit: 0.0,
        }
    }
}

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

/// The cost model of a coordinator's answer.
fn cost_of(costs: &pb::Costs) -> CostModel {
    CostModel {
        in_rack: LinkCost { latency: costs.latency, per_byte: costs.per_byte },
        cross_rack: LinkCost { latency: costs.rack_latency, per_byte: costs.rack_per_byte },
        reduce_per_byte: costs.reduce_per_byte,
        per_message: costs.per_message,
        lane_per_byte: costs.lane_per_byte,
        publish_per_byte: costs.publish_per_byte,
        operation: costs.operation,
        chunk: costs.chunk,
        burst_loss: costs.burst_loss,
        free_fan_in: costs.free_fan_in,
        incast_loss: costs.incast_loss,
        queue: costs.queue,
        overflow: costs.overflow,
        paths: costs.paths.max(1),
        connections: costs.connections,
        ..CostModel::default()
    }
}

impl ClusterFile {
    /// The measurements of a coordinator, and the costs by which it chooses.
    pub fn of_job(status: &pb::StatusResponse) -> Self {
        let name = |node: u32| {
            let node = status.nodes.get(node as usize);
            node.map_or_else(String::new, |node| node.host.clone())
        };
        let links = status.network.iter().flat_map(|network| &network.links).map(|link| Link {
            from: name(link.from),
            to: name(link.to),
            latency_us: rounded(link.latency_seconds / MICRO),
            lane_rate_mbit: rounded(link.lane_bytes_per_second * 8.0 / MEGA),
            rate_mbit: rounded(link.bytes_per_second * 8.0 / MEGA),
        });
        let found = |at: usize| status.network.as_ref()?.racks.get(at);
        let host = |(at, node): (usize, &pb::NodeStatus)| Host {
            name: node.host.clone(),
            rack: found(at).map_or(node.rack.clone(), |rack| format!("found{rack}")),
            line_mbit: node.line_mbit,
            server: node.slots == 0,
        };
        Self {
            network: status
                .costs
                .as_ref()
                .map(cost_of)
                .as_ref()
                .map(Network::from)
                .unwrap_or_default(),
            order: status.network.iter().flat_map(|network| network.order.clone()).collect(),
            hosts: status.nodes.iter().enumerate().map(host).collect(),
            links: links.collect(),
            tiers: Vec::new(),
            job: None,
        }
    }

    /// The racks of the hosts, the servers last.
    pub(crate) fn topology(&self) -> Topology {
        let labels: Vec<&str> = self.hosts.iter().map(|host| host.rack.as_str()).collect();
        let servers = self.hosts.iter().filter(|host| host.server).count() as u32;
        Topology::from_labels(&labels).with_servers(servers)
    }

    /// Adds the measurements of ranks, whose daemons had these numbers of data threads and of
    /// connections per thread and peer.
    #[must_use]
    pub(crate) fn with_calls(
        mut self,
        calls: &Calls,
        lanes: u32,
        streams: u32,
        status: &pb::StatusResponse,
    ) -> Self {
        if let Some(burst) = calls.burst() {
            self.network.burst_bytes = rounded(burst.bytes);
            self.network.burst_mbit = rounded(burst.rate * 8.0 / MEGA);
            // One data thread moved this much, so it is at least this fast.
            if self.network.lane_rate_mbit > 0.0 {
                let fast = self.network.burst_mbit;
                self.network.lane_rate_mbit = self.network.lane_rate_mbit.max(fast);
            }
        }
        // Without bursts, short transfers show the rate of a line.
        let saves_up = self.network.burst_bytes > 0.0;
        if let Some(line) = calls.line().filter(|_| saves_up) {
            self.set_line(line * 8.0 / MEGA);
        }
        if let Some(share) = calls.uplink().filter(|_| saves_up) {
            self.set_uplinks(share * 8.0 / MEGA);
        }
        // The cost model counts the time of its messages with the operation.
        let call = (calls.call - self.of_messages(status)).max(0.0);
        self.job = status.sizes.as_ref().map(|sizes| Job {
            call_us: rounded(call / MICRO),
            lanes,
            streams,
            chunk_bytes: sizes.chunk_bytes,
            credit_pieces: sizes.credit_pieces,
            piece_bytes: sizes.piece_bytes,
        });
        self
    }

    /// Seconds that the messages of a few bytes take by the cost model.
    fn of_messages(&self, status: &pb::StatusResponse) -> f64 {
        let Some(costs) = &status.costs else { return 0.0 };
        let cost = CostModel { operation: 0.0, ..cost_of(costs) };
        let (kind, topology, bytes) = (Kind::Allreduce, self.topology(), FEW_BYTES as u64);
        if topology.contributors() < 2 {
            return 0.0;
        }
        let (rule, allowed) = Rules::default().allowed(kind, 0, &topology);
        let alone = Pipeline { pieces: 1, in_flight: 1 };
        select(kind, &topology, bytes, alone, (rule, &allowed), &cost).predicted_seconds
    }

    /// Gives racks with several hosts uplinks with this share for each host, in Mbit/s, if there is
    /// one level of racks.
    fn set_uplinks(&mut self, share: f64) {
        let topology = self.topology();
        let members = topology.members();
        let is_slow = share < SLOWER * self.network.rack_rate_mbit;
        if topology.tiers().len() > 1 || members.len() < 2 || is_slow {
            return;
        }
        // Two racks were measured, with all hosts of the smaller one at work.
        let hosts = members.iter().take(2).map(Vec::len).min().unwrap_or(1);
        let latency_us = (self.network.rack_latency_us - self.network.latency_us).max(0.0);
        let rate_mbit = rounded(share * hosts as f64);
        self.tiers = vec![Tier { rate_mbit, latency_us: rounded(latency_us) }];
    }

    /// Sets the rate of lines with bursts, in Mbit/s: short transfers showed up to two thirds more
    /// than that, or slightly less if other processes interfered. Slower lines stay unchanged.
    fn set_line(&mut self, rate: f64) {
        let racks = self.topology();
        let places: HashMap<&str, u32> =
            self.hosts.iter().map(|host| host.name.as_str()).zip(0..).collect();
        let place = |name: &str| places.get(name).copied();
        let is_near = |link: &Link| match (place(&link.from), place(&link.to)) {
            (Some(from), Some(to)) => racks.same_rack(from, to),
            _ => false,
        };
        let near: Vec<bool> = self.links.iter().map(is_near).collect();
        let of = |is_one: &dyn Fn(&Link) -> bool| {
            let links = self.links.iter().zip(&near).filter(|(link, near)| **near && is_one(link));
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
        let alike: Vec<bool> = self
            .hosts
            .iter()
            .map(|host| of(&|link| ends_at(host, link)).is_none_or(is_alike))
            .collect();
        let line = rate.round().max(1.0) as u32;
        for (host, _) in self.hosts.iter_mut().zip(alike).filter(|(_, alike)| *alike) {
            host.line_mbit = if host.line_mbit == 0 { line } else { host.line_mbit.min(line) };
        }
        let links = self.links.iter_mut().zip(near).filter(|(_, near)| *near);
        for (link, _) in links.filter(|(link, _)| is_alike(link.rate_mbit)) {
            link.rate_mbit = rounded(rate);
        }
    }

    /// The text of the file.
    ///
    /// # Errors
    /// [`CommandError`] if it can't be written as TOML, which is a bug.
    pub fn to_toml(&self) -> Result<String, CommandError> {
        let text = toml::to_string(self).map_err(CommandError::failed)?;
        Ok(format!(
            "# Written by gradwire probe. gradwire explain --cluster and gradwire simulate run \
             read it.\n{text}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::probe_calls::tests::calls;

    fn measured() -> ClusterFile {
        let (rack, server) = ("r1".to_owned(), false);
        let host = |name: &str, line_mbit| Host {
            name: name.into(),
            rack: rack.clone(),
            line_mbit,
            server,
        };
        let cost = CostModel { operation: 1.5e-4, lane_per_byte: 1e-9, ..CostModel::default() };
        ClusterFile {
            order: vec![1, 0],
            network: Network::from(&cost),
            hosts: vec![host("a", 1000), host("b", 4000)],
            links: vec![Link {
                from: "a".into(),
                to: "b".into(),
                latency_us: 12.5,
                lane_rate_mbit: 900.0,
                rate_mbit: 940.0,
            }],
            tiers: Vec::new(),
            job: Some(Job {
                call_us: 312.5,
                lanes: 2,
                streams: 1,
                chunk_bytes: 262_144,
                credit_pieces: 8,
                piece_bytes: 4 << 20,
            }),
        }
    }

    #[test]
    fn a_written_file_can_be_read() {
        let written = measured();
        let text = written.to_toml().unwrap();
        let read = input::parse(&text).unwrap();
        assert!(text.contains("latency_us = 12.5"), "{text}");
        assert!(text.contains("[job]\ncall_us = 312.5\nlanes = 2"), "{text}");
        assert!(!text.contains("burst_b"), "{text}");
        assert_eq!(read.setup.network.topology.lines(), [1, 4]);
        assert_eq!(read.setup.network.topology.order(), [1, 0]);
        assert_eq!((read.setup.transport.lanes, read.setup.transport.chunk), (2, 262_144));
        // The processor time of a message is counted separately.
        let latency = read.setup.network.pairs[&(0, 1)].latency;
        assert!((latency + read.cost.per_message - 12.5e-6).abs() < 1e-9, "{latency}");
        let cost = read.cost;
        for (read, was) in [
            (cost.in_rack.per_byte, CostModel::default().in_rack.per_byte),
            (cost.operation, 1.5e-4),
            (cost.lane_per_byte, 1e-9),
            (cost.burst_loss, CostModel::default().burst_loss),
        ] {
            assert!((read / was - 1.0).abs() < 1e-3, "{read} {was}");
        }
    }

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
            file.clone().with_calls(&calls, 2, 1, &status)
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
        let found = fast.with_calls(&calls((120e6, 262_144.0), 30e6), 2, 1, &status);
        assert_eq!(found.tiers, []);
    }

    #[test]
    fn servers_stay_servers() {
        let node = |host: &str, slots| pb::NodeStatus {
            host: host.to_owned(),
            slots,
            ..pb::NodeStatus::default()
        };
        let nodes = vec![node("a", 1), node("b", 1), node("s", 0)];
        let status = pb::StatusResponse { nodes, ..pb::StatusResponse::default() };
        let text = ClusterFile::of_job(&status).to_toml().unwrap();
        let topology = input::parse(&text).unwrap().setup.network.topology;
        assert_eq!((topology.contributors(), topology.servers()), (2, 1), "{text}");
    }
}
