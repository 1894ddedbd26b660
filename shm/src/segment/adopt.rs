//! Turns memory that the program already has into a segment, at the same addresses.
//!
//! A framework can keep an array in a file that it maps (PyTorch does so to share a tensor with
//! other processes). Such a file cannot be handed to the daemon: it is not sealed, so a process
//! could truncate it while the daemon works on it, and the daemon would receive SIGBUS (TRUST). So
//! the contents move to a sealed memfd, whose mapping replaces the old one atomically. The
//! descriptor of the framework's file is redirected to the memfd, so that the old file takes no
//! memory any more.
//!
//! The framework keeps the addresses: it, and not the segment, unmaps them when the array is freed.
//! So before anything is mapped there, [`is_mapped`] checks that they are still exactly the mapping
//! of that file.

use std::{
    mem::ManuallyDrop,
    os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use procfs::process::{MMPermissions, Process};
use rustix::{io::Errno, mm::MremapFlags};

use super::{HugePages, Segment, SegmentError, reserve::Reserve};

/// The file behind a mapping: the number of its device, and its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapped {
    device: (i32, i32),
    inode: u64,
}

/// The program's memory as a segment.
pub(crate) struct Adopted {
    pub(crate) segment: Segment,
    pub(crate) reserve: Reserve,
    /// The file that is mapped there from now on.
    pub(crate) mapped: Mapped,
    /// For the daemon.
    pub(crate) fd: OwnedFd,
}

fn file_behind(fd: BorrowedFd<'_>) -> Result<Mapped, SegmentError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| SegmentError::system("stat", 0, errno))?;
    let device = (rustix::fs::major(stat.st_dev) as i32, rustix::fs::minor(stat.st_dev) as i32);
    Ok(Mapped { device, inode: stat.st_ino })
}

/// Whether these addresses are exactly mappings of this file, all of it readable and writable.
pub(crate) fn is_mapped(start: usize, bytes: u64, file: Mapped) -> bool {
    let Ok(maps) = Process::myself().and_then(|process| process.maps()) else { return false };
    let (start, end) = (start as u64, start as u64 + bytes);
    let access = MMPermissions::READ | MMPermissions::WRITE;
    let mut at = start;
    for map in maps.iter().filter(|map| map.address.0 < end && map.address.1 > start) {
        let of_file = map.dev == file.device
            && map.inode == file.inode
            && map.offset == map.address.0.wrapping_sub(start);
        // The list is in the order of addresses. A mapping that reaches beyond is somebody else's.
        if map.address.0 != at || map.address.1 > end || !of_file || !map.perms.contains(access) {
            return false;
        }
        at = map.address.1;
    }
    at == end
}

/// Moves memory of the program to a segment, at the same addresses. `fd` is the descriptor of the
/// file that is mapped there, from its first byte on. It is redirected to the segment's memory.
///
/// The caller ensures that nothing writes to the memory during the call: such a write may be lost.
///
/// # Errors
/// [`SegmentError`] if it is not a mapping of that file, or if memory is missing. Then nothing has
/// changed.
pub(crate) fn adopt(
    name: &str,
    start: usize,
    bytes: u64,
    fd: RawFd,
    huge: HugePages,
) -> Result<Adopted, SegmentError> {
    let refused = SegmentError::NotAMapping { address: start, bytes, fd };
    let page = rustix::param::page_size() as u64;
    let (Some(size), true, true) =
        (bytes.checked_next_multiple_of(page), fd >= 0, (start as u64).is_multiple_of(page))
    else {
        return Err(refused);
    };
    // SAFETY: if the number is not a descriptor, `fstat` reports that. It is not used otherwise
    // before the check below has shown that its file is mapped here. It is not closed here
    // (`ManuallyDrop`).
    let mut file = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd) });
    let before = file_behind(file.as_fd())?;
    if bytes == 0 || !is_mapped(start, size, before) {
        return Err(refused);
    }
    // The addresses may not be aligned to the huge pages of the pool.
    let huge = if huge == HugePages::Require { HugePages::Advise } else { huge };
    let (mut segment, memory) = Segment::create(name, size, huge)?;
    let mapped = file_behind(memory.as_fd())?;
    let reserve = Reserve::of(&segment, memory.as_fd(), huge)?;
    let there = ptr::with_exposed_provenance_mut::<u8>(start);
    // SAFETY: both ranges are mapped for this many bytes, as checked above, and do not overlap. The
    // bytes are copied as they are. If somebody violates the contract of this function and writes
    // to them meanwhile, the copy has old or new bytes.
    unsafe { ptr::copy_nonoverlapping(there.cast_const(), segment.as_ptr(), bytes as usize) };
    // SAFETY: the source is exactly the segment's mapping, and the target exactly that of the file,
    // as checked above. After this the target has the same bytes as before, and it stays accessible
    // meanwhile, so references into it stay valid. `segment` refers to the new place from now on,
    // and no longer unmaps it.
    let moved = unsafe {
        rustix::mm::mremap_fixed(
            segment.pointer(),
            size as usize,
            size as usize,
            MremapFlags::MAYMOVE,
            there.cast(),
        )
    };
    moved.map_err(|errno| SegmentError::system("take the place of memory", size, errno))?;
    segment.start = ptr::NonNull::new(there)
        .ok_or_else(|| SegmentError::system("map memory", size, Errno::FAULT))?;
    segment.unmaps = false;
    // The framework owns the number and closes it. If the system refuses, the old file keeps its
    // memory until then.
    let _ = rustix::io::dup3(&memory, &mut file, rustix::io::DupFlags::CLOEXEC);
    Ok(Adopted { segment, reserve, mapped, fd: memory })
}

#[cfg(test)]
mod tests {
    use std::{ffi::c_void, os::fd::AsRawFd};

    use rustix::{
        fs::{MemfdFlags, SealFlags},
        mm::{MapFlags, ProtFlags},
    };

    use super::*;

    /// Memory of a framework: a mapped file, not sealed. Unmapped on drop.
    struct Framework {
        fd: OwnedFd,
        start: *mut c_void,
        bytes: usize,
    }

    impl Framework {
        fn new(bytes: usize) -> Self {
            let fd = rustix::fs::memfd_create("gradwire-test-framework", MemfdFlags::CLOEXEC);
            let fd = fd.unwrap();
            rustix::fs::ftruncate(&fd, bytes as u64).unwrap();
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
            let start = unsafe {
                rustix::mm::mmap(ptr::null_mut(), bytes, access, MapFlags::SHARED, &fd, 0)
            };
            Self { fd, start: start.unwrap(), bytes }
        }

        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: it is mapped, and this thread alone uses it.
            unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.bytes) }
        }

        fn adopt(&self) -> Result<Adopted, SegmentError> {
            let (start, bytes) = (self.start.expose_provenance(), self.bytes as u64);
            adopt("gradwire-test-adopt", start, bytes, self.fd.as_raw_fd(), HugePages::Never)
        }
    }

    impl Drop for Framework {
        fn drop(&mut self) {
            // SAFETY: the range is exactly our mapping.
            unsafe { rustix::mm::munmap(self.start, self.bytes) }.unwrap();
        }
    }

    #[test]
    fn memory_keeps_its_addresses_and_is_sealed() {
        let mut memory = Framework::new(3 * 4096 + 100);
        memory.bytes().iter_mut().zip(1..).for_each(|(byte, value)| *byte = value as u8);
        let before = memory.bytes().to_vec();
        let adopted = memory.adopt().unwrap();
        assert_eq!(memory.bytes(), before);
        // The framework has the sealed memory now, so it cannot truncate it either (TRUST).
        let seals = rustix::fs::fcntl_get_seals(&memory.fd).unwrap();
        assert!(seals.contains(SealFlags::SHRINK | SealFlags::GROW));
        assert_eq!(rustix::fs::ftruncate(&memory.fd, 0), Err(Errno::PERM));
        let daemon = Segment::open(adopted.fd, u64::MAX).unwrap();
        assert_eq!(rustix::fs::ftruncate(&memory.fd, 0), Err(Errno::PERM));
        memory.bytes()[5000] = 77;
        // SAFETY: both are within mappings, and this thread alone uses them.
        unsafe {
            assert_eq!(daemon.as_ptr().add(5000).read_volatile(), 77);
            daemon.as_ptr().add(9000).write_volatile(78);
        }
        assert_eq!(memory.bytes()[9000], 78);
        // The daemon's mapping outlives the framework's.
        drop(adopted.segment);
        memory.bytes()[1] = 9;
        drop(memory);
        // SAFETY: as above.
        assert_eq!(unsafe { daemon.as_ptr().add(1).read_volatile() }, 9);
    }

    #[test]
    fn it_can_move_again_for_another_daemon() {
        let mut memory = Framework::new(2 * 4096);
        memory.bytes()[4096] = 1;
        let first = memory.adopt().unwrap();
        let daemon = Segment::open(first.fd, u64::MAX).unwrap();
        // The first daemon was given up, and the memory was taken back from it.
        first.reserve.replace(&first.segment).unwrap();
        first.reserve.settle(&first.segment, 0..8192, true).unwrap();
        memory.bytes()[4096] = 2;
        let second = memory.adopt().unwrap();
        let other = Segment::open(second.fd, u64::MAX).unwrap();
        memory.bytes()[4097] = 3;
        // SAFETY: all are within mappings, and this thread alone uses them.
        unsafe {
            assert_eq!(other.as_ptr().add(4096).read_volatile(), 2);
            assert_eq!(other.as_ptr().add(4097).read_volatile(), 3);
            assert_eq!(daemon.as_ptr().add(4096).read_volatile(), 1);
        }
    }

    #[test]
    fn other_memory_is_refused() {
        let memory = Framework::new(4 * 4096);
        let start = memory.start.expose_provenance();
        let fd = memory.fd.as_raw_fd();
        let refused = |start, bytes, fd| {
            let result = adopt("gradwire-test-adopt", start, bytes, fd, HugePages::Never);
            result.err().expect("it must be refused").to_string()
        };
        for (start, bytes) in [
            (start, 2 * 4096),
            (start, 5 * 4096),
            (start + 4096, 3 * 4096),
            (start + 8, 4 * 4096 - 8),
            (start, 0),
        ] {
            assert!(refused(start, bytes, fd).contains("cannot be adopted"), "{start} {bytes}");
        }
        let other = Framework::new(4 * 4096);
        refused(start, 4 * 4096, other.fd.as_raw_fd());
        refused(start, 4 * 4096, -1);
        refused(start, 4 * 4096, 999_999);
        let heap = vec![0u8; 1 << 20];
        refused(heap.as_ptr().addr().next_multiple_of(4096), 4096, fd);
        memory.adopt().unwrap();
    }

    #[test]
    fn unmapped_addresses_are_noticed() {
        let memory = Framework::new(4096);
        let adopted = memory.adopt().unwrap();
        let start = memory.start.expose_provenance();
        assert!(is_mapped(start, 4096, adopted.mapped));
        drop(memory);
        assert!(!is_mapped(start, 4096, adopted.mapped));
    }
}
