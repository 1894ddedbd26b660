//! Finds or generates the schedule of a piece, and the nodes that run it.

use std::{collections::HashMap, sync::Arc};

use gradwire_collectives::{
    Links,
    algorithms::{self, Kind, Roles, Section, Spec},
    execution::Plan,
    layout,
    schedule::Schedule,
    topology::Topology,
};
use gradwire_proto::{NodeId, Route};
use parking_lot::Mutex;

use crate::model::world::World;

/// The limit of schedules kept for reuse (BOUND). A training step needs a few: one per size of
/// piece.
const PLANS: usize = 256;

/// The limit of their sections in total (BOUND). An alltoall has many.
const SECTIONS: usize = 1 << 16;

/// The limit of their steps in total, unless there is only one (BOUND): about 200 MB. Schedules for
/// thousands of nodes have many.
const STEPS: usize = 1 << 20;

/// The inputs of a schedule, besides the topology.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    nodes: Arc<[NodeId]>,
    /// Whether each section has its own roles; otherwise they all have the same.
    is_exchange: bool,
    sections: Vec<Section>,
    spec: Spec,
    element: u64,
}

/// A schedule that is ready for execution.
#[derive(Debug, Clone)]
pub(super) struct Planned {
    pub(super) plan: Arc<Plan>,
    /// The node of each participant.
    pub(super) nodes: Arc<[NodeId]>,
    /// The place of each section in the memory of this node, in elements.
    pub(super) starts: Arc<[u64]>,
    /// The number of elements that this node sends, receives or reduces.
    pub(super) elements: u64,
}

#[derive(Debug)]
pub(super) struct Plans {
    me: NodeId,
    alone: Arc<[NodeId]>,
    idle: Arc<Plan>,
    planned: Mutex<Made>,
}

/// The schedules, and the topology that they are made for.
#[derive(Debug)]
struct Made {
    topology: Topology,
    /// How often the topology has changed.
    changes: u64,
    by_key: HashMap<Key, Planned>,
}

/// The starts of consecutive sections, and their end.
fn in_order(sections: &[Section]) -> (Arc<[u64]>, u64) {
    let mut end = 0;
    let starts = sections.iter().map(|section| {
        end += section.count;
        end - section.count
    });
    (starts.collect(), end)
}

impl Plans {
    pub(super) fn new(world: &World) -> Self {
        let me = world.node;
        let topology = world.topology();
        let empty = Schedule::empty(1, 0);
        Self {
            me,
            alone: Arc::from([me]),
            idle: Arc::new(Plan::new(&empty, 1)),
            planned: Mutex::new(Made { topology, changes: 0, by_key: HashMap::new() }),
        }
    }

    /// From now on, makes schedules for these rates of links.
    pub(super) fn set_links(&self, links: Links) {
        let mut made = self.planned.lock();
        let topology = made.topology.clone().with_links(Some(links));
        made.change(topology);
    }

    /// From now on, makes schedules for this topology of all nodes, with the present rates of
    /// links.
    pub(super) fn arrange(&self, topology: Topology) {
        let mut made = self.planned.lock();
        let links = made.topology.links().cloned();
        made.change(topology.with_links(links));
    }

    /// This node's schedule for a piece with these sections that takes `route` between `nodes`. The
    /// roles in `sections`, as positions in `nodes`, matter only if each flow has its own route.
    /// `None` if this node or a node of the route is not in `nodes`.
    pub(super) fn of(
        &self,
        route: Route,
        nodes: &Arc<[NodeId]>,
        spec: Spec,
        mut sections: Vec<Section>,
        element: u64,
    ) -> Option<Planned> {
        let idle = |sections: &[Section]| {
            let (starts, elements) = in_order(sections);
            Planned { plan: self.idle.clone(), nodes: self.alone.clone(), starts, elements }
        };
        if route == Route::Nothing {
            return Some(idle(&[]));
        }
        let nodes = route.ends().map_or_else(|| nodes.clone(), Arc::from);
        let me = nodes.binary_search(&self.me).ok()? as u32;
        let is_exchange = route == Route::Each;
        if !is_exchange {
            let roles = Roles::of(route, &nodes)?;
            sections.iter_mut().for_each(|section| section.roles = roles);
        }
        if nodes.len() == 1 {
            return Some(idle(&sections));
        }
        Some(self.planned(Key { nodes, is_exchange, sections, spec, element }, me))
    }

    fn planned(&self, key: Key, me: u32) -> Planned {
        let made = self.planned.lock();
        if let Some(planned) = made.by_key.get(&key) {
            return planned.clone();
        }
        let topology = made.topology.part(key.nodes.iter().map(|node| node.0));
        let changes = made.changes;
        drop(made);
        let new = schedule(&key, &topology, me);
        self.planned.lock().keep(key, &new, changes);
        new
    }
}

impl Made {
    /// From now on, schedules are for another topology.
    fn change(&mut self, topology: Topology) {
        self.topology = topology;
        self.changes += 1;
        self.by_key.clear();
    }

    /// Keeps a schedule for reuse. `changes` is the number of topology changes when it was made: a
    /// schedule for an earlier topology is not kept.
    fn keep(&mut self, key: Key, new: &Planned, changes: u64) {
        if changes != self.changes {
            return;
        }
        let planned = &mut self.by_key;
        // Training steps repeat, so the limits are rarely reached. If shapes change all the time,
        // no schedule is more useful than another. Exchanges change most, and must not displace the
        // others.
        let sections: usize = planned.keys().map(|key| key.sections.len()).sum();
        if key.is_exchange && sections + key.sections.len() > SECTIONS {
            planned.retain(|key, _| !key.is_exchange);
        }
        let steps: usize = planned.values().map(|planned| planned.plan.steps.len()).sum();
        if planned.len() >= PLANS || steps + new.plan.steps.len() > STEPS {
            planned.clear();
        }
        planned.insert(key, new.clone());
    }
}

fn schedule(key: &Key, topology: &Topology, me: u32) -> Planned {
    let Key { nodes, is_exchange, sections, spec, element } = key;
    let nodes = nodes.clone();
    if *is_exchange {
        let schedule = algorithms::generate_sections(sections, *spec, topology, me);
        let schedule = layout::compacted(schedule);
        let plan = Arc::new(Plan::new(&schedule, *element));
        let starts = schedule.blocks.iter().map(|block| block.offset).collect();
        let elements = schedule.blocks.iter().map(|block| block.count).sum();
        return Planned { plan, nodes, starts, elements };
    }
    let (starts, elements) = in_order(sections);
    let kind = sections.first().map_or(Kind::Allreduce, |section| Kind::of_roles(section.roles));
    let schedule = algorithms::generate(kind, *spec, topology, me, elements);
    let plan = Arc::new(Plan::new(&schedule, *element));
    Planned { plan, nodes, starts, elements }
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
        let sections = vec![Section { roles: Roles::default(), count: 100 }];
        let found = plans.of(route, &nodes(set), Algorithm::Ring.into(), sections, 4);
        found.map(|found| (found.plan, found.nodes.iter().map(|n| n.0).collect()))
    }

    #[test]
    fn a_schedule_is_made_once_per_participants() {
        let plans = plans(3);
        let (all, participants) = of(&plans, Route::All, &[1, 3, 4]).unwrap();
        assert_eq!(participants, [1, 3, 4]);
        let again = of(&plans, Route::All, &[1, 3, 4]).unwrap().0;
        assert!(Arc::ptr_eq(&all, &again));
        let others = of(&plans, Route::All, &[0, 3, 4]).unwrap().0;
        assert!(!Arc::ptr_eq(&all, &others), "the participants are part of the key");
        let root = of(&plans, Route::From(NodeId(4)), &[1, 3, 4]).unwrap().0;
        assert!(!Arc::ptr_eq(&all, &root));
    }

    /// SAME: schedules follow the arrangement, also those of some of the nodes.
    #[test]
    fn schedules_follow_the_arrangement() {
        let plans = plans(3);
        let neighbours = |set: &[u32]| {
            let (plan, nodes) = of(&plans, Route::All, set).unwrap();
            let mut peers: Vec<u32> = plan.peers.iter().map(|&peer| nodes[peer as usize]).collect();
            peers.sort_unstable();
            peers
        };
        let all = [0, 1, 2, 3, 4];
        let arrange = |racks: &[u32], order: &[u32]| {
            plans.arrange(Topology::flat(5).arranged(racks, order).unwrap());
        };
        assert_eq!(neighbours(&all), [2, 4]);
        assert_eq!(neighbours(&[0, 1, 2, 3]), [0, 2]);
        arrange(&[], &[3, 0, 1, 2, 4]);
        assert_eq!(neighbours(&all), [0, 4]);
        assert_eq!(neighbours(&[1, 2, 3, 4]), [1, 4]);
        // Nodes of one rack are neighbours.
        arrange(&[0, 1, 0, 1, 0], &all);
        assert_eq!(neighbours(&all), [0, 1]);
        // Rates of links do not change the arrangement, and vice versa.
        let links = Links::new(vec![1000; 5], 0, Vec::new());
        plans.set_links(links.clone().unwrap());
        assert_eq!(neighbours(&all), [0, 1]);
        arrange(&[], &[]);
        assert_eq!(neighbours(&all), [2, 4]);
        assert_eq!(plans.planned.lock().topology.links(), links.as_ref());
    }

    /// SAME: schedules are not made under the lock, so the topology may change meanwhile.
    #[test]
    fn a_schedule_for_earlier_links_is_not_kept() {
        let plans = plans(3);
        let slow_line = |node: usize| {
            let mut lines = vec![1000; 5];
            lines[node] = 10;
            Links::new(lines, 0, Vec::new()).unwrap()
        };
        plans.set_links(slow_line(4));
        let sections = || vec![Section { roles: Roles::default(), count: 10_000 }];
        let all = nodes(&[0, 1, 2, 3, 4]);
        let by_rates =
            || plans.of(Route::All, &all, Algorithm::Blink.into(), sections(), 4).unwrap().plan;
        let old = by_rates();
        let (key, planned) = {
            let made = plans.planned.lock();
            let (key, planned) = made.by_key.iter().next().unwrap();
            (key.clone(), planned.clone())
        };
        plans.set_links(slow_line(0));
        plans.planned.lock().keep(key, &planned, 1);
        let new = by_rates();
        assert!(!Arc::ptr_eq(&new, &old), "it is made for the new rates");
        assert!(Arc::ptr_eq(&new, &by_rates()), "and kept");
    }

    #[test]
    fn a_move_has_its_two_nodes_as_participants() {
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
    fn a_single_node_needs_no_schedule() {
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
