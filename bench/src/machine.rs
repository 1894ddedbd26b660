//! What the measurement ran on, for those who compare figures.

use std::fs;

use serde::Serialize;

/// The machine of rank 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// The processor; empty where the system does not say.
    pub processor: String,
    /// How many cores this process may run on.
    pub cores: usize,
    /// Its memory, in bytes; 0 where the system does not say.
    pub memory_bytes: u64,
    /// The kernel's release.
    pub kernel: String,
    /// Whether transparent huge pages back ordinary and shared memory, as the kernel writes it.
    pub huge_pages: [String; 2],
}

impl Machine {
    /// Asks the system.
    pub fn look() -> Self {
        let uname = rustix::system::uname();
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let huge = |name: &str| {
            chosen(&read(&format!("/sys/kernel/mm/transparent_hugepage/{name}"))).to_owned()
        };
        let memory = read("/proc/meminfo");
        Self {
            name: uname.nodename().to_string_lossy().into_owned(),
            processor: field(&read("/proc/cpuinfo"), "model name").to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kibibytes(&memory, "MemTotal").unwrap_or_default(),
            kernel: uname.release().to_string_lossy().into_owned(),
            huge_pages: [huge("enabled"), huge("shmem_enabled")],
        }
    }
}

/// The value of the first line `name : value`.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map_or("", |(_, value)| value.trim())
}

/// The bytes that a line `name : value kB` says.
pub(super) fn kibibytes(text: &str, name: &str) -> Option<u64> {
    field(text, name).split(' ').next()?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The number that a line `name : value` says.
pub(super) fn number(text: &str, name: &str) -> Option<u64> {
    field(text, name).parse().ok()
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
        let cpu = "processor\t: 0\nmodel name\t: A CPU @ 2\n\nmodel name\t: other\n";
        assert_eq!(field(cpu, "model name"), "A CPU @ 2");
        assert_eq!((field(cpu, "stepping"), chosen("always [madvise] never")), ("", "madvise"));
        assert_eq!(chosen(""), "");
        assert_eq!(kibibytes("VmHWM: 9 kB\nVmRSS:\t 12 kB\n", "VmRSS"), Some(12 << 10));
        assert_eq!(kibibytes("VmRSS: much", "VmRSS"), None);
        assert_eq!((number("a: 7\nb:\t9\n", "b"), number("b: 9 kB", "b")), (Some(9), None));
        assert!(Machine::look().cores > 0);
    }
}
