//! Runs operations on a network: events in the order of time.

mod faults;
mod tcp;
mod transfer;

use std::{
    cmp::{Ordering, Reverse},
    collections::{BTreeMap, BinaryHeap, HashMap},
    sync::Arc,
};

use gradwire_collectives::{
    Topology,
    execution::{Chunk, Progress, Work},
    generate, generate_sections, layout,
};
use gradwire_proto::Sequence;
use rand::SeedableRng;
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::{
    config::{Processor, Tcp, Transport},
    fair::FlowId,
    fault::Fault,
    flows::{Flows, Transfer},
    job::{Content, Director, Operation, Order},
    lane::{Frame, Lane, Planned, Running},
    network::{Links, Network},
    path::Record,
    report::{Done, Outcome, Usage},
};

/// What is simulated, and how.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The hosts and links.
    pub network: Network,
    /// How daemons move bytes.
    pub transport: Transport,
    /// What their processors take.
    pub processor: Processor,
    /// What TCP does besides.
    pub tcp: Option<Tcp>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// For everything that chance decides.
    pub seed: u64,
    /// The most simulated seconds.
    pub limit: f64,
    /// Whether the use of links over time and the critical path are recorded.
    pub details: bool,
}

impl Setup {
    /// A network on which only the links are a limit.
    pub fn new(network: Network) -> Self {
        Self {
            network,
            transport: Transport::default(),
            processor: Processor::default(),
            tcp: None,
            faults: Vec::new(),
            seed: 0,
            limit: 3600.0,
            details: false,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    Start(u64),
    Arrive {
        from: u32,
        to: u32,
        lane: u32,
        transfer: Transfer,
    },
    Reduced {
        lane: usize,
        sequence: u64,
        chunk: Chunk,
    },
    Published {
        host: u32,
        lane: usize,
        sequence: u64,
    },
    Begin(usize),
    End(usize),
    Redraw(usize),
    /// TCP sends again.
    Again(FlowId),
    /// TCP's window has grown.
    Grow(FlowId),
    Wake,
}

#[derive(Debug)]
struct At(f64, u64, Event);

impl PartialEq for At {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for At {}

impl PartialOrd for At {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for At {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

/// Something that may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Todo {
    Link(usize, u32),
    Held(usize),
    Reduce(usize),
}

/// What is known of a connection besides its chunks.
#[derive(Debug)]
struct About {
    from: u32,
    to: u32,
    lane: u32,
    latency: f64,
    /// Without faults and TCP.
    cap: f64,
    /// TCP's window as a rate.
    window: f64,
    /// When it has sent last.
    used: f64,
    retries: u32,
    /// The number of the pair of hosts.
    pair: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct HostState {
    is_paused: bool,
    has_left: bool,
    line: f64,
    slowness: f64,
}

/// An operation that was ordered.
#[derive(Debug)]
struct Ordered {
    operation: Arc<Operation>,
    plans: Arc<Vec<Arc<Planned>>>,
    at: f64,
    done: Vec<(u32, f64)>,
}

/// A run.
#[derive(Debug)]
pub(crate) struct Engine<'a, D> {
    setup: &'a Setup,
    director: &'a mut D,
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
    plans: HashMap<Operation, Arc<Vec<Arc<Planned>>>>,
    ordered: BTreeMap<u64, Ordered>,
    unfinished: u64,
    random: Xoshiro256PlusPlus,
    outcome: Outcome,
    record: Option<Record>,
}

/// Runs what a director orders.
pub fn run(setup: &Setup, director: &mut impl Director) -> Outcome {
    Engine::new(setup, director).run()
}

/// The plans of all participants of an operation.
pub(crate) fn plans_of(operation: &Operation, topology: &Topology) -> Vec<Arc<Planned>> {
    let topology = topology.part(operation.hosts.iter().copied());
    let plan = |me: u32| {
        let schedule = match &operation.content {
            Content::Kind(kind, count) => generate(*kind, operation.spec, &topology, me, *count),
            Content::Sections(sections) => {
                layout::compacted(generate_sections(sections, operation.spec, &topology, me))
            }
        };
        Arc::new(Planned::new(&schedule, operation.element))
    };
    (0..topology.participants()).map(plan).collect()
}

impl<'a, D: Director> Engine<'a, D> {
    fn new(setup: &'a Setup, director: &'a mut D) -> Self {
        let mut flows = Flows::default();
        let links = setup.network.add_to(&mut flows.fair);
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
        let mut ended = Vec::new();
        while self.unfinished > 0 || !self.director.is_over() {
            let event = self.events.peek().map_or(f64::INFINITY, |Reverse(at)| at.0);
            let finish = self.flows.next();
            let next = event.min(finish);
            if next > self.setup.limit {
                self.stands_still(next);
                break;
            }
            self.now = self.now.max(next);
            while let Some(Reverse(At(time, ..))) = self.events.peek()
                && *time <= next
            {
                let Some(Reverse(At(_, _, event))) = self.events.pop() else { break };
                self.handle(event);
                self.work();
            }
            if finish <= next {
                self.flows.ended(self.now, &mut ended);
                for &flow in &ended {
                    self.sent(flow);
                }
            }
            self.flows.compute(self.now);
        }
        self.finish()
    }

    fn finish(self) -> Outcome {
        let mut outcome = self.outcome;
        let senders = self.senders.iter().map(|&(_, most)| most).collect();
        let finished = |(&sequence, ordered): (&u64, &Ordered)| {
            let is_done = ordered.done.len() == ordered.operation.hosts.len();
            let Ordered { at, ref done, .. } = *ordered;
            is_done.then(|| Done { sequence, ordered: at, nodes: done.clone() })
        };
        outcome.done = self.ordered.iter().filter_map(finished).collect();
        outcome.seconds = outcome.done.iter().map(Done::end).fold(0.0, f64::max);
        outcome.senders = senders;
        outcome.usage = self.flows.usage;
        if let Some(record) = self.record {
            let last = outcome.done.iter().max_by(|a, b| a.end().total_cmp(&b.end()));
            let path = last.and_then(|done| {
                let ordered = self.ordered.get(&done.sequence)?;
                Some(record.path(done, &ordered.operation.hosts, &ordered.plans))
            });
            outcome.critical_path = path.unwrap_or_default();
        }
        outcome
    }

    /// Says who waits for whom.
    fn stands_still(&mut self, next: f64) {
        let name = |host: u32| &self.setup.network.hosts[host as usize].name;
        let mut waits: Vec<String> = Vec::new();
        for ordered in self.ordered.values() {
            let missing = ordered.operation.hosts.iter();
            let done = |host: &u32| ordered.done.iter().any(|(one, _)| one == host);
            waits.extend(missing.filter(|host| !done(host)).map(|&host| name(host).clone()));
        }
        waits.sort_unstable();
        waits.dedup();
        let stuck = self
            .about
            .iter()
            .zip(0..)
            .filter(|&(_, id)| !self.flows.is_empty(id))
            .map(|(about, _)| format!("{} to {}", name(about.from), name(about.to)));
        let stuck: Vec<String> = stuck.take(3).collect();
        let what = if next.is_infinite() { "nothing moves any more" } else { "it is not done" };
        let stuck =
            if stuck.is_empty() { String::new() } else { format!(": {}", stuck.join(", ")) };
        self.outcome.standstill = Some(format!(
            "{what} after {:.3} s{stuck}; {} of {} hosts wait",
            if next.is_infinite() { self.now } else { self.setup.limit },
            waits.len(),
            self.setup.network.hosts.len(),
        ));
    }

    fn orders(&mut self) {
        for Order { sequence, operation, at } in self.director.orders(self.now) {
            let plans = self
                .plans
                .entry((*operation).clone())
                .or_insert_with(|| Arc::new(plans_of(&operation, &self.setup.network.topology)));
            let plans = plans.clone();
            self.unfinished += 1;
            self.ordered.insert(sequence, Ordered { operation, plans, at, done: Vec::new() });
            self.at(at.max(self.now), Event::Start(sequence));
        }
        if let Some(wake) = self.director.wake() {
            self.at(wake.max(self.now), Event::Wake);
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Start(sequence) => self.start(sequence),
            Event::Arrive { from, to, lane, transfer } => {
                let Transfer { sequence, message, offset, bytes, .. } = transfer;
                let lane = self.lane(to, lane);
                self.arrived(lane, Frame { from, sequence, message, offset, bytes });
            }
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
        for (me, &host) in operation.hosts.iter().enumerate() {
            let lane = self.lane(host, number);
            let planned = plans[me].clone();
            if operation.hosts.len() == 1 || planned.plan.steps.is_empty() {
                self.publish(lane, sequence, operation.bytes());
                continue;
            }
            let (progress, hosts) = (Progress::new(&planned.plan), operation.hosts.clone());
            for (step, peer) in planned.plan.senders() {
                let link = self.lanes[lane].links.entry(hosts[peer as usize]).or_default();
                link.queue.push(Sequence(sequence), step);
            }
            let peers =
                planned.plan.peers.iter().map(|&peer| Todo::Link(lane, hosts[peer as usize]));
            self.todo.extend(peers);
            self.todo.push(Todo::Reduce(lane));
            if let Some(record) = &mut self.record {
                record.begin(sequence, host, planned.plan.steps.len());
            }
            let is_complete = progress.is_complete();
            self.lanes[lane].pieces.insert(sequence, Running { planned, progress, hosts });
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
        // The first that can go on goes on first.
        while !self.todo.is_empty() {
            for todo in std::mem::take(&mut self.todo) {
                match todo {
                    Todo::Link(lane, peer) => self.send(lane, peer),
                    Todo::Held(lane) => self.take_held(lane),
                    Todo::Reduce(lane) => self.reduce(lane),
                }
            }
        }
    }

    /// A step has done some bytes: what waits for it may go on.
    fn advance(&mut self, lane: usize, sequence: u64, step: u32, offset: u64, bytes: u64) {
        let host = self.host(lane);
        let now = self.now;
        let Some(running) = self.lanes[lane].pieces.get_mut(&sequence) else { return };
        let planned = running.planned.clone();
        running.progress.advance(&planned.plan, step, offset..offset + bytes);
        if let Some(record) = &mut self.record {
            record.advance(sequence, host, step, now);
        }
        for &later in planned.waiting(step) {
            let todo = match planned.plan.steps[later as usize].work {
                Work::Send { peer, .. } => Todo::Link(lane, running.hosts[peer as usize]),
                Work::Combine { .. } | Work::Copy => Todo::Held(lane),
                Work::Reduce { .. } => Todo::Reduce(lane),
                Work::Publish => continue,
            };
            if self.todo.last() != Some(&todo) {
                self.todo.push(todo);
            }
        }
        if running.progress.is_complete() {
            self.complete(lane, sequence);
        }
    }

    fn complete(&mut self, lane: usize, sequence: u64) {
        let Some(running) = self.lanes[lane].pieces.remove(&sequence) else { return };
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
        self.director.done(host, sequence, self.now);
        let Some(ordered) = self.ordered.get_mut(&sequence) else { return };
        ordered.done.push((host, self.now));
        if ordered.done.len() == ordered.operation.hosts.len() {
            self.unfinished -= 1;
        }
        self.orders();
    }

    /// Reduces the contributions of the node, one chunk after the other.
    fn reduce(&mut self, lane: usize) {
        let cost = self.setup.processor.local;
        loop {
            let one = &mut self.lanes[lane];
            if one.reduces {
                return;
            }
            let chunk = self.setup.transport.chunk;
            let next = one.pieces.iter_mut().find_map(|(&sequence, running)| {
                let chunk = running.progress.next_local(&running.planned.plan, chunk)?;
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
