//! Chunks from a lane to the lane of a peer.

use gradwire_collectives::execution::{Chunk, HandedOut, Work};
use gradwire_proto::Sequence;

use super::{
    Engine,
    state::{About, Event, Ordered, Receiver},
};
use crate::{
    config::{Processor, Transport},
    fair::{FlowId, Use},
    flows::Transfer,
    job::Director,
    lane::{Frame, Lane, Running},
    network::Path,
};

impl<D: Director> Engine<'_, D> {
    /// The index of the link to a peer. Its connections are created on first use.
    fn connect(&mut self, lane: usize, peer: u32) -> usize {
        let links = &mut self.lanes[lane].links;
        let place = links.place_or_default(peer);
        if !links.at_mut(place).flows.is_empty() {
            return place;
        }
        let (host, streams) = (self.host(lane), self.setup.transport.streams);
        let number = lane as u32 % self.setup.transport.lanes;
        let next = self.pairs.len();
        let pair = *self.pair_of.entry((host, peer)).or_insert(next);
        if pair == next {
            self.pairs.push((peer, 0));
        }
        for stream in 0..streams {
            let ends = (host, peer);
            let path =
                self.setup.network.path(&self.links, self.setup.seed, ends, [number, stream]);
            let Path { mut uses, latency, cap } = path;
            if let Some(resource) = self.lanes[lane].processor {
                uses.push(Use { resource, weight: 0.0 });
            }
            if let Some(resource) = self.lanes[self.lane(peer, number)].processor {
                uses.push(Use { resource, weight: 0.0 });
            }
            if let Some(collapse) = &self.collapse {
                collapse.stand_in(&mut uses);
            }
            let flow = self.flows.add(&uses, cap);
            let window = if self.setup.tcp.is_some() { 0.0 } else { f64::INFINITY };
            let (used, retries) = (f64::NEG_INFINITY, 0);
            let (from, to, lane_number) = (host, peer, number);
            self.about.push(About {
                from,
                to,
                lane: lane_number,
                latency,
                cap,
                window,
                used,
                retries,
                pair,
                last: None,
            });
            self.limit(flow);
            self.lanes[lane].links.at_mut(place).flows.push(flow);
        }
        place
    }

    /// Hands chunks to the connections to a peer while these accept them.
    pub(super) fn send(&mut self, lane: usize, peer: u32) {
        let place = self.connect(lane, peer);
        let Transport { chunk: limit, socket, .. } = self.setup.transport;
        let is_whole = self.setup.transport.is_whole();
        loop {
            let Lane { links, pieces, .. } = &mut self.lanes[lane];
            let link = links.at_mut(place);
            let count = link.flows.len();
            let has_room = |&at: &usize| {
                let flow = link.flows[at];
                let waiting = self.flows.waiting_bytes(flow);
                self.flows.is_empty(flow) || waiting.saturating_add(limit) <= socket
            };
            let Some(at) = (0..count).map(|i| (link.first + i) % count).find(has_room) else {
                return;
            };
            let mut message = 0;
            let next = link.queue.next_chunk(|Sequence(sequence), step| {
                let Some(running) = pieces.get_mut(sequence) else {
                    return HandedOut { chunk: None, is_all: true };
                };
                let Running { planned, progress, chunk: limit, .. } = running;
                if let Work::Send { message: its, .. } = planned.plan.steps[step as usize].work {
                    message = its;
                }
                let chunk = if is_whole {
                    progress.hand_out_whole(&planned.plan, step)
                } else {
                    progress.hand_out(&planned.plan, step, *limit)
                };
                // A step with nothing ready is queued again once it has.
                let is_all = chunk.is_none() || progress.is_handed_out(&planned.plan, step);
                HandedOut { chunk, is_all }
            });
            let Some((Sequence(sequence), Chunk { step, offset, bytes })) = next else { return };
            link.first = (at + 1) % count;
            let flow = link.flows[at];
            let is_sent = self.flows.waiting_bytes(flow) + bytes <= socket;
            let transfer = Transfer { sequence, step, message, offset, bytes, is_sent };
            if self.flows.push(flow, transfer, self.now) {
                self.started(flow);
            }
            if self.flows.first(flow) == Some(&transfer) {
                self.weigh(flow);
            }
            if is_sent {
                self.advance(lane, sequence, step, offset, bytes);
            }
        }
    }

    /// Sets the processor costs of a connection's bytes, at its first chunk.
    fn weigh(&mut self, flow: FlowId) {
        let Processor { send, receive, reduce, frame, .. } = self.setup.processor;
        if !self.setup.processor.is_limit() {
            return;
        }
        let Some(&Transfer { sequence, message, bytes, .. }) = self.flows.first(flow) else {
            return;
        };
        let About { from, to, .. } = self.about[flow as usize];
        let Ordered { operation, plans, .. } = &self.ordered[&sequence];
        let place = |host: u32| operation.hosts.binary_search(&host).unwrap_or_default();
        let receiver = plans.of(place(to) as u32);
        let reduces = receiver.is_some_and(|plan| plan.reduces(place(from) as u32, message));
        let each = frame / bytes as f64;
        let receive = receive + each + if reduces { reduce } else { 0.0 };
        let last = self.flows.fair.uses(flow).count() - 1;
        self.flows.fair.set_weight(flow, last - 1, (send + each).max(f64::MIN_POSITIVE));
        self.flows.fair.set_weight(flow, last, receive.max(f64::MIN_POSITIVE));
    }

    /// Handles the end of a connection's first chunk.
    pub(super) fn sent(&mut self, flow: FlowId) {
        let (transfer, gone) = self.flows.take(flow, self.now);
        let About { from, to, lane: number, latency, pair, .. } = self.about[flow as usize];
        self.about[flow as usize].used = self.now;
        self.outcome.chunks += 1;
        self.outcome.sent[from as usize] += self.with_header(transfer.bytes);
        let (from_there, to_there) = match &self.collapse {
            // The representative of the receiver gets the same from another host.
            Some(collapse) => (collapse.seen_from(to, from), collapse.representative(to)),
            None => (from, to),
        };
        if let Some(step) = self.receiving(flow, (from_there, to_there), &transfer) {
            let Transfer { sequence, offset, bytes, .. } = transfer;
            let frame = Frame { from: from_there, sequence, step, offset, bytes };
            let lane = self.lane(to_there, number) as u32;
            self.at(gone + latency, Event::Arrive(lane, frame));
        }
        let lane = self.lane(from, number);
        if !transfer.is_sent {
            let Transfer { sequence, step, offset, bytes, .. } = transfer;
            self.advance(lane, sequence, step, offset, bytes);
        }
        self.send(lane, to);
        self.work();
        self.flows.rest(flow, self.now);
        if self.flows.is_empty(flow) {
            let active = &mut self.pairs[pair].1;
            *active -= 1;
            if *active == 0 {
                let receiver = self.receiver(to);
                self.senders[receiver].0 -= 1;
            }
        } else {
            self.weigh(flow);
            self.lose(flow, self.loss);
        }
    }

    /// The step that receives a connection's data. Most chunks belong to the same message as the
    /// one before.
    fn receiving(
        &mut self,
        flow: FlowId,
        (from, to): (u32, u32),
        transfer: &Transfer,
    ) -> Option<u32> {
        let &Transfer { sequence, message, .. } = transfer;
        let last = &mut self.about[flow as usize].last;
        if let Some(last) = last.filter(|last| (last.sequence, last.message) == (sequence, message))
        {
            return Some(last.step);
        }
        let Ordered { operation, plans, .. } = &self.ordered[&sequence];
        let place = |host: u32| operation.hosts.binary_search(&host).unwrap_or_default() as u32;
        let step = plans.of(place(to)).and_then(|it| it.plan.receiving(place(from), message));
        debug_assert!(step.is_some(), "the message has no receiver");
        *last = step.map(|step| Receiver { sequence, message, step });
        step
    }

    pub(super) fn arrived(&mut self, lane: usize, frame: Frame) {
        let one = &mut self.lanes[lane];
        if one.pieces.place(frame.sequence).is_none() {
            one.early.entry(frame.sequence).or_default().push(frame);
            return;
        }
        let to = self.host(lane);
        self.outcome.received[to as usize] += self.with_header(frame.bytes);
        self.receive(lane, frame);
    }

    /// Delivers a frame if its step may receive it; holds it back otherwise.
    fn receive(&mut self, lane: usize, frame: Frame) {
        let Frame { from, sequence, step, offset, bytes } = frame;
        let Some(running) = self.lanes[lane].pieces.get(sequence) else { return };
        let Running { planned, progress, .. } = running;
        if !progress.takes(&planned.plan, step, offset, bytes) {
            self.lanes[lane].held.entry((sequence, step)).or_default().push(frame);
            return;
        }
        let fused = planned.plan.steps[step as usize].fused;
        let host = self.host(lane);
        if let Some(record) = &mut self.record {
            record.received(sequence, host, step, from);
        }
        if let Some(local) = fused {
            self.advance(lane, sequence, local, offset, bytes);
        }
        self.advance(lane, sequence, step, offset, bytes);
    }

    pub(super) fn take_held(&mut self, lane: usize, sequence: u64, step: u32) {
        for frame in self.lanes[lane].held.remove(&(sequence, step)).unwrap_or_default() {
            self.receive(lane, frame);
        }
    }

    /// The index of the host whose incoming traffic counts for a host.
    pub(super) fn receiver(&self, host: u32) -> usize {
        self.collapse.as_ref().map_or(host, |collapse| collapse.representative(host)) as usize
    }
}
