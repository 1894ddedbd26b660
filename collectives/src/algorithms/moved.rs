//! Moves: the contribution of one participant goes to another one, over their link.
//!
//! Nothing is reduced between nodes and no other participant is involved, so there is no choice of
//! algorithm. The piece is cut into blocks only to use several streams: inside a block the receiver
//! follows the sender chunk by chunk anyway.

use super::{
    kind::Roles,
    parts::{
        build::{self, Builder},
        shape::Shape,
    },
};
use crate::{
    schedule::{Action, Schedule, split},
    topology::Topology,
};

/// Blocks have about this many elements.
const BLOCK: u64 = 1 << 17;
const MAX_BLOCKS: u64 = 256;

pub(super) fn moved(participants: u32, from: u32, to: u32, me: u32, count: u64) -> Schedule {
    if from == to {
        return build::alone(participants, me, count, Roles { from: Some(from), to: Some(to) });
    }
    let blocks = split(count, count.div_ceil(BLOCK).clamp(1, MAX_BLOCKS));
    let mut builder = Builder::new(blocks.len());
    for block in 0..blocks.len() as u32 {
        if me == from {
            builder.add(block, Action::ReduceLocal, block);
            builder.add(block, Action::send(to), block);
        } else if me == to {
            builder.add(block, Action::copy(from), block);
            builder.add(block, Action::Publish, block);
        }
    }
    builder.finish(participants, me, blocks)
}

/// The cost of one message, at the rate of the line or of the smaller rack's uplink: α + S·β.
pub(super) fn shape(topology: &Topology, from: u32, to: u32) -> Shape {
    let size = |of: u32| {
        let all = 0..topology.participants();
        all.filter(|&other| topology.same_rack(other, of)).count()
    };
    let smaller = size(from).min(size(to)) as f64;
    let across = if topology.same_rack(from, to) { 0.0 } else { 1.0 };
    Shape {
        line: 1.0,
        uplink: across / smaller,
        messages: 1.0,
        blocks: 1.0,
        hops_in: 1.0 - across,
        hops_across: across,
        fill: 1.0,
        ..Shape::default()
    }
}
