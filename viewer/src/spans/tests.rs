use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::pb::TraceBatch;
use gradwire_services::otlp::trace::v1::Span;
use gradwire_telemetry::otlp::number_attribute;
use gradwire_tests::sample;
use gradwire_trace::Kind;

use super::{
    message::{Origin, requests},
    step::{MAX_HELD, Sampled, Steps},
};
use crate::trace::{
    found::{Slice, What},
    join::Joiner,
    recorded::{self, CONTROL, LANE_0, Recorded, recorded},
};

/// The events of a rank with this local number, and of its node, for a step with one tensor that
/// begins at this time.
fn life(local: u32, step: u64, at_ns: u64) -> Vec<Recorded> {
    let (track, peer, operation) = (2 * local + 2, 0, 10 * step);
    let order = recorded(Kind::Order, CONTROL, at_ns + 2_000, 1_000, operation);
    let moved = |kind, after, took| {
        recorded(kind, LANE_0, at_ns + after, took, operation).other(peer).bytes(64)
    };
    vec![
        recorded(Kind::Step, track, at_ns, 0, step - 1),
        recorded(Kind::Submit, track, at_ns + 1_000, 500, step),
        recorded(Kind::Wait, track, at_ns + 4_000, 4_000, step),
        recorded(Kind::Read, CONTROL, at_ns + 1_700, 0, step).name(1),
        recorded(Kind::Gather, CONTROL, at_ns + 1_700, 301, 0).name(1),
        order.name(1).bytes(step),
        recorded(Kind::Queue, LANE_0, at_ns + 3_000, 100, operation),
        moved(Kind::Reduce, 3_100, 400),
        moved(Kind::Send, 3_500, 300),
        moved(Kind::Receive, 4_000, 900),
        recorded(Kind::Publish, LANE_0, at_ns + 5_000, 600, operation),
        recorded(Kind::Piece, CONTROL, at_ns + 3_000, 2_500, operation),
        recorded(Kind::Complete, CONTROL, at_ns + 5_400, 0, step),
        recorded(Kind::Step, track, at_ns + 9_000, 0, step),
    ]
}

/// A batch of a node, with events about its peer and its first rank.
fn batch(node: u32, mut events: Vec<Recorded>) -> TraceBatch {
    for Recorded { event, .. } in &mut events {
        match event.kind {
            Kind::Send | Kind::Receive => event.other = 1 - node,
            Kind::Read | Kind::Complete | Kind::Order => event.other = 2 * node,
            _ => {}
        }
    }
    recorded::batch(node, "grad", &events)
}

/// The job of the sample with one rank for each of its nodes.
fn job(every: u64) -> (Joiner, Steps, Origin) {
    let mut status = sample::status(0);
    status.nodes.iter_mut().for_each(|node| node.slots = 1);
    let joiner = Joiner::new(&status);
    let steps = Steps::new(every, joiner.hosts());
    let hosts = joiner.hosts().to_vec();
    (joiner, steps, Origin { job: "j1".to_owned(), epoch: 1, version: "1", hosts })
}

fn at(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn add(joiner: &mut Joiner, steps: &mut Steps, batch: TraceBatch, ms: u64) {
    joiner.add(batch, |_, _| true);
    steps.add(joiner.take(), at(ms));
}

fn spans(step: &Sampled, origin: &Origin) -> Vec<Span> {
    let resources = requests(step, origin).into_iter().flat_map(|one| one.resource_spans);
    resources.flat_map(|one| one.scope_spans).flat_map(|one| one.spans).collect()
}

/// Checks that a trace has one root and unique ids, and that children are within their parents.
fn check(spans: &[Span]) {
    let by_id: BTreeMap<&[u8], &Span> =
        spans.iter().map(|span| (&span.span_id[..], span)).collect();
    assert_eq!(by_id.len(), spans.len());
    let roots = spans.iter().filter(|span| span.parent_span_id.is_empty()).count();
    assert_eq!(roots, 1);
    for span in spans {
        assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
        assert_eq!(span.trace_id, spans[0].trace_id);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        for link in &span.links {
            assert!(by_id.contains_key(&link.span_id[..]), "{span:?}");
        }
        if span.parent_span_id.is_empty() {
            continue;
        }
        let parent = by_id[&span.parent_span_id[..]];
        assert!(parent.start_time_unix_nano <= span.start_time_unix_nano, "{span:?} {parent:?}");
        assert!(parent.end_time_unix_nano >= span.end_time_unix_nano, "{span:?} {parent:?}");
    }
}

#[test]
fn a_step_is_one_trace_of_all_ranks() {
    let (mut joiner, mut steps, origin) = job(100);
    for (node, at_ns) in [(0, 10_000), (1, 10_500)] {
        add(&mut joiner, &mut steps, batch(node, life(0, 100, at_ns)), 5);
        assert_eq!(steps.goes_on(), node == 0);
    }
    assert!(steps.finish(at(200)).is_empty(), "events may arrive late");
    let whole = steps.finish(at(400));
    assert_eq!((whole.len(), whole[0].number, steps.is_open()), (1, 100, false));
    let all = spans(&whole[0], &origin);
    check(&all);
    let one = |name: &str| {
        let found: Vec<&Span> = all.iter().filter(|span| span.name == name).collect();
        assert_eq!(found.len(), 1, "{name}: {all:#?}");
        found[0]
    };
    let root = one("step 100");
    assert_eq!((root.start_time_unix_nano, root.end_time_unix_nano), (10_000, 19_500));
    for rank in ["rank 0", "rank 2"] {
        assert_eq!(one(rank).parent_span_id, root.span_id);
    }
    let of = |parent: &Span, name: &str| {
        let is_it = |span: &&Span| span.parent_span_id == parent.span_id && span.name == name;
        let found: Vec<Span> = all.iter().filter(is_it).cloned().collect();
        assert_eq!(found.len(), 1, "{name}: {all:#?}");
        found[0].clone()
    };
    // Before the wait, and after it.
    let computes = all.iter().filter(|span| span.name == "compute");
    let took = |span: &Span| span.end_time_unix_nano - span.start_time_unix_nano;
    assert_eq!(computes.map(took).collect::<Vec<_>>(), [4_000, 1_000, 4_000, 1_000]);
    let mut received = Vec::new();
    for (rank, node, host) in [("rank 0", 0, "a"), ("rank 2", 1, "b")] {
        let submit = of(one(rank), "submit grad");
        of(&of(one(rank), "wait grad"), "wake-up");
        let node_span = one(&format!("node {host}"));
        assert_eq!(node_span.parent_span_id, root.span_id);
        for what in ["gather", "negotiate"] {
            of(node_span, &format!("{what} grad"));
        }
        let piece = of(node_span, "piece grad");
        let ids: Vec<&[u8]> = piece.links.iter().map(|link| &link.span_id[..]).collect();
        assert!(ids.contains(&&submit.span_id[..]), "node {node}");
        // It lasts as long as a lane works on it.
        assert_eq!(took(&piece), 2_600);
        for what in ["queue", "reduce", "send", "publish"] {
            of(&piece, &format!("{what} grad"));
        }
        received.push((of(&piece, "receive grad"), of(&piece, "send grad")));
        assert!(
            received[node].0.attributes.contains(&number_attribute("gradwire.operation", 1000))
        );
    }
    assert_eq!(received[0].0.links[0].span_id, received[1].1.span_id);
    assert_eq!(received[1].0.links[0].span_id, received[0].1.span_id);
    // The same step of another job has another trace.
    let other = spans(&whole[0], &Origin { job: "j2".to_owned(), ..origin.clone() });
    assert_ne!(other[0].trace_id, all[0].trace_id);
}

/// The events of a rank are in order, and so are those of its daemon, but not across the two.
#[test]
fn the_order_of_batches_changes_nothing() {
    let names = |merge: &dyn Fn(Vec<Recorded>, Vec<Recorded>) -> Vec<Recorded>| {
        let (mut joiner, mut steps, origin) = job(100);
        for (node, at_ns) in [(1, 10_500), (0, 10_000)] {
            let is_of_rank = |event: &Recorded| event.track == 2;
            let (rank, daemon) = life(0, 100, at_ns).into_iter().partition(is_of_rank);
            for event in merge(rank, daemon) {
                add(&mut joiner, &mut steps, batch(node, vec![event]), 5);
            }
        }
        let whole = steps.finish(at(400));
        let all = spans(&whole[0], &origin);
        check(&all);
        let mut names: Vec<_> = all.into_iter().map(|span| (span.name, span.links.len())).collect();
        names.sort();
        names
    };
    let expected = names(&|rank, daemon| [rank, daemon].concat());
    assert_eq!(names(&|rank, daemon| [daemon, rank].concat()), expected);
    for first in 0..4 {
        let merged = names(&|rank, daemon| {
            let (begin, end) = rank.split_at(first);
            [begin, &daemon, end].concat()
        });
        assert_eq!(merged, expected, "after {first} events of the rank");
    }
}

#[test]
fn each_sampled_step_has_its_own_events() {
    let (mut joiner, mut steps, origin) = job(1);
    for step in 2..6 {
        for (node, at_ns) in [(0, 10_000 * step), (1, 10_000 * step + 3)] {
            let mut events = life(0, step, at_ns);
            // A step ends when the next one begins.
            events.pop();
            add(&mut joiner, &mut steps, batch(node, events), step);
        }
    }
    for node in [0, 1] {
        let end = recorded(Kind::Step, 2, 70_000, 0, 5);
        add(&mut joiner, &mut steps, batch(node, vec![end]), 6);
    }
    let whole = steps.finish(at(400));
    assert_eq!(whole.iter().map(|step| step.number).collect::<Vec<_>>(), [2, 3, 4, 5]);
    for step in &whole {
        let all = spans(step, &origin);
        check(&all);
        let operations = step.nodes.values().flatten().filter_map(|slice| slice.operation);
        assert!(operations.into_iter().all(|operation| operation == 10 * step.number));
        let gathers = step.nodes.values().flatten().filter(|slice| slice.what == What::Gather);
        assert_eq!(gathers.count(), 2);
    }
    assert!(steps.goes_on(), "the next one has begun");
    assert!(steps.end().is_empty(), "and has not ended");
}

#[test]
fn an_incomplete_step_is_left_out() {
    let (mut joiner, mut steps, _) = job(100);
    let mut events = life(0, 100, 10_000);
    add(&mut joiner, &mut steps, batch(0, events.clone()), 0);
    assert!(steps.finish(at(5_000)).is_empty() && steps.goes_on());
    // The other rank has begun, and never ends.
    events.pop();
    add(&mut joiner, &mut steps, batch(1, events), 5_000);
    assert!(steps.finish(at(16_000)).is_empty() && !steps.is_open() && !steps.goes_on());
    // The wait for a rank without steps is limited.
    add(&mut joiner, &mut steps, batch(0, life(0, 200, 100_000)), 20_000);
    assert!(steps.finish(at(25_000)).is_empty());
    let whole = steps.finish(at(31_000));
    assert_eq!((whole.len(), whole[0].ranks.len()), (1, 1));
    // A step with an unknown begin is ignored.
    add(&mut joiner, &mut steps, batch(0, vec![recorded(Kind::Step, 2, 1 << 30, 0, 300)]), 40_000);
    assert!(!steps.is_open());
}

/// Events that a node sent while its clock was hardly known keep their error.
#[test]
fn a_step_has_the_worst_error_of_the_clocks() {
    let (mut joiner, mut steps, _) = job(100);
    let errors = [(0, 900_000), (40, 70_000), (60, 50), (3_000, 50)];
    let note = |steps: &mut Steps, joiner: &Joiner, until: u64| {
        for (ms, error_ns) in errors.into_iter().filter(|(ms, _)| *ms <= until) {
            steps.note_missing(joiner.lost(), error_ns, at(ms));
        }
    };
    note(&mut steps, &joiner, 60);
    for (node, at_ns) in [(0, 10_000), (1, 10_500)] {
        add(&mut joiner, &mut steps, batch(node, life(0, 100, at_ns)), 70);
    }
    steps.note_missing(joiner.lost(), 50, at(80));
    assert_eq!(steps.finish(at(400))[0].error_ns, 900_000);
    // Long after, that error is forgotten.
    note(&mut steps, &joiner, 3_000);
    for (node, at_ns) in [(0, 1 << 30), (1, 1 << 30)] {
        add(&mut joiner, &mut steps, batch(node, life(0, 200, at_ns)), 3_010);
    }
    steps.note_missing(joiner.lost(), 50, at(3_020));
    assert_eq!(steps.finish(at(3_400))[0].error_ns, 50);
}

#[test]
fn held_slices_and_messages_are_bounded() {
    let (mut joiner, mut steps, origin) = job(100);
    let begin = recorded(Kind::Step, 2, 1_000, 0, 99);
    add(&mut joiner, &mut steps, batch(0, vec![begin]), 0);
    let submits = (0..MAX_HELD as u64 + 10).map(|ticket| {
        let submit = recorded(Kind::Submit, 2, 2_000 + ticket, 1, ticket);
        let read = recorded(Kind::Read, CONTROL, 2_000, 0, ticket).name(1);
        vec![submit, read]
    });
    add(&mut joiner, &mut steps, batch(0, submits.flatten().collect()), 0);
    let end = recorded(Kind::Step, 2, 1 << 30, 0, 100);
    add(&mut joiner, &mut steps, batch(0, vec![end]), 0);
    let whole = steps.end();
    let slices: Vec<&Slice> = whole[0].ranks[&0].slices.iter().collect();
    assert_eq!((slices.len(), whole[0].left_out), (MAX_HELD, 10), "BOUND");
    let messages = requests(&whole[0], &origin);
    assert!(messages.len() > MAX_HELD / 2048 && messages.len() <= MAX_HELD / 2048 + 1);
    for message in &messages {
        let bytes = prost::Message::encoded_len(message);
        assert!(bytes < 4 << 20, "{bytes}");
    }
    check(&spans(&whole[0], &origin));
}
