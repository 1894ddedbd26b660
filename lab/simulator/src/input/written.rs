//! Writes the description of a measured cluster, which [`parse`](super::parse) reads.
//!
//! `gradwire probe --out` writes such a file: what the links cost, the hosts, and the measurements
//! of each link.

use gradwire_collectives::{CostModel, LinkCost, Topology};
use gradwire_proto::pb;
use serde::Serialize;

const MICRO: f64 = 1e-6;
const MEGA: f64 = 1e6;
const PERCENT: f64 = 100.0;

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
pub fn rounded(value: f64) -> f64 {
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

/// The cost model of a coordinator's answer.
pub fn cost_of(costs: &pb::Costs) -> CostModel {
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
    pub fn topology(&self) -> Topology {
        let labels: Vec<&str> = self.hosts.iter().map(|host| host.rack.as_str()).collect();
        let servers = self.hosts.iter().filter(|host| host.server).count() as u32;
        Topology::from_labels(&labels).with_servers(servers)
    }

    /// The text of the file.
    ///
    /// # Errors
    /// If it can't be written as TOML, which is a bug.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        let text = toml::to_string(self)?;
        Ok(format!(
            "# Written by gradwire probe. gradwire explain --cluster and gradwire simulate run \
             read it.\n{text}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::parse, *};

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
        let read = parse(&text).unwrap();
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
    fn servers_stay_servers() {
        let node = |host: &str, slots| pb::NodeStatus {
            host: host.to_owned(),
            slots,
            ..pb::NodeStatus::default()
        };
        let nodes = vec![node("a", 1), node("b", 1), node("s", 0)];
        let status = pb::StatusResponse { nodes, ..pb::StatusResponse::default() };
        let text = ClusterFile::of_job(&status).to_toml().unwrap();
        let topology = parse(&text).unwrap().setup.network.topology;
        assert_eq!((topology.contributors(), topology.servers()), (2, 1), "{text}");
    }
}
