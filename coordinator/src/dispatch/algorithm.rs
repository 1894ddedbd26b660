//! Chooses the algorithm of a piece. The choice holds for all pieces of similar size, between the
//! same nodes, in pipelines of similar length. Measured times may change it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    ops::Range,
    time::Duration,
};

use gradwire_collectives::{
    Algorithm, CostModel, Kind, Links, Pipeline, Rules, Spec, Topology, algorithms::has_servers,
    select,
};
use gradwire_proto::{
    Collective, NodeId, Route, SpecId,
    compression::{GROUP, GROUP_BYTES},
    pb,
};

use super::decision::{Decision, FILLS, Known};
use crate::model::{
    EngineConfig,
    command::KnownSpec,
    learned::{Learned, Time},
    network::Arrangement,
    status::{MAX_CANDIDATES, MAX_CHOICES as SHOWN},
};

/// The most choices that are kept (BOUND).
const MAX_CHOICES: usize = 4096;

/// The pieces that share a decision.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    /// The participants.
    topology: Topology,
    kind: Kind,
    quantized: bool,
    /// The number of the rule that applies.
    rule: usize,
    /// The exponent of the power of two that bounds the bytes, or the elements of quantized pieces.
    size: u32,
    /// The most pieces of the pipeline, a power of two.
    pieces: u32,
}

/// The [`Class::size`] of a piece with `bytes` bytes on the wire.
fn size_of(bytes: u64, quantized: bool) -> u32 {
    // Counted in bytes, a group would exceed the power of two because of its scale.
    let units = if quantized { bytes.div_ceil(GROUP_BYTES as u64) * GROUP as u64 } else { bytes };
    units.min(1 << 62).next_power_of_two().ilog2()
}

impl Class {
    /// The most bytes of its pieces on the wire.
    fn bytes(&self) -> u64 {
        let units = 1u64 << self.size;
        if self.quantized { units.div_ceil(GROUP as u64) * GROUP_BYTES as u64 } else { units }
    }
}

/// A class without its rule: measured times do not depend on rules.
type Measured = (Topology, Kind, bool, u32, u32);

/// The measured times of a class, and the microseconds of a time of 1000 (0: unknown).
type Times = (Vec<Time>, u64);

/// The piece for which an algorithm is chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    pub(crate) route: Route,
    pub(crate) collective: Collective,
    /// The bytes of the piece on the wire.
    pub(crate) bytes: u64,
    /// Whether partial results travel in eight bits.
    pub(crate) quantized: bool,
}

/// A class that does not occur in this many operations no longer delays the tuning of sizes, such
/// as broadcasts at the start.
const RECENT: u64 = 4096;

/// Longer pipelines, in pieces, count as endless.
const LONG_PIPELINE: u64 = 64;

/// The id of a decision while it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct DecisionId(u64);

/// One candidate of a decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChoiceId {
    decision: DecisionId,
    candidate: usize,
}

/// The decision for a class of pieces.
#[derive(Debug)]
struct Made {
    id: DecisionId,
    /// The number of the rule that allowed it, counted from 1; 0 for none.
    rule: usize,
    decision: Decision,
    /// The number of the last operation that used it.
    used: u64,
}

/// The algorithm of a piece.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) spec: KnownSpec,
    /// `None` without a choice.
    pub(crate) id: Option<ChoiceId>,
    /// The reason, if this piece caused the decision.
    pub(crate) reason: Option<String>,
    /// The servers that take part.
    pub(crate) servers: Range<u32>,
}

/// What decisions depend on besides the pieces.
#[derive(Debug)]
struct Policy {
    rules: Rules,
    /// The rules for quantized pieces.
    quantized: Rules,
    cost: CostModel,
    credit: u32,
    may_explore: bool,
}

/// The choices that have been made.
#[derive(Debug)]
pub(crate) struct Chooser {
    topology: Topology,
    policy: Policy,
    made: BTreeMap<Class, Made>,
    classes: BTreeMap<DecisionId, Class>,
    last: DecisionId,
    /// The number of operations with a choice.
    operations: u64,
    /// The times of earlier jobs.
    remembered: BTreeMap<Measured, Times>,
    ids: BTreeMap<Spec, SpecId>,
    /// Specs that have not been sent to the nodes yet.
    unannounced: Vec<KnownSpec>,
}

/// Strips the rates of links and the order of nodes, which every job measures anew.
fn measured(class: &Class) -> Measured {
    let Class { topology, kind, quantized, size, pieces, .. } = class;
    (topology.clone().with_links(None).unordered(), *kind, *quantized, *size, *pieces)
}

impl Policy {
    fn rules(&self, quantized: bool) -> &Rules {
        if quantized { &self.quantized } else { &self.rules }
    }

    /// The cost model's decision for a class, and the number of the rule that applies.
    fn decide(&self, class: &Class) -> (usize, Decision) {
        let Class { ref topology, kind, quantized, rule, pieces, .. } = *class;
        let in_flight = self.credit.min(pieces);
        let (rule, allowed) = self.rules(quantized).allowed(kind, rule, topology);
        let by = (rule, &allowed[..]);
        let pipeline = Pipeline { pieces, in_flight };
        let choice = select(kind, topology, class.bytes(), pipeline, by, &self.cost);
        let run = if pieces > 1 { FILLS * in_flight } else { 1 };
        (rule, Decision::new(choice, run, self.may_explore))
    }
}

/// Applies the times of earlier jobs to a decision.
fn recall(decision: &mut Decision, (times, micros): &Times) {
    decision.remember(times, (*micros > 0).then_some(*micros as f64 * 1e-6));
}

/// A decision and its reason, for the log.
fn in_words(class: &Class, decision: &Decision) -> String {
    let Class { pieces, quantized, .. } = *class;
    let format = if quantized { ", quantized" } else { "" };
    let among = if pieces > 1 { format!(", a pipeline of {pieces}") } else { String::new() };
    let (spec, reason) = (decision.spec(), decision.reason());
    format!("{spec} for up to {} bytes{format}{among}: {reason}", class.bytes())
}

impl Chooser {
    /// A chooser for these nodes, the servers last.
    pub(crate) fn new(topology: Topology, config: &EngineConfig) -> Self {
        Self {
            topology,
            policy: Policy {
                rules: config.rules.clone(),
                quantized: config.quantized_rules.clone(),
                cost: config.cost,
                credit: config.credit_pieces,
                may_explore: config.may_explore,
            },
            made: BTreeMap::new(),
            classes: BTreeMap::new(),
            last: DecisionId(0),
            operations: 0,
            remembered: BTreeMap::new(),
            ids: BTreeMap::new(),
            unannounced: Vec::new(),
        }
    }

    /// Uses these costs from now on. Existing choices stay.
    pub(crate) fn set_cost(&mut self, cost: CostModel) {
        self.policy.cost = cost;
    }

    /// Uses these rates of links from now on.
    pub(crate) fn set_links(&mut self, links: Links) {
        self.topology = self.topology.clone().with_links(Some(links));
    }

    /// How many nodes have ranks.
    pub(crate) fn nodes(&self) -> u32 {
        self.topology.contributors()
    }

    /// Whether no candidate is left to try for recent operations.
    pub(crate) fn is_settled(&self) -> bool {
        let is_recent = |made: &&Made| self.operations - made.used < RECENT;
        self.made.values().filter(is_recent).all(|made| made.decision.is_settled())
    }

    /// Sets the number of operations that use up the credit.
    pub(crate) fn set_credit(&mut self, credit: u32) {
        self.policy.credit = credit;
    }

    /// Arranges the nodes in racks and in an order, before the first choice. Returns false if the
    /// arrangement does not match the nodes.
    pub(crate) fn arrange(&mut self, Arrangement { racks, order, .. }: &Arrangement) -> bool {
        let arranged = self.topology.clone().arranged(racks, order);
        arranged.is_some_and(|topology| {
            self.topology = topology;
            true
        })
    }

    /// The costs by which algorithms are chosen.
    pub(crate) fn cost(&self) -> &CostModel {
        &self.policy.cost
    }

    /// The new specs, which the nodes need before the operations.
    pub(crate) fn take_unannounced(&mut self) -> Vec<KnownSpec> {
        std::mem::take(&mut self.unannounced)
    }

    /// A spec with its id.
    fn known(&mut self, spec: Spec) -> KnownSpec {
        let next = SpecId(self.ids.len() as u32 + 1);
        let id = match self.ids.entry(spec) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(free) => {
                self.unannounced.push(KnownSpec { id: next, spec });
                *free.insert(next)
            }
        };
        KnownSpec { id, spec }
    }

    /// The servers that may take part in a piece of this kind.
    fn servers(&self, kind: Kind) -> Range<u32> {
        let (first, end) = (self.topology.contributors(), self.topology.participants());
        if kind == Kind::Allreduce { first..end } else { end..end }
    }

    /// The algorithm for a piece, in a pipeline of `pieces` that are in flight or waiting.
    pub(crate) fn choose(&mut self, work: Work, participants: &[NodeId], pieces: u64) -> Chosen {
        let Work { route, collective, bytes, quantized } = work;
        // A single node leaves no choice.
        let several = participants.len() > 1;
        let Some(kind) = Kind::of(route, collective, participants).filter(|_| several) else {
            let spec = KnownSpec { id: SpecId(0), spec: Algorithm::Ring.into() };
            return Chosen { spec, id: None, reason: None, servers: 0..0 };
        };
        let servers = self.servers(kind);
        let topology = self.topology.part(participants.iter().map(|node| node.0).chain(servers));
        let size = size_of(bytes, quantized);
        let rules = self.policy.rules(quantized);
        let rule = rules.rule_for(kind, bytes);
        // A fixed choice does not depend on the class, and a move has only one way.
        let is_fixed = matches!(kind, Kind::Move { .. })
            || rules.forced(rule, topology.contributors()).is_some();
        let pieces = if is_fixed { 1 } else { pieces.clamp(1, LONG_PIPELINE) as u32 };
        let pieces = pieces.next_power_of_two();
        let class = Class { topology, kind, quantized, rule, size, pieces };
        if self.made.len() >= MAX_CHOICES && !self.made.contains_key(&class) {
            self.remembered = self.measured();
            self.made.clear();
            self.classes.clear();
        }
        let (made, reason) = match self.made.entry(class) {
            Entry::Occupied(made) => (made.into_mut(), None),
            Entry::Vacant(free) => {
                self.last.0 += 1;
                self.classes.insert(self.last, free.key().clone());
                let (rule, mut decision) = self.policy.decide(free.key());
                if let Some(times) = self.remembered.get(&measured(free.key())) {
                    recall(&mut decision, times);
                }
                let reason = in_words(free.key(), &decision);
                (free.insert(Made { id: self.last, rule, decision, used: 0 }), Some(reason))
            }
        };
        self.operations += 1;
        made.used = self.operations;
        let (candidate, spec) = made.decision.next();
        let id = Some(ChoiceId { decision: made.id, candidate });
        let servers = if has_servers(kind, &spec) { self.servers(kind) } else { 0..0 };
        Chosen { spec: self.known(spec), id, reason, servers }
    }

    /// Observes the time of a piece, with `in_flight` pieces of the same algorithm in flight. It
    /// counts if the piece ran as its decision expects: alone, or in a pipeline that uses up the
    /// credit. Returns the reason if that changes the decision.
    pub(crate) fn observe(
        &mut self,
        id: ChoiceId,
        time: Duration,
        in_flight: u32,
    ) -> Option<String> {
        let class = self.classes.get(&id.decision)?;
        let Class { pieces, .. } = *class;
        if in_flight != pieces.min(self.policy.credit) {
            return None;
        }
        self.count(id, time / in_flight.max(1))
    }

    /// Observes the time of `count` pieces that started together. It counts if they were a whole
    /// pipeline. Returns the reason if that changes the decision.
    pub(crate) fn observe_burst(
        &mut self,
        id: ChoiceId,
        time: Duration,
        count: u32,
    ) -> Option<String> {
        let Class { pieces, .. } = *self.classes.get(&id.decision)?;
        if count.next_power_of_two() != pieces {
            return None;
        }
        self.count(id, time / count.max(1))
    }

    fn count(&mut self, id: ChoiceId, time: Duration) -> Option<String> {
        let class = self.classes.get(&id.decision)?;
        let Made { decision, .. } = self.made.get_mut(class)?;
        decision.observe(id.candidate, time).then(|| in_words(class, decision))
    }

    /// Applies the times of earlier jobs, also to existing decisions.
    pub(crate) fn remember(&mut self, learned: &[Learned]) {
        for Learned { topology, kind, quantized, size, pieces, times, micros } in
            learned.iter().take(MAX_CHOICES)
        {
            let class = (topology.clone(), *kind, *quantized, *size, *pieces);
            self.remembered.insert(class, (times.clone(), *micros));
        }
        for (class, made) in &mut self.made {
            if let Some(times) = self.remembered.get(&measured(class)) {
                recall(&mut made.decision, times);
            }
        }
    }

    /// The times of this job and of earlier ones, at most [`MAX_CHOICES`].
    fn measured(&self) -> BTreeMap<Measured, Times> {
        let mut all = self.remembered.clone();
        for (class, made) in &self.made {
            let (class, times) = (measured(class), made.decision.times());
            if !times.is_empty() && (all.len() < MAX_CHOICES || all.contains_key(&class)) {
                let micros = made.decision.seconds().unwrap_or(0.0) * 1e6;
                all.insert(class, (times, micros.round() as u64));
            }
        }
        all
    }

    /// The times of this job and of earlier ones, to be kept for the next job.
    pub(crate) fn learned(&self) -> Vec<Learned> {
        let learned = self.measured().into_iter();
        let learned = learned.map(|(class, (times, micros))| {
            let (topology, kind, quantized, size, pieces) = class;
            Learned { topology, kind, quantized, size, pieces, times, micros }
        });
        learned.collect()
    }

    /// The choices with the most operations, at most [`SHOWN`].
    pub(crate) fn status(&self) -> Vec<pb::Choice> {
        let mut made: Vec<(&Class, &Made)> = self.made.iter().collect();
        made.sort_by_key(|(_, made)| std::cmp::Reverse(made.decision.operations()));
        made.truncate(SHOWN);
        made.sort_by_key(|(class, _)| *class);
        let status = made.into_iter().map(|(class, Made { rule, decision, .. })| {
            let Class { topology, kind, quantized, pieces, .. } = class;
            let format = if *quantized { "quantized; " } else { "" };
            let observed = decision.observed();
            let candidate = |known: Known<Spec>| pb::Candidate {
                spec: known.spec.to_string(),
                predicted_seconds: known.predicted,
                expected_seconds: known.expected,
                tried: known.tried,
            };
            let runner_up = decision.runner_up().map(|(spec, time)| (spec.to_string(), time));
            let (runner_up, runner_up_seconds) = runner_up.unwrap_or_default();
            pb::Choice {
                collective: kind.name().to_owned(),
                nodes: topology.contributors(),
                bytes: class.bytes(),
                pieces: *pieces,
                rule: *rule as u32,
                spec: decision.spec().to_string(),
                predicted_seconds: decision.predicted(),
                expected_seconds: decision.expected(),
                candidates: decision.candidates().take(MAX_CANDIDATES).map(candidate).collect(),
                runner_up,
                runner_up_seconds,
                reason: format!("{format}{}", decision.reason()),
                version: decision.version(),
                operations: decision.operations(),
                observed: observed.count(),
                mean_seconds: observed.mean(),
                spread_seconds: observed.spread(),
            }
        });
        status.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use fixedbitset::FixedBitSet;
    use gradwire_proto::JobId;
    use gradwire_settings::{Algorithms, Settings};

    use super::*;
    use crate::dispatch::credit::{Completed, Flight};

    /// A chooser among these algorithms by measured times, for two nodes.
    fn tuned(algorithms: &str) -> (Chooser, Flight) {
        let mut settings = Settings::default();
        settings.tuning.enabled = true;
        settings.negotiation.algorithm = Algorithms(Rules::parse(algorithms).unwrap());
        let config = EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &settings).unwrap();
        let flight = Flight::new(config.credit_pieces as usize);
        (Chooser::new(Topology::flat(2), &config), flight)
    }

    /// The choice after a long pipeline of 4 MiB pieces in which one algorithm is twice as fast.
    fn choice_if_fast(fast: Algorithm, pieces: u64) -> pb::Choice {
        let (mut chooser, mut flight) = tuned("ring,recursive-doubling");
        let both = [NodeId(0), NodeId(1)];
        let work = Work {
            route: Route::All,
            collective: Collective::Allreduce,
            bytes: 4 << 20,
            quantized: false,
        };
        let mut now = Duration::ZERO;
        let mut started = VecDeque::new();
        for _ in 0..40_000 {
            while flight.has_credit() && (flight.len() as u64) < pieces {
                let Chosen { spec, id, .. } = chooser.choose(work, &both, pieces);
                let mut nodes = FixedBitSet::with_capacity(2);
                nodes.insert_range(..);
                let sequence = flight.start(nodes, Vec::new(), (id, 0, None), now);
                started.push_back((sequence, spec.spec.algorithm()));
            }
            let (sequence, algorithm) = started.pop_front().unwrap();
            now += Duration::from_millis(if algorithm == fast { 1 } else { 2 });
            assert!(flight.done(both[0], sequence).unwrap().is_none());
            let completed = flight.done(both[1], sequence).unwrap().unwrap();
            let Completed { operation, in_flight, .. } = completed;
            if let (Some(choice), Some(in_flight)) = (operation.choice, in_flight) {
                chooser.observe(choice, now - operation.since, in_flight);
            }
        }
        let mut status = chooser.status();
        assert_eq!(status.len(), 1);
        status.remove(0)
    }

    /// The choice after many bursts of 1 MiB pieces in which one algorithm is twice as fast.
    fn choice_in_bursts(fast: Algorithm, pieces: u64) -> pb::Choice {
        let (mut chooser, mut flight) = tuned("ring,recursive-doubling");
        let both = [NodeId(0), NodeId(1)];
        let (route, collective) = (Route::All, Collective::Allreduce);
        let work = Work { route, collective, bytes: 1 << 20, quantized: false };
        let mut now = Duration::ZERO;
        for _ in 0..20_000 {
            let mut started = Vec::new();
            for _ in 0..pieces {
                let Chosen { spec, id, .. } = chooser.choose(work, &both, pieces);
                let mut nodes = FixedBitSet::with_capacity(2);
                nodes.insert_range(..);
                let sequence = flight.start(nodes, Vec::new(), (id, 0, None), now);
                started.push((sequence, spec.spec.algorithm()));
            }
            for (sequence, algorithm) in started {
                now += Duration::from_millis(if algorithm == fast { 1 } else { 2 });
                assert!(flight.done(both[1], sequence).unwrap().is_none());
                let completed = flight.done(both[0], sequence).unwrap().unwrap();
                if let Some((choice, burst)) = completed.operation.choice.zip(completed.burst) {
                    chooser.observe_burst(choice, now - burst.since, burst.count);
                }
            }
            now += Duration::from_millis(5);
        }
        chooser.status().remove(0)
    }

    /// A full piece of f32 is priced by its wire bytes, not by twice as many.
    #[test]
    fn quantized_pieces_have_exact_classes() {
        let groups = |bytes: u64| bytes / 4 / GROUP as u64 * GROUP_BYTES as u64;
        for shift in [16, 20, 22] {
            let wire = groups(1 << shift);
            let class = |bytes| Class {
                topology: Topology::flat(2),
                kind: Kind::Allreduce,
                quantized: true,
                rule: 0,
                size: size_of(bytes, true),
                pieces: 1,
            };
            assert_eq!(class(wire).bytes(), wire);
            assert_eq!(class(wire - GROUP_BYTES as u64).bytes(), wire);
            assert_eq!(class(wire + 1).bytes(), 2 * wire);
        }
        assert_eq!((size_of(4096, false), size_of(4097, false)), (12, 13));
    }

    /// Sizes are tuned once no algorithm is left to try, except in classes that no longer occur.
    #[test]
    fn old_classes_do_not_delay_the_tuning_of_sizes() {
        let (mut chooser, _) = tuned("auto");
        let both = [NodeId(0), NodeId(1)];
        let work =
            |collective, bytes| Work { route: Route::All, collective, bytes, quantized: false };
        // Often enough to begin exploring, but not to finish.
        for _ in 0..2 * 10 {
            let Chosen { id, .. } = chooser.choose(work(Collective::Allreduce, 1 << 20), &both, 1);
            chooser.observe(id.unwrap(), Duration::from_millis(1), 1);
        }
        assert!(!chooser.is_settled());
        for _ in 0..RECENT {
            // Without observed times, this class explores nothing.
            chooser.choose(work(Collective::Allreduce, 64), &both, 1);
        }
        assert!(chooser.is_settled());
    }

    /// A tensor with a few pieces does not use up the credit, but its times count, too.
    #[test]
    fn the_fastest_of_a_burst_is_found() {
        for pieces in [2, 3, 6, 8] {
            for fast in [Algorithm::Ring, Algorithm::RecursiveDoubling] {
                let choice = choice_in_bursts(fast, pieces);
                assert_eq!(
                    choice.spec,
                    Spec::from(fast).to_string(),
                    "{pieces} pieces: {choice:?}"
                );
                assert!(
                    (choice.expected_seconds - 1e-3).abs() < 1e-5,
                    "{pieces} pieces: {choice:?}"
                );
                assert!(choice.observed > 10_000, "{pieces} pieces: {choice:?}");
            }
        }
    }

    /// In a pipeline, a time counts only if all pieces in flight have the same algorithm.
    #[test]
    fn the_fastest_of_a_pipeline_is_found() {
        for pieces in [1, 4, 8, 64] {
            for fast in [Algorithm::Ring, Algorithm::RecursiveDoubling] {
                let choice = choice_if_fast(fast, pieces);
                assert_eq!(
                    choice.spec,
                    Spec::from(fast).to_string(),
                    "{pieces} pieces: {choice:?}"
                );
                assert!(choice.observed > 20_000, "{pieces} pieces: {choice:?}");
            }
        }
    }
}
