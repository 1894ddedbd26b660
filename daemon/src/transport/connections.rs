//! Which connections a node dials, and when it does so again. Pure.
//!
//! A connection that broke is dialled again at once. If nothing was under way, the pieces continue;
//! otherwise the job fails. A connection that the peer has closed is dialled again when a schedule
//! next needs the peer: at the end of a job each node leaves at its own time.

use std::collections::HashMap;

use gradwire_proto::NodeId;

use super::{frame::Totals, handshake::ConnectionId};

/// What a connection is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Demand {
    /// A schedule needs it: the job fails without.
    Schedule,
    /// A probe would like to have it.
    Probe,
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// There is no connection. The counts of the earlier ones.
    Down(Totals),
    /// It is being dialled; `is_needed` if a schedule needs it.
    Dialling {
        is_needed: bool,
    },
    Up,
}

#[derive(Debug)]
struct Entry {
    state: State,
    attempts: u32,
}

/// The connections with one peer.
#[derive(Debug)]
struct Peer {
    /// By number.
    connections: Vec<Entry>,
    /// Whether none of them has to be dialled when the peer is needed.
    is_settled: bool,
}

/// The connections that this node dials.
#[derive(Debug, Default)]
pub(crate) struct Connections(HashMap<NodeId, Peer>);

impl Connections {
    /// A schedule needs a peer, or a probe would like to have it, with which there are `count`
    /// connections. Returns those to dial now, with their counts.
    pub(crate) fn need(
        &mut self,
        peer: NodeId,
        count: u32,
        demand: Demand,
    ) -> Vec<(ConnectionId, Totals)> {
        let none = || {
            let down = || Entry { state: State::Down(Totals::default()), attempts: 0 };
            Peer { connections: (0..count).map(|_| down()).collect(), is_settled: false }
        };
        let there = self.0.entry(peer).or_insert_with(none);
        if there.is_settled {
            return Vec::new();
        }
        let is_schedule = demand == Demand::Schedule;
        there.is_settled = is_schedule;
        let mut due = Vec::new();
        for (number, entry) in (0..).zip(&mut there.connections) {
            match entry.state {
                State::Up => continue,
                State::Down(totals) => due.push((ConnectionId { peer, number }, totals)),
                State::Dialling { .. } => {}
            }
            let was_needed = matches!(entry.state, State::Dialling { is_needed: true });
            entry.state = State::Dialling { is_needed: is_schedule || was_needed };
        }
        due
    }

    fn entry(&mut self, id: ConnectionId) -> Option<(&mut Entry, &mut bool)> {
        let there = self.0.get_mut(&id.peer)?;
        Some((there.connections.get_mut(id.number as usize)?, &mut there.is_settled))
    }

    /// The number of the next attempt.
    pub(crate) fn attempt(&mut self, id: ConnectionId) -> u32 {
        let Some((entry, _)) = self.entry(id) else { return 0 };
        entry.attempts += 1;
        entry.attempts
    }

    /// The connection is made.
    pub(crate) fn connected(&mut self, id: ConnectionId) {
        if let Some((entry, _)) = self.entry(id) {
            entry.state = State::Up;
        }
    }

    /// The connection was lost with these counts. Returns whether to dial it now.
    pub(crate) fn lost(&mut self, id: ConnectionId, totals: Totals, is_closed: bool) -> bool {
        let Some((entry, is_settled)) = self.entry(id) else { return false };
        *is_settled = false;
        entry.state =
            if is_closed { State::Down(totals) } else { State::Dialling { is_needed: false } };
        !is_closed
    }

    /// The connection can't be made. Returns whether a schedule needs it; otherwise it is dialled
    /// when one does.
    pub(crate) fn failed(&mut self, id: ConnectionId, totals: Totals) -> bool {
        let Some((entry, is_settled)) = self.entry(id) else { return true };
        if matches!(entry.state, State::Dialling { is_needed: true }) {
            return true;
        }
        entry.state = State::Down(totals);
        *is_settled = false;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEER: NodeId = NodeId(1);
    const FIRST: ConnectionId = ConnectionId { peer: PEER, number: 0 };
    const SECOND: ConnectionId = ConnectionId { peer: PEER, number: 1 };
    const SOME: Totals = Totals { written: 3, read: 4 };

    fn up() -> Connections {
        let mut connections = Connections::default();
        let none = Totals::default();
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(FIRST, none), (SECOND, none)]);
        connections.connected(FIRST);
        connections.connected(SECOND);
        connections
    }

    #[test]
    fn a_peer_is_dialled_once() {
        assert_eq!(up().need(PEER, 2, Demand::Schedule), []);
    }

    #[test]
    fn a_broken_connection_is_dialled_at_once_and_a_closed_one_when_it_is_needed() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false));
        assert!(!connections.lost(SECOND, SOME, true));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(SECOND, SOME)]);
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), []);
    }

    #[test]
    fn what_nobody_needs_may_stay_unreachable() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false));
        assert!(!connections.failed(FIRST, SOME));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(FIRST, SOME)]);
        assert!(connections.failed(FIRST, SOME), "now it is needed");
    }

    #[test]
    fn what_is_needed_while_it_is_dialled_must_be_reached() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), []);
        assert!(connections.failed(FIRST, SOME));
    }

    /// A probe must not fail the job, and takes nothing away from a schedule.
    #[test]
    fn what_only_a_probe_wants_may_stay_unreachable() {
        let mut connections = Connections::default();
        let none = Totals::default();
        let both = [(FIRST, none), (SECOND, none)];
        assert_eq!(connections.need(PEER, 2, Demand::Probe), both);
        assert_eq!(connections.need(PEER, 2, Demand::Probe), []);
        assert!(!connections.failed(FIRST, none));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(FIRST, none)]);
        assert_eq!(connections.need(PEER, 2, Demand::Probe), []);
        assert!(connections.failed(FIRST, none) && connections.failed(SECOND, none));
    }

    #[test]
    fn attempts_ascend_whatever_becomes_of_them() {
        let mut connections = up();
        assert_eq!([connections.attempt(FIRST), connections.attempt(FIRST)], [1, 2]);
        connections.lost(FIRST, SOME, false);
        assert_eq!([connections.attempt(FIRST), connections.attempt(SECOND)], [3, 1]);
    }
}
