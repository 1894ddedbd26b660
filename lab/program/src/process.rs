//! The resources that processes use, counted by the system, and the services on a rank's node.

use std::path::Path;

use gradwire_launcher::error::CommandError;
use procfs::{ProcError, process::Process};

/// The resources that a process has used so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Time on a processor, in seconds.
    pub cpu: f64,
    /// Memory in use, in bytes.
    pub memory: u64,
    /// The private part of the memory: not of files, and not shared.
    pub private: u64,
    /// How often its threads waited and gave up their core.
    pub waits: u64,
    /// How often its threads were preempted.
    pub preemptions: u64,
    /// The number of page faults.
    pub faults: u64,
}

impl Usage {
    /// The resources that a process has used so far.
    ///
    /// # Errors
    /// [`CommandError`] if the process has ended, or the system does not report it.
    pub fn of(pid: u32) -> Result<Self, CommandError> {
        let unknown = |error: ProcError| CommandError::failed(format!("process {pid}: {error}"));
        let process = Process::new(i32::try_from(pid).unwrap_or(-1)).map_err(unknown)?;
        let status = process.status().map_err(unknown)?;
        let stat = process.stat().map_err(unknown)?;
        // A thread that has just ended is missing.
        let threads: Vec<_> = process.tasks().map_err(unknown)?.flatten().collect();
        // `schedstat` is exact, while `stat` counts in hundredths of a second, longer than many
        // steps. Some kernels don't have `schedstat`.
        let nanoseconds = threads.iter().filter_map(|thread| thread.schedstat().ok());
        let nanoseconds = nanoseconds.map(|of_thread| of_thread.sum_exec_runtime);
        let cpu = match nanoseconds.reduce(|all, thread| all + thread) {
            Some(nanoseconds) => nanoseconds as f64 / 1e9,
            None => (stat.utime + stat.stime) as f64 / procfs::ticks_per_second().max(1) as f64,
        };
        let of_threads: Vec<_> = threads.iter().filter_map(|thread| thread.status().ok()).collect();
        let bytes = |kibibytes: Option<u64>| kibibytes.unwrap_or_default() * 1024;
        Ok(Self {
            cpu,
            memory: bytes(status.vmrss),
            private: bytes(status.rssanon),
            waits: of_threads.iter().filter_map(|status| status.voluntary_ctxt_switches).sum(),
            preemptions: of_threads.iter().filter_map(|s| s.nonvoluntary_ctxt_switches).sum(),
            faults: stat.minflt,
        })
    }
}

/// The services of a rank's job on its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beside {
    /// The daemon of the node.
    pub daemon: u32,
    /// The coordinator, if it runs on the node.
    pub coordinator: Option<u32>,
}

impl Beside {
    /// Finds the services next to this process: its agent started them, too.
    ///
    /// # Errors
    /// [`CommandError`] without a daemon, because no agent started this process.
    pub fn look() -> Result<Self, CommandError> {
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid());
        let processes = procfs::process::all_processes().map_err(CommandError::failed)?;
        let (mut daemon, mut coordinator) = (None, None);
        for process in processes.flatten() {
            // A process that has just ended is not the daemon.
            if !process.stat().is_ok_and(|stat| stat.ppid == parent) {
                continue;
            }
            match role(&process.cmdline().unwrap_or_default()) {
                Some(Role::Daemon) => daemon = Some(process.pid().unsigned_abs()),
                Some(Role::Coordinator) => coordinator = Some(process.pid().unsigned_abs()),
                None => {}
            }
        }
        let daemon = daemon.ok_or_else(|| {
            CommandError::failed("no daemon found next to this rank").hint(
                "start gradwire bench directly or as the program of gradwire run, not in a script",
            )
        })?;
        Ok(Self { daemon, coordinator })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Role {
    Daemon,
    Coordinator,
}

/// The role of a process, by its command line.
fn role(words: &[String]) -> Option<Role> {
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    match (program, words.get(1).map(String::as_str)) {
        ("gradwired", _) => Some(Role::Daemon),
        ("gradwire-lab", Some("coordinator")) => Some(Role::Coordinator),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resources_of_a_process_are_read() {
        let own = std::process::id();
        let before = Usage::of(own).unwrap();
        assert!(before.memory > before.private && before.private > 10_000, "{before:?}");
        assert!(before.faults > 0, "{before:?}");
        let mut sum = 0_u64;
        while Usage::of(own).unwrap().cpu <= before.cpu {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let pages = std::hint::black_box(vec![1_u8; 8 << 20]);
        std::thread::sleep(std::time::Duration::from_millis(1));
        let after = Usage::of(own).unwrap();
        assert!(after.private >= before.private + (7 << 20), "{before:?} {after:?}");
        assert!(after.faults > before.faults && after.waits > before.waits, "{before:?} {after:?}");
        drop(pages);
        let error = Usage::of(u32::MAX).unwrap_err();
        assert!(error.what.starts_with("process 4294967295: "), "{error}");
    }

    #[test]
    fn a_process_is_known_by_its_command_line() {
        let role = |line: &str| super::role(&line.split(' ').map(String::from).collect::<Vec<_>>());
        assert_eq!(role("/a/gradwired"), Some(Role::Daemon));
        assert_eq!(role("/a/gradwire-lab coordinator"), Some(Role::Coordinator));
        for other in ["/a/gradwire-lab bench", "/a/gradwire coordinator", "sh gradwired", ""] {
            assert_eq!(role(other), None, "{other:?}");
        }
    }
}
