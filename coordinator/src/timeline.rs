//! The last minutes of the job as points over time, for charts. Pure: the time is an argument.
//!
//! Once per second the newest reports of the nodes are added to an open point, which is closed
//! after some seconds and then has their means. A point needs at most 9 KiB: 8 bytes for each of
//! the first 1,024 ranks and 12 for each of 64 links. So the ring has at most 1.6 MiB (BOUND),
//! however large the job is.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use gradwire_proto::pb::{NodeReport, RankReport};

/// The time of one point.
pub const POINT: Duration = Duration::from_secs(5);

/// How many points are kept: 15 minutes (BOUND).
pub const POINTS: usize = 180;

/// The time between two looks at the reports. Nodes report as often.
const LOOK: Duration = Duration::from_secs(1);

/// How much earlier a look may be: they are made with heartbeats.
const EARLY: Duration = Duration::from_millis(100);

/// The most links of a point, those with the most bytes (BOUND).
const MAX_LINKS: usize = 64;

/// Bytes per second from one node to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// The sender.
    pub from: u32,
    /// The receiver.
    pub to: u32,
    /// Bytes per second.
    pub rate: f32,
}

/// The means of some seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Point {
    /// The end of these seconds, since the coordinator started.
    pub at: Duration,
    /// The time per step of the slowest rank; `None` if no rank makes steps.
    pub step_seconds: Option<f64>,
    /// The share of the time in which ranks were blocked in waits; `None` without ranks.
    pub blocked: Option<f64>,
    /// Operations per second, of the node with the most.
    pub operations_per_second: f64,
    /// The memory of all daemons, shared memory included.
    pub resident_bytes: u64,
    /// The shared memory that ranks have handed over.
    pub shared_bytes: u64,
    /// Each rank that others waited for, with the share of the time in which they did.
    pub waits: Vec<(u32, f32)>,
    /// The links with the most bytes.
    pub links: Vec<Link>,
}

/// The sum and the number of some values.
#[derive(Debug, Default)]
struct Mean(f64, u32);

impl Mean {
    fn add(&mut self, value: Option<f64>) {
        if let Some(value) = value {
            (self.0, self.1) = (self.0 + value, self.1 + 1);
        }
    }

    fn get(&self) -> Option<f64> {
        (self.1 > 0).then(|| self.0 / f64::from(self.1))
    }
}

/// The looks since the last point.
#[derive(Debug, Default)]
struct Open {
    looks: u32,
    step: Mean,
    blocked: Mean,
    operations: Mean,
    resident: Mean,
    shared: Mean,
    /// Bytes per second by sender and receiver, summed over the looks.
    links: BTreeMap<(u32, u32), f64>,
}

impl Open {
    fn add(&mut self, reports: &BTreeMap<u32, NodeReport>) {
        self.looks += 1;
        let ranks = || reports.values().flat_map(|report| &report.ranks);
        self.step.add(ranks().filter_map(step_seconds).max_by(f64::total_cmp));
        let mut blocked = Mean::default();
        ranks().for_each(|rank| blocked.add(Some(rank.exposed)));
        self.blocked.add(blocked.get());
        let operations = reports.values().map(|report| report.operations_per_second);
        self.operations.add(operations.max_by(f64::total_cmp));
        let sum = |of: fn(&NodeReport) -> u64| Some(reports.values().map(|it| of(it) as f64).sum());
        self.resident.add(sum(|report| report.resident_bytes));
        self.shared.add(sum(|report| report.shared_bytes));
        for (link, rate) in links(reports) {
            *self.links.entry(link).or_default() += rate;
        }
    }

    fn close(self, at: Duration, waits: Vec<(u32, f32)>) -> Point {
        let looks = f64::from(self.looks.max(1));
        let mut links: Vec<Link> = self
            .links
            .into_iter()
            .map(|((from, to), sum)| Link { from, to, rate: (sum / looks) as f32 })
            .collect();
        links.sort_by(|one, other| other.rate.total_cmp(&one.rate));
        links.truncate(MAX_LINKS);
        Point {
            at,
            step_seconds: self.step.get(),
            blocked: self.blocked.get(),
            operations_per_second: self.operations.get().unwrap_or_default(),
            resident_bytes: self.resident.get().unwrap_or_default() as u64,
            shared_bytes: self.shared.get().unwrap_or_default() as u64,
            waits,
            links,
        }
    }
}

/// The time per step of a rank. It grows while the rank makes no step.
fn step_seconds(rank: &RankReport) -> Option<f64> {
    (rank.step_seconds > 0.0).then(|| rank.step_seconds.max(rank.since_step_seconds))
}

/// The traffic between nodes. A node reports only its busiest peers, so the reports of receivers
/// are used, too. Nodes that do not exist are left out (TRUST).
fn links(reports: &BTreeMap<u32, NodeReport>) -> BTreeMap<(u32, u32), f64> {
    let mut links = BTreeMap::<(u32, u32), f64>::new();
    for (node, report) in reports {
        for peer in report.peers.iter().filter(|peer| reports.contains_key(&peer.node)) {
            for (link, rate) in [
                ((*node, peer.node), peer.sent_bytes_per_second),
                ((peer.node, *node), peer.received_bytes_per_second),
            ] {
                let most = links.entry(link).or_default();
                *most = most.max(rate);
            }
        }
    }
    links.retain(|_, rate| *rate > 0.0);
    links
}

/// The last minutes of a job.
#[derive(Debug, Default)]
pub struct Timeline {
    points: VecDeque<Arc<Point>>,
    open: Open,
    looked: Duration,
    /// The end of the last point, and how long tensors had waited for each rank then.
    closed: Duration,
    waited: BTreeMap<u32, Duration>,
}

impl Timeline {
    /// Whether it is time for a look at the reports.
    pub fn is_due(&self, at: Duration) -> bool {
        at + EARLY >= self.looked + LOOK
    }

    /// Adds the newest reports of the nodes, by number. `waited` is how long tensors have waited
    /// for each rank since the job began.
    pub fn add(
        &mut self,
        at: Duration,
        reports: &BTreeMap<u32, NodeReport>,
        waited: &BTreeMap<u32, Duration>,
    ) {
        self.looked = at;
        self.open.add(reports);
        let passed = at.saturating_sub(self.closed);
        if passed + EARLY < POINT {
            return;
        }
        let share = |(rank, time): (&u32, &Duration)| {
            let before = self.waited.get(rank).copied().unwrap_or_default();
            let share = time.saturating_sub(before).as_secs_f64() / passed.as_secs_f64();
            (share > 0.0).then_some((*rank, share.min(1.0) as f32))
        };
        let waits = waited.iter().filter_map(share).collect();
        let point = std::mem::take(&mut self.open).close(at, waits);
        if self.points.len() == POINTS {
            self.points.pop_front();
        }
        self.points.push_back(Arc::new(point));
        (self.closed, self.waited) = (at, waited.clone());
    }

    /// The points, the oldest first.
    pub fn points(&self) -> Vec<Arc<Point>> {
        self.points.iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::PeerReport;

    use super::*;

    fn report(step: f64, exposed: f64, peers: &[(u32, f64, f64)]) -> NodeReport {
        let rank = RankReport { step_seconds: step, exposed, ..RankReport::default() };
        let peer = |&(node, sent, received): &(u32, f64, f64)| PeerReport {
            node,
            sent_bytes_per_second: sent,
            received_bytes_per_second: received,
        };
        NodeReport {
            ranks: vec![rank],
            peers: peers.iter().map(peer).collect(),
            resident_bytes: 100,
            operations_per_second: 10.0 * step,
            ..NodeReport::default()
        }
    }

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_point_has_the_means_of_its_seconds() {
        let mut timeline = Timeline::default();
        for second in 1..=5_u64 {
            assert!(timeline.is_due(seconds(second)));
            let first = report(second as f64, 0.2, &[(1, 50.0, 8.0), (7, 9.0, 9.0)]);
            let reports = [(0, first), (1, report(0.5, 0.4, &[(0, 10.0, 40.0)]))].into();
            let waited = [(0, Duration::ZERO), (3, seconds(second) / 2)].into();
            timeline.add(seconds(second), &reports, &waited);
            assert!(!timeline.is_due(seconds(second) + LOOK / 2));
            assert_eq!(timeline.points().len(), usize::from(second == 5));
        }
        let link = |from, to, rate| Link { from, to, rate };
        let points = timeline.points();
        assert_eq!(
            *points[0],
            Point {
                at: seconds(5),
                step_seconds: Some(3.0),
                blocked: Some(0.30000000000000004),
                operations_per_second: 30.0,
                resident_bytes: 200,
                shared_bytes: 0,
                waits: vec![(3, 0.5)],
                links: vec![link(0, 1, 50.0), link(1, 0, 10.0)],
            }
        );
        // Afterwards nobody waits, and no rank makes steps.
        for second in 6..=10 {
            let reports = [(0, NodeReport::default())].into();
            timeline.add(seconds(second), &reports, &[(3, seconds(5) / 2)].into());
        }
        let last = timeline.points().pop().unwrap();
        assert_eq!((last.step_seconds, last.blocked, last.waits.len()), (None, None, 0));
    }

    #[test]
    fn the_last_15_minutes_are_kept() {
        let mut timeline = Timeline::default();
        let nodes = 0..70;
        let reports: BTreeMap<u32, NodeReport> = nodes
            .clone()
            .map(|node| (node, report(1.0, 0.0, &[((node + 1) % 70, f64::from(node + 1), 0.0)])))
            .collect();
        for second in 1..=4000 {
            timeline.add(seconds(second), &reports, &BTreeMap::new());
        }
        let points = timeline.points();
        assert_eq!(points.len(), POINTS, "BOUND");
        assert_eq!(points.len() as u32 * POINT, seconds(15 * 60));
        let ends = [points.first(), points.last()].map(|point| point.unwrap().at);
        assert_eq!(ends, [seconds(3105), seconds(4000)]);
        let links = &points[0].links;
        assert_eq!((links.len(), links[0].rate, links[63].rate), (MAX_LINKS, 70.0, 7.0), "BOUND");
    }
}
