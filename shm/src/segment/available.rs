//! How much memory can still be taken before the out-of-memory killer acts.
//!
//! The kernel does not refuse to reserve more than a control group allows. It kills a process
//! instead, often an innocent training process. So this module checks first. The answer is a
//! snapshot, not a promise; it turns the usual mistake (tensors that cannot fit) into an error.

use std::{fs, path::Path};

use procfs::{Current, Meminfo, ProcResult, ProcessCGroup, process::Process};
use rustix::io::Errno;

use super::{
    error::SegmentError,
    pages::{HUGE_PAGE, HugePages},
};

/// How much memory is left, and by which limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Available {
    /// The bytes left.
    pub bytes: u64,
    /// The limit that applies.
    pub limit: String,
}

/// How much memory this process may still take, by the strictest limit; `None` if none is known.
pub fn available() -> Option<Available> {
    let groups = Process::myself().and_then(|process| process.cgroups());
    let groups = groups.map_or(Vec::new(), |groups| groups.0);
    let read = |path: &Path| fs::read_to_string(path).ok();
    let limits = machine(Meminfo::current()).into_iter().chain(control_groups(&groups, &read));
    limits.min_by_key(|left| left.bytes)
}

/// Refuses a segment of `bytes` bytes if the `missing` bytes that it does not have yet don't fit.
pub(super) fn check(bytes: u64, missing: u64) -> Result<(), SegmentError> {
    match available() {
        Some(left) if missing > left.bytes => {
            Err(SegmentError::NoMemory { bytes, available: left.bytes, limit: left.limit })
        }
        // If no limit is known, nothing is refused here. Filling the pages still reports what the
        // kernel refuses.
        _ => Ok(()),
    }
}

/// Refuses a segment that does not fit the pool of huge pages together with its reserve.
pub(super) fn check_huge(bytes: u64) -> Result<(), SegmentError> {
    let path = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let read = |file: &str| fs::read_to_string(format!("{path}/{file}")).ok();
    let free = free_huge(&read);
    let pages = huge_pages(bytes);
    if pages > free { Err(SegmentError::NoHugePages { bytes, pages, free }) } else { Ok(()) }
}

/// The error if the kernel refuses to map this many bytes. It takes huge pages out of the pool when
/// they are mapped, so this may mean that others were faster.
pub(super) fn not_mapped(huge: HugePages, bytes: u64, errno: Errno) -> SegmentError {
    let lacks_pages = huge == HugePages::Require && errno == Errno::NOMEM;
    let lack = if lacks_pages { check_huge(bytes).err() } else { None };
    lack.unwrap_or_else(|| SegmentError::system("map memory", bytes, errno))
}

/// The huge pages of a segment and of its reserve, which must never lack one.
fn huge_pages(bytes: u64) -> u64 {
    2 * bytes.div_ceil(HUGE_PAGE)
}

/// The pages of the pool that nobody has. `read` reads its files.
fn free_huge(read: &dyn Fn(&str) -> Option<String>) -> u64 {
    let number = |file| read(file).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
    // Free pages may already be reserved by others. Overcommitted pages do not exist yet.
    let free = number("free_hugepages").saturating_sub(number("resv_hugepages"));
    let surplus = number("nr_overcommit_hugepages").saturating_sub(number("surplus_hugepages"));
    free.saturating_add(surplus)
}

fn machine(meminfo: ProcResult<Meminfo>) -> Option<Available> {
    let bytes = meminfo.ok()?.mem_available?;
    Some(Available { bytes, limit: "MemAvailable of this machine".into() })
}

/// The file names of one version of control groups.
struct Names {
    root: &'static str,
    max: &'static str,
    current: &'static str,
    /// The lines of `memory.stat` that count memory which the kernel reclaims under pressure.
    reclaimable: &'static [&'static str],
}

const V2: Names = Names {
    root: "/sys/fs/cgroup",
    max: "memory.max",
    current: "memory.current",
    reclaimable: &["active_file", "inactive_file", "slab_reclaimable"],
};
const V1: Names = Names {
    root: "/sys/fs/cgroup/memory",
    max: "memory.limit_in_bytes",
    current: "memory.usage_in_bytes",
    // Version 1 does not count the slab.
    reclaimable: &["total_active_file", "total_inactive_file"],
};

/// How much each limit above this process leaves. In a container the group's own path is often not
/// visible and the limit is at the root, so this checks every level.
fn control_groups(
    groups: &[ProcessCGroup],
    read: &dyn Fn(&Path) -> Option<String>,
) -> Vec<Available> {
    let mut limits = Vec::new();
    for ProcessCGroup { hierarchy, controllers, pathname } in groups {
        let names = match hierarchy {
            0 => V2,
            _ if controllers.iter().any(|name| name == "memory") => V1,
            _ => continue,
        };
        for level in Path::new(pathname).ancestors() {
            let folder = Path::new(names.root).join(level.strip_prefix("/").unwrap_or(level));
            limits.extend(group(&folder, &names, read));
        }
    }
    limits
}

fn group(
    folder: &Path,
    names: &Names,
    read: &dyn Fn(&Path) -> Option<String>,
) -> Option<Available> {
    let number = |file| read(&folder.join(file))?.trim().parse::<u64>().ok();
    // Without a limit, version 2 has "max", which is not a number, and version 1 a very large
    // number.
    let max = number(names.max)?;
    let current = number(names.current)?;
    let stat = read(&folder.join("memory.stat")).unwrap_or_default();
    let used = current.saturating_sub(reclaimable(&stat, names.reclaimable));
    let limit = format!("{} = {max} bytes in {}", names.max, folder.display());
    Some(Available { bytes: max.saturating_sub(used), limit })
}

/// The sum of these lines of a `memory.stat`.
fn reclaimable(stat: &str, lines: &[&str]) -> u64 {
    stat.lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| lines.contains(name))
        .filter_map(|(_, bytes)| bytes.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use procfs::{FromBufRead, ProcError, ProcessCGroups};

    use super::*;

    /// The groups of a `/proc/PID/cgroup`.
    fn groups(text: &str) -> Vec<ProcessCGroup> {
        ProcessCGroups::from_buf_read(text.as_bytes()).unwrap().0
    }

    #[test]
    fn the_machine_reports_what_is_available() {
        let left = machine(Meminfo::current()).unwrap();
        assert!((1 << 20..1 << 46).contains(&left.bytes), "{left:?}");
        assert_eq!(machine(Err(ProcError::NotFound(None))), None);
    }

    #[test]
    fn every_level_of_a_control_group_counts() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/job/step/memory.max" => "max\n",
                "/sys/fs/cgroup/job/step/memory.current" => "700\n",
                "/sys/fs/cgroup/job/memory.max" => "1000\n",
                "/sys/fs/cgroup/job/memory.current" => "900\n",
                "/sys/fs/cgroup/job/memory.stat" => "anon 500\ninactive_file 300\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        let limits = control_groups(&groups("0::/job/step\n"), &read);
        let limit = "memory.max = 1000 bytes in /sys/fs/cgroup/job".to_owned();
        assert_eq!(limits, [Available { bytes: 400, limit }]);
    }

    #[test]
    fn control_groups_version_1_are_read() {
        let read = |path: &Path| {
            let text = match path.to_str()? {
                "/sys/fs/cgroup/memory/memory.limit_in_bytes" => "1000\n",
                "/sys/fs/cgroup/memory/memory.usage_in_bytes" => "1500\n",
                _ => return None,
            };
            Some(text.to_owned())
        };
        let limits = control_groups(&groups("5:devices:/x\n4:cpu,memory:/x\n"), &read);
        assert_eq!(limits.len(), 1);
        assert_eq!(limits[0].bytes, 0);
    }

    /// How much a group with a limit of 1000 leaves when 900 are used.
    fn left(text: &str, stat: &'static str) -> u64 {
        let read = |path: &Path| {
            let text = match path.file_name()?.to_str()? {
                "memory.max" | "memory.limit_in_bytes" => "1000",
                "memory.current" | "memory.usage_in_bytes" => "900",
                "memory.stat" => stat,
                _ => return None,
            };
            Some(text.to_owned())
        };
        control_groups(&groups(text), &read)[0].bytes
    }

    #[test]
    fn reclaimable_memory_counts_as_available() {
        let (v2, v1) = ("0::/\n", "4:memory:/\n");
        let stat = "anon 100\nfile 600\nshmem 50\nactive_file 400\ninactive_file 150\n\
                    slab_reclaimable 30\nslab_unreclaimable 20\nslab 50\n";
        assert_eq!(left(v2, stat), 100 + 400 + 150 + 30);
        // The names without a prefix are the group's own, without its children's.
        let stat = "cache 600\nactive_file 1\ninactive_file 2\ntotal_cache 600\n\
                    total_active_file 400\ntotal_inactive_file 150\ntotal_unevictable 7\n";
        assert_eq!(left(v1, stat), 100 + 400 + 150);
        for groups in [v2, v1] {
            assert_eq!(left(groups, ""), 100);
            assert_eq!(left(groups, "active_file\ninactive_file many\n"), 100);
        }
        // The two files are read one after the other: more may be reclaimable than was in use.
        assert_eq!(left(v2, "active_file 950\ninactive_file 18446744073709551615\n"), 1000);
    }

    #[test]
    fn reserved_huge_pages_are_not_free() {
        let free = |free: &str, reserved: &str, beyond: &str, surplus: &str| {
            let read = |file: &str| match file {
                "free_hugepages" => Some(free.to_owned()),
                "resv_hugepages" => Some(reserved.to_owned()),
                "nr_overcommit_hugepages" => Some(beyond.to_owned()),
                "surplus_hugepages" => Some(surplus.to_owned()),
                _ => None,
            };
            free_huge(&read)
        };
        assert_eq!(free("10\n", "4\n", "0\n", "0\n"), 6);
        assert_eq!(free("10\n", "4\n", "5\n", "2\n"), 9);
        assert_eq!(free("1\n", "4\n", "", "?"), 0);
        assert_eq!(free_huge(&|_| None), 0, "a kernel without them");
    }

    #[test]
    fn a_segment_needs_its_huge_pages_twice() {
        assert_eq!([1, HUGE_PAGE, HUGE_PAGE + 1].map(huge_pages), [2, 2, 4]);
        let pages = huge_pages(HUGE_PAGE);
        let error = SegmentError::NoHugePages { bytes: HUGE_PAGE, pages, free: 1 }.to_string();
        assert!(error.contains("needs 2 huge pages of 2 MiB, and 1 are free"), "{error}");
        assert!(error.contains("vm.nr_hugepages to at least 1 more"), "{error}");
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        let error = check(1 << 46, 1 << 46).unwrap_err().to_string();
        assert!(error.contains("70368744177664 bytes does not fit"), "{error}");
        assert!(error.contains("raise the limit"), "{error}");
    }
}
