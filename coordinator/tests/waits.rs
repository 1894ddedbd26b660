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

/// The report of a node on a tensor that only some of its ranks have submitted.
fn partly(submitted: &[u32], missing: &[u32], waiting_ms: u64) -> pb::NodeReport {
    let tensor = pb::PartlySubmitted {
        process_set: 0,
        name: "w".to_owned(),
        waiting_ms,
        submitted: submitted.to_vec(),
        missing: missing.to_vec(),
        is_pair: false,
    };
    pb::NodeReport { partly: vec![tensor], ..pb::NodeReport::default() }
}

/// Nodes with ranks 0 and 1, and 2 and 3. The first one has announced the tensor.
#[test]
fn the_status_names_ranks_and_not_nodes() {
    let mut engine = engine(&[2, 2]);
    ready(&mut engine, 0, vec![by("w", 0, &[0, 1], &sum(), None)], ms(100));
    let shown = |reports: &[(u32, pb::NodeReport)]| {
        let status = engine.status(&reports.iter().cloned().collect(), ms(2100));
        let pending = status.pending.iter().map(|it| (it.waiting_ms, it.missing_ranks.clone()));
        (pending.collect::<Vec<_>>(), status.pending_count)
    };
    assert_eq!(shown(&[]), (vec![(2000, vec![2, 3])], 1));
    assert_eq!(shown(&[(1, partly(&[2], &[3], 2050))]), (vec![(2050, vec![3])], 1));
    // TRUST: a node knows only its own ranks.
    assert_eq!(shown(&[(1, partly(&[0, 2], &[1, 3], 1500))]), (vec![(2000, vec![3])], 1));
    assert_eq!(shown(&[(7, partly(&[2], &[3], 2050))]), (vec![(2000, vec![2, 3])], 1));
}

#[test]
fn the_status_has_waits_inside_nodes() {
    let engine = engine(&[2, 2]);
    let report = pb::NodeReport { more_partly: 4, ..partly(&[0], &[1], 5000) };
    let reports = [(0, report), (1, partly(&[2], &[3], 4000))].into();
    let status = engine.status(&reports, ms(6000));
    assert_eq!(status.pending.len(), 1);
    let pending = &status.pending[0];
    assert_eq!((pending.waiting_ms, pending.missing_ranks.as_slice()), (5000, [1, 3].as_slice()));
    assert_eq!(status.pending_count, 5);
}

/// A wait for one rank is seen while it lasts, and counts once.
#[test]
fn waits_that_last_count() {
    let mut engine = engine(&[2, 1]);
    ready(&mut engine, 1, vec![by("w", 0, &[2], &sum(), None)], ms(100));
    let counted = |engine: &mut Engine, reports: &[(u32, pb::NodeReport)], now| {
        engine.count_lasting(&reports.iter().cloned().collect(), now);
        let waits = engine.step(Event::Drained, now).measures.waits;
        let ranks = waits.ranks.iter().map(|(rank, wait)| (rank.0, wait.time));
        (ranks.collect::<Vec<_>>(), waits.nodes.into_values().collect::<Vec<_>>())
    };
    assert_eq!(counted(&mut engine, &[], ms(1000)), (vec![], vec![]), "short");
    assert_eq!(counted(&mut engine, &[], ms(2000)), (vec![], vec![ms(1900)]), "two ranks");
    let report = [(0, partly(&[0], &[1], 2500))];
    assert_eq!(counted(&mut engine, &report, ms(3000)), (vec![(1, ms(2900))], vec![ms(1000)]));
    let last = Some((1, ms(3600)));
    let waits = ready(&mut engine, 0, vec![by("w", 0, &[0, 1], &sum(), last)], ms(4000));
    let time = waits.ranks.values().map(|wait| (wait.time, wait.tensors)).collect::<Vec<_>>();
    assert_eq!(time, [(ms(1000), 1)]);
}

/// No node has announced it: it may have ended since the report.
#[test]
fn waits_inside_a_node_count_to_the_report() {
    let mut engine = engine(&[2]);
    for (now, time) in [(9000, 2000), (9500, 500)] {
        let age_ms = 700;
        let report = pb::NodeReport { age_ms, ..partly(&[0], &[1], now - age_ms - 6300) };
        engine.count_lasting(&[(0, report)].into(), ms(now));
        let waits = engine.step(Event::Drained, ms(now)).measures.waits;
        assert_eq!((waits.ranks[&Rank(1)].time, waits.nodes.len()), (ms(time), 0));
    }
}
