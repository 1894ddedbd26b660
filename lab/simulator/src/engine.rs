//! Runs operations on a network: events in the order of time.

mod faults;
mod fetch;
mod finish;
mod state;
mod tcp;
mod transfer;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
    sync::Arc,
};

use gradwire_collectives::{
    Block, Topology,
    execution::{Progress, Work},
    generate, generate_sections, layout,
};
use gradwire_proto::Sequence;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use self::state::{About, At, Event, HostState, Ordered, Todo};
pub use crate::setup::Setup;
use crate::{
    buckets::Buckets,
    collapse::Collapse,
    flows::Flows,
    job::{Content, Director, Operation, Order},
    lane::{Lane, Planned, Plans, Running},
    network::Links,
    path::Record,
    report::{Outcome, Usage},
};

/// The memory for up to this many events or chunks is fetched together.
const AHEAD: usize = 16;

/// A run.
#[derive(Debug)]
pub(crate) struct Engine<'a, D> {
    setup: &'a Setup,
    director: &'a mut D,
    /// The hosts that represent all, if any.
    collapse: Option<Collapse>,
    links: Links,
    flows: Flows,
    about: Vec<About>,
    /// Active connections of each pair of hosts.
    pairs: Vec<(u32, u32)>,
    pair_of: HashMap<(u32, u32), usize>,
    senders: Vec<(u32, u32)>,
    lanes: Vec<Lane>,
    hosts: Vec<HostState>,
    loss: f64,
    events: BinaryHeap<Reverse<At>>,
    count: u64,
    now: f64,
    todo: Vec<Todo>,
    /// Scratch: the batch of `todo` in progress.
    doing: Vec<Todo>,
    plans: HashMap<Operation, Arc<Plans>>,
    ordered: BTreeMap<u64, Ordered>,
    unfinished: u64,
    random: Xoshiro256PlusPlus,
    outcome: Outcome,
    record: Option<Record>,
}

/// Runs the operations that a director orders.
pub fn run(setup: &Setup, director: &mut impl Director) -> Outcome {
    Engine::new(setup, director).run()
}

/// The plan of one participant, given the blocks before it. `topology` is that of the participants.
fn plan_of(
    operation: &Operation,
    topology: &Topology,
    me: u32,
    blocks: &mut Arc<[Block]>,
) -> Planned {
    let mut schedule = match &operation.content {
        Content::Kind(kind, count) => generate(*kind, operation.spec, topology, me, *count),
        Content::Sections(sections) => {
            layout::compacted(generate_sections(sections, operation.spec, topology, me))
        }
    };
    schedule.share_blocks(blocks);
    *blocks = schedule.blocks.clone();
    Planned::new(&schedule, operation.element)
}

/// The plans of all participants of an operation.
pub(crate) fn plans_of(operation: &Operation, topology: &Topology) -> Vec<Arc<Planned>> {
    let topology = topology.part(operation.hosts.iter().copied());
    let mut blocks = Arc::default();
    let mut plan = |me| Arc::new(plan_of(operation, &topology, me, &mut blocks));
    (0..topology.participants()).map(&mut plan).collect()
}

impl<'a, D: Director> Engine<'a, D> {
    fn new(setup: &'a Setup, director: &'a mut D) -> Self {
        let mut flows = Flows::default();
        let links = setup.network.add_to(&mut flows.fair);
        let collapse = Collapse::new(setup, &director.operations(), &links);
        let network = &setup.network;
        flows.buckets =
            Buckets::new(links.all(), network.burst, network.burst_rate, &mut flows.fair);
        let hosts = setup.network.hosts.len();
        let mut lanes = Vec::new();
        for host in &setup.network.hosts {
            for _ in 0..setup.transport.lanes {
                let processor = setup.processor.is_limit();
                let processor = processor.then(|| flows.fair.add_resource(1.0 / host.slowness));
                lanes.push(Lane { processor, ..Lane::default() });
            }
        }
        let resources = hosts * 2 + links.up.iter().flatten().flatten().count() * 2 + lanes.len();
        flows.usage = Usage::new(resources, setup.details);
        flows.header = setup.transport.header;
        let host = |host: &crate::network::Host| HostState {
            line: 1.0,
            slowness: host.slowness,
            ..HostState::default()
        };
        let mut engine = Self {
            setup,
            director,
            collapse,
            links,
            flows,
            about: Vec::new(),
            pairs: Vec::new(),
            pair_of: HashMap::new(),
            senders: vec![(0, 0); hosts],
            lanes,
            hosts: setup.network.hosts.iter().map(host).collect(),
            loss: 0.0,
            events: BinaryHeap::new(),
            count: 0,
            now: 0.0,
            todo: Vec::new(),
            doing: Vec::new(),
            plans: HashMap::new(),
            ordered: BTreeMap::new(),
            unfinished: 0,
            random: Xoshiro256PlusPlus::seed_from_u64(setup.seed),
            outcome: Outcome {
                sent: vec![0.0; hosts],
                received: vec![0.0; hosts],
                ..Outcome::default()
            },
            record: setup.details.then(Record::default),
        };
        for (index, fault) in setup.faults.iter().enumerate() {
            engine.at(fault.from, Event::Begin(index));
            if fault.until.is_finite() {
                engine.at(fault.until, Event::End(index));
            }
        }
        engine
    }

    fn at(&mut self, time: f64, event: Event) {
        self.count += 1;
        self.events.push(Reverse(At(time, self.count, event)));
    }

    fn run(mut self) -> Outcome {
        self.orders();
        let (mut due, mut ended) = (Vec::new(), Vec::new());
        while self.unfinished > 0 || !self.director.is_over() {
            let event = self.events.peek().map_or(f64::INFINITY, |Reverse(at)| at.0);
            let finish = self.flows.next();
            let next = event.min(finish);
            if next > self.setup.limit {
                self.stands_still(next);
                break;
            }
            self.now = self.now.max(next);
            self.due(next, &mut due);
            while !due.is_empty() {
                for some in due.chunks(AHEAD) {
                    self.fetch_receivers(some);
                    for &event in some {
                        self.handle(event);
                        self.work();
                    }
                }
                self.due(next, &mut due);
            }
            if finish <= next {
                self.flows.ended(self.now, &mut ended);
                for some in ended.chunks(AHEAD) {
                    self.fetch_senders(some);
                    for &flow in some {
                        self.sent(flow);
                    }
                }
            }
            self.flows.compute(self.now);
        }
        self.finish()
    }

    /// Takes all events up to `until`, the earliest time. Events that they cause at the same time
    /// come after all of them.
    fn due(&mut self, until: f64, due: &mut Vec<Event>) {
        due.clear();
        while let Some(Reverse(At(time, ..))) = self.events.peek()
            && *time <= until
        {
            let Some(Reverse(At(_, _, event))) = self.events.pop() else { break };
            due.push(event);
        }
    }

    fn orders(&mut self) {
        for Order { sequence, operation, at } in self.director.orders(self.now) {
            let plans = self.plans(&operation);
            self.unfinished += 1;
            self.ordered.insert(sequence, Ordered { operation, plans, at, done: Vec::new() });
            self.at(at.max(self.now), Event::Start(sequence));
        }
        if let Some(wake) = self.director.wake() {
            self.at(wake.max(self.now), Event::Wake);
        }
    }

    /// The plans of an operation, made from schedules that are not kept. With representatives, only
    /// theirs are made.
    fn plans(&mut self, operation: &Operation) -> Arc<Plans> {
        if let Some(plans) = self.plans.get(operation) {
            return plans.clone();
        }
        let topology = self.setup.network.topology.part(operation.hosts.iter().copied());
        let mut plans = Plans::new(topology.participants());
        let mut blocks = Arc::default();
        let mut add = |me| plans.set(me, plan_of(operation, &topology, me, &mut blocks));
        match &self.collapse {
            Some(collapse) => collapse.hosts().iter().copied().for_each(&mut add),
            None => (0..topology.participants()).for_each(&mut add),
        }
        let plans = Arc::new(plans);
        self.plans.insert(operation.clone(), plans.clone());
        plans
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(sequence) => self.start(sequence),
            Event::Arrive(lane, frame) => self.arrived(lane as usize, frame),
            Event::Reduced { lane, sequence, chunk } => {
                self.lanes[lane].reduces = false;
                self.free(lane);
                self.advance(lane, sequence, chunk.step, chunk.offset, chunk.bytes);
                self.todo.push(Todo::Reduce(lane));
            }
            Event::Published { host, lane, sequence } => {
                self.free(lane);
                self.published(host, sequence);
            }
            Event::Begin(index) => self.fault(index, true),
            Event::End(index) => self.fault(index, false),
            Event::Redraw(index) => {
                if self.now < self.setup.faults[index].until {
                    self.draw(index);
                }
            }
            Event::Again(flow) => self.flows.set_stalled(flow, false, self.now),
            Event::Grow(flow) => self.grow(flow),
            Event::Wake => self.orders(),
        }
    }

    fn with_header(&self, bytes: u64) -> f64 {
        (bytes + self.setup.transport.header) as f64
    }

    fn lane(&self, host: u32, lane: u32) -> usize {
        (host * self.setup.transport.lanes + lane) as usize
    }

    fn host(&self, lane: usize) -> u32 {
        lane as u32 / self.setup.transport.lanes
    }

    fn start(&mut self, sequence: u64) {
        let ordered = &self.ordered[&sequence];
        let (operation, plans) = (ordered.operation.clone(), ordered.plans.clone());
        let number = (sequence % u64::from(self.setup.transport.lanes)) as u32;
        let chunk = operation.spec.chunk().unwrap_or(self.setup.transport.chunk);
        for (me, &host) in (0..).zip(&*operation.hosts) {
            let Some(planned) = plans.of(me).cloned() else { continue };
            let lane = self.lane(host, number);
            if operation.hosts.len() == 1 || planned.plan.steps.is_empty() {
                self.publish(lane, sequence, operation.bytes());
                continue;
            }
            let (mut progress, hosts) = (Progress::new(&planned.plan), operation.hosts.clone());
            // As in a daemon with one rank: contributions that are only sent need no copy.
            if self.setup.processor.local > 0.0 {
                for (step, reduction) in planned.plan.only_users() {
                    let bytes = planned.plan.steps[step as usize].bytes;
                    progress.advance(&planned.plan, reduction, 0..bytes);
                }
            }
            let progress = progress.with_noted_ends(&planned.plan);
            let links = &mut self.lanes[lane].links;
            for &peer in &planned.plan.peers {
                links.place_or_default(hosts[peer as usize]);
            }
            for (step, peer) in planned.plan.senders() {
                if let Some(link) = links.get_mut(hosts[peer as usize]) {
                    link.queue.push(Sequence(sequence), step);
                }
            }
            let peers =
                planned.plan.peers.iter().map(|&peer| Todo::Link(lane, hosts[peer as usize]));
            self.todo.extend(peers);
            self.todo.push(Todo::Reduce(lane));
            if let Some(record) = &mut self.record {
                record.begin(sequence, host, planned.plan.steps.len());
            }
            let is_complete = progress.is_complete();
            let running = Running { planned, progress, hosts, chunk };
            self.lanes[lane].pieces.insert(sequence, running);
            if is_complete {
                self.complete(lane, sequence);
            }
            for frame in self.lanes[lane].early.remove(&sequence).unwrap_or_default() {
                self.arrived(lane, frame);
            }
        }
    }

    /// Does what can be done now.
    fn work(&mut self) {
        // In order: the first that can proceed goes first.
        while !self.todo.is_empty() {
            let spare = std::mem::take(&mut self.doing);
            let mut doing = std::mem::replace(&mut self.todo, spare);
            for todo in doing.drain(..) {
                match todo {
                    Todo::Link(lane, peer) => self.send(lane, peer),
                    Todo::Held(lane, sequence, step) => self.take_held(lane, sequence, step),
                    Todo::Reduce(lane) => self.reduce(lane),
                }
            }
            self.doing = doing;
        }
    }

    /// Records the progress of a step, and wakes the steps that wait for it.
    fn advance(&mut self, lane: usize, sequence: u64, step: u32, offset: u64, bytes: u64) {
        let host = self.host(lane);
        let now = self.now;
        let Lane { pieces, links, held, .. } = &mut self.lanes[lane];
        let Some(Running { planned, progress, hosts, .. }) = pieces.get_mut(sequence) else {
            return;
        };
        progress.advance(&planned.plan, step, offset..offset + bytes);
        let has_ended = progress.done(step) == planned.plan.steps[step as usize].bytes;
        if let Some(record) = &mut self.record {
            record.advance(sequence, host, step, now);
        }
        for &later in planned.waiting(step) {
            if has_ended && bytes > 0 {
                progress.note_end(later);
            }
            let todo = match planned.plan.steps[later as usize].work {
                Work::Send { peer, .. } => {
                    let peer = hosts[peer as usize];
                    if let Some(link) = links.get_mut(peer) {
                        link.queue.put_back(Sequence(sequence), later);
                    }
                    Todo::Link(lane, peer)
                }
                Work::Combine { .. } | Work::Copy if held.is_empty() => continue,
                Work::Combine { .. } | Work::Copy => Todo::Held(lane, sequence, later),
                Work::Reduce { .. } => Todo::Reduce(lane),
                Work::Publish => continue,
            };
            if self.todo.last() != Some(&todo) {
                self.todo.push(todo);
            }
        }
        if progress.is_complete() {
            self.complete(lane, sequence);
        }
    }

    fn complete(&mut self, lane: usize, sequence: u64) {
        let Some(running) = self.lanes[lane].pieces.remove(sequence) else { return };
        let published = running.planned.plan.steps.iter();
        let bytes = published.filter(|step| step.work == Work::Publish).map(|step| step.bytes);
        let bytes = bytes.sum();
        self.publish(lane, sequence, bytes);
    }

    /// Occupies a lane. Returns when it is done.
    fn occupy(&mut self, lane: usize, seconds: f64) -> f64 {
        let host = self.host(lane);
        let seconds = seconds * self.hosts[host as usize].slowness;
        let one = &mut self.lanes[lane];
        one.busy = one.busy.max(self.now) + seconds;
        if seconds > 0.0
            && let Some(processor) = one.processor
        {
            self.flows.fair.set_capacity(processor, 0.0);
        }
        one.busy
    }

    fn free(&mut self, lane: usize) {
        let host = self.host(lane);
        let one = &self.lanes[lane];
        if let Some(processor) = one.processor.filter(|_| one.busy <= self.now) {
            let capacity = 1.0 / self.hosts[host as usize].slowness;
            self.flows.fair.set_capacity(processor, capacity);
        }
    }

    fn publish(&mut self, lane: usize, sequence: u64, bytes: u64) {
        let at = self.occupy(lane, bytes as f64 * self.setup.processor.publish);
        let host = self.host(lane);
        self.at(at, Event::Published { host, lane, sequence });
    }

    fn published(&mut self, host: u32, sequence: u64) {
        let Some(ordered) = self.ordered.get_mut(&sequence) else { return };
        let alike = self.collapse.as_ref().map(|collapse| collapse.class(host));
        for host in alike.unwrap_or_else(|| vec![host]) {
            self.director.done(host, sequence, self.now);
            ordered.done.push((host, self.now));
        }
        if ordered.done.len() == ordered.operation.hosts.len() {
            self.unfinished -= 1;
        }
        self.orders();
    }

    /// Reduces the node's own contributions, chunk by chunk.
    fn reduce(&mut self, lane: usize) {
        let cost = self.setup.processor.local;
        loop {
            let one = &mut self.lanes[lane];
            if one.reduces {
                return;
            }
            let next = one.pieces.iter_mut().find_map(|(sequence, running)| {
                let limit = running.chunk;
                let chunk = running.progress.next_local(&running.planned.plan, limit)?;
                Some((sequence, chunk))
            });
            let Some((sequence, chunk)) = next else { return };
            if cost > 0.0 {
                one.reduces = true;
                let at = self.occupy(lane, cost * chunk.bytes as f64);
                self.at(at, Event::Reduced { lane, sequence, chunk });
                return;
            }
            self.advance(lane, sequence, chunk.step, chunk.offset, chunk.bytes);
        }
    }
}
