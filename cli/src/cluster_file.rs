//! The file that describes a cluster. `gradwire probe --out` writes it as TOML: what the links
//! cost, the hosts, and what was measured of each link. `gradwire explain --cluster` and
//! `gradwire simulate run` read it, and every other description of a cluster, by the simulator's
//! parser.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::Path,
};

use gradwire_collectives::{CostModel, LinkCost};
use gradwire_launcher::error::CommandError;
use gradwire_proto::pb;
use gradwire_simulator::input::{self, Input};
use serde::Serialize;

use crate::{cluster::printable, probe_calls::Calls};

const MICRO: f64 = 1e-6;
const MEGA: f64 = 1e6;
const PERCENT: f64 = 100.0;

/// A cluster with its costs.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct ClusterFile {
    /// The hosts by number, from 0, in the order in which a ring visits them, as far as racks stay
    /// together; empty: in their order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<u32>,
    /// What links, reductions and messages cost.
    pub network: Network,
    /// The hosts, in the order of their ranks, the servers last.
    #[serde(rename = "host")]
    pub hosts: Vec<Host>,
    /// What was measured of each link.
    #[serde(rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// How daemons ran when it was measured, for the simulator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
}

/// How daemons run, and what a call takes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// Microseconds that a call takes besides what it moves, from its submission until the rank
    /// goes on.
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

/// What was measured between two hosts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Link {
    /// A host.
    pub from: String,
    /// Another one.
    pub to: String,
    /// Of a small message, in microseconds.
    pub latency_us: f64,
    /// In each direction at once, by one data thread, in Mbit/s.
    pub lane_rate_mbit: f64,
    /// The same by all data threads.
    pub rate_mbit: f64,
}

/// The settings `network.*`, with fractions.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[expect(missing_docs, reason = "gradwire config show --explain has the same names")]
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
    /// What a line lets through at once after it had nothing to do, and at which rate; 0: nothing.
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

/// Seconds per byte as Mbit/s; 0 for no time.
fn mbit(per_byte: f64) -> f64 {
    if per_byte > 0.0 { 8.0 / per_byte / MEGA } else { 0.0 }
}

/// Seconds per byte as MB/s; 0 for no time.
fn megabytes(per_byte: f64) -> f64 {
    mbit(per_byte) / 8.0
}

/// Four digits are more than what measurements are worth.
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

/// The error for a file that describes no cluster.
fn refused(path: &Path, what: impl fmt::Display) -> CommandError {
    CommandError::usage(format!("cluster file {}: {what}", path.display()))
}

/// Reads a description of a cluster (BOUND, TRUST).
///
/// # Errors
/// [`CommandError`] with the file, the line, the key and what is accepted, or why it can't be read.
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
            format!("it has more than {} bytes, which is the most that is read", input::MAX_BYTES);
        return Err(refused(path, what));
    }
    String::from_utf8(bytes).map_err(|_| refused(path, "it is not UTF-8").hint("save it as UTF-8"))
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
    /// What a coordinator has measured, and the costs with which it chooses.
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
            job: None,
        }
    }

    /// With what ranks have measured, of daemons with so many data threads and connections of each
    /// of them with each peer.
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
            // One data thread has moved that: it is not slower, even if lines are.
            if self.network.lane_rate_mbit > 0.0 {
                let fast = self.network.burst_mbit;
                self.network.lane_rate_mbit = self.network.lane_rate_mbit.max(fast);
            }
            // What follows it is what lines can do. Of different lines daemons would make different
            // use.
            let line = (burst.line * 8.0 / MEGA).round().max(1.0) as u32;
            let usual = self.hosts.first().map_or(0, |host| host.line_mbit);
            if self.hosts.iter().all(|host| host.line_mbit == usual) && (usual == 0 || line < usual)
            {
                self.hosts.iter_mut().for_each(|host| host.line_mbit = line);
            }
        }
        self.job = status.sizes.as_ref().map(|sizes| Job {
            call_us: rounded(calls.barrier / MICRO),
            lanes,
            streams,
            chunk_bytes: sizes.chunk_bytes,
            credit_pieces: sizes.credit_pieces,
            piece_bytes: sizes.piece_bytes,
        });
        self
    }

    /// The text of the file.
    ///
    /// # Errors
    /// [`CommandError`] if it can't be written as TOML, which is a defect.
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
    fn what_is_written_is_read() {
        let written = measured();
        let text = written.to_toml().unwrap();
        let read = input::parse(&text).unwrap();
        assert!(text.contains("latency_us = 12.5"), "{text}");
        assert!(text.contains("[job]\ncall_us = 312.5\nlanes = 2"), "{text}");
        assert!(!text.contains("burst_b"), "{text}");
        assert_eq!(read.setup.network.topology.lines(), [1, 4]);
        assert_eq!(read.setup.network.topology.order(), [1, 0]);
        assert_eq!((read.setup.transport.lanes, read.setup.transport.chunk), (2, 262_144));
        // What the processors take of it is counted there.
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
        let topology = input::parse(&text).unwrap().setup.network.topology;
        assert_eq!((topology.contributors(), topology.servers()), (2, 1), "{text}");
    }
}
