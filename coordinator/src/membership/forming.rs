//! Decides which nodes may join. Nodes are checked, and get their ranks once all have joined.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use gradwire_proto::{MAX_LABEL_BYTES, PROTOCOL, Rank, VERSION, check_rack_label, pb};

use super::members::Members;
use crate::model::{
    ConnectionId, EngineConfig,
    command::{Node, RefusalKind},
    text,
};

/// The most local ranks of a node: the most ranks of a job.
const MAX_SLOTS: u32 = Rank::MAX;

/// Why a node may not join.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) text: String,
}

fn refuse(kind: RefusalKind, text: impl Into<String>) -> Result<(), Refusal> {
    Err(Refusal { kind, text: text.into() })
}

/// The checks that do not depend on other nodes, the most basic first. A node of another release
/// can't be asked for a proof, and a node without a proof gets no information about the job.
pub(crate) fn check_join(
    config: &EngineConfig,
    join: &pb::Join,
    proven: bool,
) -> Result<(), Refusal> {
    let host = text::excerpt(&join.host, MAX_LABEL_BYTES);
    if join.protocol != PROTOCOL {
        return refuse(
            RefusalKind::Version,
            format!(
                "gradwired {} speaks protocol {}, but this coordinator {VERSION} speaks \
                 {PROTOCOL}: install the same release on every node",
                text::excerpt(&join.version, 32),
                join.protocol
            ),
        );
    }
    if !proven {
        return refuse(
            RefusalKind::Secret,
            "the job secret of this node differs from the coordinator's: both must have the same \
             GRADWIRE_SECRET, which `gradwire run` creates for each job and passes to every node",
        );
    }
    if join.job != config.job.as_str() {
        let theirs = text::excerpt(&join.job, 80);
        return refuse(
            RefusalKind::Job,
            format!(
                "node '{host}' belongs to job '{theirs}', but this coordinator serves job '{}': \
                 check GRADWIRE_JOB and GRADWIRE_COORDINATOR on that node",
                config.job
            ),
        );
    }
    if join.epoch != config.named_epoch() {
        return refuse(
            RefusalKind::Epoch,
            format!(
                "node '{host}' belongs to {}, but this coordinator serves {}: the daemons of all \
                 hosts must be started for the same epoch (GRADWIRE_EPOCH)",
                epoch_of(join.epoch),
                epoch_of(config.named_epoch())
            ),
        );
    }
    let invalid = |text: String| refuse(RefusalKind::Invalid, text);
    if join.host.len() > MAX_LABEL_BYTES || join.host.chars().any(char::is_control) {
        return invalid(format!(
            "invalid host name {:?}: expected at most {MAX_LABEL_BYTES} bytes, \
             without control characters",
            text::excerpt(&join.host, 80)
        ));
    }
    if let Err(accepted) = check_rack_label(&join.rack) {
        return invalid(format!(
            "invalid rack label {:?} of node '{host}': expected {accepted}; set \
             GRADWIRE_NODE__RACK on that node",
            text::excerpt(&join.rack, 80)
        ));
    }
    if join.host.is_empty() {
        return invalid("the host name is empty: set GRADWIRE_HOST on that node".into());
    }
    let address = text::excerpt(&join.data_address, 80);
    match join.data_address.parse::<SocketAddr>() {
        Err(_) => {
            return invalid(format!(
                "invalid data address '{address}' of node '{host}': expected ip:port"
            ));
        }
        Ok(at) if at.ip().is_unspecified() || at.port() == 0 => {
            return invalid(format!(
                "other nodes can't dial the data address '{address}' of node '{host}': set \
                 GRADWIRE_ADDRESS to an address of that node"
            ));
        }
        Ok(_) => {}
    }
    let reachable = |at: SocketAddr| !at.ip().is_unspecified() && at.port() != 0;
    let metrics = &join.metrics_address;
    if !metrics.is_empty() && !metrics.parse().is_ok_and(reachable) {
        let address = text::excerpt(metrics, 80);
        return invalid(format!(
            "invalid metrics address '{address}' of node '{host}': expected an ip:port that other \
             hosts can reach"
        ));
    }
    let is_server = join.order >= config.nodes - config.servers;
    if join.order < config.nodes && is_server && join.slots > 0 {
        return invalid(format!(
            "node '{host}' is a server because of its order {} of {}, but has {} slots: a server \
             has no ranks",
            join.order, config.nodes, join.slots
        ));
    }
    if !is_server && !(1..=MAX_SLOTS).contains(&join.slots) {
        return invalid(format!(
            "node '{host}' has {} slots: expected 1 to {MAX_SLOTS}; only servers have none, and \
             those are the last GRADWIRE_SERVERS nodes",
            join.slots
        ));
    }
    if join.order >= config.nodes {
        return invalid(format!(
            "node '{host}' has order {}, but the job has {}, numbered from 0",
            join.order,
            text::count(config.nodes as usize, "node")
        ));
    }
    Ok(())
}

/// Names an epoch as joins have it.
fn epoch_of(named: u64) -> String {
    if named == 0 { "a job of fixed size".to_owned() } else { format!("epoch {named}") }
}

/// The nodes that have joined while the world is not complete.
#[derive(Debug, Default)]
pub(crate) struct Forming {
    joined: BTreeMap<u32, (ConnectionId, pb::Join)>,
}

impl Forming {
    /// Adds a node that has passed [`check_join`], unless its place is taken.
    pub(crate) fn admit(
        &mut self,
        connection: ConnectionId,
        join: pb::Join,
    ) -> Result<(), Refusal> {
        if self.order_of(connection).is_some() {
            return refuse(RefusalKind::Invalid, "this stream has already joined");
        }
        if let Some((_, there)) = self.joined.get(&join.order) {
            return refuse(
                RefusalKind::Taken,
                format!(
                    "order {} of node '{}' is taken by node '{}' at {}: \
                     every node needs its own GRADWIRE_ORDER",
                    join.order, join.host, there.host, there.data_address
                ),
            );
        }
        let same_address =
            self.joined.values().find(|(_, there)| there.data_address == join.data_address);
        if let Some((_, there)) = same_address {
            return refuse(
                RefusalKind::Taken,
                format!(
                    "nodes '{}' and '{}' have the same data address {}: set GRADWIRE_ADDRESS on \
                     each to an address that the others can reach",
                    there.host, join.host, join.data_address
                ),
            );
        }
        self.joined.insert(join.order, (connection, join));
        Ok(())
    }

    fn order_of(&self, connection: ConnectionId) -> Option<u32> {
        self.joined.iter().find(|(_, (there, _))| *there == connection).map(|(&order, _)| order)
    }

    /// Forgets a node whose stream has ended; its place is free again. Returns its order and host.
    pub(crate) fn forget(&mut self, connection: ConnectionId) -> Option<(u32, String)> {
        let order = self.order_of(connection)?;
        self.joined.remove(&order).map(|(_, join)| (order, join.host))
    }

    /// The host of a node that has joined.
    pub(crate) fn host(&self, connection: ConnectionId) -> Option<&str> {
        let order = self.order_of(connection)?;
        self.joined.get(&order).map(|(_, join)| join.host.as_str())
    }

    /// How many nodes have joined.
    pub(crate) fn len(&self) -> usize {
        self.joined.len()
    }

    /// Describes which nodes have not joined, and which have.
    pub(crate) fn missing(&self, config: &EngineConfig) -> String {
        let missing: Vec<Rank> =
            (0..config.nodes).filter(|order| !self.joined.contains_key(order)).map(Rank).collect();
        let hosts: Vec<_> =
            self.joined.iter().map(|(o, (_, j))| format!("{o} ({})", j.host)).collect();
        let joined = match &hosts[..] {
            [] => String::new(),
            _ => format!("; joined: {}", hosts.join(", ")),
        };
        let noun = if missing.len() == 1 { "node" } else { "nodes" };
        format!(
            "{} of {} nodes have joined; missing: {noun} {}{joined}",
            self.joined.len(),
            config.nodes,
            Rank::list(missing)
        )
    }

    /// Returns the world of all nodes that have joined.
    pub(crate) fn close(&mut self, now: Duration) -> Members {
        let mut first_rank = 0;
        let nodes = std::mem::take(&mut self.joined).into_values().map(|(connection, join)| {
            let node = Node {
                host: join.host,
                data_address: join.data_address,
                metrics_address: join.metrics_address.parse().ok(),
                first_rank: Rank(first_rank),
                slots: join.slots,
                rack: join.rack,
                line_mbit: join.line_mbit,
            };
            first_rank += node.slots;
            (connection, node)
        });
        Members::new(nodes, now)
    }
}
