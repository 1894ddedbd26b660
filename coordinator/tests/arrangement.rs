//! SAME: nodes are arranged once, by their links, and all know it before the first operation.

use std::{collections::BTreeMap, time::Duration};

use gradwire_collectives::algorithms::probe::Pattern;
use gradwire_coordinator::{
    engine::Engine,
    model::{
        Command, ConnectionId, EngineConfig, Event,
        command::{Execute, Probe},
        event::{Announcement, Submitted},
    },
};
use gradwire_proto::{
    DType, JobId, NodeId, PROTOCOL, Priority, ProcessSetId, Rank, ReduceOp, Request, Sequence,
    Shape, TensorName, VERSION, convert::TensorRef, pb,
};
use gradwire_settings::Settings;

/// The factor by which a link is slower than usual.
type Slowness = fn(u32, u32) -> f64;

fn even(_: u32, _: u32) -> f64 {
    1.0
}

/// Nodes with odd numbers are in one rack, and the others in another.
fn in_racks(a: u32, b: u32) -> f64 {
    if a % 2 == b % 2 { 1.0 } else { 4.0 }
}

/// One link is slow.
fn one(a: u32, b: u32) -> f64 {
    if (a.min(b), a.max(b)) == (1, 2) { 4.0 } else { 1.0 }
}

/// A job of nodes with one rank each, and servers.
struct Job {
    engine: Engine,
    ranks: u32,
    now: Duration,
    slowness: Slowness,
}

fn step(engine: &mut Engine, event: Event, now: Duration) -> Option<Execute> {
    let commands = engine.step(event, now).commands;
    assert!(
        !commands.iter().any(|command| matches!(command, Command::Abort { .. })),
        "{commands:?}"
    );
    let executes = commands.into_iter().filter_map(|command| match command {
        Command::Execute(execute) => Some(*execute),
        _ => None,
    });
    let mut executes: Vec<Execute> = executes.collect();
    assert!(executes.len() <= 1);
    executes.pop()
}

fn allreduce() -> Request {
    let shape = Shape::new(&[1024]).unwrap();
    Request::allreduce(DType::F32, shape, ReduceOp::Sum)
}

impl Job {
    fn new(racks: &[&str], servers: u32, strict: bool, slowness: Slowness) -> Self {
        let mut settings = Settings::default();
        settings.negotiation.strict = strict;
        let nodes = racks.len() as u32;
        let job = JobId::new("job").unwrap();
        let config = EngineConfig::new(job, nodes, servers, &settings).unwrap();
        assert!(config.probe);
        let mut engine = Engine::new(config);
        for (node, rack) in (0..nodes).zip(racks) {
            let join = pb::Join {
                protocol: PROTOCOL,
                version: VERSION.into(),
                job: "job".into(),
                host: format!("h{node}"),
                data_address: format!("10.0.0.{node}:7000"),
                slots: u32::from(node < nodes - servers),
                order: node,
                rack: (*rack).to_owned(),
                ..pb::Join::default()
            };
            let connection = ConnectionId(node.into());
            assert_eq!(
                step(&mut engine, Event::Joined { connection, join, proven: true }, Duration::ZERO),
                None
            );
        }
        Self { engine, ranks: nodes - servers, now: Duration::from_secs(1), slowness }
    }

    fn announce(&mut self, name: &str) {
        for node in 0..self.ranks {
            let announcement = Announcement {
                set: ProcessSetId::GLOBAL,
                tensor: TensorRef::Name(TensorName::new(name).unwrap()),
                submitted: vec![Submitted {
                    ranks: vec![Rank(node)],
                    request: allreduce(),
                    priority: Priority(0),
                    duplicate: false,
                    sites: Vec::new(),
                }],
                latest: None,
            };
            let connection = ConnectionId(node.into());
            let event = Event::Ready { connection, announcements: vec![announcement] };
            assert_eq!(step(&mut self.engine, event, self.now), None);
        }
    }

    fn seconds(&self, probe: &Probe, group: &[NodeId]) -> f64 {
        let slowness = match group {
            [a, b] => (self.slowness)(a.0, b.0),
            _ => 1.0,
        };
        match probe.pattern {
            Pattern::RoundTrips(count) => f64::from(count) * 60e-6,
            Pattern::Messages(count) => 30e-6 + f64::from(count) * 1e-6,
            Pattern::Exchange(bytes) => 30e-6 + slowness * bytes as f64 / 1e9,
            Pattern::Gather(bytes) => 30e-6 + bytes as f64 * (group.len() - 1) as f64 / 1e9,
            Pattern::Reduce(bytes) | Pattern::Copy(bytes) => bytes as f64 / 10e9,
        }
    }

    /// Runs all probes until nothing is left. Returns all answers.
    fn run(&mut self) -> Vec<Execute> {
        let mut answers = Vec::new();
        while let Some(execute) = step(&mut self.engine, Event::Drained, self.now) {
            let mut done: BTreeMap<NodeId, Vec<(Sequence, Duration)>> = BTreeMap::new();
            for probe in &execute.probes {
                for group in &probe.groups {
                    let time = Duration::from_secs_f64(self.seconds(probe, group));
                    group.iter().for_each(|node| {
                        done.entry(*node).or_default().push((probe.sequence, time));
                    });
                }
            }
            let longest = done.values().flatten().map(|(_, time)| *time).max();
            self.now += longest.unwrap_or_default() + Duration::from_micros(100);
            for (node, probes) in done {
                for (sequence, time) in probes {
                    let connection = ConnectionId(node.0.into());
                    let event = Event::Probed { connection, sequence, time, retransmits: 0 };
                    assert_eq!(step(&mut self.engine, event, self.now), None);
                }
            }
            answers.push(execute);
        }
        answers
    }
}

/// The arrangement of a job that begins with an allreduce. It is sent at most once, not later than
/// the first operation, and operations are not sent before the links are measured.
fn arrangement(mut job: Job) -> Option<(Vec<u32>, Vec<u32>)> {
    job.announce("a");
    let first = job.run();
    job.announce("b");
    let answers: Vec<Execute> = first.into_iter().chain(job.run()).collect();
    let places = |is: fn(&Execute) -> bool| -> Vec<usize> {
        let all = answers.iter().enumerate();
        all.filter(|(_, answer)| is(answer)).map(|(place, _)| place).collect()
    };
    let operations = places(|answer| !answer.operations.is_empty());
    let probes = places(|answer| !answer.probes.is_empty());
    let arranged = places(|answer| answer.arrangement.is_some());
    assert_eq!(operations.len(), 2, "{answers:?}");
    assert!(probes.last().is_some_and(|last| *last < operations[0]), "{answers:?}");
    assert!(arranged.len() <= 1 && arranged.iter().all(|at| *at <= operations[0]), "{answers:?}");
    let arrangement = answers[*arranged.first()?].arrangement.clone()?;
    assert!(!arrangement.reason.is_empty());
    Some((arrangement.racks, arrangement.order))
}

#[test]
fn unlabelled_racks_are_found_by_their_links() {
    let found = arrangement(Job::new(&[""; 6], 0, false, in_racks));
    assert_eq!(found, Some((vec![0, 1, 0, 1, 0, 1], Vec::new())));
    // Servers are in racks, too.
    let found = arrangement(Job::new(&[""; 6], 2, false, in_racks));
    assert_eq!(found, Some((vec![0, 1, 0, 1, 0, 1], Vec::new())));
}

#[test]
fn a_ring_avoids_a_slow_link() {
    let (racks, order) = arrangement(Job::new(&[""; 5], 0, false, one)).unwrap();
    assert!(racks.is_empty());
    let at = |node: u32| order.iter().position(|other| *other == node).unwrap();
    let apart = (at(1) + 5 - at(2)) % 5;
    assert!((2..=3).contains(&apart), "1 and 2 are neighbours in {order:?}");
    // With labels, racks are known, but the order still changes.
    let (racks, order) = arrangement(Job::new(&["r"; 5], 0, false, one)).unwrap();
    assert!(racks.is_empty() && !order.is_empty());
}

#[test]
fn only_clear_arrangements_are_sent() {
    let labels = ["a", "a", "a", "b", "b", "b"];
    for (racks, strict, slowness) in [
        (&[""; 6][..], false, even as Slowness),
        (&labels, false, in_racks),
        (&[""; 6], true, in_racks),
        (&[""; 6], true, one),
        // Too few for two racks, or for another order.
        (&[""; 3], false, in_racks),
    ] {
        assert_eq!(arrangement(Job::new(racks, 0, strict, slowness)), None, "{racks:?} {strict}");
    }
}
