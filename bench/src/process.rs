//! What the system says that processes use, and which processes a rank has beside it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use gradwire_launcher::error::CommandError;

use crate::machine;

/// What a process has used so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Time on a processor, in seconds.
    pub cpu: f64,
    /// Memory in use, in bytes.
    pub memory: u64,
    /// That of it which is the process's alone: not of files, and not shared.
    pub private: u64,
    /// Times that its threads waited for something, and gave their core away.
    pub waits: u64,
    /// Times that their core was taken from them.
    pub preemptions: u64,
    /// Pages that had to be given to it.
    pub faults: u64,
}

impl Usage {
    /// Of a process.
    ///
    /// # Errors
    /// [`CommandError`] if it has ended, or the system does not say.
    pub fn of(pid: u32) -> Result<Self, CommandError> {
        let folder = format!("/proc/{pid}");
        let unknown = |error: io::Error| CommandError::failed(format!("{folder}: {error}"));
        let status = fs::read_to_string(format!("{folder}/status")).map_err(unknown)?;
        let stat = fs::read_to_string(format!("{folder}/stat")).map_err(unknown)?;
        let threads = fs::read_dir(format!("{folder}/task")).map_err(unknown)?;
        let threads: Vec<PathBuf> = threads.flatten().map(|thread| thread.path()).collect();
        // A thread that ends meanwhile is not there any more.
        let nanoseconds = threads.iter().filter_map(|thread| on_processor(thread));
        let cpu = match nanoseconds.reduce(|all, thread| all + thread) {
            Some(nanoseconds) => nanoseconds as f64 / 1e9,
            None => {
                let ticks = numbers::<2>(&stat, USER_TIME).map_or(0, |times| times.iter().sum());
                ticks as f64 / rustix::param::clock_ticks_per_second().max(1) as f64
            }
        };
        let of_threads: Vec<String> = threads
            .iter()
            .filter_map(|thread| fs::read_to_string(thread.join("status")).ok())
            .collect();
        let count = |name| of_threads.iter().filter_map(|text| machine::number(text, name)).sum();
        let bytes = |name| machine::kibibytes(&status, name).unwrap_or_default();
        Ok(Self {
            cpu,
            memory: bytes("VmRSS"),
            private: bytes("RssAnon"),
            waits: count("voluntary_ctxt_switches"),
            preemptions: count("nonvoluntary_ctxt_switches"),
            faults: numbers::<1>(&stat, MINOR_FAULTS).map_or(0, |[faults]| faults),
        })
    }
}

/// Nanoseconds of one thread; none where the kernel does not count them. `schedstat` is exact where
/// `stat` counts in hundredths of a second, more than many a step takes.
fn on_processor(thread: &Path) -> Option<u64> {
    let text = fs::read_to_string(thread.join("schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

// Where the fields of `/proc/<pid>/stat` stand behind the name.
const PARENT: usize = 1;
const MINOR_FAULTS: usize = 7;
const USER_TIME: usize = 11;

/// Some fields of `/proc/<pid>/stat`, which come after a name that may hold anything.
fn numbers<const N: usize>(stat: &str, first: usize) -> Option<[u64; N]> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(first);
    let mut numbers = [0; N];
    for number in &mut numbers {
        *number = fields.next()?.parse().ok()?;
    }
    Some(numbers)
}

/// The processes of its job that a rank has beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beside {
    /// The daemon of its node.
    pub daemon: u32,
    /// The coordinator, on the node that has it.
    pub coordinator: Option<u32>,
}

impl Beside {
    /// Those of this process: the agent that started it has started them too.
    ///
    /// # Errors
    /// [`CommandError`] if there is no daemon, because something else has started this process.
    pub fn look() -> Result<Self, CommandError> {
        let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_pid().unsigned_abs());
        let pids = fs::read_dir("/proc").map_err(CommandError::failed)?.flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let (mut daemon, mut coordinator) = (None, None);
        for pid in pids {
            // One that ends meanwhile is nobody's daemon.
            let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
            let own = |stat: &String| numbers(stat, PARENT) == Some([u64::from(parent)]);
            if read("stat").filter(own).is_none() {
                continue;
            }
            match role(&read("cmdline").unwrap_or_default()) {
                Some(Role::Daemon) => daemon = Some(pid),
                Some(Role::Coordinator) => coordinator = Some(pid),
                None => {}
            }
        }
        let daemon = daemon.ok_or_else(|| {
            CommandError::failed("there is no daemon beside this rank that could be watched").hint(
                "start gradwire bench by itself or as the program of gradwire run, not in a script",
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

/// What a process is by its words, which end with zeros.
fn role(words: &str) -> Option<Role> {
    let mut words = words.split('\0');
    let program = Path::new(words.next()?).file_name()?.to_str()?;
    match (program, words.next()) {
        ("gradwired", _) => Some(Role::Daemon),
        ("gradwire", Some("coordinator")) => Some(Role::Coordinator),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_uses_is_read() {
        let stat = "12 (a) S 1 (x) S 1 2 3 4 5 6 7 8 9 10 70 7 0 0";
        assert_eq!(numbers(stat, USER_TIME), Some([70, 7]));
        assert_eq!((numbers(stat, PARENT), numbers(stat, MINOR_FAULTS)), (Some([1]), Some([7])));
        assert_eq!(numbers::<2>("12 (a) S 1", USER_TIME), None);
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
        assert!(error.what.starts_with("/proc/4294967295: "), "{error}");
    }

    #[test]
    fn a_process_is_known_by_its_words() {
        assert_eq!(role("/a/gradwired\0"), Some(Role::Daemon));
        assert_eq!(role("/a/gradwire\0coordinator\0"), Some(Role::Coordinator));
        for other in ["/a/gradwire\0bench\0", "/a/gradwire\0", "sh\0gradwired\0", ""] {
            assert_eq!(role(other), None, "{other:?}");
        }
    }
}
