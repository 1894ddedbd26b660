//! The file that describes a measured cluster: `gradwire probe --out` writes it, and
//! `gradwire explain --cluster` and `gradwire simulate run` read it. It is TOML: what the links
//! cost, the hosts, and what was measured of each link.

use std::{
    fmt,
    fs::File,
    io::{self, Read},
    path::Path,
};

use gradwire_collectives::{CostModel, LinkCost, Topology};
use gradwire_launcher::error::CommandError;
use gradwire_proto::pb;
use serde::{Deserialize, Serialize};

use crate::probe_calls::Calls;

/// The largest file that is read (BOUND).
const MAX_BYTES: u64 = 4 << 20;

/// The most hosts.
const MAX_HOSTS: usize = 4096;

/// The smallest rate, so that times are numbers.
const LEAST: f64 = 1e-3;

const MICRO: f64 = 1e-6;
const MEGA: f64 = 1e6;
const PERCENT: f64 = 100.0;

/// A cluster with its costs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClusterFile {
    /// The hosts by number, from 0, in the order in which a ring visits them, as far as racks stay
    /// together; empty: in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub order: Vec<u32>,
    /// What links, reductions and messages cost.
    #[serde(default)]
    pub network: Network,
    /// The hosts, in the order of their ranks, the servers last.
    #[serde(default, rename = "host")]
    pub hosts: Vec<Host>,
    /// What was measured of each link.
    #[serde(default, rename = "link", skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<Link>,
    /// How daemons ran when it was measured, for the simulator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<Job>,
}

/// How daemons run, and what a call takes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its rack.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub rack: String,
    /// The rate of its line in Mbit/s; 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub line_mbit: u32,
    /// Whether it has no ranks and reduces for the others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub server: bool,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// What was measured between two hosts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
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

/// The inverse of [`mbit`].
fn per_byte(mbit: f64) -> f64 {
    if mbit > 0.0 { 8.0 / (mbit * MEGA) } else { 0.0 }
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

impl Network {
    /// The cost model, with the usual numbers of data threads and of connections.
    ///
    /// # Errors
    /// The name of a key and what it may be, if its value is out of range (TRUST).
    pub fn cost(&self) -> Result<CostModel, String> {
        let positive = [
            ("rate_mbit", self.rate_mbit),
            ("rack_rate_mbit", self.rack_rate_mbit),
            ("reduce_mb_per_s", self.reduce_mb_per_s),
        ];
        let others = [
            ("latency_us", self.latency_us),
            ("rack_latency_us", self.rack_latency_us),
            ("message_ns", self.message_ns),
            ("burst_loss_percent", self.burst_loss_percent),
            ("sender_loss_percent", self.sender_loss_percent),
            ("lane_rate_mbit", self.lane_rate_mbit),
            ("publish_mb_per_s", self.publish_mb_per_s),
            ("operation_us", self.operation_us),
            ("overflow_us", self.overflow_us),
            ("burst_bytes", self.burst_bytes),
            ("burst_mbit", self.burst_mbit),
        ];
        let is_number = |value: f64| value.is_finite() && value < 1e12;
        if let Some((key, value)) =
            positive.into_iter().find(|(_, value)| !is_number(*value) || *value < LEAST)
        {
            return Err(format!("network.{key} is {value}: it must be at least {LEAST}"));
        }
        if let Some((key, value)) =
            others.into_iter().find(|(_, value)| !is_number(*value) || *value < 0.0)
        {
            return Err(format!("network.{key} is {value}: it must be at least 0"));
        }
        for (key, value) in [
            ("chunk_bytes", self.chunk_bytes),
            ("free_senders", self.free_senders.into()),
            ("rack_paths", self.rack_paths.into()),
        ] {
            if value == 0 {
                return Err(format!("network.{key} is 0: it must be more than 0"));
            }
        }
        Ok(CostModel {
            in_rack: LinkCost {
                latency: self.latency_us * MICRO,
                per_byte: per_byte(self.rate_mbit),
            },
            cross_rack: LinkCost {
                latency: self.rack_latency_us * MICRO,
                per_byte: per_byte(self.rack_rate_mbit),
            },
            reduce_per_byte: per_byte(self.reduce_mb_per_s * 8.0),
            per_message: self.message_ns / 1e9,
            lane_per_byte: per_byte(self.lane_rate_mbit),
            publish_per_byte: per_byte(self.publish_mb_per_s * 8.0),
            operation: self.operation_us * MICRO,
            chunk: self.chunk_bytes,
            burst_loss: self.burst_loss_percent / PERCENT,
            free_fan_in: self.free_senders,
            incast_loss: self.sender_loss_percent / PERCENT,
            queue: self.queue_bytes,
            overflow: self.overflow_us * MICRO,
            paths: self.rack_paths,
            ..CostModel::default()
        })
    }
}

/// The error for a file that describes no cluster.
pub(crate) fn refused(path: &Path, what: impl fmt::Display) -> CommandError {
    CommandError::usage(format!("cluster file {}: {what}", path.display()))
}

/// The text of a file that describes a cluster (BOUND).
///
/// # Errors
/// [`CommandError`] if it can't be read, is too large or is not UTF-8.
pub fn read_text(path: &Path) -> Result<String, CommandError> {
    let failed = |error: io::Error| {
        refused(path, error).hint("gradwire probe --out FILE writes such a file")
    };
    let file = File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX_BYTES {
        let what = format!("it has more than {MAX_BYTES} bytes, which is the most that is read");
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

    /// Reads a file.
    ///
    /// # Errors
    /// [`CommandError`] with the file, the place and what is accepted.
    pub fn read(path: &Path) -> Result<Self, CommandError> {
        Self::parse(&read_text(path)?).map_err(|what| refused(path, what))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: Self = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            let line = text.get(..at).map_or(1, |before| before.matches('\n').count() + 1);
            format!("line {line}: {}", error.message().replace('\n', "; "))
        })?;
        file.network.cost()?;
        if file.hosts.is_empty() || file.hosts.len() > MAX_HOSTS {
            let what = "it must have a section [[host]] with a name for each host";
            return Err(format!("{what}, 1 to {MAX_HOSTS}; it has {}", file.hosts.len()));
        }
        if file.hosts[0].server || !file.hosts.is_sorted_by_key(|host| host.server) {
            return Err(
                "hosts with server = true come after all others, of which there has to be \
                        one"
                .to_owned(),
            );
        }
        let mut names: Vec<&str> = file.hosts.iter().map(|host| host.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("there are two hosts {:?}", pair[0]));
        }
        if file.arranged().is_none() {
            let what = format!(
                "order must have each number from 0 to {} once, or be left out",
                names.len() - 1
            );
            return Err(what);
        }
        for link in &file.links {
            for end in [&link.from, &link.to] {
                if names.binary_search(&end.as_str()).is_err() {
                    return Err(format!("a link names {end:?}, which is not one of the hosts"));
                }
            }
        }
        Ok(file)
    }

    /// The hosts in their racks and their order.
    pub fn topology(&self) -> Topology {
        self.arranged().unwrap_or_else(|| self.labelled())
    }

    fn arranged(&self) -> Option<Topology> {
        self.labelled().arranged(&[], &self.order)
    }

    fn labelled(&self) -> Topology {
        let labels: Vec<&str> = self.hosts.iter().map(|host| host.rack.as_str()).collect();
        let servers = self.hosts.iter().filter(|host| host.server).count();
        let lines: Vec<u32> = self.hosts.iter().map(|host| host.line_mbit).collect();
        Topology::from_labels(&labels).with_servers(servers as u32).with_lines(&lines)
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
        assert_eq!(ClusterFile::parse(&text), Ok(written.clone()), "{text}");
        assert!(text.contains("latency_us = 12.5"), "{text}");
        assert!(text.contains("[job]\ncall_us = 312.5\nlanes = 2"), "{text}");
        assert!(!text.contains("burst_b"), "{text}");
        assert_eq!(written.topology().lines(), [1, 4]);
        assert_eq!(written.topology().order(), [1, 0]);
        let twice = text.replace("order = [", "order = [1, ");
        assert!(ClusterFile::parse(&twice).unwrap_err().contains("each number from 0 to 1 once"));
        let cost = written.network.cost().unwrap();
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
        let topology = ClusterFile::parse(&text).unwrap().topology();
        assert_eq!((topology.contributors(), topology.servers()), (2, 1), "{text}");
    }

    /// What is left out is as usual.
    #[test]
    fn hosts_are_enough() {
        let file =
            ClusterFile::parse("[[host]]\nname = \"a\"\n[network]\nrate_mbit = 100").unwrap();
        assert_eq!(file.network, Network { rate_mbit: 100.0, ..Network::default() });
        assert_eq!(file.topology().participants(), 1);
    }

    #[test]
    fn each_mistake_is_named_with_its_place() {
        let host = "[[host]]\nname = \"a\"\n";
        for (text, expected) in [
            ("[network]\nrate_mbits = 1", "line 2: unknown field `rate_mbits`"),
            ("[network\n", "line 1"),
            ("[[host]]\nrack = \"r\"", "missing field `name`"),
            ("", "it must have a section [[host]]"),
            (&format!("{host}[network]\nrate_mbit = 0.0"), "network.rate_mbit is 0"),
            (&format!("{host}[network]\nrate_mbit = nan"), "network.rate_mbit is NaN"),
            (&format!("{host}[network]\nlatency_us = -1.0"), "network.latency_us is -1"),
            (&format!("{host}[network]\nchunk_bytes = 0"), "network.chunk_bytes is 0"),
            (&format!("{host}[network]\nlatency_us = \"x\""), "line 4: invalid type"),
            (&format!("{host}{host}"), "there are two hosts \"a\""),
            (&format!("{host}server = true"), "hosts with server = true come after all others"),
            (
                &format!("{host}[[host]]\nname=\"s\"\nserver=true\n[[host]]\nname=\"b\""),
                "hosts with server = true come after all others",
            ),
            (
                &format!(
                    "{host}[[link]]\nfrom=\"a\"\nto=\"b\"\nlatency_us=1.0\nrate_mbit=1.0\n\
                     lane_rate_mbit=1.0"
                ),
                "a link names \"b\"",
            ),
        ] {
            let error = ClusterFile::parse(text).unwrap_err();
            assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
        }
    }
}
