//! `gradwire bench` with real ranks and a real daemon: its table, its JSON, and its errors.

mod common;

use std::fs;

use common::{GRADWIRE, Place, number};
use serde_json::Value;

#[test]
fn ranks_are_started_and_figures_printed() {
    let place = Place::new();
    let words = "bench allreduce -np 2 -b 4 -e 64K -f 128 -w 1 --iters 3 --json out.json \
                 --set data.lanes=1 --algorithm ring --barrier";
    let words: Vec<_> = words.split_whitespace().collect();
    let output = place.measure(&words);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{output:?}");
    assert!(output.stdout.contains("bench allreduce f32 sum\n# 2 ranks on localhost:2"));
    let table = output.rows();
    assert_eq!(table.iter().map(|row| row[0]).collect::<Vec<_>>(), ["4", "512", "65536"]);

    let json: Value =
        serde_json::from_slice(&fs::read(place.path().join("out.json")).unwrap()).unwrap();
    assert_eq!(json["command"], "allreduce");
    assert_eq!(json["nodes"][0]["ranks"], 2);
    assert_eq!(json["settings"]["data.lanes"], "1");
    assert_eq!(json["settings"]["negotiation.algorithm"], "ring");
    assert!(json["machine"]["cores"].as_u64().unwrap() > 0);
    for (cells, row) in table.iter().zip(json["rows"].as_array().unwrap()) {
        let [bytes, elements, min, median, p99, ..] = cells[..] else { panic!("{cells:?}") };
        assert_eq!(row["bytes"].to_string(), bytes);
        assert_eq!(row["elements"].as_u64().unwrap() * 4, row["bytes"].as_u64().unwrap());
        assert_eq!(elements, row["elements"].to_string());
        assert_eq!(row["times_us"].as_array().unwrap().len(), 3);
        assert!(0.0 < number(min) && number(min) <= number(median), "{cells:?}");
        assert!(number(median) <= number(p99), "{cells:?}");
        assert!((row["median_us"].as_f64().unwrap() - number(median)).abs() <= 0.051);
        let seconds = row["median_us"].as_f64().unwrap() / 1e6;
        let bandwidth = row["bytes"].as_f64().unwrap() / 1e9 / seconds;
        let reported = row["algorithm_gb_s"].as_f64().unwrap();
        assert!((reported / bandwidth - 1.0).abs() < 1e-6, "{row}");
        // Two ranks: each byte passes each rank's link once.
        assert_eq!(row["bus_gb_s"], row["algorithm_gb_s"]);
        assert!(row["baseline_us"].as_f64().unwrap() > 0.0);
    }
    place.assert_clean(false);
}

#[test]
fn bench_can_be_the_program_of_a_job() {
    let place = Place::new();
    for words in [
        "broadcast -b 24 -e 24K -f 8 --root 1 -m ordinary -d f64",
        "barrier",
        "allreduce -b 1K -e 1K -o average -d bf16 --check 2",
    ] {
        let line = format!("run -np 2 -- {GRADWIRE} bench {words} -w 0 --iters 2");
        let output = place.measure(&line.split(' ').collect::<Vec<_>>());
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{words}: {output:?}");
        assert!(output.stdout.lines().all(|line| line.starts_with("[0] ")), "{output:?}");
        let rows = output.rows();
        assert!(!rows.is_empty() && rows.iter().all(|row| number(row[0]) > 0.0), "{output:?}");
    }
    place.assert_clean(false);
}

#[test]
fn every_collective_gives_checked_results() {
    let place = Place::new();
    let sizes = "-b 4 -e 100K -f 160 -w 1 --iters 2";
    for (words, bytes) in [
        ("reduce -o max --root 2", ["4", "640", "102400"]),
        ("allgather -d i16", ["6", "636", "102396"]),
        ("gather --root 1 -m ordinary", ["12", "636", "102396"]),
        ("scatter --root 2 -d c64 -b 8", ["24", "1272", ""]),
        ("reducescatter -o bit-xor -d u32", ["12", "636", "102396"]),
        ("alltoall -d f8e4m3", ["3", "639", "102399"]),
        ("send-receive -m ordinary -d bool", ["4", "640", "102400"]),
    ] {
        let line = format!("bench {words} {sizes} -np 3");
        // Some cases have their own size, and an option that is given twice is an error.
        let line = if words.contains("-b ") { line.replacen("-b 4 ", "", 1) } else { line };
        let output = place.measure(&line.split(' ').collect::<Vec<_>>());
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{words}: {output:?}");
        let rows = output.rows();
        let reported: Vec<_> = rows.iter().map(|row| row[0]).collect();
        let expected: Vec<_> = bytes.into_iter().filter(|bytes| !bytes.is_empty()).collect();
        assert_eq!(reported, expected, "{words}");
        // The baseline adds floats and moves anything.
        let is_right = |cell| if words.contains("-o ") { cell == "-" } else { number(cell) > 0.0 };
        assert!(rows.iter().all(|row| row.len() == 9 && is_right(row[7])), "{output:?}");
    }
    place.assert_clean(false);
}

#[test]
fn nodes_have_the_line_for_their_baseline() {
    let place = Place::new();
    let words = "bench allreduce -H 127.0.0.1:1,127.0.0.2:1 -b 1M -e 1M -w 1 --iters 2 \
                 --line-rate 1Gbit --json out.json";
    let words: Vec<_> = words.split_whitespace().collect();
    let output = place.measure(&words);
    assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{output:?}");
    let json = fs::read(place.path().join("out.json")).unwrap();
    let row = &serde_json::from_slice::<Value>(&json).unwrap()["rows"][0];
    // 2 (2 − 1) / 2 · 2^20 bytes at 10^9 bits a second.
    assert_eq!(row["baseline_us"], 8388.608);
    let without: Vec<_> =
        words.iter().filter(|word| !["--line-rate", "1Gbit"].contains(word)).copied().collect();
    let output = place.measure(&without);
    assert!(output.rows()[0].ends_with(&["-", "-"]), "{output:?}");
}

#[test]
fn a_models_gradients_are_one_step() {
    let place = Place::new();
    fs::write(place.path().join("net"), "front 100 10\nmiddle 7\nscale\nlast 3 3\n").unwrap();
    for memory in ["arena", "ordinary"] {
        let words = "bench model --shapes net -np 2 --iters 3 --compute-ms 4 --check 1";
        let words: Vec<_> = words.split(' ').chain(["--memory", memory]).collect();
        let output = place.measure(&words);
        assert_eq!((output.code, output.stderr.as_str()), (Some(0), ""), "{output:?}");
        let rows = output.rows();
        assert_eq!(rows[0][..4], ["4068", "1017", "4", "4"]);
        // A step includes its computation, and the wait after the last submission.
        assert!(number(rows[0][5]) >= 4000.0, "{rows:?}");
        assert!(number(rows[0][4]) > 0.0, "{rows:?}");
    }
    place.assert_clean(false);
}

#[test]
fn impossible_measurements_are_refused() {
    let place = Place::new();
    for (words, expected) in [
        ("bench allreduce -b 12X", "error: invalid value '12X'"),
        ("bench allreduce -b 8 -e 4", "error: -b 8 is more than -e 4"),
        ("bench allreduce -f 1", "error: -f must be at least 2, not 1"),
        ("bench allreduce -d f8", "error: invalid value 'f8'"),
        ("bench model --shapes alexnet", "error: --shapes alexnet: No such file"),
        ("bench allreduce --algorithm rng", "error: setting negotiation.algorithm = \"rng\""),
        (
            "bench allreduce -np 3 --algorithm torus(dims=2x2)",
            "error: setting negotiation.algorithm = \"torus(dims=2x2)\": torus(dims=2x2) is for 4 \
             nodes, and there are 1",
        ),
        ("bench broadcast -np 2 --root 2", "error: --root 2 is not a rank: the job has 2 ranks"),
        ("bench allreduce -np 3 -H a:1", "error: -np 3 is more than the 1 slots"),
        ("bench gather -np 2 --root 2", "error: --root 2 is not a rank: the job has 2 ranks"),
        ("bench send-receive -np 1", "error: send-receive needs two ranks: the job has 1"),
        ("bench reduce -o bit-or", "error: --op bit-or of --dtype f32: only integers and bool"),
    ] {
        let output = place.run(&words.split(' ').collect::<Vec<_>>());
        assert_eq!(output.code, Some(2), "{output:?}");
        assert!(output.stderr.starts_with(expected), "{output:?}");
    }
    // The ranks report what only they can know.
    let line = format!("run -np 2 {GRADWIRE} bench broadcast --root 2");
    let output = place.measure(&line.split(' ').collect::<Vec<_>>());
    assert_eq!(output.code, Some(2), "{output:?}");
    assert!(output.stderr.contains("--root 2 is not a rank: the job has 2 ranks"), "{output:?}");
    let output = place.measure(&["bench", "barrier", "-np", "2", "--json", "no/such/folder"]);
    assert_eq!(output.code, Some(1), "{output:?}");
    let expected = "[0] error: --json no/such/folder can't be written: No such";
    assert!(output.stderr.contains(expected), "{output:?}");
    place.assert_clean(false);
}
