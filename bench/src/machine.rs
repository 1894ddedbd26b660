//! The machine of the measurement, for comparing figures.

use std::fs;

use procfs::{CpuInfo, Current, Meminfo};
use serde::Serialize;

/// The machine of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// The processor; empty if the system does not report it.
    pub processor: String,
    /// The number of cores that this process may use.
    pub cores: usize,
    /// Its memory, in bytes; 0 if the system does not report it.
    pub memory_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// Whether ordinary and shared memory use transparent huge pages, in the kernel's words.
    pub huge_pages: [String; 2],
}

impl Machine {
    /// Reads it from the system.
    pub fn look() -> Self {
        let uname = rustix::system::uname();
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let huge = |name: &str| {
            chosen(&read(&format!("/sys/kernel/mm/transparent_hugepage/{name}"))).to_owned()
        };
        let processor = CpuInfo::current().ok().and_then(|cpus| cpus.model_name(0).map(Into::into));
        let memory = Meminfo::current().map_or(0, |memory| memory.mem_total);
        Self {
            name: uname.nodename().to_string_lossy().into_owned(),
            processor: processor.unwrap_or_default(),
            cores: cores(),
            memory_bytes: memory,
            kernel: uname.release().to_string_lossy().into_owned(),
            huge_pages: [huge("enabled"), huge("shmem_enabled")],
        }
    }
}

/// The number of cores that this process may use.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The word in brackets of `always [madvise] never`.
fn chosen(text: &str) -> &str {
    let inside = text.split_once('[').and_then(|(_, rest)| rest.split_once(']'));
    inside.map_or("", |(word, _)| word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_files_are_understood() {
        assert_eq!((chosen("always [madvise] never"), chosen("")), ("madvise", ""));
        let machine = Machine::look();
        assert!(machine.memory_bytes > 1 << 20, "{machine:?}");
        assert!(machine.cores > 0);
    }
}
