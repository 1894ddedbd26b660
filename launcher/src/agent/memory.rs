//! Whether the kernel's out-of-memory killer has ended a process.
//!
//! To its parent, a victim looks like any process that was killed by SIGKILL. But the kernel counts
//! victims, for each control group and for the machine. So this module reads the count from time to
//! time. A process whose end by SIGKILL comes with a larger count is taken for a victim.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use gradwire_services::launch::ProcessEnd;
use procfs::{ProcessCGroup, process::Process};
use rustix::process::Signal;

/// The count of the whole machine, where that of a control group can't be read.
const MACHINE: &str = "/proc/vmstat";

/// The victims in the control group of this process, whose children are in it, too.
#[derive(Debug)]
pub(super) struct Victims {
    file: PathBuf,
    known: Mutex<Known>,
}

/// The counts at the last two looks. A victim may have been counted before the last look, while
/// its end is only known after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Known {
    before: u64,
    last: u64,
}

impl Known {
    fn look(&mut self, count: u64) {
        *self = Self { before: self.last.max(self.before), last: count };
    }

    /// Whether the end of a victim is not known yet. From then on it counts as known.
    fn take(&mut self, count: u64) -> bool {
        let is_new = count > self.before;
        self.before += u64::from(is_new);
        is_new
    }
}

impl Victims {
    pub(super) fn new() -> Self {
        let groups = Process::myself().and_then(|process| process.cgroups());
        let groups = groups.map_or(Vec::new(), |groups| groups.0);
        let is_counted =
            |path: &Path| fs::read_to_string(path).is_ok_and(|it| count(&it).is_some());
        let file = files(&groups).into_iter().find(|path| is_counted(path));
        let file = file.unwrap_or_else(|| MACHINE.into());
        let new = Self { file, known: Mutex::new(Known { before: 0, last: 0 }) };
        let count = new.count();
        *new.known() = Known { before: count, last: count };
        new
    }

    fn known(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn count(&self) -> u64 {
        fs::read_to_string(&self.file).ok().and_then(|text| count(&text)).unwrap_or(0)
    }

    /// Reads the count. To be called every few seconds.
    pub(super) fn look(&self) {
        let count = self.count();
        self.known().look(count);
    }

    /// How a process ended: out of memory, if it is a victim. Its parent has just learned of it.
    pub(super) fn end(&self, end: ProcessEnd) -> ProcessEnd {
        let is_killed = end == ProcessEnd::Signal(Signal::KILL.as_raw());
        if is_killed && self.known().take(self.count()) { ProcessEnd::OutOfMemory } else { end }
    }
}

/// The files that may have the count of a process in these control groups, the best one first.
/// In a container, the path of a group may not be visible, and the group is at the root.
fn files(groups: &[ProcessCGroup]) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for ProcessCGroup { hierarchy, controllers, pathname } in groups {
        let (roots, name): (&[&str], _) = match hierarchy {
            0 => (&["/sys/fs/cgroup", "/sys/fs/cgroup/unified"], "memory.events"),
            _ if controllers.iter().any(|name| name == "memory") => {
                (&["/sys/fs/cgroup/memory"], "memory.oom_control")
            }
            _ => continue,
        };
        for root in roots {
            let path = pathname.trim_start_matches('/');
            files.extend([Path::new(root).join(path).join(name), Path::new(root).join(name)]);
        }
    }
    files
}

/// The number of victims in the text of such a file.
fn count(text: &str) -> Option<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("oom_kill "))
        .and_then(|it| it.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_of_the_own_group_is_best() {
        let group = |hierarchy, controllers: &[&str], path: &str| ProcessCGroup {
            hierarchy,
            controllers: controllers.iter().map(ToString::to_string).collect(),
            pathname: path.to_owned(),
        };
        let groups = [
            group(9, &["name=systemd"], "/"),
            group(4, &["cpu", "memory"], "/job/a"),
            group(0, &[], "/x"),
        ];
        let files = files(&groups);
        let files: Vec<_> = files.iter().map(|path| path.display().to_string()).collect();
        assert_eq!(
            files[..2],
            [
                "/sys/fs/cgroup/memory/job/a/memory.oom_control",
                "/sys/fs/cgroup/memory/memory.oom_control"
            ]
        );
        assert_eq!(files[2], "/sys/fs/cgroup/x/memory.events");
    }

    #[test]
    fn all_versions_of_the_file_are_read() {
        assert_eq!(count("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"), Some(3));
        assert_eq!(count("low 0\noom 5\noom_kill 2\noom_group_kill 7\n"), Some(2));
        assert_eq!(count("nr_free_pages 12\n"), None);
        assert_eq!(count("oom_kill x\n"), None);
    }

    #[test]
    fn each_victim_explains_one_end() {
        let mut known = Known { before: 3, last: 3 };
        assert!(!known.take(3));
        assert!(known.take(5) && known.take(5) && !known.take(5), "two victims");
        // It was counted just before a look, and one look ago.
        known.look(6);
        assert!(known.take(6) && !known.take(6));
        known.look(7);
        known.look(7);
        assert!(!known.take(7), "too long ago");
    }
}
