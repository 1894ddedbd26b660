//! Training steps: the gradients of a model become ready one after the other, last layer first, and
//! all nodes wait for all of them.
//!
//! The coordinator's own [`Engine`] decides, in simulated time, what is sent when, in which pieces
//! and by which algorithm. It learns of a gradient `Control::call` seconds after it is ready, and
//! of an operation `Control::done` seconds after a node has published it.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use gradwire_collectives::{Kind, Spec, Topology};
use gradwire_coordinator::{
    EngineConfig,
    engine::Engine,
    model::{
        Command, ConnectionId, Event,
        command::{self, Execute},
        event::{Announcement, Submitted},
    },
};
use gradwire_proto::{
    DType, PROTOCOL, Priority, ProcessSetId, Rank, ReduceOp, Request, Sequence, Shape, TensorId,
    TensorName, VERSION, convert::TensorRef, pb,
};

use crate::{
    config::Control,
    job::{Content, Director, Operation, Order},
};

/// An f32 gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gradient {
    /// The name.
    pub name: TensorName,
    /// The number of elements.
    pub elements: u64,
    /// The gradient with the highest priority is sent first.
    pub priority: Priority,
}

/// A model, and its compute time.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its gradients, front layer first.
    pub gradients: Vec<Gradient>,
    /// Seconds from the beginning of a step until the last gradient is ready. Gradients are evenly
    /// spaced.
    pub compute: f64,
}

impl Model {
    /// The bytes of all gradients.
    pub fn bytes(&self) -> u64 {
        self.gradients.iter().map(|gradient| gradient.elements).sum::<u64>() * ELEMENT
    }
}

/// The bytes of an element.
const ELEMENT: u64 = size_of::<f32>() as u64;

/// A gradient as announced by nodes.
#[derive(Debug)]
struct Tensor {
    name: TensorName,
    id: Option<TensorId>,
    request: Request,
    priority: Priority,
}

/// An operation that some hosts have not finished.
#[derive(Debug)]
struct Flying {
    missing: usize,
    elements: u64,
}

/// The amount moved by an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Used {
    /// Operations.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Training steps, with one rank on each host.
#[derive(Debug)]
pub struct Training {
    engine: Engine,
    control: Control,
    compute: f64,
    hosts: Arc<[u32]>,
    /// The gradients, in the order in which they become ready.
    tensors: Vec<Tensor>,
    places: BTreeMap<TensorName, usize>,
    /// Elements of all gradients.
    elements: u64,
    /// The remaining steps.
    steps: u32,
    /// When the current step began.
    begun: f64,
    /// The gradients that are ready in this step.
    ready: usize,
    /// Elements that all hosts have received in this step.
    exchanged: u64,
    flying: BTreeMap<u64, Flying>,
    /// What the engine has yet to learn: when, from which host, and what was done.
    reports: VecDeque<(f64, u32, Sequence)>,
    /// The last time returned by `wake`, and the next one.
    announced: f64,
    wake: Option<f64>,
    /// The times of finished steps.
    taken: Vec<f64>,
    used: BTreeMap<Spec, Used>,
    failure: Option<String>,
}

impl Training {
    /// A number of steps on the hosts of `topology`, without servers. Uses the parts of `config`
    /// about pieces, credit, algorithms and costs.
    ///
    /// # Errors
    /// If the coordinator refuses such a job.
    pub fn new(
        model: &Model,
        steps: u32,
        topology: &Topology,
        config: EngineConfig,
        control: Control,
    ) -> Result<Self, String> {
        let tensor = |gradient: &Gradient| {
            let shape = Shape::new(&[gradient.elements]).map_err(|error| error.to_string())?;
            let request = Request::allreduce(DType::F32, shape, ReduceOp::Average);
            let Gradient { name, priority, .. } = gradient.clone();
            Ok(Tensor { name, id: None, request, priority })
        };
        let tensors: Vec<Tensor> =
            model.gradients.iter().rev().map(tensor).collect::<Result<_, String>>()?;
        let places = tensors.iter().enumerate().map(|(at, one)| (one.name.clone(), at)).collect();
        Ok(Self {
            engine: joined(topology, config)?,
            control,
            compute: model.compute,
            hosts: (0..topology.participants()).collect(),
            elements: model.gradients.iter().map(|gradient| gradient.elements).sum(),
            steps: if tensors.is_empty() { 0 } else { steps },
            tensors,
            places,
            begun: 0.0,
            ready: 0,
            exchanged: 0,
            flying: BTreeMap::new(),
            reports: VecDeque::new(),
            announced: f64::NEG_INFINITY,
            wake: None,
            taken: Vec::new(),
            used: BTreeMap::new(),
            failure: None,
        })
    }

    /// Seconds that each step has taken.
    pub fn taken(&self) -> &[f64] {
        &self.taken
    }

    /// The amount moved by each algorithm.
    pub fn used(&self) -> &BTreeMap<Spec, Used> {
        &self.used
    }

    /// Why the coordinator ended the job, if it did.
    pub fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// When the coordinator learns of the next gradient.
    fn due(&self) -> Option<f64> {
        if self.steps == 0 || self.ready == self.tensors.len() {
            return None;
        }
        let part = (self.ready + 1) as f64 / self.tensors.len() as f64;
        Some(self.begun + self.control.call + self.compute * part)
    }

    /// Reports finished operations to the engine. Reports of a finished step precede the next step,
    /// as on the stream of a node.
    fn report(&mut self, now: f64) -> bool {
        let begins = self.ready == 0;
        let mut any = false;
        while let Some(&(_, host, sequence)) =
            self.reports.front().filter(|(at, ..)| begins || *at <= now)
        {
            self.reports.pop_front();
            let connection = ConnectionId(host.into());
            self.tell(Event::Done { connection, sequences: vec![sequence] }, now);
            any = true;
        }
        any
    }

    /// Announces the gradients that are ready.
    fn announce(&mut self, now: f64) -> bool {
        let first = self.ready;
        while self.due().is_some_and(|due| due <= now) {
            self.ready += 1;
        }
        if first == self.ready {
            return false;
        }
        for host in self.hosts.clone().iter() {
            let announcement = |tensor: &Tensor| {
                let submitted = || Submitted {
                    ranks: vec![Rank(*host)],
                    request: tensor.request.clone(),
                    priority: tensor.priority,
                    duplicate: false,
                    sites: Vec::new(),
                };
                let set = ProcessSetId::GLOBAL;
                match tensor.id {
                    Some(id) => {
                        let (tensor, submitted) = (TensorRef::Id(id), Vec::new());
                        Announcement { set, tensor, submitted, latest: None }
                    }
                    None => Announcement {
                        set,
                        tensor: TensorRef::Name(tensor.name.clone()),
                        submitted: vec![submitted()],
                        latest: None,
                    },
                }
            };
            let announcements = self.tensors[first..self.ready].iter().map(announcement).collect();
            let connection = ConnectionId((*host).into());
            self.tell(Event::Ready { connection, announcements }, now);
        }
        true
    }

    fn tell(&mut self, event: Event, now: f64) -> Option<Execute> {
        let mut answer = None;
        for command in self.engine.step(event, Duration::from_secs_f64(now.max(0.0))).commands {
            match command {
                Command::Execute(execute) => answer = Some(*execute),
                Command::Abort(failure) => self.failure = Some(failure.to_string()),
                _ => {}
            }
        }
        answer
    }

    fn obey(&mut self, execute: Execute, now: f64) -> Vec<Order> {
        for registration in &execute.registrations {
            if let Some(&at) = self.places.get(&registration.name) {
                self.tensors[at].id = Some(registration.id);
            }
        }
        let evicted: BTreeSet<TensorId> = execute.evicted.iter().copied().collect();
        if !evicted.is_empty() {
            for tensor in &mut self.tensors {
                tensor.id = tensor.id.filter(|id| !evicted.contains(id));
            }
            for host in self.hosts.clone().iter() {
                let connection = ConnectionId((*host).into());
                self.tell(Event::Forgotten { connection, ids: execute.evicted.clone() }, now);
            }
        }
        if let Some(failed) = execute.failures.first() {
            self.failure = Some(failed.failure.to_string());
        }
        execute.operations.into_iter().map(|operation| self.order(&operation, now)).collect()
    }

    fn order(&mut self, operation: &command::Operation, now: f64) -> Order {
        let elements = operation.segments.iter().map(|segment| segment.count).sum();
        let spec = operation.spec.spec;
        let used = self.used.entry(spec).or_default();
        used.operations += 1;
        used.bytes += elements * ELEMENT;
        let Sequence(sequence) = operation.sequence;
        self.flying.insert(sequence, Flying { missing: self.hosts.len(), elements });
        let content = Content::Kind(Kind::Allreduce, elements);
        let operation = Operation { content, spec, element: ELEMENT, hosts: self.hosts.clone() };
        Order { sequence, operation: operation.into(), at: now + self.control.order }
    }

    /// Begins the next step once all hosts have finished this one.
    fn end(&mut self, now: f64) {
        let has_all = self.ready == self.tensors.len() && self.exchanged == self.elements;
        if self.steps > 0 && has_all {
            self.steps -= 1;
            self.taken.push(now - self.begun);
            (self.begun, self.ready, self.exchanged) = (now, 0, 0);
        }
    }
}

impl Director for Training {
    fn orders(&mut self, now: f64) -> Vec<Order> {
        if self.failure.is_some() {
            self.wake = None;
            return Vec::new();
        }
        let mut is_new = self.report(now);
        is_new |= self.announce(now);
        let answer = if is_new { self.tell(Event::Drained, now) } else { None };
        let orders = answer.map_or_else(Vec::new, |execute| self.obey(execute, now));
        // Returned once: the caller asks again after waking.
        let next = self.due().into_iter().chain(self.reports.front().map(|&(at, ..)| at));
        let next = next.reduce(f64::min).filter(|&at| self.announced != at);
        if let Some(at) = next {
            self.announced = at;
        }
        self.wake = next;
        orders
    }

    fn wake(&self) -> Option<f64> {
        self.wake
    }

    fn done(&mut self, host: u32, sequence: u64, now: f64) {
        self.reports.push_back((now + self.control.done, host, Sequence(sequence)));
        let Some(flying) = self.flying.get_mut(&sequence) else { return };
        flying.missing -= 1;
        if flying.missing == 0 {
            self.exchanged += flying.elements;
            self.flying.remove(&sequence);
            self.end(now);
        }
    }

    fn is_over(&self) -> bool {
        self.steps == 0 || self.failure.is_some()
    }
}

/// An engine that all hosts have joined.
fn joined(topology: &Topology, config: EngineConfig) -> Result<Engine, String> {
    let nodes = topology.participants();
    let job = config.job.to_string();
    let config = EngineConfig { nodes, servers: 0, ranks: None, probe: false, ..config };
    config.validate().map_err(|error| error.to_string())?;
    let mut engine = Engine::new(config);
    let lines = topology.lines();
    for host in 0..nodes {
        // From the outermost group to the rack.
        let groups = topology.tiers().iter().rev();
        let names: Vec<String> = groups.map(|tier| tier[host as usize].to_string()).collect();
        let join = pb::Join {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            job: job.clone(),
            host: format!("host{host}"),
            data_address: format!("10.0.{}.{}:7000", host / 256, host % 256),
            slots: 1,
            order: host,
            rack: names.join("/"),
            line_mbit: lines.get(host as usize).copied().unwrap_or(0),
            ..pb::Join::default()
        };
        let connection = ConnectionId(host.into());
        let event = Event::Joined { connection, join, proven: true };
        for command in engine.step(event, Duration::ZERO).commands {
            match command {
                Command::Abort(failure) => return Err(failure.to_string()),
                Command::Refuse { text, .. } => return Err(text),
                _ => {}
            }
        }
    }
    Ok(engine)
}
