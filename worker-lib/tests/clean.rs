//! A session leaves nothing behind (CLEAN). This test has its own binary, because it counts the
//! process's threads and descriptors.

#[expect(dead_code, reason = "other tests use the rest of it")]
mod fake;

use std::{fs, thread};

use fake::FakeDaemon;
use gradwire_worker::AllreduceOptions;

/// Threads and shared memory of sessions in this process.
fn ours() -> Vec<String> {
    let threads = fs::read_dir("/proc/self/task").unwrap().filter_map(|task| {
        fs::read_to_string(task.unwrap().path().join("comm")).ok().filter(|n| n.starts_with("gw-"))
    });
    let memory = fs::read_to_string("/proc/self/maps").unwrap();
    let memory = memory.lines().filter(|line| line.contains("memfd:gradwire-test"));
    let fds = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| {
        let target = fs::read_link(fd.unwrap().path()).ok()?.to_string_lossy().into_owned();
        target.contains("memfd:gradwire-test").then_some(target)
    });
    threads.chain(memory.map(str::to_owned)).chain(fds).collect()
}

#[test]
fn a_session_leaves_nothing_behind() {
    for operation in ["sum", "hold", "abort", "die"] {
        let (daemon, session) = FakeDaemon::alone();
        let tensor = session.zeros::<f32>(&[100_000]).unwrap();
        assert!(!ours().is_empty());
        let handle = session.allreduce_async(tensor, AllreduceOptions::named(operation)).unwrap();
        match operation {
            "hold" => drop(handle),
            "sum" => drop(handle.wait().unwrap()),
            _ => drop(handle.wait().unwrap_err()),
        }
        drop(session);
        drop(daemon);
        assert_eq!(ours(), Vec::<String>::new(), "after {operation}");
    }
    // Over several epochs, one of which does not form.
    let daemon = FakeDaemon::elastic(&[0]);
    let session = daemon.worker(0).attach().unwrap();
    let tensor = session.zeros::<f32>(&[100_000]).unwrap();
    let handle = session.allreduce_async(tensor, AllreduceOptions::named("hold")).unwrap();
    let kept = session.zeros::<f32>(&[100_000]).unwrap();
    let daemon = daemon.succeed(&[0]);
    daemon.answer_last("gradwire.epoch", &[]);
    let other = session.clone();
    // SAFETY: nobody writes to a tensor.
    #[expect(unsafe_code, reason = "the call moves tensors")]
    let rejoins = thread::spawn(move || unsafe { other.rejoin() }.unwrap().epoch);
    daemon.until_answered();
    let daemon = daemon.succeed(&[0]);
    assert_eq!(rejoins.join().unwrap(), 3);
    drop((handle, kept));
    session.shutdown().unwrap();
    drop((session, daemon));
    assert_eq!(ours(), Vec::<String>::new(), "after several epochs");
}
