//! What goes to the nodes and comes from them: messages are counted, and kept for another stream.

use std::sync::Arc;

use gradwire_proto::{
    auth::Claim,
    clock::nanoseconds,
    pb::{self, coordinator_message::Message},
};
use gradwire_services::broadcast::Broadcast;

use super::{Runtime, Session};
use crate::{
    convert,
    model::{ConnectionId, Event},
};

impl Runtime {
    /// Sends messages to some nodes. Returns the loss of those for which too many wait.
    pub(super) fn send(
        &mut self,
        messages: &[Arc<Broadcast>],
        to: impl Fn(ConnectionId, &Session) -> bool,
    ) -> Vec<Event> {
        let mut overrun = Vec::new();
        for (&connection, node) in &mut self.nodes {
            if node.overrun || !to(connection, node) {
                continue;
            }
            messages.iter().for_each(|message| node.peer.outbox.send(Arc::clone(message)));
            if let Some(why) = node.peer.outbox.overrun() {
                node.overrun = true;
                overrun.push(Event::Lost { connection, why, may_return: false });
            }
        }
        overrun
    }

    /// Sends every node its last message (TELL). Only those whose stream may break are still
    /// listened to.
    pub(super) fn end(&mut self, last: Message) -> Vec<Event> {
        let last = convert::message(last);
        self.last_reports.get_or_insert(self.reports());
        self.nodes.retain(|_, node| {
            node.peer.outbox.send(last.clone());
            node.peer.outbox.remembers()
        });
        Vec::new()
    }

    /// Sends heartbeats to some nodes, which also tell them whether to record a trace.
    pub(super) fn beat(&mut self, trace: bool, to: impl Fn(ConnectionId) -> bool) {
        let paused = self.is_paused;
        let begun = self.nodes.values().any(|node| node.peer.newest.lock().begun);
        for (connection, node) in &mut self.nodes {
            // Too many waiting messages also show that the coordinator is alive.
            if !to(*connection) || node.node.is_none() || node.peer.outbox.overrun().is_some() {
                continue;
            }
            let echo = node.peer.newest.lock().echo;
            let beat = Message::Heartbeat(pb::Heartbeat {
                report: None,
                trace,
                begun,
                sent_ns: self.clock.now_ns(),
                echo_ns: echo.map_or(0, |echo| echo.sent_ns),
                held_ns: echo.map_or(0, |echo| nanoseconds(echo.received.elapsed())),
                received: node.received.tell(),
                paused,
                round_trip_ns: 0,
            });
            node.peer.outbox.send(convert::message(beat));
        }
    }

    /// Counts a message of a node, and tells it the count if that is due. Returns whether its
    /// stream is that of a node.
    pub(super) fn count(&mut self, connection: ConnectionId) -> bool {
        let Some(session) = self.nodes.get_mut(&connection) else { return false };
        if session.received.note() && session.peer.outbox.remembers() {
            self.beat(self.traces.is_wanted(), |to| to == connection);
        }
        true
    }

    /// A node has received `received` messages. After the end of the job, it has nothing to wait
    /// for.
    pub(super) fn confirm(&mut self, connection: ConnectionId, received: u64) {
        let Some(session) = self.nodes.get(&connection) else { return };
        if let Err(impossible) = session.peer.outbox.confirm(received) {
            let what = impossible.to_string();
            self.step(Event::Nonsense { connection, what });
        } else if self.last_reports.is_some() && session.peer.outbox.is_confirmed() {
            self.nodes.remove(&connection);
        }
    }

    /// Continues with a node on another stream. It has received `received` messages. Returns what
    /// is wrong with that.
    pub(super) fn resume(
        &mut self,
        connection: ConnectionId,
        earlier: Option<ConnectionId>,
        received: u64,
    ) -> Option<Event> {
        let earlier = earlier.and_then(|earlier| self.nodes.remove(&earlier));
        let session = self.nodes.get_mut(&connection)?;
        let count = earlier.as_ref().map_or(0, |earlier| earlier.received.count());
        let (nonce, job) = (&session.peer.nonce, self.job.as_str());
        let claim = Claim::Resumed { nonce, job, epoch: self.epoch, received: count };
        let proof = self.secret.prove(&claim).to_vec();
        let message = Some(Message::Resumed(pb::Resumed { received: count, proof }));
        session.peer.outbox.greet(Ok(pb::CoordinatorMessage { message }));
        let again = match earlier {
            Some(earlier) => {
                earlier.peer.replaced.cancel();
                (session.node, session.overrun) = (earlier.node, earlier.overrun);
                session.received = earlier.received;
                *session.peer.newest.lock() = std::mem::take(&mut *earlier.peer.newest.lock());
                session.peer.outbox.take_over(&earlier.peer.outbox, received)
            }
            None => session.peer.outbox.confirm(received).map(|()| 0),
        };
        match again {
            Ok(again) => {
                tracing::debug!(again, received, count, "a node has another stream");
                None
            }
            Err(impossible) => Some(Event::Nonsense { connection, what: impossible.to_string() }),
        }
    }
}
