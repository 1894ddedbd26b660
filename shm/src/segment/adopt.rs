//! Turns a file that a framework maps into a segment, at the same addresses.
//!
//! A framework can move an array into a file that it maps (PyTorch does so to share a tensor with
//! other processes). Such a file cannot be handed to the daemon: it is not sealed, so a process
//! could truncate it while the daemon works on it, and the daemon would receive SIGBUS (TRUST). So
//! a sealed memfd with the contents of the array replaces the mapping of the file atomically. The
//! contents need not be in the file: they are copied once, from wherever they are. The descriptor
//! of the framework's file is redirected to the memfd, so that the old file takes no memory any
//! more.
//!
//! The framework keeps the addresses: it, and not the segment, unmaps them when the array is freed.
//! So before anything is mapped there, [`Mappings`] shows that they are still exactly the mapping
//! of that file. The same holds when the memory moves again, for another daemon (`renew`).

use std::{
    cell::OnceCell,
    convert::Infallible,
    mem::ManuallyDrop,
    ops::Range,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::fs::MetadataExt,
    },
    ptr::{self, NonNull},
};

use procfs::process::{MMPermissions, MemoryMaps, Process};
use rustix::{io::Errno, mm::MremapFlags};

use super::{HUGE_PAGE, Segment, SegmentError, parallel};

/// The file behind a mapping: the number of its device, and its inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapped {
    device: (i32, i32),
    inode: u64,
}

impl Mapped {
    fn new(device: u64, inode: u64) -> Self {
        Self { device: (rustix::fs::major(device) as i32, rustix::fs::minor(device) as i32), inode }
    }
}

/// The memory of a framework in which a segment is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Adopted {
    /// The file of the segment.
    file: Mapped,
    /// The framework's descriptor, which refers to that file until it is closed.
    fd: RawFd,
}

impl Adopted {
    /// Whether these addresses are exactly the memory.
    pub(crate) fn is_at(&self, start: usize, bytes: u64, mappings: &Mappings) -> bool {
        mappings.are_exactly(start, bytes, self.file)
    }

    /// Refuses addresses that are not exactly the memory any more.
    pub(super) fn check(&self, address: usize, bytes: u64) -> Result<(), SegmentError> {
        let gone = SegmentError::NotAMapping { address, bytes, fd: self.fd };
        self.is_at(address, bytes, &Mappings::default()).then_some(()).ok_or(gone)
    }

    /// Puts a segment with the same bytes in the place of this memory, which is the segment `old`.
    /// The framework's descriptor is redirected to the new `memory`, if it still refers to the old.
    ///
    /// Nobody unmaps the memory or closes the descriptor during the call.
    ///
    /// # Errors
    /// [`SegmentError`] if the framework has unmapped it. Then nothing has changed.
    pub(super) fn replace(
        &mut self,
        old: &Segment,
        new: Segment,
        memory: &OwnedFd,
    ) -> Result<(), SegmentError> {
        let (start, bytes) = (old.as_ptr().addr(), old.bytes());
        self.check(start, bytes)?;
        let file = file_behind(memory.as_fd())?;
        old.replace(new)?;
        // The framework may have closed the descriptor, and opened another file with its number.
        let behind = std::fs::metadata(format!("/proc/self/fd/{}", self.fd));
        if behind.is_ok_and(|stat| Mapped::new(stat.dev(), stat.ino()) == self.file) {
            // SAFETY: it is open and refers to the old memory, which this process does not map any
            // more. By the contract it stays open during the call.
            unsafe { redirect(BorrowedFd::borrow_raw(self.fd), memory, bytes) };
        }
        self.file = file;
        Ok(())
    }
}

fn file_behind(fd: BorrowedFd<'_>) -> Result<Mapped, SegmentError> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| SegmentError::system("stat", 0, errno))?;
    Ok(Mapped::new(stat.st_dev, stat.st_ino))
}

/// What this process maps: read once, when it is first needed, because that takes milliseconds in a
/// large process.
#[derive(Default)]
pub(crate) struct Mappings(OnceCell<Option<MemoryMaps>>);

impl Mappings {
    /// Whether these addresses are exactly mappings of this file, all of it readable and writable.
    fn are_exactly(&self, start: usize, bytes: u64, file: Mapped) -> bool {
        let start = start as u64;
        let maps = self.0.get_or_init(|| Process::myself().and_then(|own| own.maps()).ok());
        let (Some(maps), Some(end)) = (maps, start.checked_add(bytes)) else { return false };
        let access = MMPermissions::READ | MMPermissions::WRITE;
        let mut at = start;
        for map in maps.iter().filter(|map| map.address.0 < end && map.address.1 > start) {
            let of_file = map.dev == file.device
                && map.inode == file.inode
                && map.offset == map.address.0.wrapping_sub(start);
            // The list is in the order of addresses. A mapping that reaches beyond is somebody
            // else's.
            let within = map.address.0 == at && map.address.1 <= end;
            if !within || !of_file || !map.perms.contains(access) {
                return false;
            }
            at = map.address.1;
        }
        at == end
    }
}

/// Where contents are. Threads copy parts of them that don't overlap.
pub(super) struct Contents(pub(super) *const u8);

// SAFETY: whoever makes one promises that the contents do not change while it is used.
unsafe impl Sync for Contents {}

impl Contents {
    /// Copies the contents to the beginning of a segment.
    ///
    /// # Safety
    /// There are `bytes` bytes of them, which are not in the segment. Nobody else uses the segment.
    pub(super) unsafe fn copy_to(&self, segment: &Segment, bytes: u64) -> Result<(), SegmentError> {
        let outside = SegmentError::OutOfRange { bytes, max: segment.bytes() };
        segment.range(0, bytes).ok_or(outside)?;
        let copied = parallel::in_shares(0..bytes, |Range { start, end }| {
            let (from, to) = (self.0.wrapping_add(start as usize), segment.as_ptr());
            let to = to.wrapping_add(start as usize);
            // SAFETY: both are within the ranges above. The bytes are copied as they are.
            unsafe { ptr::copy_nonoverlapping(from, to, (end - start) as usize) };
            Ok::<_, Infallible>(())
        });
        let Ok(()) = copied;
        Ok(())
    }
}

/// Puts a segment at the addresses where the program maps a file, with `contents`: the address of
/// as many bytes, which may be the mapping of the file itself. `fd` is the descriptor of the file,
/// which is mapped from its first byte on. It is redirected to the segment's `memory`.
///
/// # Errors
/// [`SegmentError`] if it is not a mapping of that file, or has another size than the segment. Then
/// nothing has changed.
///
/// # Safety
/// Nobody writes to the contents during the call: such a write may be lost. The segment's addresses
/// are used as long as the program's memory stays mapped, and no longer. Nothing else uses `fd`.
pub(crate) unsafe fn move_to(
    segment: &mut Segment,
    memory: &OwnedFd,
    start: NonNull<u8>,
    bytes: u64,
    fd: BorrowedFd<'_>,
    contents: NonNull<u8>,
) -> Result<Adopted, SegmentError> {
    let (address, size) = (start.addr().get(), segment.bytes());
    let file = file_behind(fd)?;
    let page = rustix::param::page_size() as u64;
    if bytes.checked_next_multiple_of(page) != Some(size)
        || !(address as u64).is_multiple_of(page)
        || !Mappings::default().are_exactly(address, size, file)
    {
        let fd = fd.as_raw_fd();
        return Err(SegmentError::NotAMapping { address, bytes, fd });
    }
    let mapped = file_behind(memory.as_fd())?;
    // SAFETY: the caller promises that the contents are there, and nobody else has the segment. If
    // somebody violates the contract of this function and writes to the contents meanwhile, the
    // copy has old or new bytes.
    unsafe { Contents(contents.as_ptr()).copy_to(segment, bytes) }?;
    // SAFETY: the source is exactly the segment's mapping, and the target exactly that of the file,
    // as checked above. The target stays accessible meanwhile, and if the contents were there, it
    // has the same bytes as before, so references into it stay valid. `segment` refers to the new
    // place from now on, and no longer unmaps it.
    let moved = unsafe {
        rustix::mm::mremap_fixed(
            segment.pointer(),
            size as usize,
            size as usize,
            MremapFlags::MAYMOVE,
            start.as_ptr().cast(),
        )
    };
    moved.map_err(|errno| SegmentError::system("take the place of memory", size, errno))?;
    segment.start = start;
    segment.unmaps = false;
    // SAFETY: the descriptor is open while it is borrowed. By the contract nothing else relies on
    // the file behind it.
    unsafe { redirect(fd, memory, bytes) };
    Ok(Adopted { file: mapped, fd: fd.as_raw_fd() })
}

/// Makes a descriptor of an old file refer to `memory`, so that the old file takes no memory any
/// more.
///
/// # Safety
/// Nothing relies on the file behind the descriptor.
unsafe fn redirect(fd: BorrowedFd<'_>, memory: &OwnedFd, bytes: u64) {
    let old = fd.try_clone_to_owned();
    // SAFETY: the descriptor is open while it is borrowed, and is not closed here (`ManuallyDrop`).
    // By the contract nothing else relies on the file behind it.
    let mut number = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(fd.as_raw_fd()) });
    // If the system refuses, the old file keeps its memory until the program closes it.
    let _ = rustix::io::dup3(memory, &mut number, rustix::io::DupFlags::CLOEXEC);
    if let Ok(old) = old {
        close(old, bytes);
    }
}

/// Writes the bytes at `start` to the beginning of a file. The kernel reads them: if the program
/// unmaps them meanwhile, that is an error and not a signal.
///
/// # Errors
/// [`SegmentError`] if they are not mapped, or if the kernel refuses it.
///
/// # Safety
/// Nobody writes to the bytes during the call.
pub(super) unsafe fn write(
    fd: BorrowedFd<'_>,
    start: *const u8,
    bytes: u64,
) -> Result<(), SegmentError> {
    let failed = |errno| SegmentError::system("copy memory", bytes, errno);
    let mut at = 0;
    while at < bytes {
        let from = start.wrapping_add(at as usize);
        // SAFETY: the caller has found the bytes mapped and promises that nobody writes to them.
        // Only the kernel reads them.
        let rest = unsafe { std::slice::from_raw_parts(from, (bytes - at) as usize) };
        match rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, rest, at)).map_err(failed)? {
            0 => return Err(failed(Errno::NOSPC)),
            written => at += written as u64,
        }
    }
    Ok(())
}

/// Closes the old file. Freeing its pages takes longer than the copy, so nobody waits for it.
fn close(file: OwnedFd, bytes: u64) {
    if bytes > HUGE_PAGE {
        // Without a thread, the file is closed here.
        let _ = parallel::thread().spawn(move || drop(file));
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_void;

    use rustix::{
        fs::{MemfdFlags, SealFlags},
        io::Errno,
        mm::{MapFlags, ProtFlags},
    };

    use super::*;
    use crate::segment::{HugePages, reserve::Reserve};

    struct Adopted {
        segment: Segment,
        reserve: Reserve,
        place: super::Adopted,
        fd: OwnedFd,
    }

    fn adopt(start: usize, bytes: u64, file: BorrowedFd<'_>) -> Result<Adopted, SegmentError> {
        let (mut segment, fd) =
            Segment::create("gradwire-test-adopt", bytes.max(1), HugePages::Never)?;
        let reserve = Reserve::of(&segment, fd.as_fd(), HugePages::Never)?;
        let start = NonNull::new(ptr::with_exposed_provenance_mut(start)).unwrap();
        // SAFETY: only this thread uses the memory and the file, and it unmaps the memory last.
        let place = unsafe { move_to(&mut segment, &fd, start, bytes, file, start) }?;
        Ok(Adopted { segment, reserve, place, fd })
    }

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
            adopt(self.start.expose_provenance(), self.bytes as u64, self.fd.as_fd())
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

    /// PyTorch's file takes no space then.
    #[test]
    fn the_contents_may_be_elsewhere() {
        let bytes = 9 << 20;
        let mut memory = Framework::new(bytes);
        let contents: Vec<u8> = (0..bytes).map(|at| (at / 4093) as u8).collect();
        let (mut segment, fd) =
            Segment::create("gradwire-test-adopt", bytes as u64, HugePages::Never).unwrap();
        let start = NonNull::new(memory.start.cast()).unwrap();
        let from = NonNull::from(contents.as_slice()).cast();
        // SAFETY: only this thread uses the memory and the file, and it unmaps the memory last.
        unsafe { move_to(&mut segment, &fd, start, bytes as u64, memory.fd.as_fd(), from) }
            .unwrap();
        assert!(memory.bytes() == contents);
        let daemon = Segment::open(fd, u64::MAX).unwrap();
        memory.bytes()[bytes - 1] = 99;
        // SAFETY: it is within the mapping, and this thread alone uses it.
        assert_eq!(unsafe { daemon.as_ptr().add(bytes - 1).read_volatile() }, 99);
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
        let refused = |start, bytes, fd: &OwnedFd| {
            let result = adopt(start, bytes, fd.as_fd());
            result.err().expect("it must be refused").to_string()
        };
        for (start, bytes) in [
            (start, 2 * 4096),
            (start, 5 * 4096),
            (start + 4096, 3 * 4096),
            (start + 8, 4 * 4096 - 8),
            (start, 0),
            (usize::MAX - 4095, 4096),
            (usize::MAX - 4095, 2 * 4096),
        ] {
            let error = refused(start, bytes, &memory.fd);
            assert!(error.contains("cannot be adopted"), "{start} {bytes}: {error}");
        }
        let other = Framework::new(4 * 4096);
        refused(start, 4 * 4096, &other.fd);
        let heap = vec![0u8; 1 << 20];
        refused(heap.as_ptr().addr().next_multiple_of(4096), 4096, &memory.fd);
        memory.adopt().unwrap();
    }

    #[test]
    fn unmapped_addresses_are_noticed() {
        let memory = Framework::new(4096);
        let adopted = memory.adopt().unwrap();
        let start = memory.start.expose_provenance();
        assert!(adopted.place.is_at(start, 4096, &Mappings::default()));
        drop(memory);
        assert!(!adopted.place.is_at(start, 4096, &Mappings::default()));
    }
}
