//! Finds the schedule for the route of a piece, and the nodes that run it.

use std::{collections::HashMap, sync::Arc};

use gradwire_collectives::{
    algorithms::{self, Kind, Spec},
    schedule::Schedule,
    topology::Topology,
};
use gradwire_proto::{NodeId, Route};
use parking_lot::Mutex;

use crate::{data::plan::Plan, model::world::World};

/// Schedules kept for reuse (BOUND). A training step needs a few: one per size of piece.
const PLANS: usize = 256;

/// What a schedule depends on, besides the world.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    nodes: Arc<[NodeId]>,
    kind: Kind,
    spec: Spec,
    count: u64,
    element: u64,
}

/// The schedules that this node has made.
#[derive(Debug)]
pub(super) struct Plans {
    me: NodeId,
    alone: Arc<[NodeId]>,
    idle: Arc<Plan>,
    /// The topology of all nodes of the job.
    topology: Topology,
    plans: Mutex<HashMap<Key, Arc<Plan>>>,
}

impl Plans {
    pub(super) fn new(world: &World) -> Self {
        let me = world.node;
        let racks: Vec<&str> = world.nodes.iter().map(|n| n.rack.as_str()).collect();
        let topology = Topology::from_labels(&racks);
        let empty = Schedule { participants: 1, me: 0, blocks: Vec::new(), steps: Vec::new() };
        Self {
            me,
            alone: Arc::from([me]),
            idle: Arc::new(Plan::new(&empty, 1)),
            topology,
            plans: Mutex::new(HashMap::new()),
        }
    }

    /// The schedule of this node for `count` elements that go by `route` between `nodes`, and the
    /// node of each of its participants. `None` if this node, or that of the route, is not one of
    /// them.
    pub(super) fn of(
        &self,
        route: Route,
        nodes: &Arc<[NodeId]>,
        spec: Spec,
        count: u64,
        element: u64,
    ) -> Option<(Arc<Plan>, Arc<[NodeId]>)> {
        if route == Route::Nothing {
            return Some((self.idle.clone(), self.alone.clone()));
        }
        let nodes = route.ends().map_or_else(|| nodes.clone(), Arc::from);
        let me = nodes.binary_search(&self.me).ok()? as u32;
        let kind = Kind::of(route, &nodes)?;
        if nodes.len() == 1 {
            return Some((self.idle.clone(), self.alone.clone()));
        }
        let key = Key { nodes: nodes.clone(), kind, spec, count, element };
        Some((self.plan(key, me), nodes))
    }

    fn plan(&self, key: Key, me: u32) -> Arc<Plan> {
        let mut plans = self.plans.lock();
        if let Some(plan) = plans.get(&key) {
            return plan.clone();
        }
        let racks = key.nodes.iter().map(|node| self.topology.racks[node.0 as usize]).collect();
        let topology = Topology { racks };
        let schedule = algorithms::generate(key.kind, key.spec, &topology, me, key.count);
        let plan = Arc::new(Plan::new(&schedule, key.element));
        if plans.len() >= PLANS {
            // A training step repeats itself. If shapes change all the time, no schedule is better
            // to keep than another.
            plans.clear();
        }
        plans.insert(key, plan.clone());
        plan
    }
}

#[cfg(test)]
mod tests {
    use gradwire_collectives::algorithms::Algorithm;

    use super::*;

    fn nodes(nodes: &[u32]) -> Arc<[NodeId]> {
        nodes.iter().copied().map(NodeId).collect()
    }

    fn plans(me: u32) -> Plans {
        Plans::new(&crate::model::world::tests::world(me, &[1; 5]))
    }

    fn of(plans: &Plans, route: Route, set: &[u32]) -> Option<(Arc<Plan>, Vec<u32>)> {
        let found = plans.of(route, &nodes(set), Algorithm::Ring.into(), 100, 4);
        found.map(|(plan, nodes)| (plan, nodes.iter().map(|n| n.0).collect()))
    }

    #[test]
    fn a_schedule_is_made_once_for_the_same_participants() {
        let plans = plans(3);
        let (all, participants) = of(&plans, Route::All, &[1, 3, 4]).unwrap();
        assert_eq!(participants, [1, 3, 4]);
        let again = of(&plans, Route::All, &[1, 3, 4]).unwrap().0;
        assert!(Arc::ptr_eq(&all, &again));
        let others = of(&plans, Route::All, &[0, 3, 4]).unwrap().0;
        assert!(!Arc::ptr_eq(&all, &others), "who takes part is a part of the key");
        let root = of(&plans, Route::From(NodeId(4)), &[1, 3, 4]).unwrap().0;
        assert!(!Arc::ptr_eq(&all, &root));
    }

    #[test]
    fn a_move_concerns_two_nodes_and_the_lower_is_participant_0() {
        let plans = plans(3);
        let way = |from, to| Route::Move(NodeId(from), NodeId(to));
        let (plan, participants) = of(&plans, way(3, 1), &[1, 3, 4]).unwrap();
        assert_eq!((participants, &plan.peers[..]), (vec![1, 3], &[0][..]));
        assert!(plan.senders().count() > 0 && plan.receivers().count() == 0);
        assert!(of(&plans, way(1, 4), &[1, 3, 4]).is_none());
        let (plan, participants) = of(&plans, way(3, 3), &[1, 3, 4]).unwrap();
        assert!(plan.steps.is_empty() && participants == [3]);
    }

    #[test]
    fn who_is_alone_has_no_schedule() {
        let plans = plans(3);
        for route in [Route::All, Route::From(NodeId(3)), Route::To(NodeId(3))] {
            assert!(of(&plans, route, &[3]).unwrap().0.steps.is_empty());
        }
        let (plan, participants) = of(&plans, Route::Nothing, &[1, 3]).unwrap();
        assert!(plan.steps.is_empty() && participants == [3]);
        // TRUST: a root elsewhere, or a set without this node.
        assert!(of(&plans, Route::To(NodeId(0)), &[1, 3]).is_none());
        assert!(of(&plans, Route::All, &[0, 1]).is_none());
    }
}
