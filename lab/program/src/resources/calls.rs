//! Counts the system calls of a process with `perf stat`. It counts in the kernel, so it hardly
//! slows the process down, unlike a tracer.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

const EVENT: &str = "raw_syscalls:sys_enter";

/// The time that `perf` may take to attach to a process, with a large margin.
const ATTACHES: Duration = Duration::from_millis(500);

/// A running count.
#[derive(Debug)]
pub struct Counter {
    child: Child,
}

impl Counter {
    /// Begins counting the system calls of a process.
    ///
    /// # Errors
    /// Why they can't be counted.
    pub fn start(pid: u32) -> Result<Self, String> {
        let mut child = Command::new("perf")
            .args(["stat", "--field-separator=;", "--event", EVENT, "--pid", &pid.to_string()])
            // `perf` formats numbers for the user's locale.
            .env("LC_ALL", "C")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("perf can't be started: {error}"))?;
        thread::sleep(ATTACHES);
        match child.try_wait() {
            Ok(None) => Ok(Self { child }),
            _ => Err(format!("perf can't count: {}", reason(&words(&mut child)))),
        }
    }

    /// Ends the count and returns it.
    ///
    /// # Errors
    /// Why calls were not counted.
    pub fn stop(mut self) -> Result<u64, String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // `perf` prints its count when interrupted.
            let _ = kill_process(pid, Signal::INT);
        }
        let output = words(&mut self.child);
        count(&output).ok_or_else(|| format!("perf can't count: {}", reason(&output)))
    }
}

/// All output of `perf`, until its end.
fn words(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut text);
    }
    let _ = child.wait();
    text
}

/// The count in `<count>;<unit>;<event>;…`.
fn count(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(EVENT))?;
    line.split(';').next()?.parse().ok()
}

/// The first line that is not empty.
fn reason(text: &str) -> &str {
    text.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it says nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_read_and_a_refusal_reported() {
        let text = "\n145;;raw_syscalls:sys_enter;1072880;100.00;;\n";
        assert_eq!(count(text), Some(145));
        let refused = "<not supported>;;raw_syscalls:sys_enter;0;100.00;;\n";
        assert_eq!((count(refused), count("")), (None, None));
        assert_eq!(
            (reason("\n  No permission.\nmore"), reason("")),
            ("No permission.", "it says nothing")
        );
    }
}
