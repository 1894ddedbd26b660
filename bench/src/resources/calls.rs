//! Counts the system calls of a process with `perf stat`, which does so in the kernel: the process
//! is hardly slower for it, as it would be under a tracer.

use std::{
    io::Read,
    process::{Child, Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

const EVENT: &str = "raw_syscalls:sys_enter";

/// How long `perf` takes to attach to a process, generously.
const ATTACHES: Duration = Duration::from_millis(500);

/// A count that goes on.
#[derive(Debug)]
pub struct Counter {
    child: Child,
}

impl Counter {
    /// Begins to count those of a process.
    ///
    /// # Errors
    /// Why it can't be done.
    pub fn start(pid: u32) -> Result<Self, String> {
        let mut child = Command::new("perf")
            .args(["stat", "--field-separator=;", "--event", EVENT, "--pid", &pid.to_string()])
            // Its numbers are written as the user's language has them.
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

    /// Ends it.
    ///
    /// # Errors
    /// Why there is no count.
    pub fn stop(mut self) -> Result<u64, String> {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It tells what it has counted when it is interrupted.
            let _ = kill_process(pid, Signal::INT);
        }
        let output = words(&mut self.child);
        count(&output).ok_or_else(|| format!("perf can't count: {}", reason(&output)))
    }
}

/// What it says until its end.
fn words(child: &mut Child) -> String {
    let mut text = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        let _ = stderr.read_to_string(&mut text);
    }
    let _ = child.wait();
    text
}

/// `<count>;<unit>;<event>;…`
fn count(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.contains(EVENT))?;
    line.split(';').next()?.parse().ok()
}

/// The first line with something in it.
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
