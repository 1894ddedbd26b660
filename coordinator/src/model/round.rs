//! A tensor on which all ranks have agreed, as agreement passes it to dispatch.

use std::{sync::Arc, time::Duration};

use gradwire_proto::{Priority, convert::TensorRef};

use super::plan::Plan;

/// The slot of a tensor in the ready table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Slot(pub(crate) u32);

/// The most bytes of a tensor's segments in a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Text {
    /// The bytes of each segment.
    pub(crate) each: usize,
    /// The extra bytes of the first segment in a piece: the agreed request, if it is included.
    pub(crate) first: usize,
}

impl Text {
    /// The bytes for a tensor that is sent by id.
    pub(crate) const BY_ID: Self = Self { each: 64, first: 0 };
}

/// A tensor on which all ranks have agreed.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) slot: Slot,
    /// How segments refer to the tensor.
    pub(crate) tensor: TensorRef,
    pub(crate) text: Text,
    pub(crate) plan: Arc<Plan>,
    pub(crate) priority: Priority,
    /// When the first node announced it.
    pub(crate) since: Duration,
    /// When all ranks agreed on it.
    pub(crate) agreed: Duration,
}

/// The progress of a node with a tensor in dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Parts that concern the node have not been sent out.
    Queued,
    /// All of it has been sent out, but the node has not done all of it.
    InFlight,
    /// The node has done all of it, or takes no part in it.
    Done,
}
