//! Decides which nodes may join. Nodes are checked, and get their ranks once all have joined.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use gradwire_proto::{Endpoints, MAX_LABEL_BYTES, PROTOCOL, Rank, VERSION, check_rack_label, pb};

use super::{
    absence::Absence,
    members::{Joined, Members},
};
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
            "the job secret of this node differs from the coordinator's: `gradwire run` gives \
             all nodes the same one; under other launchers, GRADWIRE_SECRET_FILE must name the \
             same secret on all hosts",
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
    let reachable = |at: SocketAddr| !at.ip().is_unspecified() && at.port() != 0;
    match join.data_address.parse::<Endpoints>() {
        Err(expected) => {
            return invalid(format!(
                "invalid data address '{address}' of node '{host}': {expected}"
            ));
        }
        Ok(all) if !all.all().iter().copied().all(reachable) => {
            return invalid(format!(
                "other nodes can't dial the data address '{address}' of node '{host}': set \
                 GRADWIRE_ADDRESS to an address of that node"
            ));
        }
        Ok(_) => {}
    }
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

/// An epoch in words, from the number in a join.
fn epoch_of(named: u64) -> String {
    if named == 0 { "a job of fixed size".to_owned() } else { format!("epoch {named}") }
}

/// An address that is in both lists of data addresses.
fn common_address<'a>(one: &str, other: &'a str) -> Option<&'a str> {
    other.split(',').find(|address| one.split(',').any(|there| there == *address))
}

/// The node of a join.
fn node(join: pb::Join, first_rank: u32) -> Node {
    Node {
        host: join.host,
        data_address: join.data_address,
        metrics_address: join.metrics_address.parse().ok(),
        first_rank: Rank(first_rank),
        slots: join.slots,
        rack: join.rack,
        line_mbit: join.line_mbit,
    }
}

/// Checks that this is the daemon that has joined as `there`, and that it has made more attempts
/// than `last` (TRUST). Its host may have other addresses now.
pub(crate) fn check_return(join: &pb::Join, there: &Node, last: u32) -> Result<(), Refusal> {
    let host = text::excerpt(&join.host, MAX_LABEL_BYTES);
    let data_address = there.data_address.clone();
    let returned = Node { data_address, ..node(join.clone(), there.first_rank.0) };
    if returned != *there {
        return refuse(
            RefusalKind::Taken,
            format!(
                "node {} (host {host}, {}) wants to continue, but node {} is on host {}, with {}: \
                 only the daemon that has joined may continue",
                join.order,
                text::count(join.slots as usize, "slot"),
                join.order,
                there.host,
                text::count(there.slots as usize, "slot")
            ),
        );
    }
    if join.attempt <= last {
        return refuse(
            RefusalKind::Taken,
            format!(
                "stream {} of node {} (host {host}) comes too late: stream {last} has replaced it",
                join.attempt, join.order
            ),
        );
    }
    Ok(())
}

/// Checks that no other node has an address of this one. `others`: their hosts and addresses.
pub(crate) fn check_address<'a>(
    join: &pb::Join,
    others: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<(), Refusal> {
    let same = others.into_iter().find_map(|(host, addresses)| {
        common_address(addresses, &join.data_address).map(|at| (host, at))
    });
    let Some((host, at)) = same else { return Ok(()) };
    refuse(
        RefusalKind::Taken,
        format!(
            "nodes '{host}' and '{}' have the same data address {at}: set GRADWIRE_ADDRESS on each \
             to an address that the others can reach",
            join.host
        ),
    )
}

/// A node that has joined.
#[derive(Debug)]
struct Entry {
    connection: ConnectionId,
    join: pb::Join,
    absence: Absence,
}

/// The nodes that have joined while the world is not complete.
#[derive(Debug, Default)]
pub(crate) struct Forming {
    joined: BTreeMap<u32, Entry>,
    /// The order of the last node that was refused, and why, in a few words.
    refused: Option<(u32, String)>,
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
        if let Some(Entry { join: there, .. }) = self.joined.get(&join.order) {
            return refuse(
                RefusalKind::Taken,
                format!(
                    "order {} of node '{}' is taken by node '{}' at {}: \
                     every node needs its own GRADWIRE_ORDER",
                    join.order, join.host, there.host, there.data_address
                ),
            );
        }
        check_address(&join, self.others(join.order))?;
        self.joined.insert(join.order, Entry { connection, join, absence: Absence::default() });
        Ok(())
    }

    /// The hosts and addresses of the other nodes.
    fn others(&self, order: u32) -> impl Iterator<Item = (&str, &str)> {
        let others = self.joined.iter().filter(move |(at, _)| **at != order);
        others.map(|(_, there)| (there.join.host.as_str(), there.join.data_address.as_str()))
    }

    /// A node that has passed [`check_join`] joins again. Returns the stream that is replaced;
    /// `None` if the node is not known.
    pub(crate) fn returns(
        &mut self,
        connection: ConnectionId,
        join: &pb::Join,
        now: Duration,
    ) -> Result<Option<ConnectionId>, Refusal> {
        let Some(there) = self.joined.get(&join.order) else { return Ok(None) };
        check_return(join, &node(there.join.clone(), 0), there.join.attempt)?;
        check_address(join, self.others(join.order))?;
        let Some(there) = self.joined.get_mut(&join.order) else { return Ok(None) };
        there.join.attempt = join.attempt;
        there.join.data_address.clone_from(&join.data_address);
        there.absence.end(now);
        Ok(Some(std::mem::replace(&mut there.connection, connection)))
    }

    /// The stream of a node that may return has ended. Returns whether the node had joined.
    pub(crate) fn leaves(&mut self, connection: ConnectionId, why: &str, now: Duration) -> bool {
        let of = |there: &&mut Entry| there.connection == connection;
        let Some(there) = self.joined.values_mut().find(of) else { return false };
        there.absence.begin(why, now);
        true
    }

    /// Whether this was the stream of a node that is away and may return.
    pub(crate) fn awaits(&self, connection: ConnectionId) -> bool {
        let mut nodes = self.joined.values();
        nodes.any(|there| there.connection == connection && there.absence.is_away())
    }

    /// The node that will be the first to be away for too long: its stream, when that is, and why
    /// it is lost then.
    pub(crate) fn first_due(&self, limit: Duration) -> Option<(ConnectionId, Duration, String)> {
        let due = |there: &Entry| {
            Some((there.connection, there.absence.until(limit)?, there.absence.text(limit)?))
        };
        self.joined.values().filter_map(due).min_by_key(|(_, until, _)| *until)
    }

    /// The stream of a node.
    pub(crate) fn connection(&self, order: u32) -> Option<ConnectionId> {
        self.joined.get(&order).map(|there| there.connection)
    }

    fn order_of(&self, connection: ConnectionId) -> Option<u32> {
        self.joined.iter().find(|(_, there)| there.connection == connection).map(|(&at, _)| at)
    }

    /// Forgets a node whose stream has ended; its place is free again. Returns its order and host.
    pub(crate) fn forget(&mut self, connection: ConnectionId) -> Option<(u32, String)> {
        let order = self.order_of(connection)?;
        self.joined.remove(&order).map(|there| (order, there.join.host))
    }

    /// The host of a node that has joined.
    pub(crate) fn host(&self, connection: ConnectionId) -> Option<&str> {
        let order = self.order_of(connection)?;
        self.joined.get(&order).map(|there| there.join.host.as_str())
    }

    /// How many nodes have joined.
    pub(crate) fn len(&self) -> usize {
        self.joined.len()
    }

    /// Notes that a node was refused. It may be one of the missing nodes.
    pub(crate) fn refuses(&mut self, order: u32, described: &str, kind: RefusalKind) {
        let why = match kind {
            RefusalKind::Secret => "its job secret differs",
            RefusalKind::Version => "it is of another release",
            RefusalKind::Job => "it belongs to another job",
            _ => return,
        };
        self.refused = Some((order, format!("; refused: {described}, because {why}")));
    }

    /// Describes which nodes have not joined, and which have.
    pub(crate) fn missing(&self, config: &EngineConfig) -> String {
        let missing: Vec<Rank> =
            (0..config.nodes).filter(|order| !self.joined.contains_key(order)).map(Rank).collect();
        let hosts: Vec<_> =
            self.joined.iter().map(|(o, it)| format!("{o} ({})", it.join.host)).collect();
        let joined = match &hosts[..] {
            [] => String::new(),
            _ => format!("; joined: {}", hosts.join(", ")),
        };
        let noun = if missing.len() == 1 { "node" } else { "nodes" };
        let is_missing = |(order, _): &&(u32, String)| !self.joined.contains_key(order);
        let refused = self.refused.as_ref().filter(is_missing).map(|(_, text)| text.as_str());
        format!(
            "{} of {} nodes have joined; missing: {noun} {}{joined}{}",
            self.joined.len(),
            config.nodes,
            Rank::list(missing),
            refused.unwrap_or_default()
        )
    }

    /// Returns the world of all nodes that have joined.
    pub(crate) fn close(&mut self, now: Duration) -> Members {
        let mut first_rank = 0;
        let nodes = std::mem::take(&mut self.joined).into_values().map(|joined| {
            let Entry { connection, join, absence } = joined;
            let attempt = join.attempt;
            let node = node(join, first_rank);
            first_rank += node.slots;
            Joined { connection, node, attempt, absence }
        });
        Members::new(nodes, now)
    }
}
