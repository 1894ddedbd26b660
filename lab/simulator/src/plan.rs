//! The time of a training step on a growing cluster, by each algorithm and by the coordinator's
//! choice.
//!
//! Small sizes are simulated with the schedules of all nodes, within a limit of chunks
//! ([`Plan::work`]). Larger sizes are priced by the cost model. At one size all algorithms use the
//! same method, so that they are comparable.

use gradwire_collectives::{CostModel, Kind, LinkCost, Rules, Spec, Topology, generate};
use gradwire_coordinator::EngineConfig;
use rayon::prelude::*;

use crate::{
    config::{Control, Processor, Transport},
    engine::{Setup, run as simulate},
    network::{Ecmp, Network, TierLinks},
    priced,
    training::{Model, Training},
};

/// An algorithm counts as better only if it saves more than this part of the time.
const NOTICEABLE: f64 = 0.01;

/// A plan to compute.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The model, with one rank on each node.
    pub model: Model,
    /// The nodes of the largest size. Smaller sizes use the first of them.
    pub cluster: Topology,
    /// The numbers of nodes, ascending.
    pub sizes: Vec<u32>,
    /// Bytes per second of a line, in each direction.
    pub line: f64,
    /// The combined rate of a rack's lines, relative to its uplinks.
    pub oversubscription: f64,
    /// The uplinks of each rack, among which a hash divides connections; 0: one link.
    pub spines: u32,
    /// The algorithms to compare; empty: those that the coordinator chooses from.
    pub specs: Vec<Spec>,
    /// How daemons move bytes.
    pub transport: Transport,
    /// How the coordinator decides. Its link costs are replaced by those of the cluster.
    pub config: EngineConfig,
    /// The seed of the hash.
    pub seed: u64,
    /// The most chunks to simulate, over all sizes.
    pub work: u64,
}

/// How a time was computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// The schedules of all nodes were simulated.
    Simulated,
    /// The cost model computed it.
    Priced,
}

/// A training step by one algorithm.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    /// The algorithm; none: the coordinator's choice.
    pub spec: Option<Spec>,
    /// Seconds; none if the algorithm does not support this number of nodes.
    pub seconds: Option<f64>,
    /// Seconds by the cost model; the same if that was the method.
    pub priced: Option<f64>,
    /// The algorithm that moved most bytes.
    pub chosen: Option<Spec>,
    /// The operations of the step.
    pub operations: u64,
}

/// One size of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Size {
    /// Its nodes.
    pub nodes: u32,
    /// The number of racks.
    pub racks: usize,
    /// How all steps of this size were computed.
    pub method: Method,
    /// First the coordinator's choice, then each algorithm.
    pub steps: Vec<Step>,
}

/// The size from which another algorithm is the best.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Change {
    /// The size.
    pub nodes: u32,
    /// What was best before.
    pub before: Spec,
    /// What is best now.
    pub now: Spec,
}

/// The sizes from `first` to `last`, each twice the one before, and `last`.
pub fn doubled(first: u32, last: u32) -> Vec<u32> {
    let doubled = std::iter::successors(Some(first.max(1)), |size| size.checked_mul(2));
    let mut sizes: Vec<u32> = doubled.take_while(|&size| size < last).collect();
    sizes.push(last);
    sizes
}

impl Plan {
    fn topology(&self, nodes: u32) -> Topology {
        self.cluster.part(0..nodes)
    }

    fn setup(&self, topology: Topology) -> Setup {
        let CostModel { in_rack, cross_rack, reduce_per_byte, per_message, .. } = self.cost();
        let links = self.spines.max(1);
        let share = 1.0 / cross_rack.per_byte / f64::from(links);
        let latency = cross_rack.latency - in_rack.latency;
        let tier = TierLinks { links, rate: share, is_share: true, latency };
        let network = Network {
            tiers: vec![tier],
            ecmp: if links > 1 { Ecmp::Hash } else { Ecmp::Ideal },
            ..Network::even(topology, self.line, in_rack.latency)
        };
        let processor = Processor {
            reduce: reduce_per_byte,
            local: reduce_per_byte,
            frame: per_message,
            ..Processor::default()
        };
        let Self { transport, seed, .. } = *self;
        Setup { transport, processor, seed, limit: f64::MAX, ..Setup::new(network) }
    }

    /// What a probe of this cluster would find. Nothing is lost where several hosts send to one, as
    /// in the simulation.
    pub fn cost(&self) -> CostModel {
        let usual = self.config.cost;
        let per_byte = 1.0 / self.line;
        let (lanes, streams) = (self.transport.lanes, self.transport.streams);
        CostModel {
            in_rack: LinkCost { per_byte, ..usual.in_rack },
            cross_rack: LinkCost { per_byte: per_byte * self.oversubscription, ..usual.cross_rack },
            chunk: self.transport.chunk,
            burst_loss: 0.0,
            incast_loss: 0.0,
            queue: 0,
            paths: self.spines.max(1),
            connections: lanes * streams,
            lanes,
            ..usual
        }
    }

    /// The algorithms compared on these nodes.
    fn compared(&self, topology: &Topology) -> Vec<Spec> {
        if !self.specs.is_empty() {
            return self.specs.clone();
        }
        let rule = self.config.rules.rule_for(Kind::Allreduce, self.config.piece_bytes);
        self.config.rules.allowed(Kind::Allreduce, rule, topology).1
    }

    /// The approximate number of chunks in a step by an algorithm.
    fn chunks(&self, topology: &Topology, spec: Spec) -> u64 {
        let piece = self.config.piece_bytes.min(self.model.bytes()).max(1);
        let chunk = spec.chunk().unwrap_or(self.transport.chunk);
        let of = |me: u32| -> u64 {
            let schedule = generate(Kind::Allreduce, spec, topology, me, piece / 4);
            let sends = schedule.steps.iter().filter(|step| step.action.sends_to().is_some());
            sends.map(|send| (schedule.elements(send) * 4).div_ceil(chunk).max(1)).sum()
        };
        let chunks: u64 = (0..topology.participants()).map(of).sum();
        chunks * self.model.bytes().div_ceil(piece)
    }

    /// The number of sizes to simulate: as many as the work limit allows, smallest first.
    fn simulated(&self) -> usize {
        let mut left = self.work;
        let fits = |&&nodes: &&u32| {
            let topology = self.topology(nodes);
            let specs = self.compared(&topology);
            let fitting = specs.iter().filter(|spec| spec.fits(nodes).is_ok());
            let each: Vec<u64> = fitting.map(|&spec| self.chunks(&topology, spec)).collect();
            // The choice is one of the compared algorithms.
            let work = each.iter().sum::<u64>() + each.iter().max().unwrap_or(&0);
            left.checked_sub(work).map(|rest| left = rest).is_some()
        };
        self.sizes.iter().take_while(fits).count()
    }

    /// # Errors
    /// If the coordinator refuses the job, or the job does not end.
    fn step(&self, nodes: u32, spec: Option<Spec>, method: Method) -> Result<Step, String> {
        let topology = self.topology(nodes);
        let mut step = Step { spec, seconds: None, priced: None, chosen: None, operations: 0 };
        let rules = match spec {
            Some(spec) if spec.fits(nodes).is_err() => return Ok(step),
            Some(spec) => Rules::parse(&spec.to_string()).map_err(|error| error.to_string())?,
            None => self.config.rules.clone(),
        };
        let config = EngineConfig { rules, cost: self.cost(), ..self.config.clone() };
        let training = || {
            let control = Control::default();
            Training::new(&self.model, 1, &topology, config.clone(), control)
        };
        let mut by_price = training()?;
        let ended = priced::run(&config.cost, &topology, &mut by_price);
        step.priced = ended.and(by_price.taken().first().copied());
        let mut done = by_price;
        if method == Method::Simulated {
            done = training()?;
            let outcome = simulate(&self.setup(topology.clone()), &mut done);
            if let Some(why) = outcome.standstill {
                return Err(why);
            }
        }
        if let Some(why) = done.failure() {
            return Err(why.to_owned());
        }
        step.seconds = done.taken().first().copied();
        step.operations = done.used().values().map(|used| used.operations).sum();
        let most = done.used().iter().max_by_key(|(_, used)| used.bytes);
        step.chosen = most.map(|(&spec, _)| spec);
        Ok(step)
    }

    /// Computes all times. After each, `done` gets the number of all.
    ///
    /// # Errors
    /// If the coordinator refuses a job.
    pub fn run(&self, done: impl Fn(usize) + Sync) -> Result<Vec<Size>, String> {
        let simulated = self.simulated();
        let method = |at| if at < simulated { Method::Simulated } else { Method::Priced };
        let mut all = Vec::new();
        for (at, &nodes) in self.sizes.iter().enumerate() {
            let specs = self.compared(&self.topology(nodes)).into_iter().map(Some);
            all.extend(std::iter::once(None).chain(specs).map(|spec| (at, nodes, spec)));
        }
        let steps: Vec<Step> = all
            .par_iter()
            .map(|&(at, nodes, spec)| {
                let step = self.step(nodes, spec, method(at));
                done(all.len());
                step
            })
            .collect::<Result<_, String>>()?;
        let mut steps = all.iter().zip(steps).peekable();
        let size = |(at, &nodes): (usize, &u32)| {
            let mut mine = Vec::new();
            while let Some((_, step)) = steps.next_if(|((of, ..), _)| *of == at) {
                mine.push(step);
            }
            let racks = self.topology(nodes).members().len();
            Size { nodes, racks, method: method(at), steps: mine }
        };
        Ok(self.sizes.iter().enumerate().map(size).collect())
    }
}

impl Size {
    /// The fastest algorithm and its seconds.
    pub fn best(&self) -> Option<(Spec, f64)> {
        let times = self.steps.iter().filter_map(|step| Some((step.spec?, step.seconds?)));
        times.min_by(|a, b| a.1.total_cmp(&b.1))
    }

    fn seconds(&self, spec: Spec) -> Option<f64> {
        self.steps.iter().find(|step| step.spec == Some(spec))?.seconds
    }
}

/// Where the best algorithm changes. An algorithm stays as long as it is hardly slower than the
/// best.
pub fn changes(sizes: &[Size]) -> Vec<Change> {
    let mut changes = Vec::new();
    let mut best: Option<Spec> = None;
    for size in sizes {
        let Some((now, least)) = size.best() else { continue };
        let Some(before) = best else {
            best = Some(now);
            continue;
        };
        let stays = size.seconds(before).is_some_and(|time| time <= least * (1.0 + NOTICEABLE));
        if !stays {
            changes.push(Change { nodes: size.nodes, before, now });
            best = Some(now);
        }
    }
    changes
}
