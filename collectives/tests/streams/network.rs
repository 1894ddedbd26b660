//! A discrete-event simulation of schedules, chunk by chunk as the daemons run them: a chunk that
//! has arrived is reduced and sent on while the rest of its message is in flight.
//!
//! - A line carries one chunk at a time in each direction. Peers take turns on the sender's line.
//!   The receiver's line takes chunks in the order of arrival, from a queue that never overflows.
//! - An uplink of a rack works the same way, with the rate of all its nodes together.
//! - A node has one processor, for messages and for what is reduced.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, VecDeque},
};

use gradwire_collectives::{Action, CostModel, Schedule, Topology, verify::Graph};

/// A chunk of a block in a step.
struct Chunk {
    /// The step, as a node of the graph.
    step: usize,
    node: usize,
    bytes: f64,
    action: Action,
    /// Whether it is the first of its message.
    is_first: bool,
    /// For a send, the chunk that receives it.
    receiver: usize,
    /// How many chunks, whole steps and arrivals it still waits for.
    waits_for: u32,
    /// When the last of them is done.
    ready: f64,
    /// The chunks that wait for it.
    next: Vec<usize>,
}

/// What happens at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A chunk waits for nothing more.
    Ready(usize),
    /// A node's line is free.
    Free(usize),
    /// A chunk is done.
    Done(usize),
}

/// Seconds until the last chunk is done, for elements of 4 bytes in chunks of `chunk` bytes.
pub(crate) fn simulated(
    model: &CostModel,
    topology: &Topology,
    schedules: &[Schedule],
    chunk: u64,
) -> f64 {
    let graph = Graph::new(schedules).expect("schedules fit together");
    Network::new(model, topology, &graph, schedules, chunk).run()
}

struct Network<'a> {
    model: &'a CostModel,
    chunks: Vec<Chunk>,
    /// For each step, how many chunks are not done, and which chunks wait for all of them.
    left: Vec<usize>,
    after_all: Vec<Vec<usize>>,
    rack_of: Vec<usize>,
    rack_size: Vec<f64>,
    /// For each node, the chunks to send to each peer, the peer served last, and whether it sends.
    queues: Vec<BTreeMap<u32, VecDeque<usize>>>,
    served: Vec<u32>,
    sends: Vec<bool>,
    /// When lines, uplinks and processors are free again.
    into: Vec<f64>,
    up: Vec<f64>,
    down: Vec<f64>,
    processor: Vec<f64>,
    events: BinaryHeap<Reverse<(u64, usize, Event)>>,
    happened: usize,
}

impl<'a> Network<'a> {
    fn new(
        model: &'a CostModel,
        topology: &Topology,
        graph: &Graph,
        schedules: &[Schedule],
        chunk: u64,
    ) -> Self {
        let mut chunks: Vec<Chunk> = Vec::new();
        // The chunks of each step, and the first chunk of each of its blocks.
        let mut of_step = vec![0..0; graph.steps()];
        let mut of_block: Vec<BTreeMap<u32, usize>> = vec![BTreeMap::new(); graph.steps()];
        for (node, schedule) in schedules.iter().enumerate() {
            for (at, step) in schedule.steps.iter().enumerate() {
                let (id, first) = (graph.node(node, at), chunks.len());
                for block in step.blocks() {
                    of_block[id].insert(block, chunks.len());
                    let bytes = schedule.blocks[block as usize].count * 4;
                    for begin in (0..bytes.max(1)).step_by(chunk as usize) {
                        chunks.push(Chunk {
                            step: id,
                            node,
                            bytes: (bytes - begin).min(chunk) as f64,
                            action: step.action,
                            is_first: chunks.len() == first,
                            receiver: usize::MAX,
                            waits_for: 0,
                            ready: 0.0,
                            next: Vec::new(),
                        });
                    }
                }
                of_step[id] = first..chunks.len();
            }
        }
        let mut after_all = vec![Vec::new(); graph.steps()];
        let wait = |chunks: &mut Vec<Chunk>, before: usize, after: usize| {
            chunks[before].next.push(after);
            chunks[after].waits_for += 1;
        };
        for (node, schedule) in schedules.iter().enumerate() {
            for (at, step) in schedule.steps.iter().enumerate() {
                let id = graph.node(node, at);
                for &before in step.after {
                    let earlier = graph.node(node, before as usize);
                    if !schedule.steps.at(before as usize).shares_blocks(&step) {
                        for one in of_step[id].clone() {
                            after_all[earlier].push(one);
                            chunks[one].waits_for += 1;
                        }
                        continue;
                    }
                    for (block, &first) in &of_block[id] {
                        let Some(&theirs) = of_block[earlier].get(block) else { continue };
                        let bytes = schedule.blocks[*block as usize].count * 4;
                        for part in 0..bytes.max(1).div_ceil(chunk) as usize {
                            wait(&mut chunks, theirs + part, first + part);
                        }
                    }
                }
                // A message is sent in its order.
                if matches!(step.action, Action::Send { .. }) {
                    for one in of_step[id].clone().skip(1) {
                        wait(&mut chunks, one - 1, one);
                    }
                }
                if let Some(sender) = graph.sender(id) {
                    for (from, to) in of_step[sender].clone().zip(of_step[id].clone()) {
                        chunks[from].receiver = to;
                        chunks[to].waits_for += 1;
                    }
                }
            }
        }
        let members = topology.members();
        let mut rack_of = vec![0; schedules.len()];
        for (rack, members) in members.iter().enumerate() {
            members.iter().for_each(|&one| rack_of[one as usize] = rack);
        }
        let nodes = schedules.len();
        let mut network = Self {
            model,
            left: of_step.iter().map(std::iter::ExactSizeIterator::len).collect(),
            after_all,
            rack_of,
            rack_size: members.iter().map(|members| members.len() as f64).collect(),
            queues: vec![BTreeMap::new(); nodes],
            served: (0..nodes as u32).collect(),
            sends: vec![false; nodes],
            into: vec![0.0; nodes],
            up: vec![0.0; members.len()],
            down: vec![0.0; members.len()],
            processor: vec![0.0; nodes],
            events: BinaryHeap::new(),
            happened: 0,
            chunks,
        };
        for at in 0..network.chunks.len() {
            if network.chunks[at].waits_for == 0 {
                network.at(0.0, Event::Ready(at));
            }
        }
        network
    }

    /// Times are never negative, so their bits have the same order. Events at the same time happen
    /// in the order in which they were added.
    fn at(&mut self, time: f64, event: Event) {
        self.happened += 1;
        self.events.push(Reverse((time.to_bits(), self.happened, event)));
    }

    fn run(mut self) -> f64 {
        let mut now = 0.0;
        let mut done = 0;
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            now = f64::from_bits(time);
            match event {
                Event::Ready(chunk) => self.begin(chunk, now),
                Event::Free(node) => self.send(node, now),
                Event::Done(chunk) => {
                    done += 1;
                    self.finish(chunk, now);
                }
            }
        }
        assert_eq!(done, self.chunks.len(), "some chunks wait for ever");
        now
    }

    fn begin(&mut self, chunk: usize, now: f64) {
        let Chunk { node, bytes, action, is_first, .. } = self.chunks[chunk];
        match action {
            Action::Send { peer, .. } => {
                self.queues[node].entry(peer).or_default().push_back(chunk);
                // After all that is ready at this time, so that no peer is the first for all.
                if !std::mem::replace(&mut self.sends[node], true) {
                    self.at(now, Event::Free(node));
                }
            }
            Action::RecvReduce { .. } | Action::RecvCopy { .. } => {
                let reduces = matches!(action, Action::RecvReduce { .. });
                let gamma = if reduces { self.model.reduce_per_byte } else { 0.0 };
                let message = if is_first { self.model.per_message } else { 0.0 };
                let free = self.processor[node].max(now) + message + bytes * gamma;
                self.processor[node] = free;
                self.at(free, Event::Done(chunk));
            }
            Action::ReduceLocal | Action::Publish => self.at(now, Event::Done(chunk)),
        }
    }

    /// The line of a node takes the next chunk, for the peer whose turn it is.
    fn send(&mut self, node: usize, now: f64) {
        let served = self.served[node];
        let waiting = |(_, queue): &(&u32, &VecDeque<usize>)| !queue.is_empty();
        let later = self.queues[node].range(served + 1..).find(waiting);
        let Some((&peer, _)) = later.or_else(|| self.queues[node].iter().find(waiting)) else {
            self.sends[node] = false;
            return;
        };
        let chunk = self.queues[node].get_mut(&peer).and_then(VecDeque::pop_front).unwrap();
        self.served[node] = peer;
        let Chunk { bytes, is_first, receiver, .. } = self.chunks[chunk];
        let model = self.model;
        let message = if is_first { model.per_message } else { 0.0 };
        let start = self.processor[node].max(now) + message;
        if is_first {
            self.processor[node] = start;
        }
        let sent = start + bytes * model.in_rack.per_byte;
        self.at(sent, Event::Free(node));
        self.at(sent, Event::Done(chunk));
        // Each queue on the path passes the chunk on while it arrives.
        let (mine, theirs) = (self.rack_of[node], self.rack_of[peer as usize]);
        let mut there = (start, sent);
        let mut pass = |free: &mut f64, per_byte: f64| {
            let begin = there.0.max(*free);
            there = (begin, there.1.max(begin + bytes * per_byte));
            *free = begin + bytes * per_byte;
        };
        let latency = if mine == theirs {
            model.in_rack.latency
        } else {
            let across = model.cross_rack.per_byte;
            pass(&mut self.up[mine], across / self.rack_size[mine]);
            pass(&mut self.down[theirs], across / self.rack_size[theirs]);
            model.cross_rack.latency
        };
        pass(&mut self.into[peer as usize], model.in_rack.per_byte);
        let arrived = there.1 + latency;
        self.release(receiver, arrived);
    }

    fn finish(&mut self, chunk: usize, now: f64) {
        for next in std::mem::take(&mut self.chunks[chunk].next) {
            self.release(next, now);
        }
        let step = self.chunks[chunk].step;
        self.left[step] -= 1;
        if self.left[step] == 0 {
            for next in std::mem::take(&mut self.after_all[step]) {
                self.release(next, now);
            }
        }
    }

    /// Notes when something that a chunk waits for is done.
    fn release(&mut self, chunk: usize, time: f64) {
        let one = &mut self.chunks[chunk];
        one.waits_for -= 1;
        one.ready = one.ready.max(time);
        if one.waits_for == 0 {
            let ready = one.ready;
            self.at(ready, Event::Ready(chunk));
        }
    }
}
