//! A lane of a daemon: the pieces that it has started, its links, and the frames that came early.
//! What a piece may do next is decided by the code that the daemon runs, too
//! ([`gradwire_collectives::execution`]).

use std::{collections::BTreeMap, sync::Arc};

use gradwire_collectives::{
    Schedule,
    execution::{Plan, Progress, SendQueue, Work},
};

use crate::fair::{FlowId, ResourceId};

/// A plan, and what waits for each of its steps.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    waiting: Vec<Vec<u32>>,
}

impl Planned {
    pub(crate) fn new(schedule: &Schedule, element: u64) -> Self {
        let plan = Plan::new(schedule, element);
        let mut waiting = vec![Vec::new(); plan.steps.len()];
        for (later, step) in (0..).zip(&plan.steps) {
            for earlier in step.earlier() {
                waiting[earlier as usize].push(later);
            }
        }
        Self { plan, waiting }
    }

    /// The number of the message that a receiving step receives from a participant.
    pub(crate) fn message(&self, step: u32, from: u32) -> Option<u32> {
        (0..)
            .map_while(|message| Some((message, self.plan.receiving(from, message)?)))
            .find(|&(_, receives)| receives == step)
            .map(|(message, _)| message)
    }

    /// The steps that may go on when this one has.
    pub(crate) fn waiting(&self, step: u32) -> &[u32] {
        &self.waiting[step as usize]
    }

    /// Whether the step that receives a message reduces what comes.
    pub(crate) fn reduces(&self, participant: u32, message: u32) -> bool {
        let step = self.plan.receiving(participant, message);
        let work = step.map(|step| self.plan.steps[step as usize].work);
        matches!(work, Some(Work::Combine { .. }))
    }
}

/// A piece that a lane has started.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) planned: Arc<Planned>,
    pub(crate) progress: Progress,
    /// The host of each participant.
    pub(crate) hosts: Arc<[u32]>,
}

/// A frame that has come.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) from: u32,
    pub(crate) sequence: u64,
    pub(crate) message: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The connections of a lane with a peer.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) queue: SendQueue,
    pub(crate) flows: Vec<FlowId>,
    /// Which of them is first to get the next chunk.
    pub(crate) first: usize,
}

/// A lane.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) pieces: BTreeMap<u64, Running>,
    pub(crate) links: BTreeMap<u32, Link>,
    /// Frames of pieces that have not started here.
    pub(crate) early: BTreeMap<u64, Vec<Frame>>,
    /// Frames whose step may not receive them yet, with the step.
    pub(crate) held: Vec<(Frame, u32)>,
    /// Its processor, if that is a limit.
    pub(crate) processor: Option<ResourceId>,
    /// Until when it does nothing else than to reduce or to publish.
    pub(crate) busy: f64,
    /// Whether it reduces contributions of its node.
    pub(crate) reduces: bool,
}
