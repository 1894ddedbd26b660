//! Descriptions of clusters: errors name their line, and nothing panics.

use std::sync::Arc;

use gradwire_collectives::{Algorithm, Spec};
use gradwire_simulator::{
    input::{Input, parse},
    job::{InOrder, Operation},
    memory, run,
};
use proptest::prelude::*;

const WHOLE: &str = r#"
[network]
latency_us = 20
rate_mbit = 25000
ecmp = "hash"

[[tier]]
links = 2
rate_mbit = 25000
latency_us = 5

[[host]]
name = "a"
rack = "r1"
count = 4

[[host]]
name = "b"
rack = "r2"
count = 4
slowness = 2

[[link]]
from = "a0"
to = "a1"
latency_us = 7
lane_rate_mbit = 9000
rate_mbit = 20000

[job]
bytes = 1048576
pieces = 4
specs = ["ring", "circulant(radix=4)"]

[tcp]
timeout_ms = 10

[[fault]]
kind = "slow"
rack = "r2"
link = 1
factor = 0.5
until_ms = 100

[[fault]]
kind = "pause"
hosts = 2
every_ms = 5
until_ms = 50

[[fault]]
kind = "busy"
host = "b1"
times = 3

[[fault]]
kind = "loss"
loss_percent = 0.5
from_ms = 1
until_ms = 2

[[fault]]
kind = "leave"
host = "a3"
from_ms = 1
until_ms = 3
"#;

fn seconds(input: &Input) -> f64 {
    let hosts = input.setup.network.topology.contributors();
    let operation = Operation::new(input.kind, input.specs[0], input.bytes, hosts);
    let operation = Arc::new(operation);
    let operations = vec![operation; input.pieces as usize];
    let outcome = run(&input.setup, &mut InOrder::new(operations, input.control));
    assert_eq!(outcome.standstill, None);
    outcome.seconds
}

#[test]
fn all_keys_are_read() {
    let input = parse(WHOLE).unwrap();
    assert_eq!(input.setup.network.hosts.len(), 8);
    assert_eq!(input.setup.network.hosts[5].name, "b1");
    assert_eq!((input.specs.len(), input.setup.faults.len()), (2, 5));
    assert_eq!(input.setup.network.pairs[&(1, 0)].latency, 7e-6);
    assert!(seconds(&input) > 0.0);
}

/// The file of a probe: lines have their measured rate, not that of their interface, a message's
/// processor time is counted once, and the coordinator's costs are read.
#[test]
fn a_measured_cluster_is_as_it_was_measured() {
    let host = |name: &str, rack: &str| {
        format!("[[host]]\nname = \"{name}\"\nrack = \"{rack}\"\nline_mbit = 10000\n")
    };
    let link = |from: &str, to: &str, rate: u32| {
        format!(
            "[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nlatency_us = 9\nlane_rate_mbit = 700\n\
             rate_mbit = {rate}\n"
        )
    };
    let hosts = [host("a", "r"), host("b", "r"), host("c", "r"), host("d", "s")].concat();
    // The link between a and c is slow, and d is behind an uplink.
    let links =
        [link("a", "b", 960), link("b", "c", 940), link("a", "c", 100), link("a", "d", 250)];
    let text = format!(
        "{hosts}{}[network]\nrate_mbit = 950\nrack_rate_mbit = 240\nmessage_ns = 2000\n\
         operation_us = 200\nburst_bytes = 262144\n[job]\ncall_us = 350\nlanes = 3\n",
        links.concat()
    );
    let input = parse(&text).unwrap();
    let network = &input.setup.network;
    let megabits = |rate: f64| rate * 8.0 / 1e6;
    assert!((megabits(network.hosts[1].egress) - 960.0).abs() < 1e-6);
    assert!((megabits(network.hosts[3].ingress) - 10_000.0).abs() < 1e-6);
    assert!((megabits(network.pairs[&(0, 2)].cap) - 700.0).abs() < 1e-6);
    for pair in [(0, 1), (2, 1), (0, 3)] {
        assert_eq!(network.pairs[&pair].cap, f64::INFINITY, "{pair:?}");
    }
    assert!((network.pairs[&(1, 0)].latency - 7e-6).abs() < 1e-12);
    assert_eq!(network.burst, 262_144.0);
    assert!((input.control.call - 250e-6).abs() < 1e-12, "{:?}", input.control);
    assert!((input.control.order - 100e-6).abs() < 1e-12, "{:?}", input.control);
    assert_eq!((input.cost.lanes, input.cost.connections), (3, 3));
    assert!((input.cost.cross_rack.per_byte * 240e6 / 8.0 - 1.0).abs() < 1e-9);
    // By default an announcement takes as long as an order.
    let unknown = parse(&text.replace("call_us = 350\n", "")).unwrap();
    assert!((unknown.control.call - 100e-6).abs() < 1e-12, "{:?}", unknown.control);
}

#[test]
fn each_mistake_is_named_with_its_line() {
    let hosts = "[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"\n";
    for (text, line, expected) in [
        (String::new(), 1, "must be a [[host]] section"),
        (format!("{hosts}[network]\nrate_mbits = 1"), 6, "unknown field `rate_mbits`, expected"),
        (format!("{hosts}[network]\nrate_mbit = 0"), 6, "network.rate_mbit is 0: it must be from"),
        (format!("{hosts}[network]\nrate_mbit = -3"), 6, "network.rate_mbit is -3"),
        (format!("{hosts}[network]\nrate_mbit = inf"), 6, "network.rate_mbit is inf"),
        (format!("{hosts}[network]\nlatency_us = nan"), 6, "network.latency_us is NaN"),
        (
            format!("{hosts}[network]\nrate_mbit = \"fast\""),
            6,
            "network.rate_mbit: invalid type: string \"fast\", expected a number",
        ),
        (format!("{hosts}[network]\nburst_bytes = -1"), 6, "network.burst_bytes is -1"),
        (format!("{hosts}[network]\nburst_mbit = 0"), 6, "network.burst_mbit is 0"),
        (format!("{hosts}[network]\nqueue_bytes = 0.5"), 6, "must be a whole number"),
        (format!("{hosts}[network]\nfree_senders = 0"), 6, "network.free_senders is 0"),
        (format!("{hosts}[job]\ncall_us = nan"), 6, "job.call_us is NaN"),
        (
            format!("{hosts}[job]\npiece_bytes = 1"),
            6,
            "job.piece_bytes is 1: it must be from 65536",
        ),
        (format!("{hosts}[job]\nspecs = \"ring\""), 6, "job.specs: invalid type: string"),
        (format!("{hosts}[job]\nlanes = 1\nlanes = 1"), 7, "job.lanes: duplicate key"),
        (format!("{hosts}[job]\n[network]\n[job]"), 7, "job: duplicate key"),
        ("host = 3".to_owned(), 1, "host: invalid type: integer `3`, expected a list"),
        (format!("{hosts}[[host]]\ncount = 4"), 5, "missing field `name`"),
        (format!("{hosts}[[host]]\nname = \"\""), 6, "host.name is empty"),
        (format!("{hosts}[job]\nbytes = 7"), 6, "job.bytes is 7: it must be a multiple of 4"),
        (format!("{hosts}[[link]]\nfrom = \"a\"\nto = \"a\""), 7, "it must be another host"),
        (format!("{hosts}[network]\necmp = \"spray\""), 6, "must be \"ideal\" or \"hash\""),
        (
            format!("{hosts}[[tier]]\nrate_mbit = 10"),
            6,
            "there is 1 [[tier]] section, but the racks of the hosts have 0 levels",
        ),
        (
            "[[host]]\nname = \"a\"\nrack = \"x\"\n[[host]]\nname = \"b\"\nrack = \"y\"\n\
             [[tier]]\nrate_mbit = 10\n[[tier]]\nrate_mbit = 10"
                .to_owned(),
            10,
            "there are 2 [[tier]] sections, but the racks of the hosts have 1 level",
        ),
        (
            "[[host]]\nname = \"a\"\nrack = \"x\"\n[[host]]\nname = \"b\"\nrack = \"y\"\n\
             [[tier]]\nlinks = 0\nrate_mbit = 10"
                .to_owned(),
            9,
            "no route to each other",
        ),
        (format!("{hosts}[[host]]\nname = \"a\""), 6, "there are two hosts \"a\""),
        (format!("{hosts}count = 4096"), 4, "more than 4096 hosts"),
        (format!("{hosts}count = 1.5"), 5, "must be a whole number"),
        (format!("{hosts}[job]\nspecs = [\"torus(dims=2x4)\"]"), 6, "is for 8 nodes"),
        (format!("{hosts}[job]\nspecs = [\"rign\"]"), 6, "unknown algorithm \"rign\""),
        (format!("{hosts}[job]\ncollective = \"sum\""), 6, "it must be allreduce, broadcast"),
        (format!("{hosts}[job]\nchunk_bytes = 1"), 6, "job.chunk_bytes is 1: it must be from 4096"),
        (format!("{hosts}[[fault]]\nkind = \"fire\""), 6, "it must be pause, slow, busy"),
        (format!("{hosts}[[fault]]\nkind = \"busy\"\nhost = \"c\""), 7, "unknown host \"c\""),
        (format!("{hosts}[[fault]]\nkind = \"busy\""), 5, "a \"busy\" fault needs"),
        (format!("{hosts}[[fault]]\nkind = \"loss\"\nhost = \"a\""), 7, "has only loss_percent"),
        (
            format!("{hosts}[[fault]]\nkind = \"slow\"\nrack = \"r\""),
            7,
            "the cluster has no links between racks",
        ),
        (
            format!("{hosts}[[fault]]\nkind = \"loss\"\nfrom_ms = 5\nuntil_ms = 5"),
            8,
            "must be more than fault.from_ms",
        ),
        (format!("{hosts}[[link]]\nfrom = \"a\"\nto = \"c\""), 7, "unknown host \"c\""),
        (format!("order = [0]\n{hosts}"), 1, "order must contain each number from 0"),
        (format!("order = [1, 1]\n{hosts}"), 1, "order must contain each number from 0"),
        (format!("order = [0, 2]\n{hosts}"), 1, "order must contain each number from 0"),
        (format!("order = [-1, 0]\n{hosts}"), 1, "expected u32"),
        ("[[host]\n".to_owned(), 1, ""),
    ] {
        let error = parse(&text).unwrap_err();
        assert!(error.what.contains(expected), "{text}\n{error}");
        assert!(error.line == line && !error.what.contains('\n'), "{text}\n{error}");
    }
    let error = parse(&"#".repeat((4 << 20) + 1)).unwrap_err();
    assert!(error.what.contains("the limit is 4194304"), "{error}");
}

/// `gradwire probe` writes what `gradwire explain` reads.
#[test]
fn a_measured_cluster_is_an_input() {
    let text = "order = [1, 0]\n[network]\nlatency_us = 12.5\nrate_mbit = 940\n\
                rack_latency_us = 30.0\nrack_rate_mbit = 235.0\nreduce_mb_per_s = 5000.0\n\
                chunk_bytes = 131072\nmessage_ns = 3000.0\nburst_loss_percent = 7.0\n\
                free_senders = 8\nsender_loss_percent = 3.0\nlane_rate_mbit = 900.0\n\
                publish_mb_per_s = 9000.0\noperation_us = 150.0\nqueue_bytes = 774144\n\
                overflow_us = 4616.0\nrack_paths = 1\n[[host]]\nname = \"a\"\nrack = \"r1\"\n\
                [[host]]\nname = \"b\"\nrack = \"r2\"\nline_mbit = 1000\n[job]\n\
                specs = [\"ring\"]";
    let input = parse(text).unwrap();
    assert_eq!(input.setup.network.topology.order(), [1, 0]);
    assert!((input.control.order + input.control.done - 150e-6).abs() < 1e-12);
    // Racks of one host have a quarter of its rate.
    let least = 64.0 * 1.048576e6 * 8.0 / 235e6;
    let seconds = seconds(&input);
    assert!(seconds > least && seconds < 1.2 * least, "{seconds} {least}");
}

/// As in daemons: if some line rates are unknown, all lines count as equal.
#[test]
fn faster_lines_have_larger_shares() {
    let hosts = |line: &str| {
        format!("[[host]]\nname = \"a\"\nline_mbit = 1000\n[[host]]\nname = \"b\"\n{line}")
    };
    let lines = |line: &str| {
        let input = parse(&hosts(line)).unwrap();
        input.setup.network.topology.lines().to_vec()
    };
    assert_eq!(lines("line_mbit = 3000"), [1, 3]);
    assert!(lines("").is_empty() && lines("line_mbit = 1000").is_empty());
}

/// As in daemons: traffic of a slow link takes another way.
#[test]
fn trees_go_around_slow_links() {
    let cluster = |rates: [u32; 3]| {
        let hosts = ["a", "b", "c"].map(|name| format!("[[host]]\nname = \"{name}\"\n")).concat();
        let pairs = [("a", "b"), ("b", "c"), ("a", "c")].into_iter().zip(rates);
        let links = pairs.map(|((from, to), rate)| {
            format!(
                "[[link]]\nfrom = \"{from}\"\nto = \"{to}\"\nlane_rate_mbit = {rate}\n\
                 rate_mbit = {rate}\n"
            )
        });
        let job = "[network]\nrate_mbit = 1000\n[job]\nbytes = 1048576\n";
        hosts + &links.collect::<String>() + job
    };
    let links = |rates| parse(&cluster(rates)).unwrap().setup.network.topology.links().cloned();
    let equal = links([1000; 3]).unwrap();
    assert_eq!((equal.lines(), equal.pairs()), (&[1000; 3][..], &[][..]));
    assert_eq!(links([990, 1010, 900]), Some(equal), "noise");
    let slow = cluster([1000, 1000, 100]);
    assert_eq!(links([1000, 1000, 100]).unwrap().pairs(), [0, 100, 0]);
    let seconds = |text: &str, spec: &str| {
        let mut input = parse(text).unwrap();
        input.specs = vec![Spec::parse(spec).unwrap()];
        seconds(&input)
    };
    let (around, through) = (seconds(&slow, "blink"), seconds(&slow, "direct"));
    assert!(around * 2.0 < through, "{around} s around the slow link, {through} s through it");
}

proptest! {
    #[test]
    fn no_text_panics(text in ".{0,400}") {
        let _ = parse(&text);
    }

    /// Lines of a valid description, reordered, some of them cut or changed.
    #[test]
    fn no_description_panics(
        lines in prop::collection::vec((0usize..60, 0usize..40, any::<bool>(), -5i64..5000), 1..60),
    ) {
        let all: Vec<&str> = WHOLE.lines().collect();
        let line = |(line, cut, is_cut, number): (usize, usize, bool, i64)| {
            let text = all[line % all.len()];
            match text.split_once('=') {
                Some((key, _)) if is_cut => format!("{key}= {number}"),
                _ if cut < 2 => text.chars().take(cut).collect(),
                _ => text.to_owned(),
            }
        };
        let text: Vec<String> = lines.into_iter().map(line).collect();
        let _ = parse(&text.join("\n"));
        // And the valid description with one line changed.
        let mut changed: Vec<String> = all.iter().map(|&line| line.to_owned()).collect();
        let at = text.len() % changed.len();
        changed[at].clone_from(&text[0]);
        if let Ok(input) = parse(&changed.join("\n"))
            && input.bytes <= 1 << 20
            && input.pieces <= 4
            && input.setup.network.hosts.len() <= 8
        {
            let spec = input.specs.first().copied().unwrap_or(Algorithm::Ring.into());
            let operation = Operation::new(input.kind, spec, input.bytes, 2);
            let _ = memory::needed(&input.setup, &operation, input.pieces);
        }
    }
}
