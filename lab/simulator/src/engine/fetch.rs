//! Prefetches the memory that the next events need, for several events at once.
//!
//! With thousands of hosts most of it is in no cache. An event needs a chain of dependent reads;
//! the chains of different events can overlap. Nothing is changed, and the results are not used.

use std::hint::black_box;

use super::{Engine, state::Event};
use crate::{
    fair::FlowId,
    job::Director,
    lane::{Frame, Lane},
};

impl Lane {
    /// Reads what the look-up of a single piece needs.
    fn fetch(&self) -> u64 {
        self.pieces.first().map_or(0, |piece| piece.hosts.len() as u64)
    }

    /// Reads what a step of the first piece needs.
    fn fetch_step(&self, step: u32) -> u64 {
        let Some(piece) = self.pieces.first() else { return 0 };
        let Some(planned) = piece.planned.plan.steps.get(step as usize) else { return 0 };
        let begun = piece.progress.begun(step).prefix();
        planned.bytes
            + piece.progress.done(step)
            + begun
            + u64::from(piece.planned.first_waiting(step))
    }
}

impl<D: Director> Engine<'_, D> {
    /// For frames that have arrived.
    pub(super) fn fetch_receivers(&self, events: &[Event]) {
        let frames = || {
            events.iter().filter_map(|event| match event {
                Event::Arrive(lane, Frame { step, .. }) => Some((*lane as usize, *step)),
                _ => None,
            })
        };
        black_box(frames().map(|(lane, _)| self.lanes[lane].fetch()).sum::<u64>());
        black_box(frames().map(|(lane, step)| self.lanes[lane].fetch_step(step)).sum::<u64>());
    }

    /// For connections whose chunk has been sent.
    pub(super) fn fetch_senders(&self, flows: &[FlowId]) {
        let lanes = || {
            flows.iter().map(|&flow| {
                let about = &self.about[flow as usize];
                (&self.lanes[self.lane(about.from, about.lane)], about.to)
            })
        };
        black_box(lanes().map(|(lane, _)| lane.fetch()).sum::<u64>());
        black_box(
            lanes().filter_map(|(lane, to)| Some(lane.links.get(to)?.flows.len())).sum::<usize>(),
        );
        let next = lanes().filter_map(|(lane, to)| {
            let (_, step) = lane.links.get(to)?.queue.first()?;
            Some(lane.fetch_step(step))
        });
        black_box(next.sum::<u64>());
    }
}
