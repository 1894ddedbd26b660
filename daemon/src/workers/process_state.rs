//! What the system knows about a process.

use procfs::process::{Process, Stat};

fn stat(pid: u32) -> Option<Stat> {
    Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()
}

fn state(pid: u32) -> Option<char> {
    stat(pid).map(|stat| stat.state)
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
    matches!(state(pid), Some('T' | 't'))
}

/// Whether a process has not ended, and is not about to: the system removes its program before it
/// closes its connections.
pub(crate) fn has_program(pid: u32) -> bool {
    let process = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok());
    process.is_some_and(|process| process.exe().is_ok())
}

/// The state of a process as a part of a text, such as `; the process is stopped`; may be empty.
pub(crate) fn state_of(pid: u32) -> &'static str {
    match state(pid) {
        Some('T' | 't') => "; the process is stopped (SIGSTOP or a debugger)",
        Some('D') => "; the process waits for a disk or a file system",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

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
}
