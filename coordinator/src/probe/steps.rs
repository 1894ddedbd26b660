//! The steps of the measurement, and which nodes run them at the same time. Transfers are sized by
//! earlier measurements, so that each takes a few milliseconds on fast and on slow lines.

use gradwire_collectives::{Topology, algorithms::probe::Pattern};
use gradwire_proto::NodeId;

use super::fit::{SMALL, Sample, expected_per_byte, link};

/// The most nodes of which all pairs are measured; with N > 8, log₂ N + 1 pairs of each node.
const ALL_PAIRS: u32 = 8;

/// The most independent groups of a step. With very many nodes, only some are measured.
const MAX_GROUPS: usize = 128;

/// The most bytes that a node sends in one probe: half of a piece of the default size, so that
/// lanes need no more memory than for such pieces.
const LARGE: u64 = 2 << 20;

/// How many times as much as before a transfer may move. A slow line may let a small burst through
/// quickly, and a much larger transfer would block it, and operations behind it, for seconds.
const GROWTH: u64 = 4;

/// The bytes that several nodes send to one at the same time, in total, to see whether the queue of
/// its line overflows; limited to transfers of [`BURST_TIME`] seconds.
const BURSTS: [u64; 5] = [256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20];
const BURST_TIME: f64 = 0.035;

/// The bytes to reduce. They fit in the cache, like data that has just been received.
const REDUCED: u64 = 256 << 10;

/// The bytes to copy: a piece of the default size, which does not fit in the cache.
const COPIED: u64 = 4 << 20;

/// The numbers of messages in a series without waits; the difference counts.
const MESSAGES: [u32; 2] = [32, 256];

/// The approximate total time of the round trips between two nodes, and their largest number.
const TRIPS_TIME: f64 = 0.005;
const MAX_TRIPS: f64 = 32.0;

/// The kind of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    Reduce,
    Copy,
    /// A single round trip, which also sets up the connection.
    FirstTrip,
    Trips,
    /// An exchange of [`SMALL`] bytes.
    Small,
    /// An exchange of a few milliseconds.
    Large,
    Messages(u32),
    /// Several nodes send to one for a few milliseconds.
    Gather,
    /// Several nodes send this many bytes to one, in total.
    Burst(u64),
}

/// One measurement, by groups of nodes that run it at the same time.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) what: What,
    pub(super) groups: Vec<Vec<NodeId>>,
    /// The number of lanes that run it at the same time and share the bytes.
    pub(super) lanes: u32,
    /// Whether as many nodes as possible cross between racks at the same time.
    pub(super) is_shared: bool,
    /// Whether its times count. Otherwise it only uses up the bursts that lines let through.
    pub(super) counts: bool,
    /// The intended seconds of a transfer.
    time: f64,
}

impl Step {
    /// The pattern that the nodes run, given the samples so far.
    pub(super) fn pattern(&self, samples: &[Sample]) -> Pattern {
        let links = || some(&self.groups).map(|group| link(samples, group[0], group[1]));
        // The slowest link decides.
        let latency = || links().filter_map(|link| link.latency).fold(0.0, f64::max);
        let expected = |group: &Vec<NodeId>| expected_per_byte(samples, group[0], group[1]);
        let per_byte = || some(&self.groups).map(expected).fold(0.0, f64::max);
        let senders = || self.groups[0].len() as u64 - 1;
        // The bytes of all lanes and all senders.
        let most = GROWTH * self.moved(samples).max(SMALL);
        let lanes = u64::from(self.lanes);
        let bytes = |seconds: f64| {
            let bytes = seconds / per_byte().max(1e-12) / f64::from(self.lanes);
            (bytes.clamp(SMALL as f64, LARGE as f64) as u64).min(most / lanes) & !0xfff
        };
        // The bytes of each sender, limited by the time.
        let burst = |all: u64| {
            let fitting = (BURST_TIME / per_byte().max(1e-12)) as u64;
            Pattern::Gather((all.min(fitting).min(most) / senders()).max(4096))
        };
        match self.what {
            What::Reduce => Pattern::Reduce(REDUCED),
            What::Copy => Pattern::Copy(COPIED),
            What::FirstTrip => Pattern::RoundTrips(1),
            What::Trips => {
                let trips = TRIPS_TIME / (2.0 * latency()).max(1e-9);
                Pattern::RoundTrips(trips.clamp(1.0, MAX_TRIPS) as u32)
            }
            What::Small => Pattern::Exchange(SMALL),
            What::Large => Pattern::Exchange(bytes(self.time)),
            What::Messages(count) => Pattern::Messages(count),
            What::Gather => Pattern::Gather((bytes(self.time) / senders()).max(4096)),
            What::Burst(all) => burst(all),
        }
    }
}

impl Step {
    /// The largest transfer that every one of its nodes has completed in time, in bytes.
    fn moved(&self, samples: &[Sample]) -> u64 {
        let by = |node: &NodeId| {
            let own = samples.iter().filter(|sample| sample.nodes.contains(node));
            let moved = own.filter_map(|sample| match sample.pattern {
                Pattern::Exchange(bytes) => Some(bytes * u64::from(sample.lanes)),
                _ => None,
            });
            moved.max().unwrap_or(0)
        };
        some(&self.groups).flatten().map(by).min().unwrap_or(0)
    }
}

/// At most [`MAX_GROUPS`] of these groups, evenly spread.
fn some(groups: &[Vec<NodeId>]) -> impl Iterator<Item = &Vec<NodeId>> {
    groups.iter().step_by(groups.len().div_ceil(MAX_GROUPS).max(1))
}

/// Rounds of disjoint pairs. With up to [`ALL_PAIRS`] nodes, each node meets every other one. With
/// more, each meets those at distances 1, 2, 4, … in an order that keeps racks together.
fn rounds(topology: &Topology) -> Vec<Vec<Vec<NodeId>>> {
    let order = topology.order();
    let nodes = order.len();
    let pair = |a: usize, b: usize| {
        let (a, b) = (order[a], order[b]);
        vec![NodeId(a.min(b)), NodeId(a.max(b))]
    };
    if nodes as u32 <= ALL_PAIRS {
        // A round-robin tournament: one stays, and the others rotate. With an odd number, one node
        // pauses in each round.
        let seats = nodes.next_multiple_of(2);
        let at = |seat: usize, round: usize| {
            if seat == 0 { 0 } else { 1 + (seat - 1 + round) % (seats - 1) }
        };
        let meet = |round: usize| {
            let pairs = (0..seats / 2).map(|i| (at(i, round), at(seats - 1 - i, round)));
            let both_are_there = |&(a, b): &(usize, usize)| a < nodes && b < nodes;
            pairs.filter(both_are_there).map(|(a, b)| pair(a, b)).collect()
        };
        return (0..seats.saturating_sub(1)).map(meet).collect();
    }
    let mut rounds = Vec::new();
    let mut distance = 1;
    while distance < nodes {
        let free = |&at: &usize| at / distance % 2 == 0 && at + distance < nodes;
        rounds.push((0..nodes).filter(free).map(|at| pair(at, at + distance)).collect());
        distance *= 2;
    }
    // Neighbours that did not meet in the first round.
    rounds.push((1..nodes - 1).step_by(2).map(|at| pair(at, at + 1)).collect());
    rounds
}

/// As many disjoint pairs of nodes in different racks as possible: between the first rack and the
/// second, the third and the fourth, and so on.
fn across(topology: &Topology) -> Vec<Vec<NodeId>> {
    let members = topology.members();
    let both = members.chunks_exact(2).flat_map(|racks| {
        racks[0].iter().zip(&racks[1]).map(|(&a, &b)| vec![NodeId(a.min(b)), NodeId(a.max(b))])
    });
    both.collect()
}

/// Each node by itself.
fn each(topology: &Topology) -> Vec<Vec<NodeId>> {
    (0..topology.participants()).map(|node| vec![NodeId(node)]).collect()
}

/// How often measurements are repeated, and the seconds of a transfer.
struct Plan {
    repeats: usize,
    time: f64,
}

impl Plan {
    /// All transfers between pairs take less than half of the time limit. They are repeated if
    /// there is time, because the first one on a connection is slower.
    fn new(rounds: usize, lanes: u32) -> Self {
        let of_pair = |repeats: usize| repeats + 1 + if lanes > 1 { repeats } else { 0 };
        let repeats: usize = (40 / (rounds * of_pair(1) + 6)).clamp(1, 4);
        let time = (0.4_f64 / (rounds * of_pair(repeats)).max(1) as f64).clamp(0.002, 0.015);
        Self { repeats, time }
    }

    fn step(&self, what: What, groups: &[Vec<NodeId>], lanes: u32) -> Step {
        let groups = some(groups).cloned().collect();
        Step { what, groups, lanes, is_shared: false, counts: true, time: self.time }
    }
}

/// The measurements between pairs of nodes.
pub(super) fn between_pairs(topology: &Topology, lanes: u32) -> Vec<Step> {
    if topology.participants() < 2 {
        return Vec::new();
    }
    let rounds = rounds(topology);
    let plan = Plan::new(rounds.len(), lanes);
    let each = each(topology);
    let mut steps = [What::Reduce, What::Copy].map(|what| plan.step(what, &each, 1)).to_vec();
    for pairs in &rounds {
        let mut add = |times: usize, what, lanes| {
            steps.extend((0..times).map(|_| plan.step(what, pairs, lanes)));
        };
        add(2, What::FirstTrip, 1);
        add(plan.repeats, What::Trips, 1);
        add(plan.repeats, What::Small, 1);
        // The first one uses up the burst that a line lets through.
        add(plan.repeats + 1, What::Large, 1);
        if lanes > 1 {
            add(plan.repeats, What::Large, lanes);
        }
    }
    steps
}

/// Repeats the measurements by which pairs differ.
pub(super) fn once_more(topology: &Topology, lanes: u32) -> Vec<Step> {
    let rounds = rounds(topology);
    let plan = Plan::new(rounds.len(), lanes);
    let again = |pairs: &Vec<Vec<NodeId>>| {
        let large = plan.step(What::Large, pairs, lanes);
        let first = Step { counts: false, ..large.clone() };
        [plan.step(What::Trips, pairs, 1), first, large]
    };
    rounds.iter().flat_map(again).collect()
}

/// Repeats the measurements of single lanes, because some were disturbed.
pub(super) fn single_lanes(topology: &Topology, lanes: u32) -> Vec<Step> {
    let rounds = rounds(topology);
    let plan = Plan::new(rounds.len(), lanes);
    let again = |pairs: &Vec<Vec<NodeId>>| {
        let large = plan.step(What::Large, pairs, 1);
        [Step { counts: false, ..large.clone() }, large]
    };
    rounds.iter().flat_map(again).collect()
}

/// The measurements of single nodes, and of many at the same time.
pub(super) fn between_many(topology: &Topology, lanes: u32) -> Vec<Step> {
    let rounds = rounds(topology);
    let plan = Plan::new(rounds.len(), lanes);
    let mut steps = Vec::new();
    let mut add = |times: usize, what, groups: &[Vec<NodeId>]| {
        steps.extend((0..times).map(|_| plan.step(what, groups, 1)));
    };
    let first = &rounds[0][..1];
    MESSAGES.into_iter().for_each(|count| add(plan.repeats, What::Messages(count), first));
    let order: Vec<NodeId> = topology.order().into_iter().map(NodeId).collect();
    let others = order.len() - 1;
    let group = |senders: usize| [order[..=senders].to_vec()];
    let senders = [1, 2, 4, 8].map(|senders: usize| senders.min(others));
    let mut different: Vec<usize> = senders.into_iter().filter(|_| others > 1).collect();
    different.dedup();
    for &senders in &different {
        add(plan.repeats, What::Gather, &group(senders));
    }
    if let Some(&most) = different.last() {
        BURSTS.into_iter().for_each(|all| add(2, What::Burst(all), &group(most)));
    }
    let across = across(topology);
    if !across.is_empty() {
        // All pairs at once, so that each gets its share of the uplink.
        let large = plan.step(What::Large, &across, lanes);
        let shared = Step { is_shared: true, groups: across, ..large };
        steps.extend(std::iter::repeat_n(shared, plan.repeats));
    }
    // Again, because all nodes report with it what was lost in the step before.
    steps.push(plan.step(What::Reduce, &each(topology), 1));
    steps
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn racks(nodes: u32, size: u32) -> Topology {
        let labels: Vec<String> = (0..nodes).map(|node| (node / size).to_string()).collect();
        Topology::from_labels(&labels)
    }

    #[test]
    fn groups_of_a_step_are_disjoint() {
        for nodes in 2..=40 {
            for size in [1, 2, 3, 8, 40] {
                let topology = racks(nodes, size);
                let steps = [between_pairs, once_more, between_many];
                for step in steps.into_iter().flat_map(|steps| steps(&topology, 2)) {
                    let all: Vec<NodeId> = step.groups.iter().flatten().copied().collect();
                    let different: BTreeSet<NodeId> = all.iter().copied().collect();
                    assert_eq!(all.len(), different.len(), "{nodes} {size} {step:?}");
                    assert!(!all.is_empty(), "{nodes} {size} {step:?}");
                }
            }
        }
    }

    #[test]
    fn few_nodes_meet_all_and_many_meet_some() {
        for nodes in 2..=40u32 {
            let rounds = rounds(&racks(nodes, 4));
            let pairs: BTreeSet<Vec<NodeId>> = rounds.iter().flatten().cloned().collect();
            let met = rounds.iter().map(Vec::len).sum::<usize>();
            assert_eq!(pairs.len(), met, "no pair meets twice");
            if nodes <= ALL_PAIRS {
                assert_eq!(met as u32, nodes * (nodes - 1) / 2);
            } else {
                assert!(rounds.len() as u32 <= nodes.next_power_of_two().ilog2() + 1, "{nodes}");
                let neighbours = (0..nodes - 1).map(|at| vec![NodeId(at), NodeId(at + 1)]);
                assert!(neighbours.into_iter().all(|pair| pairs.contains(&pair)), "{nodes}");
            }
        }
    }

    #[test]
    fn a_single_node_measures_nothing() {
        assert!(between_pairs(&Topology::flat(1), 2).is_empty());
    }
}
