//! Random jobs: for any collectives, process sets, joins, sizes, priorities and speeds, the answers
//! keep the invariants, and everything completes. A failing case is printed, minimized, and kept in
//! `random.proptest-regressions`.

#[path = "random/node.rs"]
mod node;
#[path = "random/program.rs"]
mod program;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use gradwire_collectives::Rules;
use gradwire_coordinator::{
    engine::Engine,
    model::{Command, ConnectionId, EngineConfig, Event},
};
use gradwire_proto::{
    Collective, JobId, NodeId, PROTOCOL, ProcessSetId, Rank, Request, VERSION, pb,
};
use gradwire_settings::Settings;
use node::{Key, Node, World};
use program::{Phase, Tensor, mix, phases};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Job {
    slots: Vec<u32>,
    credit: u32,
    piece_bytes: u64,
    max_tensors: u32,
    phases: Vec<Phase>,
    /// The rank or node that acts next, repeated.
    turns: Vec<prop::sample::Index>,
}

fn jobs() -> impl Strategy<Value = Job> {
    (
        prop::collection::vec(1..4u32, 1..5),
        1..6u32,
        64..700u64,
        0..12u32,
        phases(),
        prop::collection::vec(any::<prop::sample::Index>(), 1..120),
    )
        .prop_map(|(slots, credit, piece_bytes, max_tensors, phases, turns)| Job {
            slots,
            credit,
            piece_bytes,
            max_tensors,
            phases,
            turns,
        })
}

/// An action of a rank.
enum Act {
    /// Submits a request in a set, by the set's number in the program.
    Submit { set: usize, name: String, request: Request, priority: i32 },
    /// Removes a set by its number in the program.
    Remove { set: usize, name: String },
    /// Waits until everything that it has submitted is done.
    Wait,
}

/// The process sets of the program, the global one first, and the actions of each rank.
struct Program {
    sets: Vec<Vec<Rank>>,
    /// The sets that exist at this point.
    alive: Vec<usize>,
    acts: BTreeMap<Rank, VecDeque<Act>>,
}

impl Program {
    fn new(job: &Job, all: Vec<Rank>) -> Self {
        let acts = all.iter().map(|&rank| (rank, VecDeque::new())).collect();
        let mut program = Self { sets: vec![all], alive: vec![0], acts };
        for phase in &job.phases {
            match phase {
                Phase::Create { mask } => program.create(*mask),
                Phase::Remove => program.remove(),
                Phase::Join { set, tensors, counts, waits } => {
                    program.join(*set, tensors, *counts, *waits);
                }
                Phase::Work { tensors, orders, times } => {
                    for time in 0..*times {
                        program.work(tensors, mix(*orders, time as u64));
                        program.wait();
                    }
                }
            }
            program.wait();
        }
        program
    }

    fn wait(&mut self) {
        self.acts.values_mut().for_each(|acts| acts.push_back(Act::Wait));
    }

    fn act(&mut self, rank: Rank, act: Act) {
        self.acts.get_mut(&rank).unwrap().push_back(act);
    }

    fn submit(&mut self, rank: Rank, set: usize, name: &str, request: Request, priority: i32) {
        self.act(rank, Act::Submit { set, name: name.to_owned(), request, priority });
    }

    fn create(&mut self, mask: u8) {
        let all = self.sets[0].clone();
        let chosen = |rank: &Rank| mask & (1 << (rank.0 % 8)) != 0;
        let mut ranks: Vec<Rank> = all.iter().copied().filter(chosen).collect();
        if ranks.is_empty() {
            ranks.push(all[0]);
        }
        let list = ranks.iter().map(|rank| u64::from(rank.0)).collect();
        let request = Request { list, ..Request::empty(Collective::AddProcessSet) };
        let name = format!("set{}", self.sets.len());
        all.into_iter().for_each(|rank| self.submit(rank, 0, &name, request.clone(), 0));
        self.alive.push(self.sets.len());
        self.sets.push(ranks);
    }

    fn remove(&mut self) {
        let Some(set) = self.alive.pop_if(|set| *set > 0) else { return };
        for rank in self.sets[0].clone() {
            self.act(rank, Act::Remove { set, name: format!("gone{set}") });
        }
    }

    fn work(&mut self, tensors: &[Tensor], orders: u64) {
        for rank in self.sets[0].clone() {
            let mut mine: Vec<(u64, usize)> = (0..tensors.len())
                .map(|at| (mix(orders, u64::from(rank.0) << 8 | at as u64), at))
                .collect();
            mine.sort_unstable();
            for (_, at) in mine {
                let tensor = &tensors[at];
                let set = self.alive[usize::from(tensor.set) % self.alive.len()];
                let members = self.sets[set].clone();
                if tensor.ranks(&members).contains(&rank) {
                    let request = tensor.request(&members, rank, None);
                    let name = tensor.name(at, &members);
                    self.submit(rank, set, &name, request, tensor.priority);
                }
            }
        }
    }

    fn join(&mut self, set: u8, tensors: &[Tensor], counts: u64, waits: bool) {
        let set = self.alive[usize::from(set) % self.alive.len()];
        let members = self.sets[set].clone();
        // The root is a rank that has data for all tensors.
        let root = members[(mix(counts, 1) % members.len() as u64) as usize];
        for &rank in &members {
            let most = tensors.len() as u64 + 1;
            let count = mix(counts, u64::from(rank.0) + 2) % most;
            let count = if rank == root { tensors.len() } else { count as usize };
            for (at, tensor) in tensors.iter().enumerate().take(count) {
                let request = tensor.request(&members, rank, Some(root));
                self.submit(rank, set, &format!("j{at}"), request, tensor.priority);
                if waits {
                    self.act(rank, Act::Wait);
                }
            }
            self.submit(rank, set, "join", Request::empty(Collective::Join), 0);
        }
    }
}

/// Sets are created one after the other, so their numbers in the program are their ids.
fn id(set: usize) -> ProcessSetId {
    ProcessSetId(set as u32)
}

struct Play {
    world: World,
    engine: Engine,
    nodes: Vec<Node>,
    program: Program,
    outstanding: BTreeMap<Rank, BTreeSet<Key>>,
    credit: usize,
}

impl Play {
    fn new(job: &Job) -> Self {
        let world = World { slots: job.slots.clone() };
        let nodes = job.slots.len() as u32;
        let mut config =
            EngineConfig::new(JobId::new("job").unwrap(), nodes, 0, &Settings::default()).unwrap();
        config.credit_pieces = job.credit;
        config.probe = false;
        config.piece_bytes = job.piece_bytes;
        config.max_tensors = job.max_tensors;
        config.rules = Rules::parse("ring").unwrap();
        config.validate().unwrap();
        let mut engine = Engine::new(config);
        for (order, &slots) in (0..).zip(&job.slots) {
            let join = pb::Join {
                protocol: PROTOCOL,
                version: VERSION.into(),
                job: "job".into(),
                host: format!("h{order}"),
                data_address: format!("10.0.0.1:{}", 7000 + order),
                slots,
                order,
                ..pb::Join::default()
            };
            let connection = ConnectionId(u64::from(order));
            engine.step(Event::Joined { connection, join, proven: true }, Duration::ZERO);
        }
        Self {
            engine,
            nodes: (0..nodes).map(|node| Node::new(NodeId(node), &world)).collect(),
            program: Program::new(job, world.ranks()),
            outstanding: BTreeMap::new(),
            credit: job.credit as usize,
            world,
        }
    }

    /// A rank acts. Returns false if it waits or has finished.
    fn rank(&mut self, rank: Rank) -> bool {
        let outstanding = self.outstanding.entry(rank).or_default();
        let act = match self.program.acts.get_mut(&rank).unwrap() {
            acts if matches!(acts.front(), Some(Act::Wait)) && !outstanding.is_empty() => None,
            acts => acts.pop_front(),
        };
        let (set, name, request, priority) = match act {
            None => return false,
            Some(Act::Wait) => return true,
            Some(Act::Submit { set, name, request, priority }) => {
                (id(set), name, request, priority)
            }
            Some(Act::Remove { set, name }) => {
                let list = vec![u64::from(id(set).0)];
                let request = Request { list, ..Request::empty(Collective::RemoveProcessSet) };
                (ProcessSetId::GLOBAL, name, request, 0)
            }
        };
        let key = (set, name);
        assert!(self.outstanding.entry(rank).or_default().insert(key.clone()));
        let node = &mut self.nodes[self.world.node_of(rank).0 as usize];
        if let Some(event) = node.submit(&self.world, rank, key, request, priority) {
            self.step(event);
        }
        true
    }

    fn node(&mut self, at: usize) -> bool {
        let node = &mut self.nodes[at];
        let Some(event) = node.act(&self.world) else { return false };
        for (rank, key) in std::mem::take(&mut node.complete) {
            let there = self.outstanding.entry(rank).or_default().remove(&key);
            assert!(there, "{key:?} of rank {rank} is done once");
        }
        if let Some(event) = event {
            self.step(event);
        }
        true
    }

    fn step(&mut self, event: Event) {
        let mut commands = self.engine.step(event, Duration::ZERO).commands;
        commands.extend(self.engine.step(Event::Drained, Duration::ZERO).commands);
        for command in commands {
            match command {
                Command::Execute(execute) => {
                    self.nodes.iter_mut().for_each(|n| n.inbox.push_back((*execute).clone()));
                }
                other => panic!("{other:?}"),
            }
        }
        let counts = self.engine.counts();
        assert!(counts.in_flight <= self.credit, "BOUND: credit");
        // Nothing waits for a timer: either all credit is out or nothing is queued.
        assert!(counts.queued == 0 || counts.in_flight == self.credit);
    }
}

fn play(job: &Job) {
    let mut play = Play::new(job);
    let (ranks, nodes) = (play.world.ranks(), play.nodes.len());
    let actors = ranks.len() + nodes;
    let mut turns = job.turns.iter().cycle();
    let mut idle = 0;
    while idle < 20 * actors {
        let at = match turns.next() {
            // After random turns, all take turns in order, so that the job completes.
            Some(index) if idle < actors => index.index(actors),
            _ => idle % actors,
        };
        let acted = match at.checked_sub(nodes) {
            Some(rank) => play.rank(ranks[rank]),
            None => play.node(at),
        };
        idle = if acted { 0 } else { idle + 1 };
    }
    for (rank, acts) in &play.program.acts {
        let waits = play.outstanding.get(rank);
        assert!(acts.is_empty(), "rank {rank} waits for {waits:?}");
        assert!(waits.is_none_or(BTreeSet::is_empty), "rank {rank} waits for {waits:?}");
    }
    for node in &play.nodes {
        assert!(node.is_idle());
        assert!(node.ids() <= job.max_tensors as usize, "BOUND: ids");
    }
    let counts = play.engine.counts();
    assert_eq!((counts.pending, counts.queued, counts.in_flight), (0, 0, 0));
    assert_eq!(counts.started, counts.done);
    assert_eq!(counts.sets, play.program.alive.len());
}

proptest! {
    #[test]
    fn every_job_completes(job in jobs()) {
        play(&job);
    }
}
