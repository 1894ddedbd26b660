//! Circulant: everybody owns one block. In each round the blocks that a participant still adds to
//! are about halved: it sends the upper half of them a fixed distance around the circle, and adds
//! what comes from the other side to the lower half. Then the same messages go back (Träff,
//! "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024, arXiv:2410.14234).
//!
//! ⌈log2 M⌉ rounds each way for any M, without folding, and (M−1)/M of the piece each way, the
//! least there is: recursive halving and doubling for all numbers of participants. Each round is
//! one message, whatever the number of its blocks.
//!
//! In racks of one size the numbers around the circle take turns over the racks, so distances that
//! are multiples of their number stay inside one. The first rounds halve inside racks, and only the
//! last ones, with the few blocks that are left, cross: 2(r−1) times the piece between r racks, the
//! least there is. To or from one participant it is the binomial tree of
//! [`recursive_doubling`](super::recursive_doubling).

use std::ops::Range;

use super::build::{self, Builder};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// Who is where on the circle, and at which distances messages go.
#[derive(Debug)]
struct Circle {
    /// The participant at each place.
    order: Vec<u32>,
    /// Decreasing; the last one is 1.
    distances: Vec<u32>,
}

/// Halved, rounded up, down to 1: nothing for 1 itself.
fn halves(mut number: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        (number > 1).then(|| {
            number = number.div_ceil(2);
            number
        })
    })
}

impl Circle {
    fn new(topology: &Topology) -> Self {
        let racks = topology.members();
        let (many, size) = (racks.len(), racks[0].len());
        if racks.iter().any(|rack| rack.len() != size) {
            let order = topology.order();
            return Self { distances: halves(order.len() as u32).collect(), order };
        }
        let order = (0..many * size).map(|place| racks[place % many][place / many]).collect();
        let inside = halves(size as u32).map(|half| half * many as u32);
        Self { order, distances: inside.chain(halves(many as u32)).collect() }
    }

    fn size(&self) -> u32 {
        self.order.len() as u32
    }

    /// Who is that far after a place.
    fn after(&self, place: u32, distance: u32) -> u32 {
        self.order[((place + distance) % self.size()) as usize]
    }

    /// Who is that far before it.
    fn before(&self, place: u32, distance: u32) -> u32 {
        self.after(place, self.size() - distance)
    }

    /// The blocks of the places that are as far after a place as these distances.
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

    /// The rounds: before each, how many blocks are still added to, and the distance, which is how
    /// many remain.
    fn rounds(&self) -> Vec<(u32, u32)> {
        let before = [self.size()].into_iter().chain(self.distances.iter().copied());
        before.zip(self.distances.iter().copied()).collect()
    }
}

pub(super) fn allreduce(topology: &Topology, me: u32, count: u64) -> Schedule {
    let circle = Circle::new(topology);
    let size = circle.size();
    let place = build::position(&circle.order, me);
    // A small piece has fewer blocks than there are participants; the others own nothing.
    let blocks = split(count, size.into());
    let there = |ranges: Vec<Range<u32>>| -> Vec<Range<u32>> {
        let cut = |range: Range<u32>| range.start..range.end.min(blocks.len() as u32);
        ranges.into_iter().map(cut).filter(|range| !range.is_empty()).collect()
    };
    let mut builder = Builder::new(blocks.len());
    let mut add = |time, action, at: u32, distances: Range<u32>| {
        let ranges = there(circle.blocks(at, distances));
        if !ranges.is_empty() {
            builder.add_ranges(time, action, ranges);
        }
    };
    let rounds = circle.rounds();
    let last = 2 * rounds.len() as u32;
    // What is sent first, what the first message adds to, and what is between them.
    let (all, remain) = rounds[0];
    for part in [remain..all, 0..all - remain, all - remain..remain] {
        add(0, Action::ReduceLocal, place, part);
    }
    for (time, &(many, distance)) in (0u32..).zip(&rounds) {
        add(time, Action::send(circle.after(place, distance)), place, distance..many);
        let from = circle.before(place, distance);
        add(time, Action::reduce(from, from < me), place, 0..many - distance);
    }
    for (round, &(many, distance)) in rounds.iter().enumerate().rev() {
        let time = last - 1 - round as u32;
        add(time, Action::send(circle.before(place, distance)), place, 0..many - distance);
        add(time, Action::copy(circle.after(place, distance)), place, distance..many);
    }
    builder.add_ranges(last, Action::Publish, vec![0..blocks.len() as u32]);
    builder.finish(size, me, blocks)
}
