//! Which algorithm a piece runs with, decided once for all pieces of about its size between the
//! same nodes.

use std::collections::BTreeMap;

use gradwire_collectives::{CostModel, Kind, Topology, select};
use gradwire_proto::NodeId;

pub use gradwire_collectives::Algorithm;

use super::{plan::Route, world::Members};

/// The most choices that are kept (BOUND).
const MOST_CHOICES: usize = 4096;

/// The racks of the participants, what is achieved between which of them, and the power of two that
/// the bytes do not exceed.
type Class = (Vec<u32>, (u8, u32, u32), u32);

/// The choices that have been made.
#[derive(Debug)]
pub(crate) struct Chooser {
    topology: Topology,
    forced: Option<Algorithm>,
    cost: CostModel,
    made: BTreeMap<Class, Algorithm>,
}

/// What a piece achieves between its participants, which are numbered from 0. Alone there is nothing
/// to be chosen.
fn kind_of(route: Route, participants: &[NodeId]) -> Option<Kind> {
    let at = |node| (0..).zip(participants).find(|(_, there)| **there == node).map(|(at, _)| at);
    match route {
        _ if participants.len() <= 1 => None,
        Route::All => Some(Kind::Allreduce),
        Route::From(node) => Some(Kind::Broadcast { root: at(node)? }),
        Route::To(node) => Some(Kind::Reduce { root: at(node)? }),
        Route::Move(from, to) => Some(Kind::Move { from: at(from)?, to: at(to)? }),
        Route::Nothing | Route::NothingBetween(..) => None,
    }
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
    pub(crate) fn new(members: &Members, forced: Option<Algorithm>, cost: CostModel) -> Self {
        let labels: Vec<&str> = members.iter().map(|(_, m)| m.node.rack.as_str()).collect();
        let topology = Topology::from_labels(&labels);
        Self { topology, forced, cost, made: BTreeMap::new() }
    }

    /// The algorithm for a piece that is so many bytes between nodes, and why if it had to be decided.
    pub(crate) fn choose(
        &mut self,
        route: Route,
        participants: &[NodeId],
        bytes: u64,
    ) -> (Algorithm, Option<String>) {
        let Some(kind) = kind_of(route, participants) else {
            return (self.forced.unwrap_or(Algorithm::Ring), None);
        };
        let racks = participants.iter().map(|node| self.topology.racks[node.0 as usize]);
        let topology = Topology { racks: racks.collect() };
        let size = bytes.next_power_of_two().ilog2();
        let class = (topology.racks.clone(), key(kind), size);
        if let Some(&algorithm) = self.made.get(&class) {
            return (algorithm, None);
        }
        let choice = select(kind, &topology, 1 << size, self.forced, &self.cost);
        if self.made.len() >= MOST_CHOICES {
            self.made.clear();
        }
        self.made.insert(class, choice.algorithm);
        let reason =
            format!("{} for up to {} bytes: {}", choice.algorithm, 1u64 << size, choice.reason);
        (choice.algorithm, Some(reason))
    }
}
