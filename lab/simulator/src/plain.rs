//! The model of the papers' formulas: a host sends one message at a time, and receives one at a
//! time, whole. A message occupies both ends for an overhead and its bytes; its latency occupies
//! nothing. Reduction occupies the receiver. A message that arrives while its receiver is occupied
//! waits, and its sender continues.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap, VecDeque},
    sync::Arc,
};

use gradwire_collectives::{
    Topology,
    execution::{Progress, Work},
};

use crate::{engine::plans_of, job::Operation, lane::Planned};

/// Costs, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Per message, at both ends.
    pub overhead: f64,
    /// Per message, in transit.
    pub latency: f64,
    /// Per byte.
    pub per_byte: f64,
    /// Per reduced byte.
    pub reduce: f64,
}

/// The outcome.
#[derive(Debug, Clone, PartialEq)]
pub struct Plain {
    /// Seconds until the last host is done.
    pub seconds: f64,
    /// Bytes that each host has sent.
    pub sent: Vec<u64>,
    /// Bytes that each host has received.
    pub received: Vec<u64>,
    /// Messages of each host.
    pub messages: Vec<u64>,
    /// The longest chain of dependent messages.
    pub chain: u32,
    /// Whether every host has finished.
    pub is_complete: bool,
}

#[derive(Debug)]
struct Host {
    planned: Arc<Planned>,
    progress: Progress,
    ready: BTreeSet<u32>,
    /// Whether it is sending.
    is_sending: bool,
    /// When the message being received, and those that wait for it, will have arrived.
    receives: f64,
    /// Messages that arrived before their step may receive them: step, and length of their chain.
    held: VecDeque<(u32, u32)>,
    /// The length of each step's chain of messages.
    chain: Vec<u32>,
    is_silent: bool,
}

/// A time that is not NaN, as an ordered key.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}

impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Time {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A host's sending port becomes free, and the step ends.
    Sent(u32, u32),
    /// A host has a message: the receiving step, and the length of its chain.
    Has(u32, u32, u32),
}

/// Runs an operation. A host that is `silent` never sends.
pub fn run(operation: &Operation, topology: &Topology, costs: Costs, silent: Option<u32>) -> Plain {
    let plans = plans_of(operation, topology);
    let mut run = Run::new(&plans, costs, silent);
    run.begin();
    while let Some(Reverse((Time(now), _, event))) = run.events.pop() {
        run.handle(event, now);
        // Events at the same time are handled before the next messages are chosen.
        while let Some(&Reverse((Time(next), _, event))) = run.events.peek()
            && next <= now * (1.0 + 1e-12)
        {
            run.events.pop();
            run.handle(event, now);
        }
        run.choose(now);
        run.plain.seconds = now;
    }
    run.plain.is_complete = run.hosts.iter().all(|host| host.progress.is_complete());
    run.plain
}

struct Run {
    costs: Costs,
    hosts: Vec<Host>,
    events: BinaryHeap<Reverse<(Time, u64, Event)>>,
    count: u64,
    plain: Plain,
}

impl Run {
    fn new(plans: &[Arc<Planned>], costs: Costs, silent: Option<u32>) -> Self {
        let host = |(me, planned): (u32, &Arc<Planned>)| Host {
            progress: Progress::new(&planned.plan),
            ready: BTreeSet::new(),
            is_sending: false,
            receives: 0.0,
            held: VecDeque::new(),
            chain: vec![0; planned.plan.steps.len()],
            planned: planned.clone(),
            is_silent: silent == Some(me),
        };
        let none = vec![0; plans.len()];
        Self {
            costs,
            hosts: (0..).zip(plans).map(host).collect(),
            events: BinaryHeap::new(),
            count: 0,
            plain: Plain {
                seconds: 0.0,
                sent: none.clone(),
                received: none.clone(),
                messages: none,
                chain: 0,
                is_complete: false,
            },
        }
    }

    fn at(&mut self, time: f64, event: Event) {
        self.count += 1;
        self.events.push(Reverse((Time(time), self.count, event)));
    }

    fn begin(&mut self) {
        for me in 0..self.hosts.len() as u32 {
            let planned = self.hosts[me as usize].planned.clone();
            for (step, about) in (0..).zip(&planned.plan.steps) {
                let host = &mut self.hosts[me as usize];
                if about.work == (Work::Reduce { lazily: false }) && about.bytes > 0 {
                    self.ended(me, step);
                } else if matches!(about.work, Work::Send { .. })
                    && host.progress.allowed(&planned.plan, step) == about.bytes
                {
                    host.ready.insert(step);
                }
            }
        }
        self.choose(0.0);
    }

    /// Ends a step, and begins the steps that wait for it.
    fn ended(&mut self, me: u32, step: u32) {
        let host = &mut self.hosts[me as usize];
        let planned = host.planned.clone();
        let plan = &planned.plan;
        let bytes = plan.steps[step as usize].bytes;
        host.progress.advance(plan, step, 0..bytes);
        let mut unblocks = false;
        for &later in planned.waiting(step) {
            let chain = host.chain[step as usize];
            host.chain[later as usize] = host.chain[later as usize].max(chain);
            let about = &plan.steps[later as usize];
            let is_allowed = host.progress.allowed(plan, later) == about.bytes;
            match about.work {
                Work::Send { .. } if is_allowed => {
                    host.ready.insert(later);
                }
                Work::Combine { .. } | Work::Copy => unblocks = true,
                _ => {}
            }
        }
        if unblocks {
            for (step, chain) in std::mem::take(&mut self.hosts[me as usize].held) {
                self.has(me, step, chain);
            }
        }
    }

    fn has(&mut self, me: u32, step: u32, chain: u32) {
        let host = &mut self.hosts[me as usize];
        let planned = host.planned.clone();
        let about = &planned.plan.steps[step as usize];
        if !host.progress.takes(&planned.plan, step, 0, about.bytes) {
            host.held.push_back((step, chain));
            return;
        }
        host.chain[step as usize] = host.chain[step as usize].max(chain);
        self.plain.chain = self.plain.chain.max(host.chain[step as usize]);
        if let Some(local) = about.fused {
            self.ended(me, local);
        }
        self.ended(me, step);
    }

    fn handle(&mut self, event: Event, now: f64) {
        match event {
            Event::Sent(me, step) => {
                self.hosts[me as usize].is_sending = false;
                self.ended(me, step);
            }
            Event::Has(me, step, chain) => self.has(me, step, chain),
        }
        debug_assert!(now.is_finite());
    }

    /// Each free host sends its first ready message.
    fn choose(&mut self, now: f64) {
        for me in 0..self.hosts.len() as u32 {
            let host = &self.hosts[me as usize];
            if host.is_sending || host.is_silent {
                continue;
            }
            let peer_of = |step: u32| match host.planned.plan.steps[step as usize].work {
                Work::Send { peer, message } => Some((step, peer, message)),
                _ => None,
            };
            let next = host.ready.first().and_then(|&step| peer_of(step));
            let Some((step, peer, message)) = next else { continue };
            self.transfer(me, step, peer, message, now);
        }
    }

    fn transfer(&mut self, me: u32, step: u32, peer: u32, message: u32, now: f64) {
        let Costs { overhead, latency, per_byte, reduce } = self.costs;
        let host = &mut self.hosts[me as usize];
        host.ready.remove(&step);
        host.is_sending = true;
        let bytes = host.planned.plan.steps[step as usize].bytes;
        let chain = host.chain[step as usize] + 1;
        let takes = overhead + bytes as f64 * per_byte;
        let to = &mut self.hosts[peer as usize];
        let received = to.planned.plan.receiving(me, message).unwrap_or_default();
        let is_reduced = to.planned.reduces(me, message);
        let work = if is_reduced { bytes as f64 * reduce } else { 0.0 };
        // Messages that arrive while the host receives wait in the network, in order.
        to.receives = to.receives.max(now) + takes + work;
        let has = to.receives + latency;
        self.plain.sent[me as usize] += bytes;
        self.plain.received[peer as usize] += bytes;
        self.plain.messages[me as usize] += 1;
        self.at(now + takes, Event::Sent(me, step));
        self.at(has, Event::Has(peer, received, chain));
    }
}
