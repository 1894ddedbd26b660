//! What the system knows about a process.

use std::{
    fs,
    time::{Duration, Instant},
};

use gradwire_proto::pb;
use procfs::process::{Process, Stat};

/// The most threads of a process that are described (BOUND).
const MAX_THREADS: usize = 64;

/// A process that uses at least this share of a core counts as running.
const BUSY: f64 = 0.2;

/// The state of a process as a part of a text, such as `; the process is stopped`; may be empty.
pub(crate) fn state_of(pid: u32) -> &'static str {
    match stat(pid).map(|stat| stat.state) {
        Some('T' | 't') => "; the process is stopped (SIGSTOP or a debugger)",
        Some('D') => "; the process waits for a disk or a file system",
        _ => "",
    }
}

fn stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()
}

/// Whether a process was started by another one, or by a descendant of that.
pub(crate) fn descends_from(pid: u32, ancestor: u32) -> bool {
    let parent = |pid: u32| stat(pid).and_then(|stat| u32::try_from(stat.ppid).ok());
    // Whatever the system says meanwhile, the search ends (WAIT).
    let parents = std::iter::successors(parent(pid), |pid| parent(*pid));
    parents.take(100).any(|parent| parent == ancestor)
}

/// Whether a process is stopped, by SIGSTOP or a debugger.
pub(crate) fn is_stopped(pid: u32) -> bool {
    matches!(stat(pid).map(|stat| stat.state), Some('T' | 't'))
}

/// Whether a process has not ended, and is not about to: the system removes its program before it
/// closes its connections.
pub(crate) fn has_program(pid: u32) -> bool {
    let process = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok());
    process.is_some_and(|process| process.exe().is_ok())
}

/// A process at an earlier moment: its state, and the processor time that it had used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Used {
    at: Instant,
    ticks: u64,
    state: char,
}

/// What a process does.
#[derive(Debug)]
pub(crate) struct Doing {
    pub(crate) doing: pb::Doing,
    /// The share of one core that it has used.
    pub(crate) cpu: f64,
    /// The kernel's function in which its main thread sleeps; may be empty.
    pub(crate) call: String,
}

/// The processor time that a process has used; `None` if the process has ended.
pub(crate) fn used(pid: u32) -> Option<Used> {
    let stat = stat(pid)?;
    Some(Used { at: Instant::now(), ticks: stat.utime + stat.stime, state: stat.state })
}

/// What a process does now and has done since `before`.
pub(crate) fn doing(pid: u32, before: Option<Used>) -> Doing {
    let process = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok());
    let stat = process.as_ref().and_then(|process| process.stat().ok());
    let (Some(process), Some(stat)) = (process, stat) else {
        return Doing { doing: pb::Doing::Gone, cpu: 0.0, call: String::new() };
    };
    let share = |before: Used| {
        let ticks = (stat.utime + stat.stime).saturating_sub(before.ticks) as f64;
        let passed = before.at.elapsed().max(Duration::from_millis(1)).as_secs_f64();
        ticks / procfs::ticks_per_second() as f64 / passed
    };
    let cpu = before.map_or(0.0, share);
    let doing = match stat.state {
        'T' | 't' => pb::Doing::Stopped,
        'Z' | 'X' | 'x' => pb::Doing::Gone,
        'D' => pb::Doing::Uninterruptible,
        // One look at a thread says little, so the earlier one counts, too. On a busy host, a
        // process that never sleeps may get little time.
        'R' if cpu > 0.0 && before.is_some_and(|it| it.state == 'R') => pb::Doing::Running,
        _ if cpu >= BUSY => pb::Doing::Running,
        _ => pb::Doing::Sleeping,
    };
    // "0": it runs, or the system does not tell.
    let call = process.wchan().unwrap_or_default();
    let call = if call == "0" { String::new() } else { call };
    Doing { doing, cpu, call }
}

/// The threads of a process: name, state, and the function of the kernel in which each sleeps. The
/// main thread comes first.
pub(crate) fn threads(pid: u32) -> Vec<pb::ThreadStack> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut ids: Vec<u32> = tasks
        .filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok())
        .take(MAX_THREADS)
        .collect();
    ids.sort_by_key(|id| (*id != pid, *id));
    let thread = |id: u32| {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/task/{id}/{file}"));
        let name = read("comm").ok()?;
        let stat = read("stat").ok()?;
        // The name in parentheses may contain anything.
        let state = stat.rsplit(')').next()?.trim_start().chars().next()?;
        let state = match state {
            'R' => "running",
            'D' => "in uninterruptible I/O",
            'T' | 't' => "stopped",
            _ => "sleeping",
        };
        let call = read("wchan").ok().filter(|call| call != "0" && !call.is_empty());
        let frame = call.map_or_else(|| state.to_owned(), |call| format!("{state} in {call}"));
        let name = format!("thread {}", name.trim_end());
        Some(pb::ThreadStack { name, frames: vec![frame] })
    };
    ids.into_iter().filter_map(thread).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_knows_its_descendants() {
        let own = std::process::id();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let (pid, parent) = (child.id(), u32::try_from(stat(own).unwrap().ppid).unwrap());
        assert!(descends_from(pid, own) && descends_from(pid, parent));
        assert!(!descends_from(own, pid) && !descends_from(own, own));
        assert!(has_program(pid));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!has_program(pid) && !descends_from(pid, own));
    }

    #[test]
    fn what_a_process_does_is_seen() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let before = used(pid);
        assert!(before.is_some());
        let sleeping = |seen: &Doing| seen.doing == pb::Doing::Sleeping;
        // It may just have been started.
        while !sleeping(&doing(pid, before)) || doing(pid, before).cpu > BUSY {
            std::thread::sleep(Duration::from_millis(5));
        }
        let threads = threads(pid);
        assert!(threads.len() == 1 && threads[0].name == "thread cat", "{threads:?}");
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(doing(pid, before).doing, pb::Doing::Gone);
        assert!(used(pid).is_none());
    }
}
