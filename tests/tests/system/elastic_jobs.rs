//! Elastic jobs of `gradwire run`: each process of a job is killed or stopped, and the others go on
//! in the next epoch. Hosts and processes come and go.

use std::{fs, thread::sleep, time::Duration};

use gradwire_tests::launched::{Job, Launch, processes::Role, programs, send_signal};
use rustix::process::Signal;

const TWO_HOSTS: &str = "127.0.0.1:2,127.0.0.2:2";

/// A job whose slots are free again after 0.2 s.
fn launch(words: &[&str]) -> Launch {
    let program = programs::beside("gradwire-elastic-rank").display().to_string();
    Launch::new()
        .words(&["--blacklist-cooldown-range", "0.2", "0.2", "--elastic-timeout", "60"])
        .words(words)
        .program(&[&program])
}

/// Waits until an epoch with `size` ranks runs that is later than `after`, and returns its number.
/// All its ranks have different numbers.
#[track_caller]
fn until_epoch(job: &Job, after: u64, size: usize) -> u64 {
    job.wait_for(&format!("an epoch after {after} with {size} ranks"), || {
        let lines = job.lines();
        let said = lines.iter().filter(|line| line.text.starts_with('[')).filter_map(|line| {
            let (_, text) = line.text.split_once(" epoch ")?;
            let numbers: Vec<u64> =
                text.split(' ').filter_map(|number| number.parse().ok()).collect();
            <[u64; 3]>::try_from(numbers).ok()
        });
        let said: Vec<_> =
            said.filter(|[epoch, _, all]| *epoch > after && *all == size as u64).collect();
        let [epoch, ..] = said.last()?;
        let mut ranks: Vec<u64> =
            said.iter().filter(|[at, ..]| at == epoch).map(|[_, rank, _]| *rank).collect();
        ranks.sort_unstable();
        (ranks == (0..size as u64).collect::<Vec<_>>()).then_some(*epoch)
    })
}

/// Lets all ranks end, and asserts that the job succeeds.
#[track_caller]
fn stop(mut job: Job, lost: &str) {
    job.allow("stop");
    let report = job.finish();
    report.assert_code(0);
    report.assert_verdict(&[lost]);
}

#[test]
fn a_killed_rank_is_replaced() {
    for (ranks, hosts) in [("3", "127.0.0.1:3"), ("4", TWO_HOSTS)] {
        let mut job = launch(&["-np", ranks, "-H", hosts, "--min-np", "1"]).start();
        let size = ranks.parse().unwrap();
        until_epoch(&job, 0, size);
        job.signal(Role::Rank(1), Signal::KILL);
        let epoch = until_epoch(&job, 1, size - 1);
        until_epoch(&job, epoch, size);
        stop(job, "rank 1 on host 127.0.0.1 was killed by SIGKILL");
    }
}

/// The example of the worker library: the new rank gets the model, and all ranks end with the same.
#[test]
fn the_example_trains_on_after_losses() {
    for lost in [0, 2] {
        let program = programs::elastic().display().to_string();
        let words = ["-np", "3", "--min-np", "2", "--elastic-timeout", "60"];
        let launch = Launch::new().words(&words).program(&[&program, "3000"]);
        let mut job = launch.words(&["--blacklist-cooldown-range", "0.2", "0.2"]).start();
        let says = |job: &Job, text: &str| {
            job.wait_for(text, || {
                let lines = job.lines();
                let found = lines.iter().filter(|line| line.text.contains(text)).count();
                (found == 3).then_some(())
            });
        };
        says(&job, "of 3 goes on after 0 steps");
        job.signal(Role::Rank(lost), Signal::KILL);
        says(&job, ": weight 3.000 after 3000 steps");
        let report = job.finish();
        report.assert_code(0);
        report.assert_verdict(&[&format!("rank {lost} on host"), "epoch 3: 3 ranks on 1 host"]);
    }
}

#[test]
fn ranks_outlive_their_daemons() {
    for daemon in [0, 1] {
        let mut job = launch(&["-np", "4", "-H", TWO_HOSTS, "--min-np", "4"]).start();
        until_epoch(&job, 0, 4);
        job.signal(Role::Daemon(daemon), Signal::KILL);
        until_epoch(&job, 1, 4);
        stop(job, "the daemon on host 127.0.0.");
    }
}

/// It hosts the coordinator, so that only its ranks notice it.
#[test]
fn the_only_daemon_may_freeze() {
    let launch = launch(&["-np", "2", "--min-np", "2"]).set("worker.daemon_timeout_ms=1500");
    let mut job = launch.start();
    until_epoch(&job, 0, 2);
    job.signal(Role::Daemon(0), Signal::STOP);
    until_epoch(&job, 1, 2);
    stop(job, "did not respond: a signal or a debugger has stopped it");
}

/// Exit code 75 tells a script that the same job may succeed if it is started again.
#[test]
fn too_many_lost_daemons_end_the_job() {
    let launch = launch(&["-np", "2", "--min-np", "1"]).set("recovery.restarts=1");
    let mut job = launch.start();
    until_epoch(&job, 0, 2);
    job.signal(Role::Daemon(0), Signal::KILL);
    until_epoch(&job, 1, 2);
    job.signal(Role::Daemon(0), Signal::KILL);
    let report = job.finish();
    report.assert_code(75);
    report.assert_verdict(&["recovery.restarts allows no more"]);
}

#[test]
fn a_stopped_rank_is_lost() {
    let launch = launch(&["-np", "3", "--min-np", "2", "--reset-limit", "1"]);
    let mut job = launch.set("heartbeat.timeout_ms=1100").start();
    until_epoch(&job, 0, 3);
    job.signal(Role::Rank(2), Signal::STOP);
    until_epoch(&job, 1, 2);
    stop(job, "is lost: no heartbeat for");
}

/// Then no rank of the next epoch attaches, and only the daemon can notice it.
#[test]
fn stopped_ranks_are_all_lost() {
    let launch = launch(&["-np", "2", "--min-np", "1"]).set("heartbeat.timeout_ms=1100");
    let mut job = launch.start();
    until_epoch(&job, 0, 2);
    job.signal(Role::Rank(0), Signal::STOP);
    job.signal(Role::Rank(1), Signal::STOP);
    let report = job.finish();
    report.assert_code(1);
    report.assert_verdict(&[
        "did not respond and was killed by the launcher, ",
        "the job ends: all processes that were in the job have ended",
    ]);
}

/// Also the host of the coordinator.
#[test]
fn a_lost_host_comes_back() {
    for agent in [0, 1] {
        let mut job = launch(&["-np", "4", "-H", TWO_HOSTS, "--min-np", "1"]).start();
        until_epoch(&job, 0, 4);
        job.signal(Role::Agent(agent), Signal::KILL);
        let epoch = until_epoch(&job, 1, 2);
        until_epoch(&job, epoch, 4);
        stop(job, "the connection to host 127.0.0.");
    }
}

#[test]
fn a_spare_replaces_a_lost_rank_at_once() {
    let mut job = launch(&["-np", "2", "--min-np", "2", "--spares", "1"]).start();
    until_epoch(&job, 0, 2);
    job.process(Role::Rank(2));
    sleep(Duration::from_millis(500));
    job.signal(Role::Rank(0), Signal::KILL);
    until_epoch(&job, 1, 2);
    stop(job, "epoch 2: 2 ranks on 1 host");
}

#[test]
fn too_few_ranks_end_the_job_in_time() {
    let words = ["-np", "2", "--min-np", "2", "--elastic-timeout", "1"];
    let program = programs::beside("gradwire-elastic-rank").display().to_string();
    let launch = Launch::new().words(&words).words(&["--blacklist-cooldown-range", "90", "90"]);
    let mut job = launch.program(&[&program]).start();
    until_epoch(&job, 0, 2);
    job.signal(Role::Rank(1), Signal::KILL);
    let report = job.finish();
    report.assert_code(137);
    report.assert_verdict(&[
        "the job needs 2 ranks (--min-np) and has 1: it waits up to 1 s for a slot in quarantine",
        "the job ends: no epoch with 2 ranks (--min-np) has formed and lasted within 1 s",
        "rank 1 on host localhost (pid ",
    ]);
}

#[test]
fn hosts_come_and_go_as_the_script_says() {
    let launch = launch(&["-np", "2", "--min-np", "1", "--max-np", "4"]);
    let list = |folder: &std::path::Path, hosts: &str| {
        fs::write(folder.join("new"), hosts).unwrap();
        fs::rename(folder.join("new"), folder.join("hosts")).unwrap();
    };
    list(launch.folder(), "127.0.0.1:2\n");
    let script = launch.script("discover", "#!/bin/sh\ncat hosts\n").display().to_string();
    let job = launch.words(&["--host-discovery-script", &script]).start();
    until_epoch(&job, 0, 2);
    list(job.folder(), "127.0.0.1:2\n127.0.0.2 # new\n");
    let grown = until_epoch(&job, 1, 3);
    list(job.folder(), "127.0.0.2:4\n");
    until_epoch(&job, grown, 4);
    list(job.folder(), "127.0.0.2:x\n");
    job.wait_for("a warning", || {
        let lines = job.lines();
        let warns = |text: &str| text.contains("line 1, '127.0.0.2:x'") && text.contains("stays");
        lines.iter().any(|line| warns(&line.text)).then_some(())
    });
    stop(job, "after ranks came");
}

#[test]
fn a_drained_host_leaves() {
    let job = launch(&["-np", "4", "-H", TWO_HOSTS, "--min-np", "1"]).start();
    until_epoch(&job, 0, 4);
    let drain = |host: &str| {
        let mut gradwire = std::process::Command::new(programs::gradwire());
        gradwire.args(["drain", host]).env("TMPDIR", job.folder()).env_remove("XDG_RUNTIME_DIR");
        let done = gradwire.output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        (done.status.success(), String::from_utf8_lossy(&text).into_owned())
    };
    let (done, text) = drain("127.0.0.3");
    assert!(!done && text.contains("its hosts are 127.0.0.1, 127.0.0.2"), "{text}");
    let (done, text) = drain("127.0.0.1");
    assert!(done && text == "the ranks of host 127.0.0.1 leave at their next commit\n", "{text}");
    until_epoch(&job, 1, 2);
    stop(job, "2 ranks on 1 host");
}

#[test]
fn a_wrong_script_starts_nothing() {
    let launch = launch(&["-np", "2", "--min-np", "1"]);
    let script = launch.script("discover", "#!/bin/sh\necho a:0\n").display().to_string();
    let report = launch.words(&["--host-discovery-script", &script]).run();
    report.assert_code(2);
    report.assert_verdict(&["line 1, 'a:0': '0' is not a slot count"]);
}

/// `gradwire status` finds the coordinator of each epoch.
#[test]
fn the_status_follows_the_epochs() {
    let mut job = launch(&["-np", "2", "--min-np", "2"]).start();
    until_epoch(&job, 0, 2);
    let daemon = job.process(Role::Daemon(0)).pid;
    send_signal(daemon, Signal::KILL);
    until_epoch(&job, 1, 2);
    let status = std::process::Command::new(programs::gradwire())
        .args(["status", "--json"])
        .env("TMPDIR", job.folder())
        .env_remove("XDG_RUNTIME_DIR")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(status.status.success(), "{status:?}");
    assert!(text.contains("\"ranks\""), "{text}");
    job.allow("stop");
    job.finish().assert_code(0);
}
