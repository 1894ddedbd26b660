//! Circulant blocks: a broadcast of n blocks in n − 1 + ⌈log2 M⌉ rounds for any M, in each of which
//! a participant sends and receives at most one block. That is the minimum (Träff, "Optimal
//! Broadcast Schedules in Logarithmic Time with Applications to Broadcast, All-Broadcast, Reduction
//! and All-Reduction", 2024, arXiv:2407.18004).
//!
//! Numbers count from the root. In a round each participant sends to its successor at a distance,
//! the *skip*. The skips are M halved repeatedly, rounded up; the rounds use them in turn, the
//! smallest first. So the links are those of a circulant graph, and all participants do the same.
//!
//! The root sends block i in round i. The path of a block depends on its number modulo ⌈log2 M⌉, so
//! the schedule repeats itself for every ⌈log2 M⌉ blocks: one `Skips::received` for each
//! participant is enough. Where n − 1 is not a multiple of that, the first rounds are left out.
//!
//! Backwards it is a reduction to the root. An allreduce is a reduction and a broadcast.

use super::prelude::*;

const BLOCKS: Parameter = Parameter {
    name: "blocks",
    about: "into how many blocks a piece is cut, if it is large enough",
    values: Values::Number { least: 1, most: 256, usual: 16 },
};

pub(super) struct CirculantBlocks;

impl Definition for CirculantBlocks {
    fn about(&self) -> About {
        About {
            idea: "a reduction and a broadcast of n blocks, each in the fewest rounds",
            cost: "2(n−1+⌈log₂ M⌉)(α + S/n·β), n blocks",
            when: "large broadcasts, any number of nodes",
            source: "Träff, \"Optimal Broadcast Schedules in Logarithmic Time\", \
                     2024 (arXiv:2407.18004)",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[BLOCKS]
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        let order = build::order_from(topology, root);
        let at = build::position(&order, me);
        let blocks = split(count, u64::from(spec.number("blocks")).min(count.div_ceil(MIN_BLOCK)));
        let rounds = Skips::new(order.len() as u32).rounds(at, blocks.len() as u32);
        let mut places = vec![Place::default(); blocks.len()];
        let last = rounds.len() as u32 - 1;
        for (time, Round { received, sent }) in (0..).zip(rounds) {
            let link =
                |peer| Link { peer: order[peer as usize], up: last - time, down: last + 1 + time };
            if let Some((block, peer)) = received {
                places[block as usize].parent = Some(link(peer));
            }
            if let Some((block, peer)) = sent {
                places[block as usize].children.push(link(peer));
            }
        }
        Rooted::new(blocks, move |block| places[block as usize].clone())
    }

    /// The cost of a broadcast of n blocks: (n−1+⌈log2 M⌉)(α + S/n·β).
    fn broadcast_cost(&self, spec: &Spec, _: &Topology, _root: u32, cluster: &Cluster) -> Shape {
        let Skips(skips) = Skips::new(cluster.nodes as u32);
        let rounds = skips.len() as f64 - 1.0;
        // The messages of a round that leave the rack.
        let crossing = |skip: &u32| (f64::from(*skip) / cluster.smallest).min(1.0);
        let crossing: f64 = skips[..skips.len() - 1].iter().map(crossing).sum();
        let blocks = f64::from(spec.number("blocks"));
        // Each hop takes a whole round, although it could begin earlier.
        let line = (blocks - 1.0 + rounds) / blocks;
        Shape {
            line,
            uplink: if cluster.racks > 1.0 { line * crossing / rounds } else { 0.0 },
            messages: blocks,
            least_block: 4.0 * MIN_BLOCK as f64,
            ..Shape { blocks, ..cluster.hops(rounds, crossing.ceil()) }
        }
    }
}

/// Small pieces aren't cut below this many elements: each block is a message for each participant.
const MIN_BLOCK: u64 = 512;

/// The skips for a number of participants, which is itself the last one.
#[derive(Debug)]
struct Skips(Vec<u32>);

impl Skips {
    fn new(nodes: u32) -> Self {
        let half = |skip: &u32| (*skip > 1).then(|| skip.div_ceil(2));
        let mut skips: Vec<u32> = std::iter::successors(Some(nodes), half).collect();
        skips.reverse();
        Self(skips)
    }

    fn nodes(&self) -> u32 {
        self.0[self.period()]
    }

    /// After how many rounds the schedule repeats itself: ⌈log2 M⌉.
    fn period(&self) -> usize {
        self.0.len() - 1
    }

    /// The first block that a participant receives: the smallest skip of its number as a sum of
    /// skips, the largest first. The root has none.
    fn first_block(&self, number: u32) -> usize {
        let mut rest = number;
        let mut last = self.period();
        for (at, &skip) in self.0.iter().enumerate().rev().skip(1) {
            if rest >= skip {
                rest -= skip;
                last = at;
            }
            if rest == 0 {
                break;
            }
        }
        last
    }

    /// The block that a participant receives in each round of a period: its
    /// [first](Self::first_block), or those that others received first in the period before, which
    /// have negative numbers. Each of the last ⌈log2 M⌉ comes once.
    fn received(&self, number: u32) -> Vec<i64> {
        let period = self.period();
        let first = self.first_block(number);
        let mut search = Search {
            skips: self,
            end: self.nodes() + number,
            below: 2 * self.nodes(),
            is_free: (0..=period).map(|block| block != first).collect(),
            found: Vec::with_capacity(period),
        };
        search.extend(0, period);
        let block = |&block: &usize| match block == period {
            true => first as i64,
            false => block as i64 - period as i64,
        };
        search.found.iter().map(block).collect()
    }

    /// What a participant receives and sends of `blocks` in each round: the block, and the peer,
    /// numbered from the root.
    fn rounds(&self, number: u32, blocks: u32) -> Vec<Round> {
        let (nodes, period) = (self.nodes(), self.period());
        let left_out = (period - (blocks as usize - 1) % period) % period;
        let own = self.received(number);
        let theirs: Vec<Vec<i64>> =
            self.0[..period].iter().map(|skip| self.received((number + skip) % nodes)).collect();
        let last = i64::from(blocks) - 1;
        let all = left_out..left_out + blocks as usize - 1 + period;
        let round = |round: usize| {
            let turn = round % period;
            let first = (round - turn) as i64 - left_out as i64;
            let (before, after) = (nodes - self.0[turn], self.0[turn]);
            // The last block takes the place of further ones.
            let moved = |block: i64, peer: u32| {
                let block = first + block;
                (block >= 0).then(|| (block.min(last) as u32, (number + peer) % nodes))
            };
            Round {
                received: moved(own[turn], before).filter(|_| number != 0),
                sent: moved(theirs[turn][turn], after).filter(|(_, peer)| *peer != 0),
            }
        };
        all.map(round).collect()
    }
}

/// What a participant does in a round: the block, and with whom.
#[derive(Debug, Clone, Copy)]
struct Round {
    received: Option<(u32, u32)>,
    sent: Option<(u32, u32)>,
}

/// A search for the participants whose first blocks one participant receives. In round k the other
/// one is between two skips before it: it has its first block, and is near enough for the skip. The
/// search goes through sums of skips, the largest first, and takes each first block once.
struct Search<'a> {
    skips: &'a Skips,
    /// The participant, once around the circle.
    end: u32,
    /// The result for the round before.
    below: u32,
    is_free: Vec<bool>,
    found: Vec<usize>,
}

impl Search<'_> {
    /// Looks among the sums that go on from `sum` with skips up to the `largest`.
    fn extend(&mut self, sum: u32, largest: usize) {
        let Skips(skips) = self.skips;
        for skip in (0..=largest).rev() {
            let next = sum + skips[skip];
            let fits = |round: usize| next + skips[round] <= self.end;
            if !self.is_free[skip] || !fits(self.found.len()) || next >= self.below {
                continue;
            }
            if fits(self.found.len() + 1) {
                self.extend(next, skip);
            }
            let Some(after) = skips.get(self.found.len() + 1) else { return };
            if sum + after > self.end {
                return;
            }
            self.below = next;
            self.is_free[skip] = false;
            self.found.push(skip);
            if self.found.len() == self.skips.period() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every participant receives each block once, from a participant that has it by then, and
    /// sends and receives at most one block in a round. There are as few rounds as possible.
    #[test]
    fn broadcasts_take_the_fewest_rounds() {
        let few = [1, 2, 3, 4, 5, 7, 8, 13, 16, 33, 64];
        let all = (2..=130).flat_map(|nodes| few.map(|blocks| (nodes, blocks)));
        for (nodes, blocks) in all.chain([(1000, 7), (1024, 16), (1025, 5)]) {
            let skips = Skips::new(nodes);
            let rounds: Vec<Vec<Round>> = (0..nodes).map(|at| skips.rounds(at, blocks)).collect();
            let least = blocks - 1 + nodes.next_power_of_two().ilog2();
            let mut has = vec![vec![false; blocks as usize]; nodes as usize];
            has[0] = vec![true; blocks as usize];
            for round in 0..least as usize {
                let mut came = Vec::new();
                for (at, own) in (0..).zip(&rounds) {
                    assert_eq!(own.len() as u32, least, "{nodes} nodes, {blocks} blocks");
                    if let Some((block, peer)) = own[round].sent {
                        assert!(has[at as usize][block as usize], "{nodes}: {at} sends {block}");
                        assert_eq!(rounds[peer as usize][round].received, Some((block, at)));
                    }
                    if let Some((block, peer)) = own[round].received {
                        assert_eq!(rounds[peer as usize][round].sent, Some((block, at)));
                        came.push((at, block));
                    }
                }
                for (at, block) in came {
                    let had = std::mem::replace(&mut has[at as usize][block as usize], true);
                    assert!(!had, "{nodes}: {at} gets {block} twice");
                }
            }
            assert!(has.iter().flatten().all(|has| *has), "{nodes} nodes, {blocks} blocks");
        }
    }
}
