//! Sealed, reserved and mapped memory: made by the worker, opened by the daemon.
//!
//! Touching a mapped page must never fail, because it would fail with a signal and not an error. So
//! everything that can fail does so earlier:
//!
//! - the maker first checks whether memory is available, so that the out-of-memory killer does not
//!   act; then it fills every page: too little memory is a [`SegmentError`], never a later SIGBUS.
//!   Pages at the end that may never be needed are left out and filled before their first use;
//! - it seals the memory against shrinking and growing;
//! - the daemon checks these seals, maps the memory, and adds the seal against future writes. That
//!   seal also prevents punching holes, so from then on no page can be taken away (TRUST). Then the
//!   daemon fills the missing pages, within its limit (BOUND).
//!
//! The seals are permanent, so a segment can be opened only once. For another daemon its contents
//! move into new memory, at the same addresses (`renew`).
//!
//! # Soundness
//!
//! Safe code can't cause undefined behaviour here. A [`Segment`] owns its mapping, and nothing else
//! unmaps it. It gives out raw pointers, which only unsafe code can use, and never a reference to
//! bytes, because another process may change them at any time. Within the crate its words are
//! atomics, for which any value is valid. Memory that another process has made is mapped only if it
//! can't shrink.

use std::{
    ffi::c_void,
    fmt,
    ops::Range,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    ptr::{self, NonNull},
    sync::atomic::{AtomicU32, AtomicU64},
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, MemfdFlags, SealFlags},
    io::Errno,
    mm::{Advice, MapFlags, MprotectFlags, ProtFlags},
    process::Resource,
};

pub(crate) mod adopt;
mod available;
mod error;
mod pages;
mod parallel;
pub(crate) mod renew;
pub(crate) mod reserve;

pub use available::{Available, available};
pub use error::SegmentError;
pub use pages::{HUGE_PAGE, HugePages};

/// A segment's number within its worker's attachment: 0, 1, 2 … in the order of hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub u32);

impl fmt::Display for SegmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// How long it may take to fill, hand over and map `bytes` bytes of memory on a slow or busy
/// machine: 64 MiB per second.
pub fn time_to_fill(bytes: u64) -> Duration {
    Duration::from_millis(bytes / ((64 << 20) / 1000))
}

/// A mapped range of shared memory; unmapped on drop, unless another owner has its addresses.
#[derive(Debug)]
pub struct Segment {
    start: NonNull<u8>,
    bytes: u64,
    /// Whether this value unmaps it. An adopted segment is unmapped by the owner of its addresses.
    unmaps: bool,
}

// SAFETY: a segment is an address range that this value owns; nothing in it is bound to a thread.
unsafe impl Send for Segment {}
// SAFETY: the methods hand out raw pointers and atomics only; ordering accesses through the raw
// pointers is the callers' duty, stated where they dereference them.
unsafe impl Sync for Segment {}

impl Segment {
    /// Makes memory of at least `bytes` (rounded up to whole pages), called `name` in
    /// `/proc/PID/maps`, filled with zeros, reserved, sealed and mapped. The descriptor is for
    /// the daemon.
    ///
    /// # Errors
    /// [`SegmentError`] names the size and what to do.
    pub fn create(
        name: &str,
        bytes: u64,
        huge: HugePages,
    ) -> Result<(Self, OwnedFd), SegmentError> {
        Self::create_partly(name, bytes, u64::MAX, huge)
    }

    /// Like [`create`](Self::create), but reserves only the pages with the first `filled` bytes.
    /// The others must not be used before [`fill`](Self::fill).
    pub(crate) fn create_partly(
        name: &str,
        bytes: u64,
        filled: u64,
        huge: HugePages,
    ) -> Result<(Self, OwnedFd), SegmentError> {
        let page = huge.page();
        let bytes = bytes
            .checked_next_multiple_of(page)
            .filter(|b| (1..=1 << 47).contains(b))
            .ok_or(SegmentError::Size { bytes })?;
        // Beyond this limit ftruncate does not fail, it raises SIGXFSZ.
        if let Some(limit) = rustix::process::getrlimit(Resource::Fsize).current
            && bytes > limit
        {
            return Err(SegmentError::FileSizeLimit { bytes, limit });
        }
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge == HugePages::Require {
            available::check_huge(bytes)?;
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        } else {
            available::check(bytes, bytes.min(filled))?;
        }
        let failed = |step| move |errno| SegmentError::system(step, bytes, errno);
        let fd = rustix::fs::memfd_create(name, flags).map_err(failed("create a memfd"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(failed("set the size"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(failed("seal the memfd"))?;
        let segment = Self::map(&fd, bytes, huge)?;
        if huge == HugePages::Advise {
            segment.advise_huge();
        }
        segment.fill_first(fd.as_fd(), filled)?;
        Ok((segment, fd))
    }

    /// Maps the memory that a worker handed over, after checking that it cannot fault (TRUST).
    ///
    /// # Errors
    /// [`SegmentError`] if it is not sealed, too large, opened before, or cannot be filled.
    pub fn open(fd: OwnedFd, max_bytes: u64) -> Result<Self, SegmentError> {
        Self::open_partly(fd, max_bytes, u64::MAX)
    }

    /// Like [`open`](Self::open), but fills only the pages with the first `filled` bytes. The
    /// others must not be used before [`fill`](Self::fill).
    pub(crate) fn open_partly(
        fd: OwnedFd,
        max_bytes: u64,
        filled: u64,
    ) -> Result<Self, SegmentError> {
        // Only memory has seals, so this also refuses every other kind of file.
        let seals = rustix::fs::fcntl_get_seals(&fd).map_err(|errno| SegmentError::Unsealed {
            found: format!("it has no seals ({errno})"),
        })?;
        let needed = SealFlags::SHRINK | SealFlags::GROW;
        if !seals.contains(needed) {
            return Err(SegmentError::Unsealed { found: format!("its seals are {seals:?}") });
        }
        let closing = SealFlags::SEAL | SealFlags::WRITE | SealFlags::FUTURE_WRITE;
        if seals.intersects(closing) {
            return Err(SegmentError::NotOurs { found: format!("{seals:?}") });
        }
        let out_of_range = |bytes| SegmentError::OutOfRange { bytes, max: max_bytes };
        let stat = rustix::fs::fstat(&fd).map_err(|e| SegmentError::system("stat", 0, e))?;
        let bytes = u64::try_from(stat.st_size).map_err(|_| out_of_range(u64::MAX))?;
        if !(1..=max_bytes.min(1 << 47)).contains(&bytes) {
            return Err(out_of_range(bytes));
        }
        let segment = Self::map(&fd, bytes, HugePages::Never)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)
            .map_err(|errno| SegmentError::system("seal against holes", bytes, errno))?;
        // The daemon fills the pages that the worker has not filled, and they count as the
        // daemon's.
        let there = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
        available::check(bytes, bytes.min(filled).saturating_sub(there))?;
        segment.fill_first(fd.as_fd(), filled)?;
        Ok(segment)
    }

    fn map(fd: &OwnedFd, bytes: u64, huge: HugePages) -> Result<Self, SegmentError> {
        let failed = |errno| available::not_mapped(huge, bytes, errno);
        let length = usize::try_from(bytes).map_err(|_| failed(Errno::NOMEM))?;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
        .map_err(failed)?;
        let start = NonNull::new(start.cast()).ok_or_else(|| failed(Errno::FAULT))?;
        Ok(Self { start, bytes, unmaps: true })
    }

    /// Advises the kernel to use huge pages; if it refuses, the pages are small.
    fn advise_huge(&self) {
        // SAFETY: the range is exactly our mapping, and the advice does not change its contents.
        let _ = unsafe {
            rustix::mm::madvise(self.pointer(), self.bytes as usize, Advice::LinuxHugepage)
        };
    }

    /// Fills the first pages, so that no later access needs a new one.
    fn fill_first(&self, fd: BorrowedFd<'_>, filled: u64) -> Result<(), SegmentError> {
        match self.populate(0..filled.min(self.bytes)) {
            // Kernels before 5.14 cannot do this. Reserving all pages is enough, but makes the
            // first touch slower.
            Err(Errno::INVAL) => rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, self.bytes),
            other => other,
        }
        .map_err(|errno| SegmentError::system("reserve pages", self.bytes, errno))
    }

    /// Fills the pages from `offset` on, too.
    ///
    /// # Errors
    /// [`SegmentError`] if memory for them is missing.
    pub(crate) fn fill(&self, offset: u64) -> Result<(), SegmentError> {
        let missing = self.bytes.saturating_sub(offset);
        available::check(missing, missing)?;
        match self.populate(offset..self.bytes) {
            // `fill_first` has reserved all pages.
            Err(Errno::INVAL) => Ok(()),
            other => other,
        }
        .map_err(|errno| SegmentError::system("reserve pages", missing, errno))
    }

    /// Fills the pages that contain these bytes.
    fn populate(&self, bytes: Range<u64>) -> rustix::io::Result<()> {
        // The kernel wants whole pages.
        let begin = bytes.start - bytes.start % rustix::param::page_size() as u64;
        parallel::in_shares(begin..bytes.end, |Range { start, end }| {
            let length = end - start;
            let start = self.range(start, length).ok_or(Errno::FAULT)?.cast::<c_void>();
            rustix::io::retry_on_intr(|| {
                // SAFETY: `range` has checked that all of it is our mapping; filling keeps the
                // contents.
                unsafe { rustix::mm::madvise(start, length as usize, Advice::LinuxPopulateWrite) }
            })
        })
    }

    fn pointer(&self) -> *mut c_void {
        self.start.as_ptr().cast()
    }

    /// Lets this process only read the segment from now on: a write is a SIGSEGV.
    ///
    /// # Errors
    /// The kernel refuses. Then nothing has changed.
    ///
    /// # Safety
    /// The addresses are exactly the segment's mapping.
    pub(crate) unsafe fn let_only_read(&self) -> rustix::io::Result<()> {
        // SAFETY: the caller promises that it is our mapping. Its contents don't change.
        unsafe { rustix::mm::mprotect(self.pointer(), self.bytes as usize, MprotectFlags::READ) }
    }

    /// The size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first byte. Another process may write any byte at any time.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The address of `offset`, if `bytes` bytes from there lie within the segment; zero bytes are
    /// allowed up to its end.
    pub fn range(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let end = offset.checked_add(bytes)?;
        // Within the mapping, so the offset fits a usize and the sum does not overflow.
        (end <= self.bytes).then(|| self.as_ptr().wrapping_add(offset as usize))
    }

    fn words<T>(&self, offset: u64, count: usize) -> Option<*const T> {
        let bytes = u64::try_from(count.checked_mul(size_of::<T>())?).ok()?;
        let start = self.range(offset, bytes)?.cast::<T>().cast_const();
        start.is_aligned().then_some(start)
    }

    /// Words of the segment that both sides may change at any time.
    pub(crate) fn cells(&self, offset: u64, count: usize) -> Option<&[AtomicU64]> {
        let start = self.words(offset, count)?;
        // SAFETY: `words` has checked that the range is mapped and aligned; it stays mapped while
        // `self` is borrowed, any bits are a valid word, and the pages are only ever accessed
        // through atomics by us, whatever the other process does.
        Some(unsafe { std::slice::from_raw_parts(start, count) })
    }

    /// A 32-bit word of the segment that both sides may change at any time.
    pub(crate) fn flag(&self, offset: u64) -> Option<&AtomicU32> {
        let start = self.words::<AtomicU32>(offset, 1)?;
        // SAFETY: as in `cells`.
        Some(unsafe { &*start })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if !self.unmaps {
            return;
        }
        // SAFETY: the range is exactly our mapping, and every reference into it borrows `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.pointer(), self.bytes as usize) };
        debug_assert!(unmapped.is_ok(), "a mapping of our own can always be unmapped");
    }
}
