//! Recursive doubling: in round t everybody exchanges all it has with the participant at distance
//! 2^t, and both reduce (Thakur, Rabenseifner & Gropp, 2005).
//!
//! ⌊log2 M⌋ rounds and nothing shorter, but every round carries the whole piece: right for small
//! ones. Where M is not a power of two, the first 2(M − 2^⌊log2 M⌋) positions fold in pairs: the
//! even one gives its contribution to the odd one, stays out, and gets the result at the end.
//!
//! Here each element is finished by everybody rather than by one owner, so identical bits (SAME)
//! rest on all participants putting the lower position on the left.
//!
//! The broadcast goes down a binomial tree: log2 M rounds too, farthest first, so that each rack
//! is entered early and then served from inside. The reduction to one participant comes up it,
//! nearest first.

use super::build::{self, Builder, Link, Place, Rooted};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// Above this many elements there are several blocks, so that they can use several streams.
const BLOCK: u64 = 1 << 16;
const MAX_BLOCKS: u64 = 16;

fn blocks_for(count: u64) -> u64 {
    count.div_ceil(BLOCK).clamp(1, MAX_BLOCKS)
}

pub(super) fn allreduce(topology: &Topology, me: u32, count: u64) -> Schedule {
    let order = topology.order();
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let blocks = split(count, blocks_for(count));
    let rounds = nodes.ilog2();
    let folded = nodes - (1 << rounds);
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        let send = |at: u32| Action::send(order[at as usize]);
        let reduce = |peer: u32| Action::reduce(order[peer as usize], peer < at);
        builder.add(0, Action::ReduceLocal, block);
        if at < 2 * folded && at.is_multiple_of(2) {
            builder.add(0, send(at + 1), block);
            builder.add(rounds + 1, Action::copy(order[at as usize + 1]), block);
        } else {
            if at < 2 * folded {
                builder.add(0, reduce(at - 1), block);
            }
            // Numbers of those who stay in, and back.
            let number = if at < 2 * folded { at / 2 } else { at - folded };
            let position = |number: u32| {
                if number < folded { 2 * number + 1 } else { number + folded }
            };
            for round in 0..rounds {
                let peer = position(number ^ (1 << round));
                builder.add(1 + round, send(peer), block);
                builder.add(1 + round, reduce(peer), block);
            }
            if at < 2 * folded {
                builder.add(rounds + 1, send(at - 1), block);
            }
        }
        builder.add(rounds + 1, Action::Publish, block);
    }
    builder.finish(nodes, me, blocks)
}

pub(super) fn rooted(topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    let order = build::order_from(topology, root);
    let nodes = order.len() as u32;
    let at = build::position(&order, me);
    let rounds = nodes.next_power_of_two().ilog2();
    Rooted::new(split(count, blocks_for(count)), move |block| {
        // The parent of a position is that without its lowest bit; a far link (high bit) is early
        // on the way down, and late on the way up.
        let link = |peer: u32, bit: u32| Link {
            peer: order[peer as usize],
            up: block + bit,
            down: block + rounds - 1 - bit,
        };
        let own = if at == 0 { rounds } else { at.trailing_zeros() };
        Place {
            parent: (at > 0).then(|| link(at & (at - 1), own)),
            children: (0..own)
                .filter(|bit| at + (1 << bit) < nodes)
                .map(|bit| link(at + (1 << bit), bit))
                .collect(),
        }
    })
}
