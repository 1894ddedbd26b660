use std::collections::BTreeMap;

use gradwire_proto::pb::{TraceBatch, TraceTrack};
use gradwire_tests::sample;
use gradwire_trace::{Kind, event::BYTES};
use serde_json::Value;

use super::{
    chrome::arrow_id,
    file::Trace,
    join::{Lost, MAX_KNOWN},
    recorded::{self, CONTROL, LANE_0, Recorded, recorded},
};

fn batch(node: u32, events: Vec<Recorded>) -> TraceBatch {
    recorded::batch(node, "grad/\"0\"<b>", &events)
}

/// The written file as JSON, and the lost events.
fn written(batches: Vec<TraceBatch>) -> (Vec<Value>, Lost) {
    let status = sample::status(0);
    let (mut trace, mut out) = (Trace::new(&status), Vec::new());
    trace.begin(&status, &mut out);
    for batch in batches {
        trace.add(batch, |_, _| true, &mut out);
    }
    trace.end(&mut out);
    let all: Vec<Value> = serde_json::from_slice(&out).expect("it is JSON");
    (all, trace.joiner().lost())
}

fn named<'a>(all: &'a [Value], phase: &str, name: &str) -> Vec<&'a Value> {
    all.iter().filter(|line| line["ph"] == phase && line["name"] == name).collect()
}

/// A tensor of rank 0, from its submission to its end, on node 0 with a peer.
fn life() -> Vec<Recorded> {
    let order = recorded(Kind::Order, CONTROL, 2_000, 1_000, 7);
    vec![
        recorded(Kind::Submit, 2, 1_000, 500, 42),
        recorded(Kind::Wait, 2, 4_000, 6_000, 42),
        recorded(Kind::Read, CONTROL, 1_700, 0, 42).name(1),
        recorded(Kind::Gather, CONTROL, 1_700, 300, 0).name(1),
        order.name(1).bytes(42),
        recorded(Kind::Queue, LANE_0, 3_000, 100, 7),
        recorded(Kind::Reduce, LANE_0, 3_100, 400, 7).bytes(64),
        recorded(Kind::Send, LANE_0, 3_500, 300, 7).other(1).bytes(64),
        recorded(Kind::Receive, LANE_0, 4_000, 900, 7).other(1).bytes(64),
        recorded(Kind::Publish, LANE_0, 5_000, 500, 7),
        recorded(Kind::Piece, CONTROL, 3_000, 2_500, 7),
        recorded(Kind::Complete, CONTROL, 5_400, 0, 42),
    ]
}

#[test]
fn a_tensor_is_followed_from_rank_to_rank() {
    let (all, lost) = written(vec![batch(0, life())]);
    assert_eq!(lost, Lost::default());
    let title = "grad/\"0\"<b>";
    let one = |phase: &str, name: &str| {
        let found = named(&all, phase, name);
        assert_eq!(found.len(), 1, "{phase} {name}: {all:#?}");
        found[0].clone()
    };
    let submit = one("X", &format!("submit {title}"));
    assert_eq!((&submit["ts"], &submit["dur"]), (&Value::from(1.0), &Value::from(0.5)));
    let wait = one("X", &format!("wait {title}"));
    assert_eq!((&wait["pid"], &wait["tid"]), (&submit["pid"], &submit["tid"]));
    let woken = one("X", "wake-up");
    assert_eq!((&woken["ts"], &woken["dur"]), (&Value::from(5.4), &Value::from(4.6)));
    for phase in ["gather", "negotiate", "queue"] {
        one("b", &format!("{phase} {title}"));
        one("e", &format!("{phase} {title}"));
    }
    for doing in ["reduce", "send", "receive", "publish"] {
        let slice = one("X", &format!("{doing} {title}"));
        assert_eq!(slice["args"]["operation"], 7);
    }
    assert_eq!(one("X", &format!("send {title}"))["args"]["peer"], "b");
    // From the submission to the operation, and to and from the peer.
    assert_eq!(one("s", "submitted")["id"], one("f", "submitted")["id"]);
    assert_eq!(one("s", "message")["id"], arrow_id("p7.0.1"));
    assert_eq!(one("f", "message")["id"], arrow_id("p7.1.0"));
}

/// A lane that was stopped before it saw the order has a slice that begins before the submission.
#[test]
fn an_arrow_arrives_after_it_left() {
    let mut life = life();
    for Recorded { event, .. } in &mut life {
        if event.kind == Kind::Reduce {
            (event.at_ns, event.duration_ns) = (200, 3_300);
        }
    }
    let (all, _) = written(vec![batch(0, life)]);
    let at = |phase: &str| named(&all, phase, "submitted")[0]["ts"].as_f64();
    assert_eq!((at("s"), at("f")), (Some(1.0), Some(3.499)));
}

/// The known first message may have arrived before the known first one left.
#[test]
fn lost_events_take_arrows_of_messages() {
    let parts = |lost: [u64; 3]| {
        let life = life();
        let (early, rest) = life.split_at(5);
        let (moved, late) = rest.split_at(4);
        let parts = [early, moved, late].map(|part| batch(0, part.to_vec()));
        parts.into_iter().zip(lost).map(|(part, lost)| TraceBatch { lost, ..part }).collect()
    };
    for (lost, arrows) in [([0, 0, 0], 1), ([1, 0, 0], 0), ([0, 1, 0], 0), ([0, 0, 1], 1)] {
        let (all, _) = written(parts(lost));
        for phase in ["s", "f"] {
            assert_eq!(named(&all, phase, "message").len(), arrows, "{lost:?}");
        }
        assert_eq!(named(&all, "f", "submitted").len(), 1, "{lost:?}");
    }
}

/// Perfetto drops events before 0.
#[test]
fn no_time_is_before_0() {
    let second = 1_000_000_000;
    let wait =
        |at: u64, took: u64, ticket| recorded(Kind::Wait, 2, at * second, took * second, ticket);
    let (all, _) = written(vec![batch(0, vec![wait(10, 1, 1), wait(2, 3, 2), wait(6, 5, 3)])]);
    let waits = all.iter().filter(|line| line["name"].as_str().unwrap().starts_with("wait"));
    let times: Vec<_> = waits.map(|line| (line["ts"].as_f64(), line["dur"].as_f64())).collect();
    let seconds = |at: f64, took: f64| (Some(at * 1e6), Some(took * 1e6));
    assert_eq!(times, [seconds(1.0, 1.0), seconds(0.0, 0.0), seconds(0.0, 2.0)]);
}

/// Related events may come in any order; at the end nothing is missing.
#[test]
fn the_order_of_events_changes_only_titles() {
    let mut life = life();
    let count = |events: Vec<Recorded>| {
        let mut kinds = BTreeMap::new();
        // The names of operations are known only once they are ordered.
        for line in written(vec![batch(0, events)]).0 {
            *kinds.entry(line["ph"].to_string()).or_insert(0) += 1;
        }
        kinds
    };
    let expected = count(life.clone());
    for _ in 0..life.len() {
        life.rotate_left(1);
        let found = count(life.clone());
        for phase in ["\"X\"", "\"b\"", "\"e\""] {
            assert_eq!(found[phase], expected[phase], "{phase} of {life:?}");
        }
    }
    life.reverse();
    assert_eq!(count(life)["\"X\""], expected["\"X\""]);
}

#[test]
fn a_rank_computes_between_its_waits() {
    let wait = |at_ns, ticket| recorded(Kind::Wait, 2, at_ns, 1_000, ticket);
    let read = |ticket| recorded(Kind::Read, 0, 100, 0, ticket).name(1);
    let done = |ticket, at_ns| recorded(Kind::Complete, 0, at_ns, 0, ticket);
    let mut events = vec![read(1), read(2), done(1, 1_500), done(2, 5_100)];
    events.extend([wait(1_000, 1), recorded(Kind::Submit, 2, 3_000, 200, 2), wait(5_000, 2)]);
    let (all, _) = written(vec![batch(0, events)]);
    let compute = named(&all, "X", "compute");
    assert_eq!(compute.len(), 1);
    assert_eq!(compute[0]["dur"], 3.0);
    let mut slices: Vec<(f64, f64)> = all
        .iter()
        .filter(|line| line["ph"] == "X")
        .map(|line| (line["ts"].as_f64().unwrap(), line["dur"].as_f64().unwrap()))
        .collect();
    slices.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.total_cmp(&a.1)));
    for (index, (at, took)) in slices.iter().enumerate() {
        for (other, length) in &slices[index + 1..] {
            let end = other + length;
            assert!(*other >= at + took - 1e-9 || end <= at + took + 1e-9, "{slices:?}");
        }
    }
}

#[test]
fn later_pieces_wait_for_credit() {
    let order = |sequence, took_ns, rank| {
        recorded(Kind::Order, CONTROL, 1_000, took_ns, sequence).name(1).other(rank).bytes(9)
    };
    let events = vec![order(3, 500, 0), order(3, 500, 1), order(4, 900, 0), order(4, 900, 1)];
    let (all, _) = written(vec![batch(0, events)]);
    assert_eq!(named(&all, "b", "negotiate grad/\"0\"<b>").len(), 1);
    let credit = named(&all, "b", "credit grad/\"0\"<b>");
    assert_eq!((credit.len(), &credit[0]["ts"]), (1, &Value::from(1.5)));
}

#[test]
fn steps_have_their_own_track() {
    let step = |number, at_ns| recorded(Kind::Step, 4, at_ns, 0, number);
    let (all, _) = written(vec![batch(0, vec![step(8, 1_000), step(9, 4_000)])]);
    let slices = named(&all, "X", "step 9");
    assert_eq!((&slices[0]["pid"], &slices[0]["dur"]), (&100_001.into(), &Value::from(3.0)));
    assert!(named(&all, "X", "step 8").is_empty(), "its begin is unknown");
    let (all, _) = written(vec![batch(0, vec![step(8, 1_000), step(10, 4_000)])]);
    assert!(named(&all, "X", "step 10").is_empty(), "the end of step 9 is unknown");
}

#[test]
fn lost_events_are_shown_and_nonsense_is_not() {
    let events = vec![
        // A rank of another node.
        recorded(Kind::Wait, 2 * 9 + 2, 1, 1, 1),
        recorded(Kind::Complete, 0, 1, 0, 1).other(3),
        // An impossible time.
        recorded(Kind::Reduce, LANE_0, u64::MAX, u64::MAX, u64::MAX),
        recorded(Kind::Send, LANE_0, 0, u64::MAX, 0),
    ];
    let mut bad = batch(0, events);
    // A record of an unknown kind, and half a record.
    bad.tracks.push(TraceTrack { track: LANE_0, events: vec![99; BYTES + BYTES / 2] });
    bad.lost = 12;
    let (all, lost) = written(vec![bad, batch(77, life())]);
    assert_eq!(lost.events, 12);
    assert_eq!(named(&all, "i", "lost 12 events").len(), 1);
    assert!(all.iter().all(|line| line["name"] != "wake-up"), "TRUST");
    let last = all.last().unwrap();
    assert_eq!((&last["name"], &last["args"]["lost_events"]), (&"gradwire_end".into(), &12.into()));
}

#[test]
fn memory_is_bounded() {
    let status = sample::status(0);
    let (mut trace, mut out) = (Trace::new(&status), Vec::new());
    for ticket in 0..MAX_KNOWN as u64 + 100 {
        let order = recorded(Kind::Order, 0, ticket, 0, ticket);
        let events =
            vec![recorded(Kind::Submit, 2, ticket, 1, ticket), order.bytes(ticket + (1 << 40))];
        trace.add(batch(0, events), |_, _| true, &mut out);
        out.clear();
    }
    let (submissions, pieces) = trace.joiner().remembered();
    assert!(submissions <= MAX_KNOWN + 1 && pieces <= MAX_KNOWN + 1, "BOUND");
}
