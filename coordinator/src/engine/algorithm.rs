//! Which algorithm a piece runs with, decided once for all pieces of about its size.

use std::collections::BTreeMap;

use gradwire_collectives::{CostModel, Kind, Topology, select};
use gradwire_proto::{Collective, ProcessSetId, Request};

pub use gradwire_collectives::Algorithm;

use super::world::{Members, ProcessSet};

/// A kind of collective within a set, and the power of two that the bytes do not exceed.
type Class = (ProcessSetId, Option<u32>, u32);

/// The choices that have been made.
#[derive(Debug)]
pub(crate) struct Chooser {
    topology: Topology,
    forced: Option<Algorithm>,
    cost: CostModel,
    made: BTreeMap<Class, Algorithm>,
}

impl Chooser {
    pub(crate) fn new(members: &Members, forced: Option<Algorithm>, cost: CostModel) -> Self {
        let labels: Vec<&str> = members.iter().map(|(_, m)| m.node.rack.as_str()).collect();
        let topology = Topology::from_labels(&labels);
        Self { topology, forced, cost, made: BTreeMap::new() }
    }

    /// The algorithm for a piece, and why if it had to be decided.
    pub(crate) fn choose(
        &mut self,
        id: ProcessSetId,
        set: &ProcessSet,
        request: &Request,
        bytes: u64,
    ) -> (Algorithm, Option<String>) {
        let root = match request.collective {
            Collective::Broadcast => Some(set.participant_of(request.root).unwrap_or(0)),
            Collective::Allreduce | Collective::Barrier => None,
        };
        let class = (id, root, bytes.next_power_of_two().ilog2());
        if let Some(&algorithm) = self.made.get(&class) {
            return (algorithm, None);
        }
        let racks = set.participants.iter().map(|node| self.topology.racks[node.0 as usize]);
        let topology = Topology { racks: racks.collect() };
        let kind = root.map_or(Kind::Allreduce, |root| Kind::Broadcast { root });
        let choice = select(kind, &topology, 1 << class.2, self.forced, &self.cost);
        self.made.insert(class, choice.algorithm);
        let reason =
            format!("{} for up to {} bytes: {}", choice.algorithm, 1u64 << class.2, choice.reason);
        (choice.algorithm, Some(reason))
    }
}
