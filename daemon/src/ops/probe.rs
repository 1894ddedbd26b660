//! Turns a probe into a piece without tensors, which runs on a lane like all others.

use std::{sync::Arc, time::Instant};

use gradwire_collectives::execution::Plan;
use gradwire_kernels::{Combine, Finish};
use gradwire_proto::{DType, NodeId, ReduceOp};

use crate::{
    data::piece::{Piece, Purpose, Wire},
    model::operation::Probe,
};

/// The piece of a probe. `None` if this node takes no part in it, or if it can't be run.
pub(super) fn piece(me: NodeId, probe: &Probe, ordered: Instant) -> Option<Piece> {
    let Probe { sequence, pattern, ref nodes } = *probe;
    let participants = nodes.len() as u32;
    let own = nodes.iter().position(|node| *node == me)? as u32;
    if !pattern.fits(participants) {
        return None;
    }
    let schedule = pattern.schedule(participants, own);
    let dtype = DType::U8;
    Some(Piece {
        sequence,
        purpose: Purpose::Probe,
        combine: Combine { dtype, op: ReduceOp::Sum },
        prescale: 1.0,
        finish: Finish::none(dtype),
        wire: Wire::Ranks,
        tensors: Vec::new(),
        segments: Vec::new(),
        bytes: schedule.blocks.iter().map(|block| block.count).sum(),
        plan: Arc::new(Plan::new(&schedule, 1)),
        nodes: Arc::clone(nodes),
        ordered,
        moved: None,
        chunk: None,
    })
}
