//! Decides which connections a node dials, and when it dials them again. Pure.
//!
//! A broken connection is dialled again immediately. A connection that the peer has closed while no
//! schedule needed it is dialled again when one does: at the end of a job, nodes leave one by one.

use std::collections::HashMap;

use gradwire_proto::NodeId;

use super::{frame::Totals, handshake::ConnectionId};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Demand {
    /// A schedule: the job fails without the connection.
    Schedule,
    /// A probe, which can do without it.
    Probe,
}

#[derive(Debug, Clone, Copy)]
enum ConnectionState {
    /// Not connected; the counts of the earlier connections.
    Down(Totals),
    /// It is being dialled; `is_needed` if a schedule needs it.
    Dialling {
        is_needed: bool,
    },
    Up,
}

#[derive(Debug)]
struct Entry {
    state: ConnectionState,
    attempts: u32,
    /// Whether it existed before.
    was_up: bool,
}

#[derive(Debug)]
struct Peer {
    /// By number.
    connections: Vec<Entry>,
    /// Whether all of them are up or dialled for a schedule.
    is_settled: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Connections(HashMap<NodeId, Peer>);

impl Connections {
    /// A schedule or a probe needs a peer, with which there are `count` connections. Returns the
    /// connections to dial now, with their counts.
    pub(crate) fn need(
        &mut self,
        peer: NodeId,
        count: u32,
        demand: Demand,
    ) -> Vec<(ConnectionId, Totals)> {
        let none = || {
            let state = ConnectionState::Down(Totals::default());
            let down = || Entry { state, attempts: 0, was_up: false };
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
                ConnectionState::Up => continue,
                ConnectionState::Down(totals) => due.push((ConnectionId { peer, number }, totals)),
                ConnectionState::Dialling { .. } => {}
            }
            let was_needed = matches!(entry.state, ConnectionState::Dialling { is_needed: true });
            entry.state = ConnectionState::Dialling { is_needed: is_schedule || was_needed };
        }
        due
    }

    fn entry(&mut self, id: ConnectionId) -> Option<(&mut Entry, &mut bool)> {
        let there = self.0.get_mut(&id.peer)?;
        Some((there.connections.get_mut(id.number as usize)?, &mut there.is_settled))
    }

    pub(crate) fn attempt(&mut self, id: ConnectionId) -> u32 {
        let Some((entry, _)) = self.entry(id) else { return 0 };
        entry.attempts += 1;
        entry.attempts
    }

    pub(crate) fn connected(&mut self, id: ConnectionId) {
        if let Some((entry, _)) = self.entry(id) {
            (entry.state, entry.was_up) = (ConnectionState::Up, true);
        }
    }

    /// Whether the connection existed before.
    pub(crate) fn was_up(&mut self, id: ConnectionId) -> bool {
        self.entry(id).is_some_and(|(entry, _)| entry.was_up)
    }

    /// The connection was lost with these counts. `is_closed`: the peer has closed it. `is_needed`:
    /// a schedule waits for it. Returns whether to dial it again now.
    pub(crate) fn lost(
        &mut self,
        id: ConnectionId,
        totals: Totals,
        is_closed: bool,
        is_needed: bool,
    ) -> bool {
        let Some((entry, is_settled)) = self.entry(id) else { return false };
        *is_settled = false;
        entry.state = if is_closed {
            ConnectionState::Down(totals)
        } else {
            ConnectionState::Dialling { is_needed }
        };
        !is_closed
    }

    /// The connection can't be made. Returns whether a schedule needs it; otherwise it is dialled
    /// again when one does.
    pub(crate) fn failed(&mut self, id: ConnectionId, totals: Totals) -> bool {
        let Some((entry, is_settled)) = self.entry(id) else { return true };
        if matches!(entry.state, ConnectionState::Dialling { is_needed: true }) {
            return true;
        }
        entry.state = ConnectionState::Down(totals);
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
    fn a_closed_connection_is_dialled_when_needed() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false, false));
        assert!(!connections.lost(SECOND, SOME, true, false));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(SECOND, SOME)]);
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), []);
    }

    #[test]
    fn an_unneeded_peer_may_stay_unreachable() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false, false));
        assert!(!connections.failed(FIRST, SOME));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), [(FIRST, SOME)]);
        assert!(connections.failed(FIRST, SOME), "now it is needed");
    }

    #[test]
    fn a_peer_needed_while_dialled_must_be_reached() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false, false));
        assert_eq!(connections.need(PEER, 2, Demand::Schedule), []);
        assert!(connections.failed(FIRST, SOME));
    }

    #[test]
    fn a_peer_needed_when_lost_must_be_reached() {
        let mut connections = up();
        assert!(connections.lost(FIRST, SOME, false, true));
        assert!(connections.failed(FIRST, SOME));
    }

    /// A probe must not fail the job, nor change what a schedule needs.
    #[test]
    fn a_probed_peer_may_stay_unreachable() {
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
    fn the_numbers_of_attempts_ascend() {
        let mut connections = up();
        assert_eq!([connections.attempt(FIRST), connections.attempt(FIRST)], [1, 2]);
        connections.lost(FIRST, SOME, false, false);
        assert_eq!([connections.attempt(FIRST), connections.attempt(SECOND)], [3, 1]);
    }
}
