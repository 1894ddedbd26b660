//! Steps of real jobs as spans at a real OpenTelemetry receiver.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use gradwire_tests::launched::{Launch, Report};
use opentelemetry_proto::tonic::{
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};

use crate::collector::{Collector, LIMIT};

/// All received spans, once the job is over.
fn spans(mut collector: Collector) -> Vec<Found> {
    let mut spans = Vec::new();
    for resource in collector.spans().into_iter().flat_map(|request| request.resource_spans) {
        let attributes = resource.resource.unwrap().attributes;
        let all = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        spans.extend(all.map(|span| Found { resource: attributes.clone(), span }));
    }
    spans
}

/// A span and its resource.
#[derive(Debug, Clone)]
struct Found {
    resource: Vec<KeyValue>,
    span: Span,
}

impl Found {
    fn times(&self) -> (u64, u64) {
        (self.span.start_time_unix_nano, self.span.end_time_unix_nano)
    }

    fn is(&self, what: &str) -> bool {
        self.span.name.split(' ').next() == Some(what)
    }

    fn number(&self, name: &str) -> Option<u64> {
        value(&self.span.attributes, name).or_else(|| value(&self.resource, name))
    }

    fn text(&self, name: &str) -> String {
        let found = self.resource.iter().chain(&self.span.attributes).find(|it| it.key == name);
        match found.and_then(|it| it.value.as_ref()?.value.as_ref()) {
            Some(Value::StringValue(text)) => text.clone(),
            other => panic!("{name}: {other:?} of {self:?}"),
        }
    }
}

fn value(attributes: &[KeyValue], name: &str) -> Option<u64> {
    match attributes.iter().find(|it| it.key == name)?.value.as_ref()?.value.as_ref()? {
        Value::IntValue(number) => u64::try_from(*number).ok(),
        _ => None,
    }
}

/// The spans of each step.
fn by_step(spans: Vec<Found>) -> BTreeMap<u64, Vec<Found>> {
    let mut traces: BTreeMap<Vec<u8>, Vec<Found>> = BTreeMap::new();
    for found in spans {
        traces.entry(found.span.trace_id.clone()).or_default().push(found);
    }
    let step = |trace: &[Found]| {
        let roots: Vec<_> = trace.iter().filter(|it| it.span.parent_span_id.is_empty()).collect();
        assert_eq!(roots.len(), 1, "{trace:#?}");
        assert!(roots[0].is("step"));
        roots[0].number("gradwire.step").unwrap()
    };
    traces.into_values().map(|trace| (step(&trace), trace)).collect()
}

/// Checks a step of all ranks: nesting, times, links, resources. Returns the number of spans of
/// each kind.
fn check(trace: &[Found], ranks: u64, hosts: &[&str], began_ns: u64) -> BTreeMap<String, usize> {
    let by_id: BTreeMap<&[u8], &Found> =
        trace.iter().map(|found| (&found.span.span_id[..], found)).collect();
    assert_eq!(by_id.len(), trace.len(), "ids are unique");
    let now_ns = now_ns();
    let mut kinds = BTreeMap::new();
    for found in trace {
        let (begin, end) = found.times();
        assert!(begin <= end && (began_ns..now_ns).contains(&begin) && end < now_ns, "{found:?}");
        *kinds.entry(found.span.name.split(' ').next().unwrap().to_owned()).or_insert(0) += 1;
        if let Some(parent) = by_id.get(&found.span.parent_span_id[..]) {
            let (since, until) = parent.times();
            assert!(since <= begin && end <= until, "{found:#?} is not within {parent:#?}");
        } else {
            assert!(found.span.parent_span_id.is_empty(), "{found:?} has no parent");
        }
    }
    // Each rank has its step, on its host, and the activities of a thread do not overlap.
    let steps: Vec<&Found> = trace.iter().filter(|found| found.is("rank")).collect();
    let found: BTreeSet<u64> = steps.iter().map(|step| step.number("rank").unwrap()).collect();
    assert_eq!(found, (0..ranks).collect());
    let root = trace.iter().find(|found| found.is("step")).unwrap();
    let each = ranks / hosts.len() as u64;
    for step in &steps {
        assert_eq!(step.span.parent_span_id, root.span.span_id);
        let rank = step.number("rank").unwrap();
        assert_eq!(step.text("host"), hosts[(rank / each) as usize]);
        assert_eq!(step.text("gradwire_job"), root.text("gradwire_job"));
        let own = trace.iter().filter(|found| found.span.parent_span_id == step.span.span_id);
        let own = own.filter(|found| found.is("wait") || found.is("compute"));
        let mut own: Vec<(u64, u64)> = own.map(Found::times).collect();
        own.sort_unstable();
        assert!(own.len() >= 2, "{step:?}");
        assert!(own.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{own:?}");
        // There are no gaps in its main thread.
        let covered: u64 = own.iter().map(|(begin, end)| end - begin).sum();
        assert_eq!(covered, step.times().1 - step.times().0);
    }
    links(trace, &by_id);
    kinds
}

/// Checks that a link leads to an earlier event, within the error of the clocks.
fn links(trace: &[Found], by_id: &BTreeMap<&[u8], &Found>) {
    let root = trace.iter().find(|found| found.is("step")).unwrap();
    let error = 2 * root.number("gradwire.clock_error_ns").unwrap();
    for found in trace {
        for link in &found.span.links {
            assert_eq!(link.trace_id, found.span.trace_id);
            let from = by_id[&link.span_id[..]];
            let (left, (_, arrived)) = (from.times().0, found.times());
            let before = left.saturating_sub(arrived);
            assert!(before <= error, "by {before} of {error} ns: {found:?} is before {from:?}");
            if found.is("piece") {
                assert!(from.is("submit"));
            } else {
                assert!(found.is("receive") && from.is("send"));
                assert_eq!(found.number("gradwire.operation"), from.number("gradwire.operation"));
                assert_eq!(found.text("gradwire.peer"), from.text("host"));
                assert_eq!(from.text("gradwire.peer"), found.text("host"));
            }
        }
    }
}

fn now_ns() -> u64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    u64::try_from(since.as_nanos()).unwrap()
}

/// `count` steps, each with a tensor of one piece and one of several.
fn steps(count: usize) -> Vec<&'static str> {
    let step = ["submit:1:500000", "loop:2:1000", "mark:1"];
    let all = std::iter::repeat_n(step, count).flatten();
    ["attach"].into_iter().chain(all).chain(["leave"]).collect()
}

fn sampled(every: u64) -> String {
    format!("otlp.sample_steps={every}")
}

fn complaints(report: &Report) -> usize {
    report.lines.iter().filter(|line| line.text.contains("can't be sent")).count()
}

#[test]
fn every_fourth_step_is_a_trace_of_all_ranks() {
    let (collector, began_ns) = (Collector::new(), now_ns());
    let launch = Launch::new().two_by_two().words(&["--verbose"]).set(&collector.setting);
    let launch = launch.set(&sampled(4)).set("data.lanes=2").set("negotiation.piece_bytes=256KiB");
    let report = launch.rank(&steps(14)).run();
    report.assert_code(0);
    assert_eq!(complaints(&report), 0, "{}", report.all());
    let traces = by_step(spans(collector));
    assert_eq!(traces.keys().copied().collect::<Vec<_>>(), [4, 8, 12]);
    for (step, trace) in &traces {
        let kinds = check(trace, 4, &["127.0.0.1", "127.0.0.2"], began_ns);
        println!("step {step}: {kinds:?}");
        // Two nodes; four ranks, each with three tensors. One of them has several pieces.
        for (kind, least) in [
            ("node", 2),
            ("submit", 12),
            ("wait", 12),
            ("compute", 4),
            ("gather", 6),
            ("negotiate", 6),
            ("credit", 2),
            ("piece", 8),
            ("queue", 8),
            ("reduce", 8),
            ("send", 8),
            ("receive", 8),
            ("publish", 8),
        ] {
            assert!(kinds[kind] >= least, "{kind} of {kinds:?}");
        }
        let linked =
            |what: &str| trace.iter().filter(|it| it.is(what) && !it.span.links.is_empty()).count();
        assert!(linked("piece") >= 8 && linked("receive") >= 8, "{trace:#?}");
        let root = trace.iter().find(|found| found.is("step")).unwrap();
        for missing in ["gradwire.lost_events", "gradwire.lost_batches", "gradwire.left_out"] {
            assert_eq!(root.number(missing), Some(0), "{missing}");
        }
    }
}

/// A short job ends right after its last step. The beginning of the first step is not known.
#[test]
fn every_step_of_a_short_job_may_be_sampled() {
    let (collector, began_ns) = (Collector::new(), now_ns());
    let launch = Launch::new().two_by_two().set(&collector.setting).set(&sampled(1));
    launch.rank(&steps(4)).run().assert_code(0);
    let traces = by_step(spans(collector));
    assert_eq!(traces.keys().copied().collect::<Vec<_>>(), [2, 3, 4]);
    for trace in traces.values() {
        check(trace, 4, &["127.0.0.1", "127.0.0.2"], began_ns);
    }
}

/// Servers have no ranks that could announce a step to them.
#[test]
fn servers_take_part_in_the_trace() {
    let (collector, began_ns) = (Collector::new(), now_ns());
    let launch = Launch::new().two_by_two().words(&["--servers", "127.0.0.3"]);
    let launch = launch.set("negotiation.algorithm=servers").set(&collector.setting);
    launch.set(&sampled(3)).rank(&steps(4)).run().assert_code(0);
    let traces = by_step(spans(collector));
    assert_eq!(traces.keys().copied().collect::<Vec<_>>(), [3]);
    check(&traces[&3], 4, &["127.0.0.1", "127.0.0.2"], began_ns);
    let nodes = traces[&3].iter().filter(|found| found.is("node"));
    let hosts: BTreeSet<String> = nodes.map(|node| node.text("host")).collect();
    assert_eq!(hosts, ["127.0.0.1", "127.0.0.2", "127.0.0.3"].map(ToOwned::to_owned).into());
}

#[test]
fn a_job_without_sampled_steps_sends_no_spans() {
    let collector = Collector::new();
    for setting in [sampled(0), sampled(5)] {
        let launch = Launch::new().ranks(2).set(&collector.setting).set(&setting);
        launch.rank(&steps(4)).run().assert_code(0);
    }
    assert_eq!(spans(collector).len(), 0);
}

#[test]
fn a_missing_collector_costs_one_log_line() {
    let away = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let collector = format!("otlp.endpoint=http://{}", away.local_addr().unwrap());
    drop(away);
    let launch = Launch::new().ranks(2).words(&["--verbose"]).set(&collector);
    let launch = launch.set("otlp.interval_ms=100").set(&sampled(1));
    let report = launch.rank(&steps(20)).run();
    report.assert_code(0);
    assert_eq!(complaints(&report), 1, "{}", report.all());
}

#[test]
fn a_collector_without_spans_still_gets_metrics() {
    let mut collector = Collector::of_metrics();
    let launch = Launch::new().ranks(2).words(&["--verbose"]).set(&collector.setting);
    let launch = launch.set("otlp.interval_ms=100").set(&sampled(1));
    let report = launch.rank(&steps(20)).run();
    report.assert_code(0);
    assert_eq!(complaints(&report), 1, "{}", report.all());
    assert!(report.all().contains("spans can't be sent"), "{}", report.all());
    assert!(!collector.metrics().is_empty());
}

/// It accepts connections and never answers.
#[test]
fn a_hanging_collector_delays_nothing() {
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let collector = format!("otlp.endpoint=http://{}", silent.local_addr().unwrap());
    let launch = Launch::new().two_by_two().words(&["--verbose"]).set(&collector);
    let report = launch.set(&sampled(1)).within(LIMIT).rank(&steps(30)).run();
    report.assert_code(0);
    assert!(complaints(&report) <= 2, "{}", report.all());
}

/// Between sampled steps the threads of a trace have ended.
#[test]
fn nothing_is_recorded_between_sampled_steps() {
    let collector = Collector::new();
    let step = ["loop:1:1000", "mark:1"];
    let all = [&["attach"], &step.repeat(6)[..], &["say:done", "until:go"], &step.repeat(6)];
    let end: [&str; 3] = ["say:again", "until:end", "leave"];
    let launch = Launch::new().two_by_two().set(&collector.setting).set(&sampled(4));
    let mut job = launch.rank(&[&all.concat()[..], &end].concat()).start();
    job.until_said("said", 4);
    // Step 4 is over, and step 8 is far away.
    let pids: Vec<u32> = (0..2).map(|node| daemon(&job, node)).collect();
    let recording = || pids.iter().any(|pid| threads(*pid).contains("gw-trace"));
    let began = Instant::now();
    while recording() {
        assert!(began.elapsed() < LIMIT, "a daemon still records");
        std::thread::sleep(Duration::from_millis(10));
    }
    job.allow("go");
    job.allow("end");
    job.finish().assert_code(0);
    assert_eq!(by_step(spans(collector)).into_keys().collect::<Vec<_>>(), [4, 8, 12]);
}

fn daemon(job: &gradwire_tests::launched::Job, node: usize) -> u32 {
    job.process(gradwire_tests::launched::processes::Role::Daemon(node as u32)).pid
}

/// The names of the threads of a process.
fn threads(pid: u32) -> BTreeSet<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon runs");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).ok();
    tasks.flatten().filter_map(name).map(|name| name.trim().to_owned()).collect()
}

#[test]
fn wrong_values_are_refused_with_a_reason() {
    for value in ["-1", "x", "1000000001", "7"] {
        let setting = format!("otlp.sample_steps={value}");
        let report = Launch::new().ranks(1).set(&setting).rank(&[]).run();
        assert_ne!(report.code(), 0);
        assert!(report.all().contains("otlp.sample_steps"), "{}", report.all());
    }
}
