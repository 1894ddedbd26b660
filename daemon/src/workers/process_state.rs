//! What the system knows about a process.

use procfs::process::Process;

fn state(pid: u32) -> Option<char> {
    let stat = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.stat().ok());
    stat.map(|stat| stat.state)
}

/// Whether a process is stopped, by SIGSTOP or a debugger.
pub(crate) fn is_stopped(pid: u32) -> bool {
    matches!(state(pid), Some('T' | 't'))
}

/// The state of a process as a part of a text, such as `; the process is stopped`; may be empty.
pub(crate) fn state_of(pid: u32) -> &'static str {
    match state(pid) {
        Some('T' | 't') => "; the process is stopped (SIGSTOP or a debugger)",
        Some('D') => "; the process waits for a disk or a file system",
        _ => "",
    }
}
