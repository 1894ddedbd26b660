use gradwire_collectives::Algorithm;
use gradwire_proto::{
    Agreed, Collective, DType, FailureKind, ReduceOp, Shape, SpecId, TensorName, convert::TensorRef,
};

use super::*;
use crate::model::{
    command::Segment,
    plan::{MAX_FLOWS, MAX_SEGMENTS},
};

fn executes(execute: Execute) -> Vec<pb::Execute> {
    let messages = super::execute(execute).into_iter();
    let part = |message: Arc<Broadcast>| {
        let bytes = message.encoded_len();
        assert!(bytes <= MAX_CONTROL_MESSAGE, "BOUND: {bytes}");
        let Some(Message::Execute(part)) = message.into_message().message else {
            panic!("expected an Execute message")
        };
        part
    };
    messages.map(part).collect()
}

fn worst(sequence: u64, request: &Request, segments: Vec<Segment>) -> Operation {
    Operation {
        sequence: Sequence(sequence),
        set: ProcessSetId::GLOBAL,
        request: request.clone(),
        spec: KnownSpec { id: SpecId(1), spec: Algorithm::DoubleTree.into() },
        segments,
        absent: (0..100_000).map(Rank).collect(),
        quantized: true,
        chunk: Some(4 << 20),
    }
}

#[test]
fn long_answers_are_split_in_order() {
    let shape = Shape::new(&[1]).unwrap();
    let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
    let agreed = Arc::new(Agreed::from_parts(request.clone(), Vec::new()));
    let names: Vec<_> =
        (0..9000).map(|n| TensorName::new(&format!("{n:0>1024}")).unwrap()).collect();
    let registrations = (0..).zip(&names).map(|(id, name)| Registration {
        id: TensorId(id),
        set: ProcessSetId::GLOBAL,
        name: name.clone(),
        agreed: Arc::clone(&agreed),
        priority: Priority(-1),
    });
    let segment = |name: &TensorName, agreed: &Arc<Agreed>| Segment {
        tensor: TensorRef::Name(name.clone()),
        part: u32::MAX,
        offset: u64::MAX,
        count: u64::MAX,
        agreed: Some(Arc::clone(agreed)),
    };
    // The largest operations: one with as many names as fit, and two with as many rows.
    let many = names[..MAX_SEGMENTS].iter().map(|name| segment(name, &agreed));
    let rows = Agreed::from_parts(request.clone(), vec![1 << 53; MAX_FLOWS]);
    let long = segment(&names[0], &Arc::new(rows));
    let operations = [
        worst(1, &request, many.collect()),
        worst(2, &request, vec![long.clone()]),
        worst(3, &request, vec![long]),
    ];
    let tensor = || TensorRef::Name(names[0].clone());
    let messages = executes(Execute {
        sets_created: vec![SetCreated {
            set: ProcessSetId(1),
            ranks: vec![Rank(7)],
            tensor: tensor(),
        }],
        registrations: registrations.collect(),
        operations: operations.to_vec(),
        specs: vec![KnownSpec { id: SpecId(1), spec: Algorithm::DoubleTree.into() }],
        failures: Vec::new(),
        joined: vec![Joined { set: ProcessSetId(4), last: Rank(3) }],
        sets_removed: vec![SetRemoved { set: ProcessSetId(2), tensor: tensor() }],
        evicted: vec![TensorId(u32::MAX)],
        probes: Vec::new(),
        links: Links::new(vec![1000; 3], 0, vec![1, 2, 3]),
        arrangement: Some(Arrangement {
            racks: vec![0; 4096],
            order: (0..4096).rev().collect(),
            reason: "the links".to_owned(),
        }),
        number: 7,
    });
    assert!(messages.len() > 4, "{}", messages.len());
    let (mut ids, mut sequences) = (Vec::new(), Vec::new());
    for part in &messages {
        let has_ids =
            !part.registrations.is_empty() || !part.specs.is_empty() || part.links.is_some();
        assert!(!has_ids || sequences.is_empty(), "ids come first");
        ids.extend(part.registrations.iter().map(|r| r.id));
        sequences.extend(part.operations.iter().map(|o| o.sequence));
    }
    assert!(ids.into_iter().eq(0..9000));
    assert_eq!(sequences, [1, 2, 3]);
    assert_eq!(messages.iter().filter_map(|part| part.links.as_ref()).count(), 1);
    let specs: Vec<_> = messages.iter().flat_map(|part| &part.specs).collect();
    assert_eq!((specs.len(), &specs[0].text[..]), (1, "double-tree"));
    let numbers: Vec<u64> = messages.iter().rev().map(|part| part.number).collect();
    assert!(numbers[0] == 7 && numbers[1..].iter().all(|number| *number == 0));
    let (first, last) = (messages.first().unwrap(), messages.last().unwrap());
    let arranged = first.arrangement.as_ref().expect("it comes before the operations");
    assert_eq!((arranged.racks.len(), arranged.order[0]), (4096, 4095));
    assert!(messages[1..].iter().all(|part| part.arrangement.is_none()));
    assert_eq!(
        (first.sets_created[0].process_set, &first.sets_created[0].ranks[..]),
        (1, &[7][..])
    );
    assert_eq!((last.joined[0].process_set, last.joined[0].last_rank), (4, 3));
    assert_eq!(last.sets_removed[0].process_set, 2);
    assert_eq!(last.evicted, [u32::MAX]);
    assert!(execute(Execute::default()).is_empty());
}

#[test]
fn an_operation_survives_the_wire() {
    let shape = Shape::new(&[0, 2]).unwrap();
    let request = Request::plain(Collective::Allgather, DType::F16, shape);
    let agreed = Agreed::from_parts(request.clone(), vec![1, 0]);
    let segment = Segment {
        tensor: TensorRef::Name(TensorName::new("w").unwrap()),
        part: 1,
        offset: 2,
        count: 3,
        agreed: Some(Arc::new(agreed.clone())),
    };
    let operation = Operation { absent: [Rank(2)].into(), ..worst(1, &request, vec![segment]) };
    let wire = executes(Execute { operations: vec![operation], ..Execute::default() });
    let operation = &wire[0].operations[0];
    assert_eq!(operation.absent, [2]);
    let segment = &operation.segments[0];
    assert_eq!((segment.part, segment.offset, segment.count), (1, 2, 3));
    assert_eq!(Agreed::try_from(segment.agreed.clone().unwrap()), Ok(agreed));
}

#[test]
fn a_long_report_is_cut() {
    let what = "ä".repeat(MAX_FAILURE_TEXT);
    let wire = pb::Failure::from(Failure::new(FailureKind::WorkerLost, what));
    assert_eq!(failure(wire).what.chars().count(), MAX_FAILURE_TEXT / 2 + 1);
}

fn heartbeat(report: pb::Report) -> Result<Incoming, WireError> {
    let beat = pb::Heartbeat { report: Some(report), ..pb::Heartbeat::default() };
    let message = Some(pb::node_message::Message::Heartbeat(beat));
    incoming(ConnectionId(0), pb::NodeMessage { message })
}

/// TRUST and BOUND: a node's report is checked before it is shown.
#[test]
fn a_report_is_checked() {
    let good = pb::Report {
        rank_steps: vec![7],
        rank_step_seconds: vec![0.5],
        rank_exposed: vec![0.25],
        rank_since_step_seconds: vec![0.0],
        rank_blocked: vec![51, 0, 0, 255],
        peers: vec![1],
        sent_bytes_per_second: vec![1e9],
        received_bytes_per_second: vec![0.0],
        ..pb::Report::default()
    };
    let Ok(Incoming::Heartbeat { report: Some(report), .. }) = heartbeat(good.clone()) else {
        panic!("expected a report")
    };
    assert_eq!(
        (report.ranks[0].steps, report.peers[0].node, report.line_bytes_per_second),
        (7, 1, None)
    );
    let blocked = report.ranks[0].blocked.unwrap();
    assert_eq!((blocked.gather, blocked.negotiate, blocked.publish), (0.2, 0.0, 1.0));
    let long = vec![0; 300];
    let rates = vec![0.0; 300];
    for (bad, why) in [
        (pb::Report { rank_steps: vec![1, 2], ..good.clone() }, "differ in length"),
        (pb::Report { peers: Vec::new(), ..good.clone() }, "differ in length"),
        (pb::Report { rank_blocked: vec![1; 5], ..good.clone() }, "differ in length"),
        (pb::Report { operations_per_second: -2.0, ..good.clone() }, "rate -2"),
        (pb::Report { rank_exposed: vec![f32::NAN], ..good.clone() }, "rate NaN"),
        (pb::Report { sent_bytes_per_second: vec![-1.0], ..good.clone() }, "rate -1"),
        (pb::Report { rank_step_seconds: vec![f32::INFINITY], ..good }, "rate inf"),
        (
            pb::Report {
                peers: long,
                sent_bytes_per_second: rates.clone(),
                received_bytes_per_second: rates,
                ..pb::Report::default()
            },
            "more than 2048",
        ),
    ] {
        let error = heartbeat(bad).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}
