//! A lane of a daemon: the pieces that it has started, its links, and frames that arrived early.
//! The daemon's own code decides what a piece may do next ([`gradwire_collectives::execution`]).

use std::{collections::BTreeMap, sync::Arc};

use gradwire_collectives::{
    Schedule,
    execution::{Plan, Progress, SendQueue, Work},
};

use crate::{
    fair::{FlowId, ResourceId},
    few::Few,
};

/// A plan, and which steps wait for each of its steps.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) plan: Plan,
    waiting: Vec<u32>,
    /// Where the list of each step begins, and the end.
    first_waiting: Vec<u32>,
}

impl Planned {
    pub(crate) fn new(schedule: &Schedule, element: u64) -> Self {
        let plan = Plan::new(schedule, element);
        let mut next = vec![0u32; plan.steps.len() + 1];
        for earlier in plan.steps.iter().flat_map(|step| step.earlier()) {
            next[earlier as usize + 1] += 1;
        }
        for step in 1..next.len() {
            next[step] += next[step - 1];
        }
        let first_waiting = next.clone();
        let mut waiting = vec![0; next[plan.steps.len()] as usize];
        for (later, step) in (0..).zip(&plan.steps) {
            for earlier in step.earlier() {
                let place = &mut next[earlier as usize];
                waiting[*place as usize] = later;
                *place += 1;
            }
        }
        Self { plan, waiting, first_waiting }
    }

    /// The index of the message that a step receives from a participant.
    pub(crate) fn message(&self, step: u32, from: u32) -> Option<u32> {
        (0..)
            .map_while(|message| Some((message, self.plan.receiving(from, message)?)))
            .find(|&(_, receives)| receives == step)
            .map(|(message, _)| message)
    }

    /// The steps that may proceed after this one.
    pub(crate) fn waiting(&self, step: u32) -> &[u32] {
        let [first, end] = [step, step + 1].map(|step| self.first_waiting[step as usize] as usize);
        &self.waiting[first..end]
    }

    /// Where the list of steps that wait for a step begins.
    pub(crate) fn first_waiting(&self, step: u32) -> u32 {
        self.first_waiting[step as usize]
    }

    /// Whether the step that receives a message reduces it.
    pub(crate) fn reduces(&self, participant: u32, message: u32) -> bool {
        let step = self.plan.receiving(participant, message);
        let work = step.map(|step| self.plan.steps[step as usize].work);
        matches!(work, Some(Work::Combine { .. }))
    }
}

/// The plans of the simulated participants of an operation.
#[derive(Debug)]
pub(crate) struct Plans(Vec<Option<Arc<Planned>>>);

impl Plans {
    pub(crate) fn new(participants: u32) -> Self {
        Self(vec![None; participants as usize])
    }

    pub(crate) fn set(&mut self, participant: u32, planned: Planned) {
        self.0[participant as usize] = Some(Arc::new(planned));
    }

    pub(crate) fn of(&self, participant: u32) -> Option<&Arc<Planned>> {
        self.0.get(participant as usize)?.as_ref()
    }
}

/// A piece that a lane has started.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) planned: Arc<Planned>,
    pub(crate) progress: Progress,
    /// The host of each participant.
    pub(crate) hosts: Arc<[u32]>,
    /// The most bytes of a chunk.
    pub(crate) chunk: u64,
}

/// A frame that has arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Frame {
    pub(crate) from: u32,
    pub(crate) sequence: u64,
    /// The step that receives it.
    pub(crate) step: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

/// The connections of a lane with a peer.
#[derive(Debug, Default)]
pub(crate) struct Link {
    pub(crate) queue: SendQueue,
    pub(crate) flows: Vec<FlowId>,
    /// The connection that gets the next chunk first.
    pub(crate) first: usize,
}

/// A lane.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    pub(crate) pieces: Few<u64, Running>,
    /// By peer.
    pub(crate) links: Few<u32, Link>,
    /// Frames of pieces that have not started here.
    pub(crate) early: BTreeMap<u64, Vec<Frame>>,
    /// Frames whose step may not receive them yet, by piece and step.
    pub(crate) held: BTreeMap<(u64, u32), Vec<Frame>>,
    /// Its processor, if that limits the speed.
    pub(crate) processor: Option<ResourceId>,
    /// Until when it is busy with reducing or publishing.
    pub(crate) busy: f64,
    /// Whether it is reducing contributions of its node.
    pub(crate) reduces: bool,
}
