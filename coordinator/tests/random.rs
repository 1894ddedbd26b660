//! Random jobs: whatever the nodes' speeds, sizes and priorities are, the answers keep their
//! promises. A failing case is printed, made small, and kept in `random.proptest-regressions`.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_coordinator::engine::{
    Algorithm, Command, ConnectionId, Engine, EngineConfig, Event,
    command::Execute,
    event::{Announcement, Join, Submitted},
};
use gradwire_proto::{
    DType, JobId, PROTOCOL, Priority, ProcessSetId, Rank, ReduceOp, Request, Sequence, Shape,
    TensorId, TensorName, VERSION, convert::TensorRef,
};
use proptest::prelude::*;

#[derive(Debug, Clone)]
struct Job {
    nodes: u32,
    credit: u32,
    piece_bytes: u64,
    max_tensors: u32,
    steps: usize,
    tensors: Vec<(DType, u64, i32)>,
    /// Which node does its next thing, again and again.
    turns: Vec<prop::sample::Index>,
}

fn jobs() -> impl Strategy<Value = Job> {
    let dtypes = prop::sample::select(vec![DType::F32, DType::Bf16, DType::I64]);
    let tensor = (dtypes, prop_oneof![Just(0), 1..300u64], -1..3i32);
    (
        1..5u32,
        1..4u32,
        64..700u64,
        0..12u32,
        1..4usize,
        prop::collection::vec(tensor, 1..12),
        prop::collection::vec(any::<prop::sample::Index>(), 1..80),
    )
        .prop_map(|(nodes, credit, piece_bytes, max_tensors, steps, tensors, turns)| Job {
            nodes,
            credit,
            piece_bytes,
            max_tensors,
            steps,
            tensors,
            turns,
        })
}

/// A tensor, its first element and how many.
type Part = (usize, u64, u64);

/// A node that does one thing at a time: announce a tensor or finish an operation.
#[derive(Default)]
struct Node {
    step: usize,
    announced: usize,
    /// Elements of this step's tensors that are done.
    covered: BTreeMap<usize, u64>,
    finished: BTreeSet<usize>,
    ids: BTreeMap<TensorId, usize>,
    /// What is to be done.
    todo: Vec<(Sequence, Vec<Part>)>,
    done: u64,
}

impl Node {
    fn tensor(&self, tensor: &TensorRef) -> usize {
        match tensor {
            TensorRef::Id(id) => self.ids[id],
            TensorRef::Name(name) => name.as_str().parse().unwrap(),
        }
    }

    fn take(&mut self, execute: &Execute) {
        for registration in &execute.registrations {
            self.ids.insert(registration.id, registration.name.as_str().parse().unwrap());
        }
        assert!(execute.failures.is_empty(), "all ranks agree: {:?}", execute.failures);
        for operation in &execute.operations {
            // ORD: one order, without a gap.
            assert_eq!(operation.sequence.0, self.done + self.todo.len() as u64 + 1);
            let parts = operation.segments.iter();
            let parts = parts.map(|s| (self.tensor(&s.tensor), s.offset, s.count)).collect();
            self.todo.push((operation.sequence, parts));
        }
    }

    /// Does the next thing; none if it waits for others or has done all.
    fn act(&mut self, job: &Job, connection: ConnectionId) -> Option<Event> {
        if !self.todo.is_empty() {
            let (sequence, parts) = self.todo.remove(0);
            self.done += 1;
            for (tensor, offset, count) in parts {
                // ONE: each element exactly once, in order.
                assert_eq!(*self.covered.entry(tensor).or_default(), offset);
                *self.covered.entry(tensor).or_default() += count;
                if self.covered[&tensor] == job.tensors[tensor].1 {
                    assert!(self.finished.insert(tensor), "done twice");
                }
            }
            if self.finished.len() == job.tensors.len() {
                self.step += 1;
                self.announced = 0;
                self.covered.clear();
                self.finished.clear();
            }
            return Some(Event::Done { connection, sequences: vec![sequence] });
        }
        if self.step == job.steps || self.announced == job.tensors.len() {
            return None;
        }
        // Each node has its own order.
        let count = job.tensors.len();
        let tensor = (self.announced + connection.0 as usize * 3) % count;
        self.announced += 1;
        let known = self.ids.iter().find(|(_, t)| **t == tensor).map(|(id, _)| *id);
        let (dtype, elements, priority) = job.tensors[tensor];
        let request = Request::allreduce(dtype, Shape::new(&[elements]).unwrap(), ReduceOp::Sum);
        let announcement = match known {
            Some(id) => Announcement {
                set: ProcessSetId::GLOBAL,
                tensor: TensorRef::Id(id),
                submitted: Vec::new(),
            },
            None => Announcement {
                set: ProcessSetId::GLOBAL,
                tensor: TensorRef::Name(TensorName::new(&tensor.to_string()).unwrap()),
                submitted: vec![Submitted {
                    ranks: vec![Rank(connection.0 as u32)],
                    request,
                    priority: Priority(priority),
                    duplicate: false,
                }],
            },
        };
        Some(Event::Ready { connection, announcements: vec![announcement] })
    }
}

fn play(job: &Job) {
    let mut config = EngineConfig::new(JobId::new("job").unwrap(), job.nodes);
    config.credit_pieces = job.credit;
    config.piece_bytes = job.piece_bytes;
    config.max_tensors = job.max_tensors;
    config.algorithm = Some(Algorithm::Ring);
    config.validate().unwrap();
    let mut engine = Engine::new(config);
    for order in 0..job.nodes {
        let join = Join {
            protocol: PROTOCOL,
            version: VERSION.into(),
            job: "job".into(),
            host: format!("h{order}"),
            data_address: format!("10.0.0.1:{}", 7000 + order),
            slots: 1,
            order,
            rack: String::new(),
            proven: true,
        };
        let connection = ConnectionId(u64::from(order));
        engine.step(Event::Joined { connection, join }, Duration::ZERO);
    }
    let mut nodes: Vec<Node> = (0..job.nodes).map(|_| Node::default()).collect();
    let mut turns = job.turns.iter().cycle();
    let mut idle = 0;
    while idle < 20 * nodes.len() {
        let at = match turns.next() {
            // After a while of chance everybody has its turn, so that the job comes to its end.
            Some(index) if idle < nodes.len() => index.index(nodes.len()),
            _ => idle % nodes.len(),
        };
        let Some(event) = nodes[at].act(job, ConnectionId(at as u64)) else {
            idle += 1;
            continue;
        };
        idle = 0;
        let mut commands = engine.step(event, Duration::ZERO).commands;
        commands.extend(engine.step(Event::Drained, Duration::ZERO).commands);
        for command in commands {
            match command {
                Command::Execute(execute) => nodes.iter_mut().for_each(|n| n.take(&execute)),
                other => panic!("{other:?}"),
            }
        }
        let counts = engine.counts();
        assert!(counts.in_flight <= job.credit as usize, "BOUND: credit");
        // Nothing waits for a timer: either all credit is out or nothing is queued.
        assert!(counts.queued == 0 || counts.in_flight == job.credit as usize);
    }
    for node in &nodes {
        assert_eq!(node.step, job.steps, "every step is done on every node");
        assert!(node.ids.len() <= job.max_tensors as usize, "BOUND: ids");
    }
    let counts = engine.counts();
    assert_eq!((counts.pending, counts.queued, counts.in_flight), (0, 0, 0));
    assert_eq!(counts.started, counts.done);
}

proptest! {
    #[test]
    fn every_job_comes_to_its_end(job in jobs()) {
        play(&job);
    }
}
