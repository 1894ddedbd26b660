//! Servers: hosts without ranks, which reduce for the others.

use std::process::{Command, Output};

use gradwire_proto::{DType, ReduceOp, Request};
use gradwire_reference::Dice;
use gradwire_tests::{
    calls::{Call, request, with_op},
    cluster::{Plan, run_job},
    launched::{Launch, processes::Role, programs},
};
use gradwire_worker::{AllreduceOptions, BroadcastOptions, JoinOptions};
use rustix::process::Signal;

use super::metrics::{series, variable};

const TWO_AND_TWO: [&str; 2] = ["--servers", "127.0.0.3,127.0.0.4"];

/// Two nodes with two ranks each, and two servers for all allreduces.
fn with_servers() -> Launch {
    Launch::new().two_by_two().words(&TWO_AND_TWO).set("negotiation.algorithm=servers")
}

/// Compared with the reference, for types and sizes with which owners have nothing, one cache line
/// or much.
#[test]
fn sums_over_servers_are_right() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let forms: [(&[u32], &str); 5] = [
        (&[1, 1, 0], "none"),
        (&[2, 1, 0, 0, 0], "none"),
        (&[1, 1, 1, 1, 0], "none"),
        (&[3, 2, 1, 0, 0], "bf16"),
        (&[2, 0, 0], "none"),
    ];
    for (slots, compression) in forms {
        let plan = Plan::nodes(slots)
            .set("negotiation.algorithm=servers")
            .set("negotiation.piece_bytes=64KiB")
            .set("data.chunk_bytes=16KiB")
            .set(format!("data.compression={compression}"));
        let results = run_job(&plan, move |session| {
            let nodes = session.nodes().len();
            let all = session.global_process_set();
            let ranks: Vec<u32> = (0..session.size()).collect();
            let mut results = Vec::new();
            for dtype in [DType::F32, DType::F16, DType::Bf16, DType::F64, DType::I32, DType::U8] {
                for op in [ReduceOp::Sum, ReduceOp::Max] {
                    for elements in [0, 1, 63, 1000, 70_001] {
                        let allreduce = gradwire_proto::Collective::Allreduce;
                        let request: Request =
                            with_op(request(allreduce, dtype, &[elements], 0), op);
                        let name = format!("{dtype}.{op}.{elements}");
                        let seed = Dice::of(&[seed, elements]).roll();
                        let call = Call { seed, ..Call::same(name, &ranks, &request) };
                        let got = call.run(session, &all, nodes).unwrap();
                        results.push(got.into_iter().flatten().map(|part| part.bytes).collect());
                    }
                }
            }
            let results: Vec<Vec<Vec<u8>>> = results;
            results
        });
        // SAME, even if the wire format rounds.
        assert!(results.iter().all(|result| *result == results[0]), "{slots:?}, seed {seed}");
    }
}

/// A server takes part in reductions of any process set, and in nothing that it can't help with.
#[test]
fn other_collectives_and_sets_work_with_servers() {
    let plan = Plan::nodes(&[1, 2, 1, 0]).set("negotiation.algorithm=servers");
    run_job(&plan, |session| {
        assert_eq!((session.size(), session.nodes().len()), (4, 3));
        for round in 0..20u64 {
            let some = session.add_process_set(&[0, 2, 3]).unwrap();
            let near = session.add_process_set(&[1, 2]).unwrap();
            let own = |rank: u32| session.tensor(&[u64::from(rank) + round], &[1]).unwrap();
            for (set, ranks) in [(&some, &[0u32, 2, 3][..]), (&near, &[1, 2])] {
                if ranks.contains(&session.rank()) {
                    let options = AllreduceOptions::named(format!("w{}", ranks.len()));
                    let options = options.op(ReduceOp::Sum).process_set(set);
                    let mut tensor = own(session.rank());
                    session.allreduce(&mut tensor, options).unwrap();
                    let wanted: u64 = ranks.iter().map(|&rank| u64::from(rank) + round).sum();
                    assert_eq!(tensor.as_slice(), [wanted]);
                }
            }
            let mut tensor = own(session.rank());
            session.broadcast(&mut tensor, BroadcastOptions::from_rank(3).name("b")).unwrap();
            assert_eq!(tensor.as_slice(), [3 + round]);
            session.remove_process_set(some).unwrap();
            session.remove_process_set(near).unwrap();
            let last = session.join(JoinOptions::default()).unwrap();
            assert!(last < 4);
        }
    });
}

/// TELL: the failure names the server and a tensor. Nothing remains.
#[test]
fn a_killed_server_is_named() {
    let mut job = with_servers().rank(&["attach", "loop:100000:300000"]).start();
    job.until_said("looping", 4);
    job.signal(Role::Daemon(3), Signal::KILL);
    let report = job.finish();
    report.assert_code(1);
    report
        .assert_verdict(&["gradwire: the daemon on host 127.0.0.4 (pid ", "was killed by SIGKILL"]);
}

#[test]
fn a_stopped_server_is_reported_as_silent() {
    let launch = with_servers().set("recovery.return_timeout_ms=3000");
    let mut job = launch.rank(&["attach", "loop:100000:300000"]).start();
    job.until_said("looping", 4);
    let fault = job.signal(Role::Daemon(2), Signal::STOP);
    let report = job.finish();
    let what = ["host 127.0.0.3", "the daemon of node 2 (a server) is lost: it has been silent"];
    report.assert_notified(&[0, 1, 2, 3], fault, &what);
    report.assert_code(1);
}

/// It reduces, and stays until the end; `gradwire status` lists it.
#[test]
fn servers_are_listed_and_take_load() {
    let steps = ["attach", "loop:20:300000", "say:done", "until:end", "leave"];
    let mut job = with_servers().words(&["--verbose"]).rank(&steps).start();
    job.until_said("said", 4);
    let status = Command::new(programs::gradwire())
        .args(["status", &job.served("grpc")[0]])
        .output()
        .expect("gradwire");
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("host 127.0.0.3: server,"), "{status}");
    assert!(status.contains("host 127.0.0.2: ranks 2-3,"), "{status}");
    // With two nodes and two servers, every node and every server sends the same amount.
    let node = sent(&variable(&job, 0, "GRADWIRE_DAEMON_METRICS"));
    let server = sent(&job.served("metrics")[2]);
    assert!(node > 1e6, "{node} bytes");
    assert!((0.8..1.25).contains(&(server / node)), "{server} bytes, {node} of a node");
    job.allow("end");
    job.finish().assert_code(0);
}

/// The bytes that a daemon has sent.
fn sent(metrics: &str) -> f64 {
    let shown = series(metrics);
    let sent = shown.iter().filter(|(name, _)| name.contains("network_sent_bytes_total"));
    sent.map(|(_, bytes)| bytes).sum()
}

/// If line rates differ in the hostfile, faster hosts do more. The ranks check every sum.
#[test]
fn faster_lines_do_more() {
    let launch = Launch::new();
    let hosts = "127.0.0.1 line=1G\n127.0.0.2 line=1000\n127.0.0.3 line=3G\n";
    let file = launch.folder().join("hosts");
    std::fs::write(&file, hosts).unwrap();
    let words = ["--verbose", "--hostfile", file.to_str().unwrap()];
    let launch = launch.words(&words).set("negotiation.algorithm=servers");
    // A probe of the loopback would change that.
    let steps = ["attach", "loop:40:300000", "say:done", "until:end", "leave"];
    let mut job = launch.set("probe.enabled=false").rank(&steps).start();
    job.leaves("hosts");
    job.until_said("said", 3);
    let bytes = [0, 1, 2].map(|rank| sent(&variable(&job, rank, "GRADWIRE_DAEMON_METRICS")));
    // With rates 1, 1, 3 of three nodes, the slow ones own (12·1 − 15), less than nothing, so they
    // send only their own piece. The fast one owns all of it and sends two.
    assert!(bytes[0] > 1e6, "{bytes:?}");
    let ratio = bytes[2] / (bytes[0] + bytes[1]);
    assert!((0.8..1.25).contains(&ratio), "{bytes:?}");
    let status = Command::new(programs::gradwire())
        .args(["explain", &job.served("grpc")[0]])
        .output()
        .expect("gradwire");
    assert!(String::from_utf8(status.stdout).unwrap().contains("servers"));
    job.allow("end");
    job.finish().assert_code(0);
}

fn run(words: &[&str]) -> Output {
    let program = programs::beside("gradwire-test-rank");
    let mut command = Command::new(programs::gradwire());
    command.arg("run").args(words).arg(program).arg("attach").output().expect("gradwire")
}

#[test]
fn invalid_servers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let hostfile = folder.path().join("hosts");
    std::fs::write(&hostfile, "127.0.0.1 role=server\n127.0.0.2\n").unwrap();
    let hostfile = hostfile.to_str().unwrap();
    let cases: [(&[&str], &str); 4] = [
        (&["--hostfile", hostfile], "the first host must have ranks"),
        (&["-H", "127.0.0.1", "--servers", "127.0.0.2:2"], "a server has no ranks"),
        (&["-H", "127.0.0.1", "--servers", "127.0.0.1"], "host 127.0.0.1 is given twice"),
        (&["-H", "127.0.0.1", "--servers", ","], "--servers: no hosts are given"),
    ];
    for (words, expected) in cases {
        let output = run(words);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(expected) && text.lines().count() == 1, "{text}");
    }
}
