//! `gradwire simulate`: its output and files, and errors before it starts.

use std::{collections::BTreeMap, fs};

use gradwire_simulator::input::written::{ClusterFile, Host, Link};
use gradwire_tests::place::{Output, Place};
use serde_json::Value;

/// Eight hosts with lines of 10 Gbit/s.
const FLAT: &str = "[network]\nlatency_us = 1\nrate_mbit = 10000\n[[host]]\nname = \"a\"\n\
                    count = 8\n[job]\nbytes = 67108864\nspecs = [\"ring\", \"direct\"]\n";

fn example(name: &str) -> String {
    format!("{}/../../examples/clusters/{name}.toml", env!("CARGO_MANIFEST_DIR"))
}

fn simulate(place: &Place, words: &[&str]) -> Output {
    place.run(&[&["simulate"], words].concat())
}

/// The output of `gradwire simulate`, and all its files as text, even those of pixels.
fn results(place: &Place, words: &[&str], out: &str) -> (String, BTreeMap<String, String>) {
    results_with(0, place, words, out)
}

fn results_with(
    code: i32,
    place: &Place,
    words: &[&str],
    out: &str,
) -> (String, BTreeMap<String, String>) {
    let output = simulate(place, &[words, &["--out", out]].concat());
    assert_eq!((output.code, output.stderr.as_str()), (Some(code), ""), "{output:?}");
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(place.path().join(out)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let bytes = fs::read(&path).unwrap();
        if name.ends_with(".svg") || name.ends_with(".png") {
            assert!(bytes.len() <= 200_000, "{name} has {} bytes", bytes.len());
        }
        let text = String::from_utf8(bytes).unwrap_or_else(|error| format!("{error:?}"));
        files.insert(name, text);
    }
    (output.stdout, files)
}

fn json(files: &BTreeMap<String, String>) -> Value {
    serde_json::from_str(&files["result.json"]).unwrap()
}

/// The rows of a file of comma-separated values; cells with commas are quoted.
fn csv<'a>(files: &'a BTreeMap<String, String>, name: &str) -> Vec<BTreeMap<&'a str, &'a str>> {
    let cells = |line: &'a str| -> Vec<&'a str> {
        let mut quoted = false;
        let mut ends = |c: char| {
            quoted ^= c == '"';
            c == ',' && !quoted
        };
        line.split(&mut ends).map(|cell| cell.trim_matches('"')).collect()
    };
    let mut lines = files[name].lines();
    let head = cells(lines.next().unwrap());
    let row = |line: &'a str| {
        let cells = cells(line);
        assert_eq!(cells.len(), head.len(), "{name}: {line}");
        head.iter().copied().zip(cells).collect()
    };
    lines.map(row).collect()
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// Checks the figures of a run: the output and the files agree, sent bytes arrive, and no line
/// exceeds its rate.
fn check(stdout: &str, files: &BTreeMap<String, String>, pieces: usize) {
    let json = json(files);
    let hosts = json["hosts"].as_u64().unwrap() as usize;
    let bytes = json["bytes"].as_f64().unwrap() * pieces as f64;
    assert_eq!(json["pieces"], pieces);
    let (operations, links) = (csv(files, "operations.csv"), csv(files, "links.csv"));
    let (over_time, paths) = (csv(files, "links-over-time.csv"), csv(files, "critical-paths.csv"));
    for run in json["runs"].as_array().unwrap() {
        let algorithm = run["algorithm"].as_str().unwrap();
        let seconds = run["seconds"].as_f64().unwrap();
        let line = stdout.lines().find(|line| line.starts_with(&format!("{algorithm} "))).unwrap();
        let rate = format!("{:.3}", bytes / seconds / 1e9);
        assert!(line.split_whitespace().any(|word| word == rate), "no {rate} in {line}");
        assert!(stdout.contains(&format!("Critical path of {algorithm}, ")), "{stdout}");

        let of = |rows: &[BTreeMap<&str, &str>], column: &str| -> Vec<f64> {
            let mine = rows.iter().filter(|row| row["algorithm"] == algorithm);
            mine.map(|row| number(row[column])).collect()
        };
        let last = |values: Vec<f64>| values.into_iter().fold(0.0, f64::max);
        let published = of(&operations, "published_s");
        assert_eq!(published.len(), hosts * pieces, "{algorithm}");
        assert!((last(published) - seconds).abs() < 1e-8, "{algorithm}");
        assert!((last(of(&paths, "end_s")) - seconds).abs() < 0.1 * seconds, "{algorithm}");
        let parts = of(&links, "utilisation");
        assert!(parts.iter().all(|part| (0.0..=1.0001).contains(part)), "{algorithm}: {parts:?}");
        let parts = of(&over_time, "utilisation");
        assert!(parts.iter().all(|part| (0.0..=1.001).contains(part)), "{algorithm}: {parts:?}");

        let sum = |what: &str| -> f64 {
            run[what].as_object().unwrap().values().map(|bytes| bytes.as_f64().unwrap()).sum()
        };
        let (sent, received) = (sum("sent_bytes"), sum("received_bytes"));
        let least = 2.0 * (hosts - 1) as f64 * bytes;
        assert!(
            sent == received && sent >= 0.999 * least,
            "{algorithm}: {sent} {received} {least}"
        );
        let way = |way: &str| -> f64 {
            let rows = links.iter().filter(|row| row["algorithm"] == algorithm);
            let rows = rows.filter(|row| row["link"].ends_with(way));
            rows.map(|row| number(row["bytes"])).sum()
        };
        let (out, into) = (way(" out"), way(" in"));
        assert!((out / into - 1.0).abs() < 1e-6 && out >= sent, "{algorithm}: {out} {into} {sent}");
    }
}

#[test]
fn each_example_runs_and_its_figures_agree() {
    for (name, pieces, algorithms) in
        [("rack", 16, 5), ("oversubscribed", 1, 4), ("stragglers", 4, 4)]
    {
        let place = Place::new();
        let (stdout, files) = results(&place, &["run", &example(name)], "out");
        assert_eq!(json(&files)["runs"].as_array().unwrap().len(), algorithms, "{stdout}");
        check(&stdout, &files, pieces);
        assert!(files.contains_key("operations.png"), "{:?}", files.keys());
        for run in json(&files)["runs"].as_array().unwrap() {
            let algorithm = run["algorithm"].as_str().unwrap();
            assert!(files["operations.svg"].contains(algorithm), "{algorithm} is not drawn");
        }
    }
}

/// Lines that are always busy carry 2(N−1)/N of the piece each way.
#[test]
fn times_match_the_closed_form() {
    let place = Place::new();
    fs::write(place.path().join("flat.toml"), FLAT).unwrap();
    let (stdout, files) = results(&place, &["run", "flat.toml"], "out");
    check(&stdout, &files, 1);
    let expected = 2.0 * 7.0 / 8.0 * 67_108_864.0 / (10e9 / 8.0);
    for run in json(&files)["runs"].as_array().unwrap() {
        let ratio = run["seconds"].as_f64().unwrap() / expected;
        assert!((1.0..1.05).contains(&ratio), "{}: {ratio}", run["algorithm"]);
    }
    assert!(
        stdout.starts_with("allreduce, 1 piece of 67108864 bytes, on 8 nodes in 1 rack; seed 0.")
    );
}

#[test]
fn the_same_seed_gives_the_same_bytes() {
    let place = Place::new();
    let file = example("stragglers");
    let run = |seed, out| results(&place, &["run", &file, "--seed", seed], out);
    let (first, again, other) = (run("3", "a/1"), run("3", "a/2"), run("4", "a/3"));
    assert!(first == again, "{first:?}\n{again:?}");
    assert_ne!(first.1["operations.csv"], other.1["operations.csv"]);
}

/// By default, all algorithms run that the cost model considers; --spec overrides the file.
#[test]
fn algorithms_come_from_command_file_or_model() {
    let place = Place::new();
    let flat = place.path().join("flat.toml");
    let algorithms = |words: &[&str]| -> Vec<String> {
        let (_, files) = results(&place, &[&["run", "flat.toml"], words].concat(), "out");
        let name = |run: &Value| run["algorithm"].as_str().unwrap().to_owned();
        json(&files)["runs"].as_array().unwrap().iter().map(name).collect()
    };
    fs::write(&flat, FLAT).unwrap();
    assert_eq!(algorithms(&[]), ["ring", "direct"]);
    let given =
        ["--spec", "torus(dims=2x4)", "--spec", "HALVING-doubling", "--spec", "torus(dims=2x4)"];
    assert_eq!(algorithms(&given), ["torus(dims=2x4)", "halving-doubling"]);
    fs::write(&flat, FLAT.replace("specs = ", "# ")).unwrap();
    let all = algorithms(&[]);
    assert!(all.len() > 2 && all.contains(&"ring".to_owned()), "{all:?}");
    fs::write(&flat, format!("{FLAT}[[host]]\nname = \"s\"\nserver = true\n")).unwrap();
    assert_eq!(algorithms(&["--spec", "servers", "--spec", "ring"]), ["servers", "ring"]);
}

/// A job that can't end reports which hosts wait, and has no time. It fails.
#[test]
fn a_dead_line_gives_no_time() {
    let place = Place::new();
    let fault = "[[fault]]\nkind = \"slow\"\nhost = \"a3\"\nfrom_ms = 5\n";
    fs::write(place.path().join("flat.toml"), format!("{FLAT}{fault}")).unwrap();
    let (stdout, files) = results_with(1, &place, &["run", "flat.toml"], "out");
    assert!(stdout.contains("0 of 1 pieces: nothing moves any more after "), "{stdout}");
    for run in json(&files)["runs"].as_array().unwrap() {
        assert!(run["seconds"].is_null() && run["operations"] == Value::Array(Vec::new()));
        assert!(run["standstill"].as_str().unwrap().contains("hosts wait"), "{run}");
    }
}

/// The file of `gradwire probe` needs no change.
#[test]
fn a_measured_cluster_is_simulated() {
    let place = Place::new();
    let host = |name: &str, rack: &str, line_mbit| Host {
        name: name.into(),
        rack: rack.into(),
        line_mbit,
        server: false,
    };
    let link = Link {
        from: "a".into(),
        to: "b".into(),
        latency_us: 12.5,
        lane_rate_mbit: 9000.0,
        rate_mbit: 9400.0,
    };
    let (hosts, links) = (vec![host("a", "r1", 10_000), host("b", "r2", 0)], vec![link]);
    let file = ClusterFile { hosts, links, ..ClusterFile::default() };
    fs::write(place.path().join("measured.toml"), file.to_toml().unwrap()).unwrap();
    let (stdout, files) = results(&place, &["run", "measured.toml"], "out");
    assert!(json(&files)["runs"][0]["seconds"].as_f64().unwrap() > 0.0, "{stdout}");
}

/// `gradwire explain` takes the same file, and reports the same errors.
#[test]
fn a_described_cluster_is_explained() {
    let place = Place::new();
    for (name, nodes) in [("rack", 16), ("oversubscribed", 64), ("stragglers", 32)] {
        let output = place.run(&["explain", "--cluster", &example(name)]);
        assert_eq!(output.code, Some(0), "{output:?}");
        assert!(output.stdout.contains(&format!("Choices on {nodes} nodes")), "{output:?}");
    }
    fs::write(place.path().join("zero.toml"), FLAT.replace("10000", "0")).unwrap();
    let output = place.run(&["explain", "--cluster", "zero.toml"]);
    assert_eq!(output.code, Some(2), "{output:?}");
    let expected = "error: cluster file zero.toml: line 3: network.rate_mbit is 0";
    assert!(output.stderr.starts_with(expected), "{output:?}");
}

#[test]
fn wrong_input_is_refused_in_one_line() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name);
    fs::write(path("flat.toml"), FLAT).unwrap();
    fs::write(path("large.toml"), "#".repeat(5 << 20)).unwrap();
    fs::write(path("binary.toml"), b"\xff\xfe").unwrap();
    fs::write(path("key.toml"), FLAT.replace("rate_mbit", "rate_mbits")).unwrap();
    fs::write(path("zero.toml"), FLAT.replace("10000", "0")).unwrap();
    fs::write(path("negative.toml"), FLAT.replace("10000", "-5")).unwrap();
    fs::write(path("nan.toml"), FLAT.replace("10000", "nan")).unwrap();
    fs::write(path("spec.toml"), FLAT.replace("direct", "dirct")).unwrap();
    fs::write(path("many.toml"), FLAT.replace("count = 8", "count = 4097")).unwrap();
    fs::write(path("escape.toml"), FLAT.replace("latency_us", "\"\\u001b[31m\"")).unwrap();
    let cases: &[(&[&str], &str, &str)] = &[
        (&["none.toml"], "cluster file none.toml: No such file", "gradwire probe --out FILE"),
        (&["."], "cluster file .: Is a directory", "gradwire probe --out FILE"),
        (
            &["large.toml"],
            "cluster file large.toml: it has more than 4194304 bytes",
            "most that is",
        ),
        (&["binary.toml"], "cluster file binary.toml: not UTF-8", "save it as UTF-8"),
        (
            &["key.toml"],
            "cluster file key.toml: line 3: unknown field `rate_mbits`",
            "expected one of `latency_us`, `rate_mbit`",
        ),
        (
            &["zero.toml"],
            "cluster file zero.toml: line 3: network.rate_mbit is 0",
            "it must be from 0.001",
        ),
        (
            &["negative.toml"],
            "cluster file negative.toml: line 3: network.rate_mbit is -5",
            "0.001",
        ),
        (&["nan.toml"], "cluster file nan.toml: line 3: network.rate_mbit is NaN", "0.001"),
        (
            &["spec.toml"],
            "cluster file spec.toml: line 9: job.specs: unknown algorithm \"dirct\"",
            "",
        ),
        (&["many.toml"], "cluster file many.toml: line 6: host.count is 4097", "1 to 4096"),
        (&["escape.toml"], "cluster file escape.toml: line 2: unknown field `[31m`", "expected"),
        (&["flat.toml", "--spec", "rign"], "invalid value 'rign' for '--spec <SPEC>'", "ring"),
        (
            &["flat.toml", "--spec", "torus(dims=2x3)"],
            "--spec: torus(dims=2x3) is for 6 nodes, and there are 8",
            "hint: ",
        ),
        (&["flat.toml", "--memory", "lots"], "invalid value 'lots' for '--memory", "such as 64K"),
        (&["flat.toml", "--memory", "0"], "invalid value '0' for '--memory", "from 1 byte"),
        (&["flat.toml", "--memory", "10K"], "ring would need about ", "--memory is 10240\nhint: "),
        (&["flat.toml", "--seed", "-1"], "unexpected argument '-1'", "--help"),
    ];
    for (words, expected, remedy) in cases {
        let output = simulate(&place, &[&["run"], *words, &["--out", "out"]].concat());
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:?}");
        assert!(output.stderr.starts_with(&format!("error: {expected}")), "{output:?}");
        assert!(output.stderr.contains(remedy) && !output.stderr.contains('\u{1b}'), "{output:?}");
        assert!(!path("out").exists(), "{words:?}");
    }
    let output = simulate(&place, &["paper", "gpt"]);
    assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:?}");
    let said = "error: invalid value 'gpt' for '<PAPER>'\n  [possible values: formulas, ring, ";
    assert!(output.stderr.starts_with(said), "{output:?}");
}

/// A directory that can't be written is found before the simulation, which would take hours.
#[test]
fn an_unwritable_directory_is_found_first() {
    let place = Place::new();
    let long = FLAT.replace("bytes = 67108864", "bytes = 1e12\npieces = 1000\nchunk_bytes = 4096");
    fs::write(place.path().join("long.toml"), long).unwrap();
    fs::write(place.path().join("file"), "").unwrap();
    fs::create_dir_all(place.path().join("taken/result.json")).unwrap();
    for (out, expected) in [
        ("file", "--out: file: File exists"),
        ("file/in", "--out: file/in: Not a directory"),
        // Nothing can be made in /proc.
        ("/proc/gradwire", "--out: /proc/gradwire: "),
        ("/proc/self", "--out: /proc/self/result.json: "),
        ("taken", "--out: taken/result.json: Is a directory"),
    ] {
        for words in [&["run", "long.toml"], &["paper", "rat"]] {
            let output = simulate(&place, &[&words[..], &["--out", out]].concat());
            assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{output:?}");
            assert!(output.stderr.starts_with(&format!("error: {expected}")), "{output:?}");
            assert!(output.stderr.contains("\nhint: name a directory that you"), "{output:?}");
        }
    }
}

#[test]
fn a_paper_is_shown_next_to_its_figures() {
    let place = Place::new();
    let (stdout, files) = results(&place, &["paper", "ring"], "made/here");
    let json = json(&files);
    let checks = json["checks"].as_array().unwrap();
    assert_eq!(json["out_of_bounds"], Value::Array(Vec::new()));
    let end = format!("{0} of {0} checked results are within their bounds.\n", checks.len());
    assert!(checks.len() >= 9 && stdout.ends_with(&end), "{stdout}");
    let rows = csv(&files, "master-and-ring.csv");
    assert!(rows.len() >= 5);
    for row in rows {
        let hosts = number(row["N"]);
        assert!((number(row["busiest of a ring, × K"]) - 2.0 * (1.0 - 1.0 / hosts)).abs() < 1e-3);
        let ratio = number(row["ring on shared links, ms"]) / number(row["2(N−1)/N·K/B, ms"]);
        assert!((ratio - 1.0).abs() < 0.02, "{row:?}");
        assert!(stdout.lines().any(|line| line.starts_with(&format!("{hosts} "))), "{stdout}");
    }
    assert_eq!(csv(&files, "silent-host.csv")[0]["j"], "1");
    for chart in json["charts"].as_array().unwrap() {
        let title = chart["title"].as_str().unwrap();
        assert!(files[&format!("{title}.svg")].contains(title), "{title}");
        assert!(files.contains_key(&format!("{title}.png")), "{title}");
    }
}

/// A model of a few layers: 12 MB.
const MODEL: &str = "front 1000 1000\nmiddle 500 1000\nnorm 1000\nback 1500 1000\n";

const PLAN: [&str; 9] =
    ["plan", "--model", "model", "--nodes", "2..48", "--link", "10g", "--racks", "3"];

fn planned(place: &Place, more: &[&str], out: &str) -> (String, BTreeMap<String, String>) {
    fs::write(place.path().join("model"), MODEL).unwrap();
    results(place, &[&PLAN, more].concat(), out)
}

/// Every size has the time of each algorithm, and the table, the files and the charts agree.
#[test]
fn a_plan_has_the_times_of_all_algorithms() {
    let place = Place::new();
    let more = ["--oversubscription", "2", "--compute-ms", "20", "--spec", "ring"];
    let (stdout, files) = planned(&place, &[&more[..], &["--spec", "circulant"]].concat(), "out");
    let json = json(&files);
    assert_eq!((&json["gradients"], &json["bytes"]), (&4.into(), &12_004_000.into()));
    let rows = csv(&files, "plan.csv");
    let sizes = json["sizes"].as_array().unwrap();
    let nodes: Vec<u64> = sizes.iter().map(|size| size["nodes"].as_u64().unwrap()).collect();
    assert_eq!(nodes, [2, 4, 8, 16, 32, 48]);
    let racks: Vec<u64> = sizes.iter().map(|size| size["racks"].as_u64().unwrap()).collect();
    assert_eq!(racks, [1, 1, 1, 1, 2, 3]);
    for (size, nodes) in sizes.iter().zip(nodes) {
        let line = stdout.lines().find(|line| line.starts_with(&format!("{nodes} "))).unwrap();
        assert!(line.contains("simulated"), "{line}");
        let steps = size["steps"].as_array().unwrap();
        let names: Vec<&str> =
            steps.iter().map(|step| step["algorithm"].as_str().unwrap()).collect();
        assert_eq!(names, ["auto", "ring", "circulant"]);
        for step in steps {
            let seconds = step["seconds"].as_f64().unwrap();
            let efficiency = step["efficiency"].as_f64().unwrap();
            assert!(
                efficiency <= 1.0 && (efficiency * seconds / 0.02 - 1.0).abs() < 1e-9,
                "{step}"
            );
            assert!(line.contains(&format!("{:.2} ms {:.1} %", seconds * 1e3, efficiency * 1e2)));
            let row = rows.iter().find(|row| {
                row["nodes"] == nodes.to_string() && row["algorithm"] == step["algorithm"]
            });
            assert!((number(row.unwrap()["step_s"]) - seconds).abs() < 1e-8, "{step}");
        }
    }
    assert_eq!(rows.len(), 6 * 3);
    for name in ["plan-step", "plan-efficiency"] {
        assert!(files[&format!("{name}.svg")].contains("circulant"), "{name}");
        assert!(files.contains_key(&format!("{name}.png")), "{name}");
    }
    assert!(stdout.contains("The best algorithm is "), "{stdout}");
}

#[test]
fn the_same_plan_gives_the_same_bytes() {
    let place = Place::new();
    let more =
        |seed| ["--oversubscription", "8", "--spines", "4", "--seed", seed, "--spec", "ring"];
    let plan = |seed, out| planned(&place, &more(seed), out);
    let (first, again, other) = (plan("3", "1"), plan("3", "2"), plan("4", "3"));
    assert!(first == again, "{}\n{}", first.0, again.0);
    assert_ne!(first.1["plan.csv"], other.1["plan.csv"]);
}

/// Sizes too large to simulate are priced, and marked so. A single node does not wait.
#[test]
fn large_sizes_are_priced() {
    let place = Place::new();
    for (nodes, method) in [("1..2", "simulated"), ("2049..4096", "priced")] {
        fs::write(place.path().join("model"), MODEL).unwrap();
        let words = ["plan", "--model", "model", "--link", "100Gbit", "--nodes", nodes];
        let (stdout, files) = results(&place, &[&words[..], &["--spec", "ring"]].concat(), "out");
        let json = json(&files);
        let sizes = json["sizes"].as_array().unwrap();
        assert_eq!(sizes.len(), 2);
        assert!(sizes.iter().all(|size| size["method"] == method), "{stdout}");
        assert!(stdout.contains(method), "{stdout}");
        if method == "simulated" {
            assert!(sizes[0]["steps"][1]["efficiency"].as_f64().unwrap() > 0.99, "{stdout}");
        }
    }
}

#[test]
fn a_wrong_plan_is_refused_in_one_line() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name);
    fs::write(path("model"), MODEL).unwrap();
    fs::write(path("twice"), "a 2\na 3").unwrap();
    fs::write(path("huge"), "a 1000000 1000000").unwrap();
    fs::write(path("file"), "").unwrap();
    let cases: &[(&[&str], &str, &str)] = &[
        (
            &["--model", "resnet51"],
            "--model resnet51: No such file",
            "bert-large, gpt2 or an existing file",
        ),
        (&["--model", "twice"], "--model twice line 2: duplicate name 'a'", "front layer first"),
        (&["--model", "huge"], "the steps have ", "a smaller model"),
        (&["--nodes", "8..2"], "invalid value '8..2' for '--nodes <FROM..TO>': 8 is more", ""),
        (&["--nodes", "0..2"], "invalid value '0..2' for '--nodes", "must be from 1 to 4096"),
        (&["--nodes", "8..4097"], "invalid value '8..4097' for '--nodes", "must be from 1 to 4096"),
        (&["--nodes", "many"], "invalid value 'many' for '--nodes", "such as 8..2048"),
        (&["--link", "fast"], "invalid value 'fast' for '--link <RATE>': not a rate", "10Gbit"),
        (&["--link", "0g"], "invalid value '0g' for '--link", "from 1kbit"),
        (&["--racks", "0"], "invalid value '0' for '--racks", "expected the number of racks"),
        (&["--racks", "49"], "48 nodes can't be in 49 racks", "hint: "),
        (&["--racks", "2x4"], "--racks: groups of racks", "the number of racks"),
        (&["--oversubscription", "0.5"], "invalid value '0.5' for '--over", "from 1 to 1000"),
        (&["--oversubscription", "nan"], "invalid value 'nan' for '--over", "from 1 to 1000"),
        (&["--compute-ms", "0"], "invalid value '0' for '--compute-ms", "milliseconds"),
        (&["--spec", "rign"], "invalid value 'rign' for '--spec <SPEC>'", "ring"),
        (&["--spec", "torus(dims=3x5)"], "--spec: torus(dims=3x5) fits none of", "parameters"),
        (&["--spines", "0"], "invalid value '0' for '--spines", ""),
        (&["--out", "file"], "--out: file: File exists", "name a directory"),
        (&["--out", "/proc/gradwire"], "--out: /proc/gradwire: ", "name a directory"),
    ];
    for (words, expected, remedy) in cases {
        // The option of the case instead of the usual one.
        let mut all = vec!["plan"];
        let has = |option: &str| words[0] == option;
        let pairs = PLAN[1..].chunks(2).filter(|pair| !has(pair[0]));
        all.extend(pairs.flatten());
        all.extend(*words);
        let output = simulate(&place, &all);
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{words:?} {output:?}");
        assert!(output.stderr.starts_with(&format!("error: {expected}")), "{output:?}");
        assert!(output.stderr.contains(remedy), "{output:?}");
    }
}

/// Options override the file, and calls run one after the other.
#[test]
fn options_override_the_work() {
    let place = Place::new();
    fs::write(place.path().join("flat.toml"), FLAT).unwrap();
    let words = ["run", "flat.toml", "--spec", "ring"];
    let run = |more: &[&str]| {
        let (stdout, files) = results(&place, &[&words, more].concat(), "out");
        (stdout, json(&files))
    };
    let seconds = |json: &Value| json["runs"][0]["seconds"].as_f64().unwrap();
    let (_, whole) = run(&[]);
    let (stdout, other) = run(&["--bytes", "1M", "--pieces", "3", "--collective", "reducescatter"]);
    assert!(stdout.starts_with("reducescatter, 3 pieces of 1048576 bytes, on 8 nodes"), "{stdout}");
    assert_eq!((other["pieces"].as_u64(), other["bytes"].as_u64()), (Some(3), Some(1 << 20)));
    assert!(seconds(&other) < seconds(&whole) / 10.0, "{other}");
    let (stdout, calls) = run(&["--calls", "4"]);
    assert!(stdout.contains("Times are medians of 4 calls, one after the other."), "{stdout}");
    assert_eq!(calls["runs"][0]["calls_s"].as_array().unwrap().len(), 4);
    assert!((seconds(&calls) / seconds(&whole) - 1.0).abs() < 1e-6, "{calls}");
}

/// A step of a model on the cluster of a file: once with the choices of the coordinator, and once
/// with each algorithm. Other costs are added once.
#[test]
fn a_step_runs_on_a_described_cluster() {
    let place = Place::new();
    fs::write(place.path().join("model"), MODEL).unwrap();
    let more = "piece_bytes = 65536\ncredit_pieces = 3\ncall_us = 700\n";
    for (name, file) in [("flat.toml", FLAT.to_owned()), ("late.toml", format!("{FLAT}{more}"))] {
        fs::write(place.path().join(name), file).unwrap();
    }
    let run = |file: &str, more: &[&str]| {
        let words = ["run", file, "--model", "model", "--spec", "ring", "--spec", "direct"];
        let (stdout, files) = results(&place, &[&words, more].concat(), "out");
        (stdout, json(&files))
    };
    let (stdout, json) = run("flat.toml", &[]);
    assert!(stdout.starts_with("A step of model: "), "{stdout}");
    let of = |json: &Value, at: usize, key: &str| json["runs"][at][key].clone();
    let names: Vec<Value> = (0..3).map(|at| of(&json, at, "algorithm")).collect();
    assert_eq!(names, ["auto", "ring", "direct"]);
    assert_eq!(of(&json, 1, "most_bytes_by"), "ring");
    let seconds = |json: &Value| of(json, 1, "seconds").as_f64().unwrap();
    let (_, same) = run("flat.toml", &["--calls", "3"]);
    assert!((seconds(&same) / seconds(&json) - 1.0).abs() < 1e-6, "{same}");
    assert_eq!(of(&same, 1, "operations"), of(&json, 1, "operations"));
    let (_, late) = run("late.toml", &["--compute-ms", "5"]);
    let computing = seconds(&late) - 5e-3 - 700e-6;
    assert!(computing > 0.0 && computing < seconds(&json), "{late} {json}");
    assert!(of(&late, 1, "operations").as_u64() >= of(&json, 1, "operations").as_u64(), "{late}");
}

#[test]
fn wrong_work_is_refused() {
    let place = Place::new();
    let path = |name: &str| place.path().join(name);
    fs::write(path("flat.toml"), FLAT).unwrap();
    fs::write(path("model"), MODEL).unwrap();
    let servers = format!("{FLAT}[[host]]\nname = \"s\"\nserver = true\n");
    fs::write(path("servers.toml"), servers).unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["flat.toml", "--bytes", "3"], "invalid value '3' for '--bytes <BYTES>': must be a mul"),
        (&["flat.toml", "--bytes", "2000G"], "invalid value '2000G' for '--bytes"),
        (&["flat.toml", "--pieces", "0"], "invalid value '0' for '--pieces"),
        (&["flat.toml", "--calls", "0"], "invalid value '0' for '--calls"),
        (&["flat.toml", "--collective", "barrier"], "invalid value 'barrier' for '--collective"),
        (&["flat.toml", "--model", "resnet51"], "--model resnet51: No such file"),
        (&["flat.toml", "--model", "model", "--bytes", "4"], "the argument '--model <MODEL|FILE>'"),
        (&["flat.toml", "--compute-ms", "3"], "the following required arguments were not provided"),
        (&["flat.toml", "--model", "model", "--compute-ms", "-1"], ""),
        (&["flat.toml", "--model", "model", "--spec", "torus(dims=3x5)"], "--spec: "),
        (
            &["flat.toml", "--model", "model", "--memory", "1K"],
            "--model: the step would need up to",
        ),
        (
            &["servers.toml", "--model", "model"],
            "--model: training steps are simulated without servers",
        ),
    ];
    for (words, expected) in cases {
        let output = simulate(&place, &[&["run"], *words].concat());
        assert_eq!((output.code, output.stdout.as_str()), (Some(2), ""), "{words:?} {output:?}");
        assert!(output.stderr.starts_with(&format!("error: {expected}")), "{output:?}");
    }
}
