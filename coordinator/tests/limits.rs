//! BOUND: requests beyond a limit are refused by name, and the job continues.

use std::time::Duration;

use gradwire_coordinator::{
    engine::Engine,
    model::{
        Command, ConnectionId, EngineConfig, Event,
        command::Execute,
        event::{Announcement, Submitted},
    },
};
use gradwire_proto::{
    Collective, DType, Failure, JobId, PROTOCOL, Part, Priority, ProcessSetId, Rank, ReduceOp,
    Request, Shape, TensorName, VERSION, convert::TensorRef, pb,
};
use gradwire_settings::Settings;

/// A job in which every node has the same number of ranks.
struct Job {
    engine: Engine,
    nodes: u32,
    slots: u32,
}

impl Job {
    /// A job with one node.
    fn new(slots: u32, max_tensors: u32) -> Self {
        Self::spread(1, slots, max_tensors)
    }

    fn spread(nodes: u32, slots: u32, max_tensors: u32) -> Self {
        let mut config =
            EngineConfig::new(JobId::new("job").unwrap(), nodes, 0, &Settings::default()).unwrap();
        config.max_tensors = max_tensors;
        config.probe = false;
        let mut engine = Engine::new(config);
        for node in 0..nodes {
            Self::join(&mut engine, node, slots);
        }
        Self { engine, nodes, slots }
    }

    fn join(engine: &mut Engine, node: u32, slots: u32) -> Vec<Command> {
        let join = pb::Join {
            protocol: PROTOCOL,
            version: VERSION.into(),
            job: "job".into(),
            host: format!("h{node}"),
            data_address: format!("10.0.{}.{}:7000", node / 256, node % 256),
            slots,
            order: node,
            ..pb::Join::default()
        };
        let connection = ConnectionId(node.into());
        engine.step(Event::Joined { connection, join, proven: true }, Duration::ZERO).commands
    }

    /// All ranks submit the same request.
    fn submit(&mut self, name: &str, request: Request) -> Execute {
        self.submit_reported(name, request).0
    }

    /// All ranks submit the same request. Also returns the reports to the operator.
    fn submit_reported(&mut self, name: &str, request: Request) -> (Execute, Vec<String>) {
        for node in 0..self.nodes {
            let first = node * self.slots;
            let announcement = Announcement {
                set: ProcessSetId::GLOBAL,
                tensor: TensorRef::Name(TensorName::new(name).unwrap()),
                submitted: vec![Submitted {
                    ranks: (first..first + self.slots).map(Rank).collect(),
                    request: request.clone(),
                    priority: Priority(0),
                    duplicate: false,
                    sites: Vec::new(),
                }],
                latest: None,
            };
            let connection = ConnectionId(node.into());
            let event = Event::Ready { connection, announcements: vec![announcement] };
            assert_eq!(self.engine.step(event, Duration::ZERO).commands, []);
        }
        let mut commands = self.engine.step(Event::Drained, Duration::ZERO).commands;
        let Some(Command::Execute(execute)) = commands.pop() else { panic!("{commands:?}") };
        let text = |command| match command {
            Command::Report { text, .. } => text,
            other => panic!("{other:?}"),
        };
        (*execute, commands.into_iter().map(text).collect())
    }

    fn refusal(&mut self, name: &str, request: Request) -> Failure {
        let mut execute = self.submit(name, request);
        assert!(execute.operations.is_empty() && execute.sets_created.is_empty());
        let failed = execute.failures.pop().expect("the request is refused");
        assert_eq!(failed.failure.tensor, name);
        failed.failure
    }
}

fn with(collective: Collective, list: u64) -> Request {
    Request { list: vec![list], ..Request::empty(collective) }
}

fn alltoall(ranks: u64) -> Request {
    Request::plain(Collective::Alltoall, DType::U8, Shape::new(&[ranks]).unwrap())
}

#[test]
fn the_number_of_process_sets_is_limited() {
    let mut job = Job::new(1, 10);
    for number in 1..=4096 {
        let execute = job.submit(&format!("s{number}"), with(Collective::AddProcessSet, 0));
        assert_eq!(execute.sets_created[0].set, ProcessSetId(number));
    }
    let failure = job.refusal("more", with(Collective::AddProcessSet, 0));
    assert!(failure.text().contains("the job already has 4096 process sets"), "{failure}");
    let execute = job.submit("gone", with(Collective::RemoveProcessSet, 7));
    assert_eq!(execute.sets_removed[0].set, ProcessSetId(7));
    let execute = job.submit("more", with(Collective::AddProcessSet, 0));
    assert_eq!(execute.sets_created[0].set, ProcessSetId(4097), "ids are not reused");
}

#[test]
fn tensors_with_too_many_parts_are_refused() {
    let mut job = Job::new(513, 10);
    let failure = job.refusal("w", alltoall(513));
    let text = "alltoall of 1 tensor between 513 ranks consists of 263169 parts";
    assert!(failure.text().contains(text), "{failure}");
    assert!(failure.details.hint.contains("smaller process sets"), "{failure}");
}

/// The agreed request of a tensor without an id is sent once in each operation, even if it is long.
#[test]
fn agreed_requests_are_sent_once_per_operation() {
    let shape = Shape::new(&[1, 1]).unwrap();
    let more = DType::ALL.iter().cycle().skip(1).take(40);
    let more = more.map(|&dtype| Part { dtype, shape: shape.clone() }).collect();
    let group = Request { more, ..Request::plain(Collective::Allgather, DType::ALL[0], shape) };
    let of_group = Job::new(128, 0).submit("w", group).operations;
    assert!(of_group.len() > 1 && of_group.iter().all(|operation| operation.segments.len() > 1));
    let of_pairs = Job::spread(256, 1, 0).submit("w", alltoall(256)).operations;
    assert_eq!(of_pairs.len(), 1);
    for operation in of_group.into_iter().chain(of_pairs) {
        let reported = operation.segments.iter().map(|segment| segment.agreed.is_some());
        assert!(reported.eq((0..operation.segments.len()).map(|at| at == 0)));
    }
}

#[test]
fn the_number_of_ranks_is_limited() {
    let nodes = |last| {
        let mut config =
            EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &Settings::default()).unwrap();
        config.ranks = None;
        config.probe = false;
        let mut engine = Engine::new(config);
        Job::join(&mut engine, 0, 4095);
        Job::join(&mut engine, 1, last)
    };
    assert!(matches!(nodes(1)[..], [Command::Welcome { .. }, Command::Welcome { .. }]));
    let [Command::Abort(failure), Command::Finish(_)] = &nodes(2)[..] else { panic!("no abort") };
    let text = "the nodes have 4097 slots in total, but a job has at most 4096 ranks";
    assert!(failure.text().contains(text), "{failure}");
}

/// Ids cost memory for each flow. All ids together have no more flows than one tensor may have.
#[test]
fn tensors_with_many_flows_have_few_ids() {
    let (ranks, most_flows) = (128, 1 << 18);
    let mut job = Job::new(ranks, 1000);
    let node = ConnectionId(0);
    let mut in_use = Vec::new();
    for number in 0..40 {
        let execute = job.submit(&format!("w{number}"), alltoall(ranks.into()));
        in_use.extend(execute.registrations.iter().map(|registration| registration.id));
        in_use.retain(|id| !execute.evicted.contains(id));
        let flows = in_use.len() * (ranks * ranks) as usize;
        assert!(flows <= most_flows, "BOUND: {flows} flows after {number} tensors");
        let sequences = execute.operations.iter().map(|operation| operation.sequence).collect();
        let done = Event::Done { connection: node, sequences };
        let forgotten = Event::Forgotten { connection: node, ids: execute.evicted };
        for event in [done, forgotten] {
            assert_eq!(job.engine.step(event, Duration::ZERO).commands, []);
        }
    }
    assert_eq!(in_use.len() * (ranks * ranks) as usize, most_flows, "the last ones have ids");
}

/// A program with a new name in every step: few ids stay, and it is reported once. The names of a
/// large model come again, and keep their ids.
#[test]
fn names_that_never_repeat_keep_few_ids() {
    let mut job = Job::new(1, 1 << 16);
    let node = ConnectionId(0);
    let (mut ids, mut warnings) = (std::collections::BTreeMap::new(), Vec::new());
    let request = Request::allreduce(DType::F32, Shape::new(&[4]).unwrap(), ReduceOp::Sum);
    let mut submit = |name: &str, most: usize| {
        let (execute, reports) = job.submit_reported(name, request.clone());
        ids.extend(execute.registrations.iter().map(|it| (it.id, it.name.to_string())));
        execute.evicted.iter().for_each(|id| assert!(ids.remove(id).is_some()));
        assert!(ids.len() <= most, "BOUND: {} ids after '{name}'", ids.len());
        warnings.extend(reports);
        let sequences = execute.operations.iter().map(|operation| operation.sequence).collect();
        let done = Event::Done { connection: node, sequences };
        let forgotten = Event::Forgotten { connection: node, ids: execute.evicted };
        for event in [done, forgotten] {
            assert_eq!(job.engine.step(event, Duration::ZERO).commands, []);
        }
        ids.len()
    };
    let kept = (0..100_000).map(|step| submit(&format!("loss_{step}"), 4097)).last().unwrap();
    assert!(kept >= 4096);
    for _ in 0..3 {
        (0..6000).for_each(|layer| {
            submit(&format!("layer.{layer}"), 4097 + 6000);
        });
    }
    let layers = ids.values().filter(|name| name.starts_with("layer")).count();
    assert_eq!(layers, 6000, "all have ids");
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains("names like 'loss_{n}' were used only once"), "{warning}");
}
