//! Halving and doubling around a circle: each participant owns one block. In each round the number
//! of blocks that it still adds to falls to about one k-th: it sends the other parts to
//! participants at fixed distances around the circle, and adds what comes from the other side to
//! the first part. Then the same messages go back (Träff, "Optimal, Non-pipelined Reduce-scatter
//! and Allreduce Algorithms", 2024, arXiv:2410.14234; of degree k as in Bruck, Ho, Kipnis, Upfal &
//! Weathersby, 1997).
//!
//! This takes ⌈log_k M⌉ rounds of k−1 messages each way for any M, without folding, and moves
//! (M−1)/M of the piece each way, the minimum: recursive halving and doubling for any number of
//! participants. A message carries any number of blocks.

use std::ops::Range;

use super::{
    build::{self, Builder},
    shape::{Cluster, Shape, rounds},
    tiers::Tiers,
};
use crate::{
    algorithms::name::{Parameter, Values},
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// The parameter k.
pub(crate) const RADIX: Parameter = Parameter {
    name: "radix",
    about: "into how many parts each round divides the blocks",
    values: Values::Number { least: 2, most: 64, usual: 2 },
};

/// The order of the participants on the circle, and the distances of messages.
#[derive(Debug)]
pub(crate) struct Circle {
    /// The participant at each place.
    pub(crate) order: Vec<u32>,
    /// Decreasing; the last one is 1.
    distances: Vec<u32>,
}

/// The number divided by the radix, rounded up, again and again down to 1; nothing for 1 itself.
fn parts(mut number: u32, radix: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        (number > 1).then(|| {
            number = number.div_ceil(radix);
            number
        })
    })
}

impl Circle {
    /// The circle with as many messages inside racks as possible. If racks have one size,
    /// successive places are in different racks, so distances that are multiples of the number of
    /// racks stay inside one. Likewise successive racks are in different groups of the next tier,
    /// and so on. A tier with groups of different sizes is ignored.
    pub(crate) fn over_racks(topology: &Topology, radix: u32) -> Self {
        let tiers = Tiers::new(topology);
        let sizes = tiers.regular();
        // The outermost group changes the fastest, the member of a rack the slowest.
        let participant = |mut place: u32| {
            let (mut position, mut stride) = (0, tiers.order.len() as u32);
            for size in sizes.iter().rev() {
                stride /= size;
                position += place % size * stride;
                place /= size;
            }
            tiers.order[position as usize]
        };
        let order: Vec<u32> = (0..tiers.order.len() as u32).map(participant).collect();
        let mut stride = order.len() as u32;
        let distances = sizes.iter().flat_map(|&size| {
            stride /= size;
            let stride = stride;
            parts(size, radix).map(move |part| part * stride)
        });
        Self { distances: distances.collect(), order }
    }

    /// The circle without regard to racks.
    pub(crate) fn plain(topology: &Topology, radix: u32) -> Self {
        let order = topology.order();
        Self { distances: parts(order.len() as u32, radix).collect(), order }
    }

    fn size(&self) -> u32 {
        self.order.len() as u32
    }

    /// The participant at a distance after a place.
    fn after(&self, place: u32, distance: u32) -> u32 {
        self.order[((place + distance) % self.size()) as usize]
    }

    /// The participant at a distance before a place.
    fn before(&self, place: u32, distance: u32) -> u32 {
        self.after(place, self.size() - distance)
    }

    /// The next place of a contribution on its way to an owner, and the round.
    pub(crate) fn next(&self, at: u32, owner: u32) -> (u32, u32) {
        let far = (owner + self.size() - at) % self.size();
        let rounds = (0..).zip(&self.distances);
        let (round, distance) = rounds
            .map(|(round, &part)| (round, far / part * part))
            .find(|&(_, d)| d > 0)
            .unwrap_or_default();
        ((at + distance) % self.size(), round)
    }

    /// How many hops a contribution takes to each owner, on average.
    pub(crate) fn sends(&self) -> f64 {
        let before = [self.size()].into_iter().chain(self.distances.iter().copied());
        let rounds = before.zip(&self.distances);
        rounds.map(|(many, &remain)| 1.0 - f64::from(remain) / f64::from(many)).sum()
    }

    /// The number of hops on the longest path to an owner.
    pub(crate) fn longest(&self) -> f64 {
        let hops = |far: u32| {
            let mut at = self.size() - far;
            let mut hops = 0u32;
            while !at.is_multiple_of(self.size()) {
                at = self.next(at, 0).0;
                hops += 1;
            }
            hops
        };
        f64::from((1..self.size()).map(hops).max().unwrap_or(0))
    }

    /// The blocks of the places at these distances after a place.
    fn blocks(&self, place: u32, distances: Range<u32>) -> Vec<Range<u32>> {
        let size = self.size();
        let (start, end) = (place + distances.start, place + distances.end);
        let parts = if start >= size {
            [start - size..end - size, 0..0]
        } else {
            [start..end.min(size), 0..end.saturating_sub(size)]
        };
        parts.into_iter().filter(|part| !part.is_empty()).collect()
    }

    /// The rounds, each with its messages: the distance of the receiver, and the blocks, by the
    /// distances of their owners. The blocks before the first message remain.
    fn rounds(&self) -> Vec<Vec<(u32, Range<u32>)>> {
        let before = [self.size()].into_iter().chain(self.distances.iter().copied());
        let rounds = before.zip(&self.distances).map(|(many, &remain)| {
            let starts = (remain..many).step_by(remain as usize);
            starts.map(|start| (start, start..(start + remain).min(many))).collect()
        });
        rounds.collect()
    }
}

/// The schedule of `me` for an allreduce around a circle.
pub(crate) fn allreduce(circle: &Circle, me: u32, count: u64) -> Schedule {
    let size = circle.size();
    let place = build::position(&circle.order, me);
    let blocks = split(count, size.into());
    let mut builder = Builder::new(blocks.len());
    let mut add = |time, action, at: u32, distances: Range<u32>| {
        builder.add_existing(time, action, circle.blocks(at, distances));
    };
    let rounds = circle.rounds();
    // The messages of a round are sent and received in the order of their distances, so that each
    // participant begins with another peer. Each has a time of its own.
    let most = rounds.iter().map(Vec::len).max().unwrap_or(1) as u32;
    let round_takes = 2 * most;
    // What is sent first, what the first message adds to, and what is between them.
    let remain = circle.distances[0];
    let first = match &rounds[0][..] {
        [(_, part)] => part.end - part.start,
        _ => remain,
    };
    let sent = rounds[0].iter().map(|(_, part)| part.clone());
    for part in sent.chain([0..first, first..remain]) {
        add(0, Action::ReduceLocal, place, part);
    }
    let mut start = 0;
    for messages in &rounds {
        for (time, (distance, part)) in (start..).zip(messages) {
            add(time, Action::send(circle.after(place, *distance)), place, part.clone());
        }
        for (time, (distance, part)) in (start + most..).zip(messages) {
            let from = circle.before(place, *distance);
            add(time, Action::reduce(from, from < me), place, 0..part.end - part.start);
        }
        start += round_takes;
    }
    for messages in rounds.iter().rev() {
        for (time, (distance, part)) in (start..).zip(messages) {
            let to = circle.before(place, *distance);
            add(time, Action::send(to), place, 0..part.end - part.start);
        }
        for (time, (distance, part)) in (start + most..).zip(messages) {
            add(time, Action::copy(circle.after(place, *distance)), place, part.clone());
        }
        start += round_takes;
    }
    builder.add_ranges(start, Action::Publish, vec![0..blocks.len() as u32]);
    builder.finish(size, me, blocks)
}

/// The cost of an allreduce: 2⌈log_k M⌉α + 2(M−1)/M·S·β + (M−1)/M·S·γ.
fn cost(cluster: &Cluster, radix: u32, over_racks: bool) -> Shape {
    let share = cluster.share();
    // Racks of different sizes are ignored.
    let in_racks = cluster.racks <= 1.0 || (over_racks && cluster.is_even());
    let sum = |sizes: &[u32]| {
        let rounds = sizes.iter().map(|&size| rounds(size.into(), radix));
        rounds.fold((0.0, 0.0), |(all, sent), (more, messages)| (all + more, sent + messages))
    };
    let (inside, _) = rounds(cluster.largest, radix);
    let (all, messages) = match (over_racks, cluster.nodes > 3.0) {
        (true, true) => sum(&cluster.regular),
        (false, true) => rounds(cluster.nodes, radix),
        // Among three participants, no message waits for another one.
        (_, false) => (1.0, cluster.others()),
    };
    Shape {
        line: 2.0 * share,
        senders: (messages / all) as u32,
        partners: messages as u32,
        in_rounds: in_racks && cluster.racks > 1.0,
        // In the first round of a phase all but a share for each of the others.
        burst: 1.0 - 1.0 / f64::from(radix).min(cluster.nodes).max(1.0),
        // Without regard to racks every message may cross.
        uplink: match cluster.racks > 1.0 {
            true if in_racks => cluster.least_uplink(),
            true => 2.0 * share,
            false => 0.0,
        },
        reduced: share,
        messages: 2.0 * messages,
        blocks: f64::from(radix),
        ..cluster.hops(2.0 * all, 2.0 * if in_racks { all - inside } else { all }).at_once(1.0)
    }
}

/// The cost on a circle over racks.
pub(crate) fn cost_over_racks(cluster: &Cluster, radix: u32) -> Shape {
    cost(cluster, radix, true)
}

/// The cost on a plain circle.
pub(crate) fn plain_cost(cluster: &Cluster, radix: u32) -> Shape {
    cost(cluster, radix, false)
}
