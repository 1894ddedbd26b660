//! The streams of nodes: they break, and others continue. A node without a stream is away, and lost
//! only if it does not come back in time.

use std::time::Duration;

use gradwire_proto::{Failure, FailureKind, NodeId, beat::LastReceived, pb};

use super::{
    JobState, Membership,
    forming::{Refusal, check_address, check_return},
};
use crate::model::{
    Command, ConnectionId, Output,
    command::{RefusalKind, Severity},
};

impl Membership {
    /// How long a node may be without a stream.
    pub(super) fn away(&self) -> Duration {
        self.config.return_timeout.unwrap_or_default()
    }

    /// Whether this was the stream of a node that has none now and may return.
    pub(crate) fn awaits(&self, connection: ConnectionId) -> bool {
        let node = self.members.id(connection).and_then(|node| self.members.get(node));
        match node {
            Some(member) => member.absence.is_away(),
            None => self.forming.awaits(connection),
        }
    }

    /// The stream of a node that has joined.
    pub(crate) fn connection(&self, node: NodeId) -> Option<ConnectionId> {
        let member = self.members.get(node).map(|member| member.connection);
        member.or_else(|| self.forming.connection(node.0))
    }

    /// Notes that a heartbeat datagram of a node was received.
    pub(crate) fn received_datagram(&mut self, node: NodeId, now: Duration) {
        if let Some(member) = self.members.get_mut(node) {
            member.last_received.datagram = now;
        }
    }

    /// Handles a node that joins on another stream than its first. Returns whether it is known.
    pub(super) fn returned(
        &mut self,
        connection: ConnectionId,
        join: &pb::Join,
        now: Duration,
        out: &mut Output,
    ) -> Result<bool, Refusal> {
        let node = NodeId(join.order);
        let received = join.received;
        if let Some(member) = self.members.get(node) {
            check_return(join, &member.node, member.attempt)?;
            let others = self.members.iter().filter(|(other, _)| *other != node);
            let places = others.map(|(_, there)| (&*there.node.host, &*there.node.data_address));
            check_address(join, places)?;
        }
        if let Some(member) = self.members.get_mut(node) {
            if let Some(why) = &member.lost {
                let text = format!("node {node} (host {}) is lost: {why}", member.node.host);
                return Err(Refusal { kind: RefusalKind::Taken, text });
            }
            let (time, why) = member.absence.end(now);
            member.last_received = LastReceived::at(now);
            let host = member.node.host.clone();
            let has_moved = member.node.data_address != join.data_address;
            member.node.data_address.clone_from(&join.data_address);
            let earlier = self.members.moves(node, connection, join.attempt);
            let who = self.members.describe(node);
            let place = match has_moved {
                true => format!(", and is at {} now", join.data_address),
                false => String::new(),
            };
            out.reason = format!(
                "{who} on host {host} has another stream after {:.1} s{place}: {why}",
                time.as_secs_f64()
            );
            let text = out.reason.clone();
            out.commands.push(Command::Report { severity: Severity::Info, text });
            out.commands.push(Command::Resume { connection, earlier, received });
            if has_moved {
                let data_address = join.data_address.clone();
                out.commands.push(Command::Moved { node, data_address });
            }
            return Ok(true);
        }
        let JobState::Forming { .. } = &self.state else { return Ok(false) };
        let earlier = self.forming.returns(connection, join, now)?;
        if earlier.is_some() {
            out.reason = format!("node {} has another stream", join.order);
        }
        out.commands.push(Command::Resume { connection, earlier, received });
        Ok(earlier.is_some())
    }

    /// Handles the end of a stream. If the node `may_return`, it gets time for that. Returns the
    /// node if its loss is a failure. `is_busy` returns whether a node takes part in an operation
    /// that it has not done.
    pub(crate) fn lost(
        &mut self,
        connection: ConnectionId,
        (why, may_return): (&str, bool),
        is_busy: impl Fn(NodeId) -> bool,
        now: Duration,
        out: &mut Output,
    ) -> Option<NodeId> {
        let may_return = may_return && self.config.return_timeout.is_some();
        if let JobState::Forming { .. } = self.state {
            if may_return && self.forming.leaves(connection, why, now) {
                out.reason = format!("a node may return: {why}");
            } else {
                self.leaves_forming(connection, why, out);
            }
            return None;
        }
        let node = self.members.id(connection)?;
        if may_return && let Some(member) = self.members.get_mut(node) {
            member.absence.begin(why, now);
            out.reason = format!("{} may return: {why}", self.members.describe(node));
            return None;
        }
        if let Some(member) = self.members.get_mut(node) {
            member.lost = Some(why.to_owned());
        }
        (!self.leaves_quietly(node, is_busy, out)).then_some(node)
    }

    /// Forgets a node that disconnected before the world was complete.
    pub(super) fn leaves_forming(&mut self, connection: ConnectionId, why: &str, out: &mut Output) {
        let Some((order, host)) = self.forming.forget(connection) else { return };
        if self.config.elastic {
            // Its successor belongs to another epoch.
            let what = format!("gradwired disconnected ({why}) before the epoch had begun");
            return self.abort(Failure::new(FailureKind::NodeLost, what).host(host), out);
        }
        let missing = self.forming.missing(&self.config);
        out.reason = format!("node {order} (host {host}) disconnected ({why}): {missing}");
        let text = out.reason.clone();
        out.commands.push(Command::Report { severity: Severity::Warning, text });
    }

    /// Whether a node that is lost is only away, and not needed any more. `is_busy` as in
    /// [`Membership::lost`].
    pub(crate) fn stays_away(
        &mut self,
        node: NodeId,
        is_busy: impl Fn(NodeId) -> bool,
        out: &mut Output,
    ) -> bool {
        let is_away = self.members.get(node).is_some_and(|member| member.absence.is_away());
        is_away && self.leaves_quietly(node, is_busy, out)
    }

    /// Whether a node whose stream has ended is not needed any more.
    fn leaves_quietly(
        &mut self,
        node: NodeId,
        is_busy: impl Fn(NodeId) -> bool,
        out: &mut Output,
    ) -> bool {
        let Some(member) = self.members.get_mut(node) else { return false };
        if !member.has_left() || is_busy(node) {
            return false;
        }
        member.gone = true;
        let who = self.members.describe(node);
        out.reason = format!("{who} closed its stream after it had left");
        true
    }
}
