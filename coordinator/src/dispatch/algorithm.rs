//! The algorithm of a piece. It is decided once for all pieces of about its size, between the same
//! nodes, in pipelines of about the same length. It also records how long such pieces have taken.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    time::Duration,
};

use gradwire_collectives::{
    Algorithm, Choice, CostModel, Kind, Pipeline, Rules, Spec, Topology, select,
};
use gradwire_proto::{NodeId, Route, SpecId};

use super::observed::Observed;
use crate::model::{
    EngineConfig,
    command::KnownSpec,
    status::{ChoiceStatus, MAX_CHOICES as SHOWN},
};

/// The most choices that are kept (BOUND).
const MAX_CHOICES: usize = 4096;

/// The racks of the participants, the kind of the piece, the number of the rule that applies, and
/// the powers of two that the bytes and the pieces of the pipeline do not exceed.
type Class = (Vec<u32>, (u8, u32, u32), usize, u32, u32);

/// A pipeline of more pieces than this counts as endless.
const LONG_PIPELINE: u64 = 64;

/// The id of a choice, as long as the choice is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ChoiceId(u64);

/// A choice, and the times of its operations.
#[derive(Debug)]
struct Made {
    known: KnownSpec,
    class: Class,
    /// The number of the rule that allowed it, counted from 1; 0 for none.
    rule: usize,
    choice: Choice,
    operations: u64,
    observed: Observed,
}

/// The algorithm of a piece.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) spec: KnownSpec,
    /// `None` if there was nothing to choose.
    pub(crate) id: Option<ChoiceId>,
    /// The reason, if the choice was made for this piece.
    pub(crate) reason: Option<String>,
}

/// The choices that have been made.
#[derive(Debug)]
pub(crate) struct Chooser {
    topology: Topology,
    rules: Rules,
    cost: CostModel,
    credit: u32,
    by_class: BTreeMap<Class, ChoiceId>,
    made: BTreeMap<ChoiceId, Made>,
    last: ChoiceId,
    ids: BTreeMap<Spec, SpecId>,
    /// Specs that have not been sent to the nodes yet.
    unannounced: Vec<KnownSpec>,
}

fn key(kind: Kind) -> (u8, u32, u32) {
    match kind {
        Kind::Allreduce => (0, 0, 0),
        Kind::Broadcast { root } => (1, root, 0),
        Kind::Reduce { root } => (2, root, 0),
        Kind::Move { from, to } => (3, from, to),
    }
}

fn name((kind, ..): (u8, u32, u32)) -> &'static str {
    ["allreduce", "broadcast", "reduce", "move"][usize::from(kind)]
}

impl Chooser {
    /// The choices for nodes with these rack labels.
    pub(crate) fn new(racks: &[&str], config: &EngineConfig) -> Self {
        let topology = Topology::from_labels(racks);
        Self {
            topology,
            rules: config.rules.clone(),
            cost: config.cost,
            credit: config.credit_pieces,
            by_class: BTreeMap::new(),
            made: BTreeMap::new(),
            last: ChoiceId(0),
            ids: BTreeMap::new(),
            unannounced: Vec::new(),
        }
    }

    /// The specs of operations that have to be sent to the nodes first.
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

    /// The algorithm for a piece of `bytes` on the wire, in a pipeline of `pieces` that are in
    /// flight or wait.
    pub(crate) fn choose(
        &mut self,
        route: Route,
        participants: &[NodeId],
        bytes: u64,
        pieces: u64,
    ) -> Chosen {
        // A single node has nothing to choose.
        let several = participants.len() > 1;
        let Some(kind) = Kind::of(route, participants).filter(|_| several) else {
            let spec = KnownSpec { id: SpecId(0), spec: Algorithm::Ring.into() };
            return Chosen { spec, id: None, reason: None };
        };
        let racks = participants.iter().map(|node| self.topology.racks[node.0 as usize]);
        let topology = Topology { racks: racks.collect() };
        let size = bytes.next_power_of_two().ilog2();
        let rule = self.rules.rule_for(kind, bytes);
        // A fixed choice does not depend on the class, and a move has only one way.
        let is_fixed = matches!(kind, Kind::Move { .. })
            || self.rules.forced(rule, topology.participants()).is_some();
        let pieces = if is_fixed { 1 } else { pieces.clamp(1, LONG_PIPELINE) as u32 };
        let pieces = pieces.next_power_of_two();
        let class = (topology.racks.clone(), key(kind), rule, size, pieces);
        if let Some(&id) = self.by_class.get(&class)
            && let Some(made) = self.made.get_mut(&id)
        {
            made.operations += 1;
            return Chosen { spec: made.known, id: Some(id), reason: None };
        }
        let pipeline = Pipeline { pieces, in_flight: self.credit.min(pieces) };
        let (rule, allowed) = self.rules.allowed(kind, rule, topology.participants());
        let choice = select(kind, &topology, 1 << size, pipeline, (rule, &allowed), &self.cost);
        if self.made.len() >= MAX_CHOICES {
            self.made.clear();
            self.by_class.clear();
        }
        let known = self.known(choice.spec);
        let among = if pieces > 1 { format!(", a pipeline of {pieces}") } else { String::new() };
        let reason =
            format!("{} for up to {} bytes{among}: {}", choice.spec, 1u64 << size, choice.reason);
        self.last.0 += 1;
        let id = self.last;
        self.by_class.insert(class.clone(), id);
        let observed = Observed::default();
        let made = Made { known, class, rule, choice, operations: 1, observed };
        self.made.insert(id, made);
        Chosen { spec: known, id: Some(id), reason: Some(reason) }
    }

    /// A piece has taken this time, with so many pieces in flight. It counts if it ran as its
    /// choice expects: alone, or in a pipeline that uses all of the credit.
    pub(crate) fn observe(&mut self, id: ChoiceId, time: Duration, in_flight: u32) {
        let Some(made) = self.made.get_mut(&id) else { return };
        let (.., pieces) = made.class;
        if in_flight == pieces.min(self.credit) {
            made.observed.add(time / in_flight.max(1));
        }
    }

    /// The choices with the most operations, at most [`SHOWN`].
    pub(crate) fn status(&self) -> Vec<ChoiceStatus> {
        let mut made: Vec<&Made> = self.made.values().collect();
        made.sort_by_key(|made| std::cmp::Reverse(made.operations));
        made.truncate(SHOWN);
        made.sort_by(|a, b| a.class.cmp(&b.class));
        let status =
            made.iter().map(|Made { class, rule, choice, operations, observed, .. }| {
                let (racks, kind, _, size, pieces) = class;
                ChoiceStatus {
                    collective: name(*kind),
                    nodes: racks.len() as u32,
                    bytes: 1 << size,
                    pieces: *pieces,
                    rule: *rule as u32,
                    spec: choice.spec,
                    predicted: choice.predicted_seconds,
                    runner_up: choice.runner_up,
                    reason: choice.reason.clone(),
                    operations: *operations,
                    observed: observed.count(),
                    mean: observed.mean(),
                    spread: observed.spread(),
                }
            });
        status.collect()
    }
}
