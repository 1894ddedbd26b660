//! Which ranks count as late, and how long tensors have waited for them.

use std::time::Duration;

use gradwire_collectives::Rules;
use gradwire_coordinator::{
    engine::Engine,
    model::{
        ConnectionId, EngineConfig, Event,
        command::Waits,
        event::{Announcement, Latest, Submitted},
    },
};
use gradwire_proto::{
    Collective, DType, JobId, PROTOCOL, Priority, ProcessSetId, Rank, ReduceOp, Request, Shape,
    TensorName, VERSION, convert::TensorRef, pb,
};
use gradwire_settings::Settings;

const fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

/// An engine whose nodes, with these slots, have all joined.
fn engine(slots: &[u32]) -> Engine {
    let (job, nodes) = (JobId::new("job").unwrap(), slots.len() as u32);
    let mut config = EngineConfig::new(job, nodes, 0, &Settings::default()).unwrap();
    config.rules = Rules::parse("ring").unwrap();
    config.probe = false;
    let mut engine = Engine::new(config);
    for (node, &slots) in (0..).zip(slots) {
        let join = pb::Join {
            protocol: PROTOCOL,
            version: VERSION.to_owned(),
            job: "job".to_owned(),
            host: format!("h{node}"),
            data_address: format!("10.0.0.{}:7000", node + 1),
            slots,
            order: node,
            ..pb::Join::default()
        };
        let connection = ConnectionId(node.into());
        engine.step(Event::Joined { connection, join, proven: true }, ms(0));
    }
    engine
}

fn sum() -> Request {
    Request::allreduce(DType::F32, Shape::new(&[4]).unwrap(), ReduceOp::Sum)
}

/// An announcement of a tensor by these ranks; `latest` is the last local one.
fn by(
    name: &str,
    set: u32,
    ranks: &[u32],
    request: &Request,
    latest: Option<(u32, Duration)>,
) -> Announcement {
    Announcement {
        set: ProcessSetId(set),
        tensor: TensorRef::Name(TensorName::new(name).unwrap()),
        submitted: vec![Submitted {
            ranks: ranks.iter().copied().map(Rank).collect(),
            request: request.clone(),
            priority: Priority(0),
            duplicate: false,
            sites: Vec::new(),
        }],
        latest: latest.map(|(local_rank, waited)| Latest { local_rank, waited }),
    }
}

fn ready(engine: &mut Engine, node: u64, announcements: Vec<Announcement>, now: Duration) -> Waits {
    engine.step(Event::Ready { connection: ConnectionId(node), announcements }, now);
    engine.step(Event::Drained, now).measures.waits
}

/// Rank 0 submits at 0 ms, rank 1 of the same node at 99 ms, rank 2 of another node at 100 ms.
#[test]
fn a_wait_begins_with_the_first_rank() {
    let mut engine = engine(&[2, 1]);
    ready(&mut engine, 0, vec![by("t", 0, &[0, 1], &sum(), Some((1, ms(99))))], ms(99));
    let waits = ready(&mut engine, 1, vec![by("t", 0, &[2], &sum(), None)], ms(100));
    assert_eq!(waits.of_tensors, [ms(100)]);
    assert_eq!(waits.ranks[&Rank(2)].time, ms(100));
    // The next round of the tensor starts anew.
    ready(&mut engine, 0, vec![by("t", 0, &[0, 1], &sum(), Some((0, ms(0))))], ms(200));
    let waits = ready(&mut engine, 1, vec![by("t", 0, &[2], &sum(), None)], ms(203));
    assert_eq!(waits.of_tensors, [ms(3)]);
}

/// Rank 2 is 50 ms late with `a`. Rank 1 is the last one with `b`, 2 ms after rank 2.
#[test]
fn each_tensor_has_its_own_last_rank() {
    let mut engine = engine(&[1, 2]);
    ready(&mut engine, 0, vec![by("a", 0, &[0], &sum(), None)], ms(50));
    ready(&mut engine, 0, vec![by("b", 0, &[0], &sum(), None)], ms(100));
    let both = vec![
        by("a", 0, &[1, 2], &sum(), Some((1, ms(50)))),
        by("b", 0, &[1, 2], &sum(), Some((0, ms(2)))),
    ];
    let waits = ready(&mut engine, 1, both, ms(102));
    assert_eq!(waits.of_tensors, [ms(52), ms(2)]);
    assert_eq!((waits.ranks[&Rank(2)].tensors, waits.ranks[&Rank(1)].tensors), (1, 1));
}

/// Rank 3 is late with a tensor of all ranks. It is not a member of the set whose tensor is in the
/// same message, whatever its node says (TRUST).
#[test]
fn the_last_rank_is_a_member_of_the_set() {
    for latest in [None, Some((0, ms(0))), Some((1, ms(40)))] {
        let mut engine = engine(&[2, 2]);
        let mut add = Request::empty(Collective::AddProcessSet);
        add.list = vec![0, 2];
        ready(&mut engine, 0, vec![by("p", 0, &[0, 1], &add, None)], ms(1));
        ready(&mut engine, 1, vec![by("p", 0, &[2, 3], &add, None)], ms(1));
        ready(&mut engine, 0, vec![by("s", 1, &[0], &sum(), None)], ms(10));
        let both =
            vec![by("w", 0, &[2, 3], &sum(), Some((1, ms(40)))), by("s", 1, &[2], &sum(), latest)];
        let waits = ready(&mut engine, 1, both, ms(50));
        assert!(!waits.ranks.contains_key(&Rank(3)), "{waits:?}");
        assert_eq!(waits.ranks.contains_key(&Rank(2)), latest == Some((0, ms(0))), "{waits:?}");
    }
}
