//! Chunks from a lane to the lane of a peer.

use gradwire_collectives::execution::{Chunk, HandedOut, Work};
use gradwire_proto::Sequence;

use super::{
    Engine,
    state::{About, Event, Ordered},
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
    /// A connection's numbers, made when it is first needed.
    fn connect(&mut self, lane: usize, peer: u32) {
        let (host, streams) = (self.host(lane), self.setup.transport.streams);
        let number = lane as u32 % self.setup.transport.lanes;
        if !self.lanes[lane].links.entry(peer).or_default().flows.is_empty() {
            return;
        }
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
            });
            self.limit(flow);
            if let Some(link) = self.lanes[lane].links.get_mut(&peer) {
                link.flows.push(flow);
            }
        }
    }

    /// Gives the connections to a peer what they can take.
    pub(super) fn send(&mut self, lane: usize, peer: u32) {
        self.connect(lane, peer);
        let Transport { chunk: limit, socket, .. } = self.setup.transport;
        let is_whole = self.setup.transport.is_whole();
        loop {
            let Lane { links, pieces, .. } = &mut self.lanes[lane];
            let Some(link) = links.get_mut(&peer) else { return };
            let count = link.flows.len();
            let has_room = |&at: &usize| {
                let flow = link.flows[at];
                let waiting = self.flows.waiting_bytes(flow);
                self.flows.is_empty(flow) || waiting.saturating_add(limit) <= socket
            };
            let Some(at) = (0..count).map(|i| (link.first + i) % count).find(has_room) else {
                return;
            };
            let next = link.queue.next_chunk(|Sequence(sequence), step| {
                let Some(running) = pieces.get_mut(&sequence) else {
                    return HandedOut { chunk: None, is_all: true };
                };
                let Running { planned, progress, chunk: limit, .. } = running;
                let chunk = if is_whole {
                    progress.hand_out_whole(&planned.plan, step)
                } else {
                    progress.hand_out(&planned.plan, step, *limit)
                };
                // One that has nothing ready is put back when it may have.
                let is_all = chunk.is_none() || progress.is_handed_out(&planned.plan, step);
                HandedOut { chunk, is_all }
            });
            let Some((Sequence(sequence), Chunk { step, offset, bytes })) = next else { return };
            link.first = (at + 1) % count;
            let flow = link.flows[at];
            let work = pieces[&sequence].planned.plan.steps[step as usize].work;
            let Work::Send { message, .. } = work else { continue };
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

    /// The first chunk of a connection sets what its bytes cost the processors.
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

    /// The first chunk of a connection has gone.
    pub(super) fn sent(&mut self, flow: FlowId) {
        let (transfer, gone) = self.flows.take(flow, self.now);
        let About { from, to, lane: number, latency, pair, .. } = self.about[flow as usize];
        self.about[flow as usize].used = self.now;
        self.outcome.chunks += 1;
        self.outcome.sent[from as usize] += self.with_header(transfer.bytes);
        let arrive = match &self.collapse {
            // Another host sends the same to the one that stands for the receiver.
            Some(collapse) => (collapse.seen_from(to, from), collapse.representative(to)),
            None => (from, to),
        };
        let (from_there, to_there) = arrive;
        let arrive = Event::Arrive { from: from_there, to: to_there, lane: number, transfer };
        self.at(gone + latency, arrive);
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

    pub(super) fn arrived(&mut self, lane: usize, frame: Frame) {
        let Frame { from, sequence, message, .. } = frame;
        let one = &mut self.lanes[lane];
        let Some(running) = one.pieces.get(&sequence) else {
            one.early.entry(sequence).or_default().push(frame);
            return;
        };
        let participant = running.hosts.binary_search(&from).unwrap_or_default() as u32;
        let Some(step) = running.planned.plan.receiving(participant, message) else {
            debug_assert!(false, "a message without a receiver");
            return;
        };
        let to = self.host(lane);
        self.outcome.received[to as usize] += self.with_header(frame.bytes);
        self.receive(lane, frame, step);
    }

    /// Takes a frame if its step may receive it, or keeps it.
    fn receive(&mut self, lane: usize, frame: Frame, step: u32) {
        let Frame { from, sequence, offset, bytes, .. } = frame;
        let Some(running) = self.lanes[lane].pieces.get(&sequence) else { return };
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
            self.receive(lane, frame, step);
        }
    }

    /// The number of the host that is counted as the receiver of what goes to a host.
    pub(super) fn receiver(&self, host: u32) -> usize {
        self.collapse.as_ref().map_or(host, |collapse| collapse.representative(host)) as usize
    }
}
