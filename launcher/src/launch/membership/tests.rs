//! Random histories of hosts and workers, and what holds in each of them.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::launch::{hosts::parse_list, plan::Plan};

fn rules(hosts: &str, (min, max, spares): (u32, u32, u32)) -> Elastic {
    Elastic {
        hosts: parse_list(hosts).unwrap(),
        min,
        max,
        spares,
        timeout: Duration::from_secs(60),
        reset_limit: None,
        restarts: 100,
        cooldown: (Duration::from_secs(1), Duration::from_secs(8)),
        reach: Duration::from_secs(30),
    }
}

/// A launcher that does what the membership asks for.
struct World {
    members: Membership,
    now: Duration,
    agents: usize,
    /// Agents that have answered and run.
    up: BTreeSet<usize>,
    /// Agents that were asked to answer.
    called: BTreeSet<usize>,
    /// The workers that run, with their agents.
    alive: BTreeMap<u32, usize>,
    /// The ranks of the last epoch.
    ranks: BTreeMap<u32, u32>,
}

impl World {
    fn new(hosts: &str, limits: (u32, u32, u32), np: u32) -> Self {
        let rules = rules(hosts, limits);
        let nodes = Plan::nodes(&rules.hosts, Some(np)).unwrap();
        let members = Membership::new(rules, &nodes);
        let mut world = Self {
            members,
            now: Duration::from_secs(1),
            agents: nodes.len(),
            up: BTreeSet::new(),
            called: (0..nodes.len()).collect(),
            alive: BTreeMap::new(),
            ranks: BTreeMap::new(),
        };
        for node in &nodes {
            world.answer(node.agent);
            world.alive.extend(node.workers.iter().map(|worker| (*worker, node.agent)));
        }
        world.formed(&nodes);
        world
    }

    fn answer(&mut self, agent: usize) {
        self.called.remove(&agent);
        if self.members.answered(agent, self.now) {
            self.up.insert(agent);
        }
    }

    fn formed(&mut self, nodes: &[Node]) {
        self.members.formed(nodes);
        let ranks = nodes.iter().flat_map(|node| &node.workers).copied().zip(0..);
        self.ranks = ranks.collect();
    }

    /// The workers that do not leave.
    fn staying(&self) -> usize {
        self.alive.keys().filter(|worker| !self.members.is_leaving(**worker)).count()
    }

    fn fill(&mut self) {
        let before = self.staying();
        for request in self.members.fill(self.agents, self.now) {
            match request {
                Request::Reach { agent, .. } => {
                    assert_eq!(agent, self.agents, "numbers of agents are not used again");
                    self.agents += 1;
                    self.called.insert(agent);
                }
                Request::Start { agent, worker } => {
                    assert!(self.up.contains(&agent));
                    assert_eq!(self.alive.insert(worker, agent), None, "nor are ids of workers");
                }
            }
        }
        let rules = self.members.rules();
        let most = (rules.max + rules.spares) as usize;
        // A host that is listed again keeps its workers, although others were started for them.
        let staying = self.staying();
        assert!(staying <= most.max(before), "{staying} of {most}, {before} before");
        let mut slots = BTreeSet::new();
        for (worker, it) in &self.members.workers {
            assert!(slots.insert((it.place, it.slot)), "one worker in a slot: {worker}");
        }
    }

    fn lose_agent(&mut self, agent: usize) {
        self.up.remove(&agent);
        self.called.remove(&agent);
        self.alive.retain(|_, at| *at != agent);
        self.members.agent_ended(agent, self.now);
    }

    /// Forms an epoch, and checks it.
    fn form(&mut self) {
        for surplus in self.members.take_surplus() {
            match surplus {
                Surplus::Host(agent) => self.lose_agent(agent),
                Surplus::Worker { worker, .. } => {
                    self.alive.remove(&worker);
                    assert_eq!(self.members.ended(worker, true, self.now), None, "not a fault");
                }
            }
        }
        let nodes = self.members.next();
        let members: Vec<u32> = nodes.iter().flat_map(|node| node.workers.clone()).collect();
        let unique: BTreeSet<_> = members.iter().collect();
        assert_eq!(unique.len(), members.len(), "a worker has one rank");
        assert!(members.len() <= self.members.rules().max as usize);
        let mut next = 0;
        for node in &nodes {
            assert_eq!(node.first_rank, next);
            next += node.ranks();
            for worker in &node.workers {
                assert_eq!(self.alive.get(worker), Some(&node.agent), "it runs there");
                assert!(!self.members.is_leaving(*worker));
            }
            let old: Vec<_> = node.workers.iter().map(|it| self.ranks.get(it)).collect();
            let survivors = old.iter().take_while(|rank| rank.is_some()).count();
            assert!(old[..survivors].is_sorted(), "survivors keep their order");
            assert!(old[survivors..].iter().all(Option::is_none), "newcomers follow");
            assert!(node.workers[survivors..].is_sorted());
        }
        let lowest = |node: &Node| node.workers.iter().filter_map(|it| self.ranks.get(it)).min();
        let lowest: Vec<_> =
            nodes.iter().map(|node| lowest(node).copied().unwrap_or(u32::MAX)).collect();
        assert!(lowest.is_sorted(), "nodes keep their order");
        let survivors = self.ranks.keys().filter(|worker| self.alive.contains_key(worker));
        let survivors: BTreeSet<_> = survivors.copied().collect();
        assert_eq!(self.members.survivors() as usize, survivors.len());
        assert!(survivors.iter().all(|worker| members.contains(worker)), "no survivor is left out");
        if let Some(first) = members.first().filter(|_| !survivors.is_empty()) {
            assert!(survivors.contains(first), "rank 0 is a survivor");
        }
        if members.len() >= self.members.rules().min as usize && !survivors.is_empty() {
            self.formed(&nodes);
            let pending = self.members.pending(self.now);
            assert_eq!(pending, Change::default(), "nothing is left to change");
        }
    }
}

#[derive(Debug, Clone)]
enum Op {
    Wait(u64),
    Kill(usize),
    Ready(usize),
    Answer(usize),
    LoseAgent(usize),
    List(usize),
    Form,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        (0u64..3000).prop_map(Op::Wait),
        (0usize..9).prop_map(Op::Kill),
        (0usize..9).prop_map(Op::Ready),
        (0usize..4).prop_map(Op::Answer),
        (0usize..9).prop_map(Op::LoseAgent),
        (0usize..4).prop_map(Op::List),
        Just(Op::Form),
    ]
}

const LISTS: [&str; 4] = ["a:2,b:1,c:3", "b:2,c:1", "a:1,d:4", "a:3"];

proptest! {
    #[test]
    fn every_history_keeps_the_rules(
        ops in prop::collection::vec(op(), 1..80), np in 1u32..5, min in 1u32..4, spares in 0u32..3,
    ) {
        let mut world = World::new(LISTS[0], (min.min(np), 5, spares), np);
        for op in ops {
            match op {
                Op::Wait(ms) => world.now += Duration::from_millis(ms),
                Op::Kill(nth) => {
                    if let Some((worker, _)) = world.alive.clone().into_iter().nth(nth) {
                        world.alive.remove(&worker);
                        world.members.ended(worker, true, world.now);
                    }
                }
                Op::Ready(nth) => {
                    if let Some((worker, _)) = world.alive.clone().into_iter().nth(nth) {
                        world.members.waits(worker);
                    }
                }
                Op::Answer(nth) => {
                    if let Some(agent) = world.called.clone().into_iter().nth(nth) {
                        world.answer(agent);
                    }
                }
                Op::LoseAgent(nth) => {
                    if let Some(agent) = world.up.clone().into_iter().nth(nth) {
                        world.lose_agent(agent);
                    }
                }
                Op::List(nth) => world.members.list(&parse_list(LISTS[nth]).unwrap()),
                Op::Form => world.form(),
            }
            world.fill();
            if let Some(at) = world.members.wakeup(world.now) {
                prop_assert!(at > world.now, "a wake-up in the past would spin");
            }
        }
    }
}

#[test]
fn a_worker_that_ran_long_is_no_repeated_fault() {
    let mut world = World::new("a:2", (1, 2, 0), 2);
    let mut ended = |worker, seconds| {
        world.now = Duration::from_secs(seconds);
        world.alive.remove(&worker);
        let again = world.members.ended(worker, true, world.now).unwrap().as_secs();
        world.now += Duration::from_secs(again);
        world.fill();
        again
    };
    assert_eq!(ended(1, 2), 1);
    assert_eq!(ended(2, 4), 2);
    assert_eq!(ended(3, 7), 4);
    assert_eq!(ended(4, 30), 1, "it had run for longer than the longest quarantine");
}

#[test]
fn a_server_is_reached_again() {
    let mut rules = rules("a:1", (1, 1, 0));
    let server = Host { name: "s".to_owned(), slots: 0, ..rules.hosts[0].clone() };
    rules.hosts.push(server);
    let nodes = Plan::nodes(&rules.hosts, Some(1)).unwrap();
    let mut members = Membership::new(rules, &nodes);
    let second = Duration::from_secs(1);
    assert!(members.answered(0, second) && members.answered(1, second));
    assert_eq!(members.next().len(), 2);
    members.agent_ended(1, second);
    assert_eq!(members.next().len(), 1, "the job goes on without it");
    let again = members.wakeup(second).unwrap();
    let reached = members.fill(2, again);
    assert!(matches!(&reached[..], [Request::Reach { agent: 2, host }] if host.name == "s"));
}

#[test]
fn workers_that_leave_are_not_awaited() {
    let mut world = World::new("a:2", (2, 2, 0), 2);
    world.members.leave(1);
    world.members.take_surplus();
    assert_eq!(world.members.awaited(world.now), "a host with a free slot", "until it has ended");
    world.members.ended(1, false, world.now);
    world.alive.remove(&1);
    world.fill();
    assert_eq!(world.members.awaited(world.now), "1 worker to start");
}

#[test]
fn newcomers_that_start_together_join_together() {
    let mut world = World::new("a:1", (1, 4, 0), 1);
    world.members.list(&parse_list("a:1,b:2").unwrap());
    world.fill();
    world.answer(1);
    world.fill();
    let added = |world: &World| world.members.pending(world.now).added;
    world.members.waits(1);
    assert!(!added(&world), "the other one still starts");
    world.members.waits(2);
    assert!(added(&world));
    world.form();
    assert!(!added(&world));
    // One that takes too long is not awaited, and neither is one that no epoch has room for.
    let mut world = World::new("a:1", (1, 4, 0), 1);
    world.members.list(&parse_list("a:1,b:2").unwrap());
    world.fill();
    world.answer(1);
    world.fill();
    world.members.waits(1);
    world.now = world.members.wakeup(world.now).unwrap();
    assert!(added(&world), "the other one takes too long");
    assert!(world.members.overdue(world.now).is_empty());
    world.now += world.members.rules().timeout;
    assert_eq!(world.members.overdue(world.now), [(1, 2)]);
    let mut world = World::new("a:3", (1, 1, 2), 1);
    world.fill();
    world.members.leave(0);
    assert!(!added(&world), "both spares still start");
    world.members.waits(1);
    assert!(added(&world), "there is room for one");
}
