//! What the system knows about a process.

use procfs::process::Process;

/// The state of a process as a part of a text, such as `; the process is stopped`; may be empty.
pub(crate) fn state_of(pid: u32) -> &'static str {
    let stat = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.stat().ok());
    match stat.map(|stat| stat.state) {
        Some('T' | 't') => "; the process is stopped (SIGSTOP or a debugger)",
        Some('D') => "; the process waits for a disk or a file system",
        _ => "",
    }
}
