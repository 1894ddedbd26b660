//! Memory in the page cache counts as available: tested in a real control group that is full of a
//! file's pages.

use std::{
    fs,
    io::Read,
    os::fd::AsFd,
    path::{Path, PathBuf},
    ptr,
};

use gradwire_shm::segment::{HugePages, Segment};
use rustix::mm::{Advice, MapFlags, ProtFlags};

mod common;

const MIB: u64 = 1 << 20;
/// The limit of the group, and the sizes of the file in its cache and of the segment.
const LIMIT: u64 = 160 * MIB;
const FILE: u64 = 120 * MIB;
const SEGMENT: u64 = 80 * MIB;

/// A control group with a memory limit; removed on drop.
struct Group(PathBuf);

impl Group {
    /// A group below this process's own, or why it cannot be made.
    fn new() -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let path = |of: &str| groups.lines().find_map(|l| Some(l.split_once(of)?.1.to_owned()));
        let (root, path, limit) = match path(":memory:") {
            Some(path) => ("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes"),
            None => ("/sys/fs/cgroup", path("0::").ok_or("no control groups")?, "memory.max"),
        };
        let name = format!("gradwire-test-{}", std::process::id());
        let folder = Path::new(root).join(path.trim_start_matches('/')).join(name);
        let failed = |error| format!("{}: {error}", folder.display());
        fs::create_dir(&folder).map_err(failed)?;
        let group = Self(folder.clone());
        fs::write(folder.join(limit), LIMIT.to_string()).map_err(failed)?;
        Ok(group)
    }

    fn admit(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Bytes of page cache that the kernel counts as active.
    fn active(&self) -> u64 {
        let stat = fs::read_to_string(self.0.join("memory.stat")).unwrap();
        let line = stat.lines().find_map(|line| line.strip_prefix("active_file "));
        line.unwrap().parse().unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Runs in the group: fills the page cache with a mapped file, which is active because it is in
/// use, then makes a segment that fits only if the cache is reclaimed.
#[test]
fn child_in_a_group() {
    let Some(group) = common::role() else { return };
    let group = std::mem::ManuallyDrop::new(Group(group.into()));
    group.admit(std::process::id());
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for offset in 0..FILE / MIB {
        rustix::io::pwrite(&file, &[1; MIB as usize], offset * MIB).unwrap();
    }
    file.sync_all().unwrap();
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let cached = unsafe {
        let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
        rustix::mm::mmap(ptr::null_mut(), FILE as usize, read, shared, file.as_fd(), 0).unwrap()
    };
    for _ in 0..3 {
        // SAFETY: the range is exactly our mapping, which is only read.
        unsafe { rustix::mm::madvise(cached, FILE as usize, Advice::LinuxPopulateRead).unwrap() };
        for offset in 0..FILE / MIB {
            rustix::io::pread(&file, &mut [0u8; MIB as usize][..], offset * MIB).unwrap();
        }
    }
    println!("ACTIVE {}", group.active());
    match Segment::create("gradwire-test-cache", SEGMENT, HugePages::Never) {
        Ok(_) => println!("CREATED"),
        Err(error) => println!("REFUSED {error}"),
    }
}

#[test]
fn a_segment_reclaims_active_page_cache() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(reason) => return println!("skipped: no control group with a limit: {reason}"),
    };
    let mut child = common::spawn("child_in_a_group", group.0.to_str().unwrap(), None);
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    let active = text.lines().find_map(|line| line.split_once("ACTIVE ")?.1.parse::<u64>().ok());
    if active.unwrap() < LIMIT - SEGMENT {
        return println!("skipped: this kernel keeps the cache on its inactive list: {text}");
    }
    assert!(text.contains("CREATED"), "{text}");
}
