//! `gradwire bench negotiation` and `resources`, which `gradwire-lab` runs.

use std::fs;

use gradwire_tests::{
    launched::programs,
    place::{Place, number},
};
use serde_json::Value;

#[test]
fn negotiation_costs_match_its_messages() {
    let place = Place::new();
    fs::write(place.path().join("net"), "front 1000 1000\nmiddle 7\nscale\nlast 30\n").unwrap();
    let words = "bench negotiation --nodes 2,3 --shapes net --iters 3 --warmup 1 --json out.json \
                 --set negotiation.piece_bytes=1MiB";
    let output = place.run(&words.split_whitespace().collect::<Vec<_>>());
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{output:?}");
    let table = output.rows();
    assert_eq!(table.iter().map(|row| row[0]).collect::<Vec<_>>(), ["2", "3"]);
    let json: Value =
        serde_json::from_slice(&fs::read(place.path().join("out.json")).unwrap()).unwrap();
    assert_eq!((&json["tensors"], &json["elements"]), (&4.into(), &1_000_038.into()));
    assert_eq!(json["settings"]["negotiation.piece_bytes"], "1MiB");
    for (cells, row) in table.iter().zip(json["rows"].as_array().unwrap()) {
        let at = |path: &str| row.pointer(path).and_then(Value::as_f64).unwrap();
        assert_eq!(row["times_us"].as_array().unwrap().len(), 3);
        assert!((at("/median_us") - number(cells[2])).abs() <= 0.051, "{row}");
        assert!((at("/us_per_tensor") * 4.0 - at("/median_us")).abs() < 1e-6, "{row}");
        // 4 MB in pieces of 1 MiB.
        assert!(at("/operations") >= 4.0, "{row}");
        // An announcement is one message, and each received message is answered by one.
        let (sent, received) = (at("/sent/messages"), at("/received/messages"));
        assert!((1.0..=received + 1.0).contains(&sent) && sent > 1.0, "{row}");
        // An id is a few bytes, a name is not.
        assert!(at("/sent/bytes") < at("/first/sent/bytes"), "{row}");
        assert!(at("/sent/wire_bytes") > at("/sent/bytes"), "{row}");
        assert!(at("/received/wire_bytes") > at("/received/bytes"), "{row}");
        assert!(at("/coordinator_cpu_us") > 0.0 && at("/coordinator_bytes") > 1e6, "{row}");
    }
    place.assert_clean(false);
}

/// The memory of a daemon does not grow with the length of a job.
#[test]
fn a_long_job_does_not_grow() {
    let place = Place::new();
    let words = "bench resources -H 127.0.0.1:1,127.0.0.2:1 -b 64K --idle 0.3 --steps 3000 \
                 --calls 20 -w 2 --json out.json";
    let output = place.measure(&words.split_whitespace().collect::<Vec<_>>());
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{output:?}");
    let json: Value =
        serde_json::from_slice(&fs::read(place.path().join("out.json")).unwrap()).unwrap();
    assert_eq!((&json["command"], &json["steps"]), (&"resources".into(), &3000.into()));
    let reported = json["rows"].as_array().unwrap();
    let processes: Vec<_> = reported.iter().map(|row| row["process"].as_str().unwrap()).collect();
    // The coordinator may be a separate process or not.
    let others = processes.iter().filter(|process| **process != "coordinator");
    assert_eq!(others.collect::<Vec<_>>(), [&"daemon", &"rank 0", &"daemon", &"rank 1"]);
    for (cells, row) in output.rows().iter().zip(reported) {
        assert_eq!(Some(cells[0]), row["host"].as_str());
        let at = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
        let samples = row["private_bytes"].as_object().unwrap();
        let mut steps: Vec<u32> = samples.keys().map(|step| step.parse().unwrap()).collect();
        steps.sort_unstable();
        assert_eq!(steps, [100, 1000, 3000]);
        assert!(samples.values().all(|bytes| bytes.as_u64().unwrap() > 100_000), "{row}");
        // BOUND: neither a daemon nor the coordinator keeps anything of a finished step. An
        // allocator may need some pages more for a while.
        assert!(at("growth_bytes") < f64::from(2 << 20), "{row}");
        assert!(at("cpu_us") > 0.0 && at("waits") > 0.0, "{row}");
        // Either the calls were counted, or there is a reason why not.
        assert_eq!(row["calls"].is_null(), row["uncounted"].is_string(), "{row}");
        assert!(row["calls"].is_null() || at("calls") > 1.0, "{row}");
    }
    place.assert_clean(false);
}

#[test]
fn a_rank_with_another_parent_sees_no_daemon() {
    let place = Place::new();
    let gradwire = programs::gradwire();
    let line = format!("{} bench resources --idle 0.1 --steps 1; exit $?", gradwire.display());
    let output = place.measure(&["run", "-np", "1", "--", "sh", "-c", &line]);
    assert_eq!(output.code, Some(1), "{output:?}");
    assert!(output.stderr.contains("no daemon found next to this rank"), "{output:?}");
    place.assert_clean(false);
}

#[test]
fn wrong_options_are_refused_at_once() {
    let place = Place::new();
    for (words, expected) in [
        ("bench resources -b 6", "error: invalid value '6' for '--bytes <BYTES>': must be a mult"),
        ("bench resources --idle 0", "error: invalid value '0' for '--idle <S>': must be from 0.1"),
        ("bench negotiation --nodes 2,x", "error: invalid value 'x' for '--nodes"),
        ("bench negotiation --nodes 4097", "error: invalid value '4097' for '--nodes"),
        ("bench negotiation --ready 162", "error: --ready 162 is more than the 161 tensors of res"),
        ("bench negotiation --set data.lanes=0", "error: setting data.lanes"),
    ] {
        let output = place.run(&words.split(' ').collect::<Vec<_>>());
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.starts_with(expected), "{output:?}");
    }
    let line = format!("run -np 1 {} bench negotiation --nodes 2", programs::gradwire().display());
    let output = place.measure(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("can't run as a rank of a job"), "{output:?}");
    place.assert_clean(false);
}
