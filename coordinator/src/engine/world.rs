//! Who is in the world: nodes come, are checked, and get their ranks once all of them are there.
//!
//! A node's id is the order that the launcher gave it, and ranks are numbered in that order.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use gradwire_proto::{
    NodeId, PROTOCOL, Rank, VERSION,
    beat::{Heard, Limits},
};

use super::{
    EngineConfig,
    command::{Node, RefusalKind},
    event::{ConnectionId, Join},
    process_set::ProcessSet,
    text,
};

/// The most local ranks of one node: as many as a job can have.
const MAX_SLOTS: u32 = Rank::MOST;

/// The longest host name or rack label, in bytes.
const MAX_LABEL: usize = 255;

/// Why a node may not join.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) kind: RefusalKind,
    pub(crate) text: String,
}

fn refuse(kind: RefusalKind, text: impl Into<String>) -> Result<(), Refusal> {
    Err(Refusal { kind, text: text.into() })
}

/// The checks that do not depend on who else is there, from the most to the least basic: a node
/// of another release can't be asked for a proof, and who has no proof is told nothing of the job.
pub(crate) fn check_join(config: &EngineConfig, join: &Join) -> Result<(), Refusal> {
    let host = text::excerpt(&join.host, MAX_LABEL);
    if join.protocol != PROTOCOL {
        return refuse(
            RefusalKind::Version,
            format!(
                "gradwired {} speaks protocol {}, this coordinator {VERSION} speaks {PROTOCOL}: \
                 install the same release on every node",
                text::excerpt(&join.version, 32),
                join.protocol
            ),
        );
    }
    if !join.proven {
        return refuse(
            RefusalKind::Secret,
            "the job secret of this node is not the coordinator's: both must have the same \
             GRADWIRE_SECRET, which `gradwire run` makes for each job and hands to every node",
        );
    }
    if join.job != config.job.as_str() {
        let theirs = text::excerpt(&join.job, 80);
        return refuse(
            RefusalKind::Job,
            format!(
                "node '{host}' belongs to job '{theirs}', this coordinator serves job '{}': check \
                 GRADWIRE_JOB and GRADWIRE_COORDINATOR on that node",
                config.job
            ),
        );
    }
    let invalid = |text: String| refuse(RefusalKind::Invalid, text);
    for (what, label) in [("host name", &join.host), ("rack label", &join.rack)] {
        if label.len() > MAX_LABEL || label.chars().any(char::is_control) {
            return invalid(format!(
                "the {what} {:?} is not usable: at most {MAX_LABEL} bytes and no control characters",
                text::excerpt(label, 80)
            ));
        }
    }
    if join.host.is_empty() {
        return invalid("the host name is empty: set GRADWIRE_HOST on that node".into());
    }
    let address = text::excerpt(&join.data_address, 80);
    match join.data_address.parse::<SocketAddr>() {
        Err(_) => {
            return invalid(format!(
                "the data address '{address}' of node '{host}' is not ip:port"
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
    if !(1..=MAX_SLOTS).contains(&join.slots) {
        return invalid(format!(
            "node '{host}' has {} slots: 1 to {MAX_SLOTS} are possible",
            join.slots
        ));
    }
    if join.order >= config.nodes {
        return invalid(format!(
            "node '{host}' has order {}, the job has {}, numbered from 0",
            join.order,
            text::count(config.nodes as usize, "node")
        ));
    }
    Ok(())
}

/// The nodes that have come while the world is not complete.
#[derive(Debug, Default)]
pub(crate) struct Forming {
    joined: BTreeMap<u32, (ConnectionId, Join)>,
}

impl Forming {
    /// Takes a node that has passed [`check_join`], unless its place is taken.
    pub(crate) fn admit(&mut self, connection: ConnectionId, join: Join) -> Result<(), Refusal> {
        if self.order_of(connection).is_some() {
            return refuse(RefusalKind::Invalid, "this stream has joined already");
        }
        if let Some((_, there)) = self.joined.get(&join.order) {
            return refuse(
                RefusalKind::Taken,
                format!(
                    "order {} of node '{}' is taken by node '{}' at {}: every node needs its own \
                     GRADWIRE_ORDER",
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
                    "nodes '{}' and '{}' both say that their data address is {}: set \
                     GRADWIRE_ADDRESS on each to an address that the others can reach",
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

    /// Forgets a node whose stream has ended; its place is free again. Gives its host.
    pub(crate) fn forget(&mut self, connection: ConnectionId) -> Option<(u32, String)> {
        let order = self.order_of(connection)?;
        self.joined.remove(&order).map(|(_, join)| (order, join.host))
    }

    /// The host of a node that has come.
    pub(crate) fn host(&self, connection: ConnectionId) -> Option<&str> {
        let order = self.order_of(connection)?;
        self.joined.get(&order).map(|(_, join)| join.host.as_str())
    }

    /// How many nodes have come.
    pub(crate) fn len(&self) -> usize {
        self.joined.len()
    }

    /// What is said of the nodes that have not come, and of those that have.
    pub(crate) fn missing(&self, config: &EngineConfig) -> String {
        let missing: Vec<Rank> =
            (0..config.nodes).filter(|order| !self.joined.contains_key(order)).map(Rank).collect();
        let here = if self.joined.is_empty() {
            "nobody has come yet".to_owned()
        } else {
            let hosts: Vec<_> =
                self.joined.iter().map(|(o, (_, j))| format!("{o} ({})", j.host)).collect();
            format!("here: {}", hosts.join(", "))
        };
        let noun = if missing.len() == 1 { "node" } else { "nodes" };
        format!(
            "{} of {} nodes have joined; missing: {noun} {}; {here}",
            self.joined.len(),
            config.nodes,
            text::ranks(missing)
        )
    }

    /// The world of all nodes that have come.
    pub(crate) fn close(&mut self, now: Duration) -> Members {
        let mut members = Members::default();
        let mut first_rank = 0;
        for (_, (connection, join)) in std::mem::take(&mut self.joined) {
            let node = Node {
                host: join.host,
                data_address: join.data_address,
                first_rank: Rank(first_rank),
                slots: join.slots,
                rack: join.rack,
            };
            first_rank += node.slots;
            members.by_connection.insert(connection, NodeId(members.all.len() as u32));
            members.all.push(Member {
                connection,
                node,
                heard: Heard::at(now),
                left: BTreeMap::new(),
                absent: BTreeSet::new(),
                gone: false,
            });
        }
        members
    }
}

/// One node of the world.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) connection: ConnectionId,
    pub(crate) node: Node,
    /// When something of it came last.
    pub(crate) heard: Heard,
    /// Its ranks that have left in good order, and how many of the job had left before.
    pub(crate) left: BTreeMap<Rank, u32>,
    /// Those of them that had never come.
    pub(crate) absent: BTreeSet<Rank>,
    /// Its stream has ended after all of them had left; nothing more is expected of it.
    pub(crate) gone: bool,
}

impl Member {
    /// Its ranks.
    pub(crate) fn ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        let first = self.node.first_rank.0;
        (first..first + self.node.slots).map(Rank)
    }

    /// Whether all its ranks have left.
    pub(crate) fn has_left(&self) -> bool {
        self.left.len() == self.node.slots as usize
    }
}

/// The nodes of the complete world; empty before it is.
#[derive(Debug, Default)]
pub(crate) struct Members {
    all: Vec<Member>,
    by_connection: BTreeMap<ConnectionId, NodeId>,
}

impl Members {
    /// The node at the other end of a stream.
    pub(crate) fn id(&self, connection: ConnectionId) -> Option<NodeId> {
        self.by_connection.get(&connection).copied()
    }

    /// A node by its id; ids come from [`Members::id`] or from the index.
    pub(crate) fn get(&self, node: NodeId) -> Option<&Member> {
        self.all.get(node.0 as usize)
    }

    /// A node by its id, to be changed.
    pub(crate) fn get_mut(&mut self, node: NodeId) -> Option<&mut Member> {
        self.all.get_mut(node.0 as usize)
    }

    /// All nodes with their ids.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (NodeId, &Member)> {
        self.all.iter().enumerate().map(|(id, member)| (NodeId(id as u32), member))
    }

    /// How many nodes there are.
    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> u32 {
        self.all.iter().map(|m| m.node.slots).sum()
    }

    /// Where a rank of the world is.
    pub(crate) fn node_of(&self, rank: Rank) -> NodeId {
        let after = self.all.partition_point(|member| member.node.first_rank <= rank);
        NodeId(after.saturating_sub(1) as u32)
    }

    /// A process set of some ranks of the world, ascending.
    pub(crate) fn set(&self, ranks: Vec<Rank>) -> ProcessSet {
        ProcessSet::new(ranks, |rank| self.node_of(rank))
    }

    /// `node 1 (ranks 2-3)`, for a failure that has the host beside it.
    pub(crate) fn describe(&self, node: NodeId) -> String {
        let ranks: Vec<Rank> = self.get(node).map_or_else(Vec::new, |m| m.ranks().collect());
        format!("node {node} ({})", text::named_ranks(&ranks))
    }

    /// A node's name for people.
    pub(crate) fn host(&self, node: NodeId) -> &str {
        self.get(node).map_or("", |m| m.node.host.as_str())
    }

    /// The node that will have been silent for too long first, and when, among those that must be
    /// alive.
    pub(crate) fn first_due(&self, limits: &Limits) -> Option<(NodeId, Duration)> {
        let alive = self.iter().filter(|(_, member)| !member.gone);
        alive.map(|(id, member)| (id, member.heard.deadline(limits))).min_by_key(|due| due.1)
    }

    /// Forgives all silence up to now: it was the coordinator that did not listen.
    pub(crate) fn hear_all(&mut self, now: Duration) {
        self.all.iter_mut().for_each(|m| m.heard = Heard::at(now));
    }
}
