//! Segments: which memory is refused, and that running out of memory is an error, never a signal.

use std::{fs::File, io::Read, os::fd::OwnedFd, process::Child};

use gradwire_shm::segment::{HugePages, Segment, SegmentError};
use rustix::{
    fs::{MemfdFlags, SealFlags},
    process::{Resource, Rlimit},
};

mod common;

fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("gradwire-test-segment", flags).unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

const BOTH: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

#[test]
fn both_sides_see_the_same_bytes() {
    let (worker, fd) = Segment::create("gradwire-test-segment", 5000, HugePages::Advise).unwrap();
    assert_eq!(worker.bytes(), 8192, "whole pages");
    let daemon = Segment::open(fd, 1 << 20).unwrap();
    assert_eq!(daemon.bytes(), 8192);
    assert_ne!(worker.as_ptr(), daemon.as_ptr());
    let (there, here) = (worker.range(4999, 1).unwrap(), daemon.range(4999, 1).unwrap());
    // SAFETY: both ranges are mapped, and only this thread uses them.
    unsafe {
        assert_eq!(here.read(), 0);
        there.write(42);
        assert_eq!(here.read(), 42);
    }
}

#[test]
fn ranges_are_checked_without_overflow() {
    let (segment, _fd) = Segment::create("gradwire-test-range", 4096, HugePages::Never).unwrap();
    assert!(segment.range(0, 4096).is_some());
    assert!(segment.range(4096, 0).is_some());
    assert!(segment.range(4096, 1).is_none());
    assert!(segment.range(4097, 0).is_none());
    assert!(segment.range(u64::MAX, 1).is_none());
    assert!(segment.range(1, u64::MAX).is_none());
}

#[test]
fn memory_that_could_shrink_is_refused() {
    for seals in [SealFlags::empty(), SealFlags::SHRINK, SealFlags::GROW] {
        let error = Segment::open(memfd(4096, seals), 1 << 20).unwrap_err();
        assert!(matches!(error, SegmentError::Unsealed { .. }), "{error}");
    }
    let file = File::open("/proc/self/exe").unwrap();
    let error = Segment::open(file.into(), 1 << 40).unwrap_err();
    assert!(error.to_string().contains("it has no seals"), "{error}");
    let (pipe, _end) = std::io::pipe().unwrap();
    assert!(Segment::open(pipe.into(), 1 << 20).is_err());
}

#[test]
fn memory_that_accepts_no_seals_is_refused() {
    for more in [SealFlags::SEAL, SealFlags::FUTURE_WRITE, SealFlags::WRITE] {
        let error = Segment::open(memfd(4096, BOTH | more), 1 << 20).unwrap_err();
        assert!(matches!(error, SegmentError::NotOurs { .. }), "{error}");
    }
}

#[test]
fn sizes_out_of_range_are_refused() {
    for (bytes, max) in [(0, 4096), (8192, 4096), (1 << 46, u64::MAX)] {
        let error = Segment::open(memfd(bytes, BOTH), max).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&bytes.to_string()), "{text}");
    }
    for bytes in [0, u64::MAX, (1 << 47) + 1] {
        let error = Segment::create("gradwire-test-size", bytes, HugePages::Never).unwrap_err();
        assert!(matches!(error, SegmentError::Size { .. }), "{error}");
    }
}

#[test]
fn too_large_a_segment_is_refused_early() {
    let error = Segment::create("gradwire-test-large", 1 << 46, HugePages::Never).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, SegmentError::NoMemory { .. }), "{text}");
    assert!(text.contains("bytes are available (") && text.contains("raise the limit"), "{text}");
}

#[test]
fn a_sparse_segment_is_filled_or_refused() {
    // BOUND: a sparse segment of the allowed size takes real memory at once …
    let opened = Segment::open(memfd(1 << 20, BOTH), 1 << 20).unwrap();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", opened.as_ptr().addr());
    let entry = smaps.split_once(&start).unwrap().1;
    let rss = entry.lines().find_map(|l| l.strip_prefix("Rss:")).unwrap();
    assert_eq!(rss.trim(), "1024 kB");
    // … and one that cannot be filled is refused.
    let error = Segment::open(memfd(1 << 46, BOTH), 1 << 46).unwrap_err();
    assert!(
        matches!(error, SegmentError::NoMemory { .. } | SegmentError::System { .. }),
        "{error}"
    );
}

#[test]
fn missing_huge_pages_are_reported() {
    // More than any pool has.
    let error = Segment::create("gradwire-test-huge", 1 << 46, HugePages::Require).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("needs 67108864 huge pages of 2 MiB"), "{text}");
    assert!(text.contains("vm.nr_hugepages"), "{text}");
    // One page, if the pool has one.
    match Segment::create("gradwire-test-huge", 1, HugePages::Require) {
        Ok((segment, fd)) => {
            assert_eq!(segment.bytes(), 2 << 20);
            assert_eq!(Segment::open(fd, 2 << 20).unwrap().bytes(), 2 << 20);
        }
        Err(error) => assert!(matches!(error, SegmentError::NoHugePages { .. }), "{error}"),
    }
}

/// Runs each limit in a process of its own, because a limit cannot be raised again.
fn under_limit(case: &str) -> String {
    let mut child: Child = common::spawn("child_under_a_limit", case, None);
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    let status = child.wait().unwrap();
    assert!(status.success(), "{case}: {status}: {text}");
    text
}

#[test]
fn child_under_a_limit() {
    let Some(case) = common::role() else { return };
    let set = |resource, limit| {
        let limit = Rlimit { current: Some(limit), maximum: Some(limit) };
        rustix::process::setrlimit(resource, limit).unwrap();
    };
    match case.as_str() {
        "file size" => set(Resource::Fsize, 1 << 20),
        "address space" => set(Resource::As, 512 << 20),
        "open files" => set(Resource::Nofile, 3),
        other => panic!("{other}"),
    }
    let bytes = if case == "address space" { 1 << 30 } else { 2 << 20 };
    let error = Segment::create("gradwire-test-limit", bytes, HugePages::Never).unwrap_err();
    println!("ERROR {error}");
}

#[test]
fn each_limit_is_an_error_that_names_it() {
    let text = under_limit("file size");
    assert!(
        text.contains("2097152 bytes exceeds this process's file size limit of 1048576"),
        "{text}"
    );
    let text = under_limit("address space");
    assert!(text.contains("map memory for shared memory of 1073741824 bytes"), "{text}");
    assert!(text.contains("ulimit -v"), "{text}");
    let text = under_limit("open files");
    assert!(text.contains("ulimit -n"), "{text}");
}
