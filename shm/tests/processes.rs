//! Two real processes with one socket, one control page and one segment: a hundred thousand
//! records, and the death of either side at every step. After each death the survivor notices, and
//! nothing of the job is left on the machine (CLEAN).

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Child,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::JobId;
use gradwire_shm::{
    arena::{Arena, ArenaConfig, RegisterError},
    control::{
        COMPLETIONS, Completion, DaemonControl, Doorbell, RingError, Submission, SubmitError,
        WorkerControl,
    },
    handover::{receive, send},
    segment::{HugePages, Segment},
};
use rustix::{
    event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll},
    process::{Pid, Signal, kill_process},
};

mod common;

use common::MAX_IN_FLIGHT;

/// The longest wait in these tests.
const LIMIT: Duration = Duration::from_secs(60);

/// The parameters of a child: `ROLE:STEP:RECORDS:JOB`.
struct Part {
    stop_at: String,
    records: u64,
    job: JobId,
}

impl Part {
    /// Prints that the step is reached; stays there if it is the last one.
    fn reach(&self, step: &str) {
        println!("AT {step}");
        if self.stop_at == step {
            loop {
                thread::park();
            }
        }
    }
}

/// The worker: a small version of worker-lib.
fn worker(part: &Part) -> Result<(), &'static str> {
    let gone = "the daemon is gone";
    let socket = common::socket();
    let (control, fd) =
        WorkerControl::create(&format!("gradwire-{}-control", part.job), MAX_IN_FLIGHT).unwrap();
    let segments = socket.try_clone().unwrap();
    let arena = Arena::new(
        ArenaConfig {
            segment_bytes: 4 << 20,
            huge: HugePages::Never,
            ..ArenaConfig::new(part.job.clone())
        },
        Box::new(move |_, _, fd| {
            let silent = || RegisterError::Unanswered(gone.into());
            send(&segments, b"segment", &[fd.as_fd()]).map_err(|_| silent())?;
            receive(&segments).ok().flatten().map(drop).ok_or_else(silent)
        }),
        Box::new(drop),
    );
    part.reach("create");
    send(&socket, b"attach", &[fd.as_fd()]).map_err(|_| gone)?;
    drop(fd);
    part.reach("hand over");
    let mut attached = receive(&socket).ok().flatten().ok_or(gone)?;
    let bell = attached.fds.pop().ok_or("no doorbell")?;
    let block = arena.allocate(1 << 20).map_err(|_| gone)?;
    part.reach("attach");

    let control = Arc::new(control);
    let lost = Arc::new(AtomicBool::new(false));
    let watch = {
        let (control, lost, socket) =
            (Arc::clone(&control), Arc::clone(&lost), socket.try_clone().unwrap());
        thread::spawn(move || {
            while let Ok(Some(_)) = receive(&socket) {}
            lost.store(true, SeqCst);
            control.wake_all();
        })
    };
    let (mut submitted, mut completed) = (0, 0);
    let outcome = loop {
        // The ring must have room for every answer.
        while submitted < part.records && submitted - completed < u64::from(COMPLETIONS) {
            match control.submit(&common::submission(submitted)) {
                Ok(Doorbell::Ring) => {
                    rustix::io::write(&bell, &1u64.to_ne_bytes()).unwrap();
                }
                Ok(Doorbell::Quiet) => {}
                Err(SubmitError::Full { .. }) => break,
                Err(error) => panic!("{error}"),
            }
            submitted += 1;
            if submitted == 1 {
                part.reach("submit");
            }
        }
        let seen = control.epoch();
        let before = completed;
        while let Some(Completion { ticket, .. }) = control.pop_completion().unwrap() {
            assert_eq!(ticket, completed, "answers come in order here");
            completed += 1;
            if completed == 1 {
                part.reach("complete");
            }
        }
        if completed == part.records {
            break Ok(());
        }
        if lost.load(SeqCst) {
            break Err(gone);
        }
        if completed == before && !control.wait(seen, LIMIT, Duration::from_micros(20)) {
            break Err("timed out");
        }
    };
    drop(block);
    socket.shutdown(std::net::Shutdown::Both).unwrap();
    watch.join().unwrap();
    outcome
}

/// The daemon: a small version of its intake.
fn daemon(part: &Part) -> Result<(), &'static str> {
    let gone = "the worker is gone";
    let socket = common::socket();
    part.reach("create");
    let mut attach = receive(&socket).ok().flatten().ok_or(gone)?;
    let fd = attach.fds.pop().ok_or("no control page")?;
    part.reach("hand over");
    let DaemonControl { submissions: mut reader, completions: writer, .. } =
        DaemonControl::open(fd, MAX_IN_FLIGHT).unwrap();
    let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    send(&socket, b"attached", &[bell.as_fd()]).map_err(|_| gone)?;
    let mut segment = receive(&socket).ok().flatten().ok_or(gone)?;
    let segment = Segment::open(segment.fds.pop().ok_or("no segment")?, 4 << 20).unwrap();
    part.reach("attach");
    send(&socket, b"added", &[]).map_err(|_| gone)?;

    let mut ticket = 0;
    loop {
        match next(&mut reader, &bell, &socket) {
            Ok(Some(submission)) => {
                assert_eq!(submission, common::submission(ticket));
                if ticket == 0 {
                    part.reach("submit");
                }
                writer.push(Completion { ticket, aux: 0 }).unwrap();
                if ticket == 0 {
                    part.reach("complete");
                }
                ticket += 1;
            }
            Ok(None) if ticket == part.records => break,
            Ok(None) => return Err(gone),
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(segment.bytes(), 4 << 20);
    Ok(())
}

/// The next submission; `None` once the worker has ended.
fn next(
    reader: &mut gradwire_shm::control::SubmissionReader,
    bell: &OwnedFd,
    socket: &UnixStream,
) -> Result<Option<Submission>, RingError> {
    loop {
        if let Some(submission) = reader.pop()? {
            return Ok(Some(submission));
        }
        if !reader.prepare_sleep() {
            continue;
        }
        let mut fds = [PollFd::new(bell, PollFlags::IN), PollFd::new(socket, PollFlags::IN)];
        let limit = Timespec { tv_sec: LIMIT.as_secs() as i64, tv_nsec: 0 };
        assert_ne!(poll(&mut fds, Some(&limit)).unwrap(), 0, "neither bell nor end");
        let ended = !fds[1].revents().is_empty();
        reader.awake();
        // Fails only if nobody has rung.
        let _ = rustix::io::read(bell, &mut [0u8; 8]);
        if ended {
            return reader.pop();
        }
    }
}

#[test]
fn child_side() {
    let Some(role) = common::role() else { return };
    let [side, stop_at, records, job] = role.split(':').collect::<Vec<_>>()[..] else {
        panic!("{role}")
    };
    let part = Part {
        stop_at: stop_at.to_owned(),
        records: records.parse().unwrap(),
        job: JobId::new(job).unwrap(),
    };
    let before = common::open_fds();
    let outcome = if side == "worker" { worker(&part) } else { daemon(&part) };
    // CLEAN: in the survivor.
    assert_eq!(common::open_fds(), before, "descriptors were left open");
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:gradwire"), "memory was left mapped: {maps}");
    println!("END {}", outcome.err().unwrap_or("all done"));
}

fn start(job: &str, records: u64, worker_stop: &str, daemon_stop: &str) -> (Child, Child) {
    let (a, b) = UnixStream::pair().unwrap();
    let role = |side, stop| format!("{side}:{stop}:{records}:{job}");
    let worker = common::spawn("child_side", &role("worker", worker_stop), Some(a));
    let daemon = common::spawn("child_side", &role("daemon", daemon_stop), Some(b));
    (worker, daemon)
}

fn end(mut child: Child) -> String {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    text.lines().find_map(|l| l.split_once("END ")).map(|(_, end)| end.to_owned()).expect(&text)
}

/// Everything on this machine that contains the job's id.
fn left_behind(job: &str) -> Vec<String> {
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let maps = fs::read_to_string(process.path().join("maps")).unwrap_or_default();
        let fds = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        let links = fds.filter_map(|fd| Some(fs::read_link(fd.path()).ok()?.display().to_string()));
        let lines = maps.lines().map(str::to_owned).chain(links);
        let environ = fs::read(process.path().join("environ")).unwrap_or_default();
        let environ = String::from_utf8_lossy(&environ).into_owned();
        found.extend(lines.chain([environ]).filter(|line| line.contains(job)));
    }
    for entry in fs::read_dir("/dev/shm").into_iter().flatten().flatten() {
        let name = entry.file_name().display().to_string();
        found.extend(name.contains("gradwire").then_some(name));
    }
    found
}

#[test]
fn many_records_arrive_whole_and_in_order() {
    let (worker, daemon) = start("shm-test-many", 100_000, "never", "never");
    assert_eq!(end(worker), "all done");
    assert_eq!(end(daemon), "all done");
    assert_eq!(left_behind("shm-test-many"), [""; 0]);
}

/// More than the ring has answers for, so that neither side is done when the other stops at its
/// first record.
const RECORDS: u64 = 3 * COMPLETIONS as u64;

#[test]
fn either_side_may_be_killed_at_every_step() {
    for victim_is_worker in [true, false] {
        for step in ["create", "hand over", "attach", "submit", "complete"] {
            let side = if victim_is_worker { "worker" } else { "daemon" };
            let job = format!("shm-test-{side}-{}", step.replace(' ', "-"));
            let stop = |is_victim| if is_victim { step } else { "never" };
            let (worker, daemon) =
                start(&job, RECORDS, stop(victim_is_worker), stop(!victim_is_worker));
            let (mut victim, survivor) =
                if victim_is_worker { (worker, daemon) } else { (daemon, worker) };
            let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
            let at = format!("AT {step}");
            assert!(lines.any(|line| line.unwrap().ends_with(&at)), "{job}: never reached");
            assert!(!left_behind(&job).is_empty(), "{job}: the search finds nothing at all");
            let pid = Pid::from_raw(victim.id().cast_signed()).unwrap();
            kill_process(pid, Signal::KILL).unwrap();
            assert!(!victim.wait().unwrap().success());
            let gone = if victim_is_worker { "the worker is gone" } else { "the daemon is gone" };
            assert_eq!(end(survivor), gone, "{job}");
            // The kernel frees a dead process's memory a moment after its end is seen.
            let start = Instant::now();
            while !left_behind(&job).is_empty() && start.elapsed() < LIMIT {
                thread::sleep(Duration::from_millis(10));
            }
            assert_eq!(left_behind(&job), [""; 0], "{job}");
        }
    }
}
