//! Viewers of a running job: `gradwire status` and `gradwire top`.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread::{self, JoinHandle},
};

use gradwire_proto::pb::StatusRequest;
use gradwire_services::inspect_client::InspectClient;
use gradwire_tests::launched::{Job, Launch, processes::Role, programs};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

const SCHEMA: &str = include_str!("../../../docs/status.schema.json");

/// Steps of at least 50 ms that take longer than the second that a report covers. The report
/// after them has nothing of the start, whose first step waits until the links are measured.
const STEPS_AFTER_START: u64 = 25;

/// Two nodes with two ranks each that make steps; rank 3 needs 50 ms longer for each of them.
pub(super) fn slow_rank_3() -> Job {
    let launch = Launch::new().two_by_two().words(&["--verbose"]);
    let job = launch.rank(&["attach", "!3/train:0:1000", "3/train:50:1000", "leave"]).start();
    job.until_said("training", 4);
    job
}

fn gradwire(words: &[&str]) -> Command {
    let mut command = Command::new(programs::gradwire());
    command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The JSON of `gradwire status`, checked against its schema.
pub(super) fn checked(text: &str) -> Value {
    let json: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let schema: Value = serde_json::from_str(SCHEMA).unwrap();
    let validator = jsonschema::draft202012::new(&schema).unwrap();
    let errors: Vec<_> = validator.iter_errors(&json).map(|error| error.to_string()).collect();
    assert!(errors.is_empty(), "{errors:#?} in {json:#}");
    json
}

/// Reads the lines of a program until `look` returns something, and ends the program.
fn until<T>(mut command: Command, mut look: impl FnMut(&str) -> Option<T>) -> T {
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let found = lines.map_while(Result::ok).find_map(|line| look(&line));
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    found.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn a_slow_rank_is_a_straggler_to_every_viewer() {
    let mut job = slow_rank_3();
    let grpc = job.served("grpc").remove(0);

    let status = job.wait_for("a straggler, and reports of all nodes", || {
        let output = gradwire(&["status", "--json", &grpc]).output().unwrap();
        let json = checked(&String::from_utf8(output.stdout).unwrap());
        let has_steps = |node: &Value| {
            let ranks = node["report"]["ranks"].as_array();
            ranks.is_some_and(|ranks| {
                ranks.len() == 2
                    && ranks.iter().all(|rank| rank["steps"].as_u64() > Some(STEPS_AFTER_START))
            })
        };
        let nodes = json["nodes"].as_array().unwrap();
        let is_complete = nodes.len() == 2 && nodes.iter().all(has_steps);
        // The shares of the lags begin with the job, whose start takes time.
        let mut lags = json["lags"].as_array().unwrap().iter();
        let is_slow = lags.any(|lag| lag["rank"] == 3 && lag["share"].as_f64() > Some(0.5));
        (is_complete && is_slow && json["straggler"] == 3).then_some(json)
    });
    // Rank 3 computes for 50 ms in each step, during which the others are blocked.
    let seconds = 1.0 / status["steps_per_second"].as_f64().unwrap();
    assert!(seconds >= 0.05, "{status:#}");
    let exposed = |node: usize, rank: usize| {
        status["nodes"][node]["report"]["ranks"][rank]["exposed"].as_f64().unwrap()
    };
    assert!(exposed(1, 1) < exposed(0, 0), "{status:#}");
    // Rank 0 waits for rank 3 on the other node: that is not negotiation.
    let time = |node: usize, rank: usize, part: &str| {
        status["nodes"][node]["report"]["ranks"][rank]["time"][part].as_f64().unwrap()
    };
    let parts = ["compute", "ranks", "negotiation", "transfer", "copies"];
    for (node, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let sum: f64 = parts.iter().map(|part| time(node, rank, part)).sum();
        assert!((0.98..1.02).contains(&sum), "{status:#}");
    }
    for (node, rank) in [(0, 0), (1, 0)] {
        let waits = time(node, rank, "ranks");
        let most = parts[2..].iter().map(|part| time(node, rank, part)).fold(0.0, f64::max);
        assert!(waits > most && waits > time(1, 1, "ranks"), "{status:#}");
    }
    assert_eq!(status["choices"][0]["collective"], "allreduce", "{status:#}");
    for node in 0..2 {
        let report = &status["nodes"][node]["report"];
        let peers = report["peers"].as_array().unwrap();
        assert_eq!(peers.len(), 1, "{status:#}");
        assert_eq!(peers[0]["node"], 1 - node, "{status:#}");
        assert!(peers[0]["sent_bytes_per_second"].as_f64() > Some(0.0), "{status:#}");
        assert!(report["resident_bytes"].as_u64() > Some(1 << 20), "{status:#}");
        assert!(report["shared_bytes"].as_u64() > Some(0), "{status:#}");
    }
    for key in ["decisions", "events"] {
        assert!(!status[key].as_array().unwrap().is_empty(), "{key}: {status:#}");
    }

    let text = until(gradwire(&["status", &grpc]), |line| {
        line.starts_with("straggler: rank 3: ").then(|| line.to_owned())
    });
    assert!(text.ends_with(" of the time"), "{text}");
    let mut last = 0.0;
    until(gradwire(&["status", "--watch", "--json", &grpc]), |line| {
        let uptime = checked(line)["uptime_seconds"].as_f64().unwrap();
        assert!(uptime > last, "{line}");
        (std::mem::replace(&mut last, uptime) > 0.0).then_some(())
    });
    // Without a terminal, top writes lines.
    let line = until(gradwire(&["top", &grpc]), |line| {
        line.contains("straggler: rank 3 (").then(|| line.to_owned())
    });
    assert!(line.contains(" running, ") && line.contains(" steps/s, "), "{line}");

    job.allow("end");
    job.finish().assert_code(0);
}

/// `gradwire top` on a terminal provided by `script`.
struct Top {
    child: Child,
    keys: ChildStdin,
    screen: Arc<Mutex<vt100::Parser>>,
    reader: JoinHandle<()>,
    folder: TempDir,
}

impl Top {
    fn start(grpc: &str) -> Self {
        let gradwire = programs::gradwire().display().to_string();
        let folder = tempfile::tempdir().unwrap();
        let line = format!("tty > tty; stty rows 40 cols 130; exec '{gradwire}' top {grpc}");
        let mut child = Command::new("script")
            .args(["--quiet", "--return", "--flush", "--command", &line, "/dev/null"])
            .current_dir(folder.path())
            .env("SHELL", "/bin/sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("script, of util-linux");
        let screen = Arc::new(Mutex::new(vt100::Parser::new(40, 130, 0)));
        let (mut output, shown) = (child.stdout.take().unwrap(), screen.clone());
        let reader = thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(read @ 1..) = output.read(&mut buffer) {
                shown.lock().unwrap_or_else(PoisonError::into_inner).process(&buffer[..read]);
            }
        });
        Self { keys: child.stdin.take().unwrap(), child, screen, reader, folder }
    }

    fn text(&self) -> String {
        self.screen.lock().unwrap_or_else(PoisonError::into_inner).screen().contents()
    }

    fn resize(&self, rows: u16, columns: u16) {
        let mut screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
        screen.screen_mut().set_size(rows, columns);
        drop(screen);
        let terminal = fs::read_to_string(self.folder.path().join("tty")).unwrap();
        let [rows, columns] = [rows, columns].map(|size| size.to_string());
        let stty = ["-F", terminal.trim(), "rows", &rows, "cols", &columns];
        assert!(Command::new("stty").args(stty).status().unwrap().success());
    }

    fn until_shown(&self, job: &Job, words: &[&str]) {
        job.wait_for(&format!("{words:?} on the screen"), || {
            let text = self.text();
            words.iter().all(|word| text.contains(word)).then_some(())
        });
    }

    /// Waits for its end, after which the terminal is restored. Returns its exit code and the
    /// contents of the terminal.
    fn end(mut self, job: &Job) -> (Option<i32>, String) {
        let status = job.wait_for("the end of top", || self.child.try_wait().unwrap());
        self.reader.join().unwrap();
        let screen = self.screen.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(!screen.screen().alternate_screen(), "{}", screen.screen().contents());
        assert!(!screen.screen().hide_cursor());
        (status.code(), screen.screen().contents())
    }
}

#[test]
fn top_shows_the_job_and_restores_the_terminal() {
    let mut job = slow_rank_3();
    let grpc = job.served("grpc").remove(0);
    for key in [b"q", b"\x03"] {
        let mut top = Top::start(&grpc);
        let words = [
            "straggler: rank 3: the others wait for it ",
            "hosts (2)",
            "0 127.0.0.1",
            "1 127.0.0.2",
            "ranks (4)",
            "links: ",
            "operations in flight",
            "decisions",
            "events",
            "the world is complete: 2 nodes",
        ];
        top.until_shown(&job, &words);
        top.resize(24, 80);
        job.wait_for("the screen in its new size", || {
            let text = top.text();
            let lines: Vec<&str> = text.lines().collect();
            let [.., border, keys] = lines[..] else { return None };
            let fits = border.starts_with('└') && border.chars().count() == 80;
            (fits && lines.len() == 24 && keys.ends_with("q quit")).then_some(())
        });
        // One pane at a time, and a filter.
        top.keys.write_all(b"2/127.0.0.2\r").unwrap();
        top.until_shown(&job, &["health", "1 127.0.0.2", "filter: 127.0.0.2  (Esc clears it)"]);
        assert!(!top.text().contains("0 127.0.0.1"), "{}", top.text());
        top.keys.write_all(key).unwrap();
        let (code, left) = top.end(&job);
        assert_eq!((code, left.trim()), (Some(0), ""), "{key:?}");
    }

    // The job ends while top runs.
    let top = Top::start(&grpc);
    top.until_shown(&job, &["hosts (2)"]);
    job.allow("end");
    let (code, left) = top.end(&job);
    assert_eq!(code, Some(1), "{left}");
    assert!(
        left.contains("error: ") && left.contains("hint: the output of gradwire run"),
        "{left}"
    );
    job.finish().assert_code(0);
}

#[test]
fn viewers_say_why_the_job_failed() {
    let mut job = slow_rank_3();
    let grpc = job.served("grpc").remove(0);
    let mut watching = gradwire(&["status", "--watch", "--json", &grpc]).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    checked(&lines.next().unwrap().unwrap());
    job.signal(Role::Rank(2), Signal::KILL);
    let last = checked(&lines.map_while(Result::ok).last().unwrap());
    assert_eq!((&last["phase"], &last["failure"]["rank"]), (&"failed".into(), &2.into()));
    let output = watching.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
    assert!(text.contains("the job failed: rank 2 on host 127.0.0.2"), "{text}");
    job.finish();
}

#[test]
fn viewers_say_that_the_coordinator_is_lost() {
    let mut job = slow_rank_3();
    let grpc = job.served("grpc").remove(0);
    let mut watching = gradwire(&["status", "--watch", "--json", &grpc]).spawn().unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    checked(&lines.next().unwrap().unwrap());
    job.signal(Role::Daemon(0), Signal::KILL);
    assert!(lines.map_while(Result::ok).all(|line| !line.is_empty()));
    let output = watching.wait_with_output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 2, "{text}");
    assert!(text.starts_with("error: ") && text.contains(&grpc), "{text}");
    assert!(text.contains("\nhint: "), "{text}");
    job.finish();
}

/// Nanoseconds of processor time of the threads of a process with this name.
fn used_ns(pid: u32, thread: &str) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let read = |task: &fs::DirEntry, file: &str| fs::read_to_string(task.path().join(file));
    let of_name = tasks.filter(|task| read(task, "comm").is_ok_and(|name| name.trim() == thread));
    let used = |task: fs::DirEntry| {
        let text = read(&task, "schedstat").unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    of_name.map(used).sum()
}

/// Connections, requests and encoding have their own thread. The thread that negotiates, and that
/// moves small tensors, makes few snapshots however many requests there are.
#[test]
fn many_requests_do_not_load_the_control_thread() {
    let mut job = Launch::new()
        .two_by_two()
        .words(&["--verbose"])
        .rank(&["attach", "loop:1:100", "until:end", "loop:20:100", "leave"])
        .start();
    job.until_said("looped", 4);
    let (grpc, pid) = (job.served("grpc").remove(0), job.process(Role::Daemon(0)).pid);
    let used = || ["gw-inspect", "gw-control"].map(|thread| used_ns(pid, thread));
    let before = used();
    let requests = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let client = InspectClient::connect(format!("http://{grpc}")).await.unwrap();
            for _ in 0..12 {
                let mut client = client.clone();
                tasks.spawn(async move {
                    for _ in 0..50 {
                        client.status(StatusRequest {}).await.unwrap();
                    }
                    50
                });
            }
        }
        tasks.join_all().await.into_iter().sum::<u32>()
    });
    assert_eq!(requests, 4 * 12 * 50);
    let after = used();
    let [inspect, control] = [0, 1].map(|thread| after[thread] - before[thread]);
    println!("{requests} requests: gw-inspect {inspect} ns, gw-control {control} ns");
    assert!(inspect > 2 * control, "gw-inspect {inspect} ns, gw-control {control} ns");
    job.allow("end");
    job.finish().assert_code(0);
}
