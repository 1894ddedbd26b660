//! Which algorithm a piece runs with, decided once for all pieces of about its size between the
//! same nodes with about as many others.

use std::collections::BTreeMap;

use gradwire_collectives::{Algorithm, CostModel, Kind, Pipeline, Spec, Topology, select};
use gradwire_proto::{NodeId, Route, SpecId};

use crate::model::{EngineConfig, command::KnownSpec};

/// The most choices that are kept (BOUND).
const MAX_CHOICES: usize = 4096;

/// The racks of the participants, what is achieved between which of them, and the powers of two
/// that the bytes and the pieces of the pipeline do not exceed.
type Class = (Vec<u32>, (u8, u32, u32), u32, u32);

/// A pipeline of more pieces than this is as good as endless.
const LONG_PIPELINE: u64 = 64;

/// The choices that have been made.
#[derive(Debug)]
pub(crate) struct Chooser {
    topology: Topology,
    forced: Option<Spec>,
    cost: CostModel,
    credit: u32,
    made: BTreeMap<Class, KnownSpec>,
    ids: BTreeMap<Spec, SpecId>,
    /// Those that the nodes have not been told.
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

impl Chooser {
    /// A chooser for nodes with these rack labels.
    pub(crate) fn new(racks: &[&str], config: &EngineConfig) -> Self {
        let topology = Topology::from_labels(racks);
        Self {
            topology,
            forced: config.algorithm,
            cost: config.cost,
            credit: config.credit_pieces,
            made: BTreeMap::new(),
            ids: BTreeMap::new(),
            unannounced: Vec::new(),
        }
    }

    /// The specs that operations have been given and that the nodes have to be told first.
    pub(crate) fn take_unannounced(&mut self) -> Vec<KnownSpec> {
        std::mem::take(&mut self.unannounced)
    }

    /// A spec with its id.
    fn known(&mut self, spec: Spec) -> KnownSpec {
        let next = SpecId(self.ids.len() as u32 + 1);
        let id = *self.ids.entry(spec).or_insert(next);
        let known = KnownSpec { id, spec };
        if id == next {
            self.unannounced.push(known);
        }
        known
    }

    /// The algorithm for a piece of `bytes` on the wire, in a pipeline of `pieces` that are in
    /// flight or wait. With the reason, if that had to be decided.
    pub(crate) fn choose(
        &mut self,
        route: Route,
        participants: &[NodeId],
        bytes: u64,
        pieces: u64,
    ) -> (KnownSpec, Option<String>) {
        // Alone there is nothing to choose.
        let several = participants.len() > 1;
        let Some(kind) = Kind::of(route, participants).filter(|_| several) else {
            let spec = self.forced.unwrap_or(Algorithm::Ring.into());
            return (KnownSpec { id: SpecId(0), spec }, None);
        };
        let racks = participants.iter().map(|node| self.topology.racks[node.0 as usize]);
        let topology = Topology { racks: racks.collect() };
        let size = bytes.next_power_of_two().ilog2();
        // One that does not fit a part of the nodes is for all of them only.
        let forced = self.forced.filter(|spec| spec.fits(topology.participants()).is_ok());
        // What is forced does not depend on it.
        let pieces = if forced.is_some() { 1 } else { pieces.clamp(1, LONG_PIPELINE) as u32 };
        let pieces = pieces.next_power_of_two();
        let class = (topology.racks.clone(), key(kind), size, pieces);
        if let Some(&spec) = self.made.get(&class) {
            return (spec, None);
        }
        let pipeline = Pipeline { pieces, in_flight: self.credit.min(pieces) };
        let choice = select(kind, &topology, 1 << size, pipeline, forced, &self.cost);
        if self.made.len() >= MAX_CHOICES {
            self.made.clear();
        }
        let known = self.known(choice.spec);
        self.made.insert(class, known);
        let among = if pieces > 1 { format!(", a pipeline of {pieces}") } else { String::new() };
        let reason =
            format!("{} for up to {} bytes{among}: {}", choice.spec, 1u64 << size, choice.reason);
        (known, Some(reason))
    }
}
