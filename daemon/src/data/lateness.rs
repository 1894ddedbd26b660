//! Decides when a piece is late, and which node is at fault (WAIT). Pure: its input is when data
//! moved.
//!
//! The duration of a piece says nothing: a line may be slow, and pieces share it. A piece is late
//! if nothing has moved for the limit on any of the links that it waits for. Bytes move on a link
//! when they arrive, or when the peer's system acknowledges them; bytes in a socket's buffer have
//! not moved yet.
//!
//! A node that waits for another one is not at fault, and says so in a [`Notice`]: how long nothing
//! has moved for it, and which node is the root of its wait. So all nodes of a chain count from the
//! same moment and name the same node.

use std::time::{Duration, Instant};

use gradwire_proto::NodeId;

use crate::transport::frame::Notice;

/// How many notices a node sends within the limit while it waits.
pub(crate) const NOTICES_PER_LIMIT: u32 = 8;

/// The activity of a link and of its peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Activity {
    /// When bytes last moved.
    moved: Instant,
    received: Option<Received>,
}

#[derive(Debug, Clone, Copy)]
struct Received {
    at: Instant,
    /// When bytes last moved for the peer.
    moved: Instant,
    root: NodeId,
}

impl Activity {
    /// A link on which bytes last moved at `moved`, without a notice.
    pub(crate) fn new(moved: Instant) -> Self {
        Self { moved, received: None }
    }

    pub(crate) fn moved(&mut self, now: Instant) {
        self.moved = now;
    }

    pub(crate) fn receive(&mut self, notice: Notice, now: Instant) {
        // A peer may send any duration (TRUST). Time before the start of the clock does not matter.
        let moved = now.checked_sub(notice.stalled).unwrap_or(self.moved);
        self.received = Some(Received { at: now, moved, root: notice.root });
    }

    fn last(&self) -> Instant {
        self.received.map_or(self.moved, |received| received.moved.max(self.moved))
    }
}

/// A link that a piece waits for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wait {
    pub(crate) peer: NodeId,
    pub(crate) activity: Activity,
}

impl Wait {
    /// The same without the notice of `peer`, which must not get its own information back.
    fn as_reported_to(mut self, peer: NodeId) -> Self {
        if self.peer == peer {
            self.activity.received = None;
        }
        self
    }
}

/// The node with the longest time without activity.
fn longest(waits: &mut dyn Iterator<Item = (NodeId, &Wait)>) -> Option<NodeId> {
    waits.min_by_key(|(_, wait)| wait.activity.last()).map(|(node, _)| node)
}

/// A wait: since when nothing has moved, and the node that is its root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lateness {
    pub(crate) since: Instant,
    pub(crate) root: NodeId,
}

impl Lateness {
    /// The wait of a piece on node `me` that last moved bytes at `moved` and waits for `waits`.
    pub(crate) fn of(
        me: NodeId,
        moved: Instant,
        waits: &[Wait],
        limit: Duration,
        now: Instant,
    ) -> Self {
        let since = waits.iter().map(|wait| wait.activity.last()).fold(moved, Instant::max);
        let root = Self::at_fault(me, waits, limit, now)
            // They all wait for each other, which must not happen.
            .or_else(|| longest(&mut waits.iter().map(|wait| (wait.peer, wait))))
            .unwrap_or(me);
        Self { since, root }
    }

    /// The wait as reported to `peer`. A peer that reads the notice is not silent, so the blame
    /// goes first to the other nodes.
    pub(crate) fn as_reported_to(
        peer: NodeId,
        me: NodeId,
        moved: Instant,
        waits: &[Wait],
        limit: Duration,
        now: Instant,
    ) -> Self {
        let all: Vec<Wait> = waits.iter().map(|wait| wait.as_reported_to(peer)).collect();
        let others: Vec<Wait> = all.iter().copied().filter(|wait| wait.peer != peer).collect();
        let lateness = Self::of(me, moved, &all, limit, now);
        let root = Self::at_fault(me, &others, limit, now).unwrap_or(lateness.root);
        Self { root, ..lateness }
    }

    /// A peer that has sent no notice for half of the `limit`; otherwise the root of the peers'
    /// waits. `None` if they all wait for this node.
    fn at_fault(me: NodeId, waits: &[Wait], limit: Duration, now: Instant) -> Option<NodeId> {
        let is_silent = |wait: &&Wait| {
            let received = wait.activity.received;
            received.is_none_or(|received| now.saturating_duration_since(received.at) > limit / 2)
        };
        let root_of =
            |wait: &Wait| wait.activity.received.map_or(wait.peer, |received| received.root);
        longest(&mut waits.iter().filter(is_silent).map(|wait| (wait.peer, wait))).or_else(|| {
            let roots = waits.iter().map(|wait| (root_of(wait), wait));
            longest(&mut roots.filter(|(root, _)| *root != me))
        })
    }

    pub(crate) fn is_late(&self, limit: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.since) > limit
    }

    /// The notice about it, for nodes that may wait for this one.
    pub(crate) fn notice(&self, now: Instant) -> Notice {
        Notice { root: self.root, stalled: now.saturating_duration_since(self.since) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(4);
    const ME: NodeId = NodeId(0);
    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);
    const C: NodeId = NodeId(3);

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn lateness(start: Instant, waits: &[Wait], after: f64) -> Lateness {
        Lateness::of(ME, start, waits, LIMIT, start + seconds(after))
    }

    #[test]
    fn a_slow_line_is_not_late() {
        let start = Instant::now();
        let mut link = Activity::new(start);
        for second in 1..100 {
            let now = start + seconds(f64::from(second) * 3.9);
            let wait = Lateness::of(ME, start, &[Wait { peer: A, activity: link }], LIMIT, now);
            assert!(!wait.is_late(LIMIT, now), "{second}");
            link.moved(now);
        }
        let wait = [Wait { peer: A, activity: link }];
        let end = seconds(99.0 * 3.9);
        assert!(
            !Lateness::of(ME, start, &wait, LIMIT, start + end + LIMIT)
                .is_late(LIMIT, start + end + LIMIT)
        );
        let late = start + end + LIMIT + seconds(0.001);
        assert!(Lateness::of(ME, start, &wait, LIMIT, late).is_late(LIMIT, late));
    }

    #[test]
    fn one_link_that_moves_is_enough() {
        let start = Instant::now();
        let mut moving = Activity::new(start);
        moving.moved(start + seconds(9.0));
        let waits =
            [Wait { peer: A, activity: Activity::new(start) }, Wait { peer: B, activity: moving }];
        let expected = Lateness { since: start + seconds(9.0), root: A };
        assert_eq!(lateness(start, &waits, 10.0), expected);
    }

    /// All nodes of a chain count from the same moment and name the silent node.
    #[test]
    fn a_waiting_node_is_not_at_fault() {
        let start = Instant::now();
        let at = |after: f64| start + seconds(after);
        // A waits for B, which is dead, and this node waits for A.
        let to_b = [Wait { peer: B, activity: Activity::new(start) }];
        let mut from_a = Activity::new(start);
        for tick in 1..9 {
            let now = at(f64::from(tick) * 0.5);
            from_a.receive(Lateness::of(A, start, &to_b, LIMIT, now).notice(now), now);
        }
        let now = at(4.2);
        let ours = Lateness::of(ME, start, &[Wait { peer: A, activity: from_a }], LIMIT, now);
        assert_eq!(ours.root, B);
        assert!(ours.is_late(LIMIT, now));
        assert!(Lateness::of(A, start, &to_b, LIMIT, now).is_late(LIMIT, now));
        // If B is also connected to this node and equally silent, it is still at fault.
        let both =
            [Wait { peer: A, activity: from_a }, Wait { peer: B, activity: Activity::new(start) }];
        assert_eq!(Lateness::of(ME, start, &both, LIMIT, now).root, B);
    }

    #[test]
    fn a_peer_that_waits_for_us_is_blamed_last() {
        let start = Instant::now();
        let now = start + seconds(5.0);
        let mut from_a = Activity::new(start);
        from_a.receive(Notice { root: ME, stalled: seconds(5.0) }, now);
        let mut from_b = Activity::new(start);
        from_b.receive(Notice { root: C, stalled: seconds(5.0) }, now);
        let a = Wait { peer: A, activity: from_a };
        let waits = [a, Wait { peer: B, activity: from_b }];
        assert_eq!(Lateness::of(ME, start, &waits, LIMIT, now).root, C);
        assert_eq!(Lateness::of(ME, start, &[a], LIMIT, now).root, A);
    }

    /// A is silent, although bytes moved to it last; B waits for this node. The notice for B names
    /// A.
    #[test]
    fn a_notice_does_not_blame_its_reader() {
        let start = Instant::now();
        let now = start + seconds(3.0);
        let mut to_a = Activity::new(start);
        to_a.moved(start + seconds(0.2));
        let mut from_b = Activity::new(start);
        from_b.receive(Notice { root: ME, stalled: seconds(2.9) }, now);
        let waits = [Wait { peer: A, activity: to_a }, Wait { peer: B, activity: from_b }];
        let reported = |to| Lateness::as_reported_to(to, ME, start, &waits, LIMIT, now).root;
        assert_eq!(reported(B), A);
        // If all others wait for this node, the reader itself is at fault.
        assert_eq!(reported(A), A);
    }

    /// A peer that has become silent is at fault, whatever its last notice said.
    #[test]
    fn an_old_notice_excuses_nobody() {
        let start = Instant::now();
        let mut from_a = Activity::new(start);
        from_a.receive(Notice { root: B, stalled: Duration::ZERO }, start + seconds(1.0));
        let wait = [Wait { peer: A, activity: from_a }];
        assert_eq!(lateness(start, &wait, 2.0).root, B);
        assert_eq!(lateness(start, &wait, 5.5), Lateness { since: start + seconds(1.0), root: A });
    }

    /// Two nodes that wait for each other must not keep each other waiting by their notices.
    #[test]
    fn a_node_does_not_get_its_own_notice_back() {
        let start = Instant::now();
        let at = |tick: u32| start + seconds(f64::from(tick) * 0.5);
        let mut ends = [Activity::new(start), Activity::new(start)];
        for tick in 1..10 {
            let received = [(ME, A), (A, ME)].map(|(me, peer)| {
                let activity = ends[me.0 as usize];
                let waits = [Wait { peer, activity }];
                Lateness::as_reported_to(peer, me, start, &waits, LIMIT, at(tick)).notice(at(tick))
            });
            // A notice takes time, too.
            ends[0].receive(received[1], at(tick) + seconds(0.4));
            ends[1].receive(received[0], at(tick) + seconds(0.4));
        }
        let now = at(10);
        let lateness = Lateness::of(ME, start, &[Wait { peer: A, activity: ends[0] }], LIMIT, now);
        assert!(lateness.is_late(LIMIT, now));
        assert_eq!(lateness.root, A);
    }

    /// TRUST: a peer may send anything.
    #[test]
    fn a_notice_of_any_duration_is_harmless() {
        let start = Instant::now();
        let mut from_a = Activity::new(start);
        from_a.receive(Notice { root: A, stalled: Duration::MAX }, start + seconds(1.0));
        let wait = [Wait { peer: A, activity: from_a }];
        assert_eq!(lateness(start, &wait, 1.0).since, start);
    }
}
