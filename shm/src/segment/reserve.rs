//! Takes shared memory back from a process that cannot be asked to stop.
//!
//! A daemon that was stopped in the middle of a write goes on writing when it is resumed, even
//! after all ranks have given it up. So the maker leaves the shared pages to it. A private mapping
//! of the same memory atomically replaces the shared one, at the same addresses and with the same
//! contents. After that the other process sees nothing that the maker writes, and once a page is
//! copied, the maker sees nothing that the other process writes to it.
//!
//! The private mapping is made together with the segment and kept in reserve. It has no pages, so
//! it only costs address space. (It needs the descriptor, but a descriptor kept open would count
//! against a far lower limit.)
//!
//! Only huge pages of the pool are set aside for it, one for each of the segment. Later the pool
//! may be full, and then the first write to a page of the private mapping would be a SIGBUS.

use std::{
    ops::Range,
    os::fd::BorrowedFd,
    ptr::{self, NonNull},
};

use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags},
};

use parking_lot::Mutex;

use super::{HugePages, Segment, SegmentError, available};

/// A private mapping of a segment's memory, kept in reserve.
#[derive(Debug)]
pub(crate) struct Reserve {
    /// Where it is, until it has replaced the shared mapping.
    start: Mutex<Option<NonNull<u8>>>,
    bytes: u64,
    /// The page size of the memory.
    page: u64,
}

// SAFETY: it is an address range that this value owns; nothing in it is bound to a thread.
unsafe impl Send for Reserve {}
// SAFETY: the address is behind a lock.
unsafe impl Sync for Reserve {}

/// Whether `bytes` bytes of memory for copies are available.
pub(crate) fn fits(bytes: u64) -> bool {
    available::check(bytes, bytes).is_ok()
}

impl Reserve {
    /// Makes the reserve of a new segment from its descriptor.
    ///
    /// # Errors
    /// [`SegmentError`] if the system has no address space for it.
    pub(crate) fn of(
        segment: &Segment,
        fd: BorrowedFd<'_>,
        huge: HugePages,
    ) -> Result<Self, SegmentError> {
        let (bytes, page) = (segment.bytes(), huge.page());
        let made = |flags| -> Result<Self, SegmentError> {
            let failed = |errno| available::not_mapped(huge, bytes, errno);
            // Without access rights the kernel commits no memory to it, and mlockall gives it no
            // pages.
            // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
            let start = unsafe {
                rustix::mm::mmap(ptr::null_mut(), bytes as usize, ProtFlags::empty(), flags, fd, 0)
            }
            .map_err(failed)?;
            let start = NonNull::new(start.cast()).ok_or_else(|| failed(Errno::FAULT))?;
            Ok(Self { start: Mutex::new(Some(start)), bytes, page })
        };
        let without_pages = made(MapFlags::PRIVATE | MapFlags::NORESERVE)?;
        if huge != HugePages::Require {
            return Ok(without_pages);
        }
        let reserve = made(MapFlags::PRIVATE)?;
        reserve.move_to(without_pages)
    }

    /// Takes the place of another reserve. Shows that the kernel can move a mapping of huge pages,
    /// because [`Reserve::replace`] must not fail for that.
    fn move_to(self, other: Self) -> Result<Self, SegmentError> {
        let length = self.bytes as usize;
        let (mut from, to) = (self.start.lock(), other.start.lock());
        if let (Some(start), Some(target)) = (*from, *to) {
            // SAFETY: both ranges are exactly mappings of ours and of one length, which nobody has
            // a pointer to.
            let moved = unsafe {
                let (start, target) = (start.as_ptr().cast(), target.as_ptr().cast());
                rustix::mm::mremap_fixed(start, length, length, MremapFlags::MAYMOVE, target)
            };
            let step = "move a mapping of huge pages (which needs Linux 5.16)";
            moved.map_err(|errno| SegmentError::system(step, self.bytes, errno))?;
            *from = None;
        }
        drop((from, to));
        Ok(other)
    }

    /// Replaces the shared mapping of the segment for which this reserve was made. A second call
    /// does nothing.
    ///
    /// # Errors
    /// [`SegmentError`] if the kernel refuses; then nothing has changed.
    pub(crate) fn replace(&self, segment: &Segment) -> Result<(), SegmentError> {
        let failed = |errno| SegmentError::system("take back memory", self.bytes, errno);
        let mut start = self.start.lock();
        let Some(unused) = *start else { return Ok(()) };
        let (from, length) = (unused.as_ptr().cast(), self.bytes as usize);
        let access = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is exactly our mapping, which nobody has a pointer to.
        unsafe { rustix::mm::mprotect(from, length, access) }.map_err(failed)?;
        // SAFETY: both ranges are exactly mappings of ours and of one length. The memory at the
        // segment's addresses has the same bytes after this as before, and stays accessible
        // meanwhile: other threads that touch it wait in the kernel. So references into it stay
        // valid.
        unsafe {
            let flags = MremapFlags::MAYMOVE;
            rustix::mm::mremap_fixed(from, length, length, flags, segment.pointer())
        }
        .map_err(failed)?;
        *start = None;
        Ok(())
    }

    /// Takes over the mapping of `new`, the reserve of the memory that `put` puts in the place of
    /// the segment.
    ///
    /// # Errors
    /// The error of `put`. Then nothing has changed.
    pub(super) fn renew<T, E>(
        &self,
        new: Self,
        put: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let mut start = self.start.lock();
        let done = put()?;
        std::mem::swap(&mut *start, &mut new.start.lock());
        Ok(done)
    }

    /// Whether it has replaced the shared mapping.
    pub(crate) fn is_used(&self) -> bool {
        self.start.lock().is_none()
    }

    /// Makes a range of the segment independent of other processes' writes, after
    /// [`Reserve::replace`]. With `copied` the bytes keep the values of some moment during this
    /// call. Otherwise they may also be zeros, and almost no memory is taken for them.
    ///
    /// # Errors
    /// [`SegmentError`] if the range is not within the segment, or if memory is missing.
    pub(crate) fn settle(
        &self,
        segment: &Segment,
        range: Range<u64>,
        copied: bool,
    ) -> Result<(), SegmentError> {
        if range.is_empty() {
            return Ok(());
        }
        let whole = range.start.next_multiple_of(self.page)..range.end - range.end % self.page;
        if copied || whole.is_empty() {
            return copy(segment, range);
        }
        clear(segment, &whole)?;
        // The first and the last page may contain other tensors, too.
        copy(segment, range.start..whole.start)?;
        copy(segment, whole.end..range.end)
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let start = self.start.get_mut();
        if let Some(start) = start.take() {
            // SAFETY: the range is exactly our mapping, and nobody has a pointer to it.
            let unmapped =
                unsafe { rustix::mm::munmap(start.as_ptr().cast(), self.bytes as usize) };
            debug_assert!(unmapped.is_ok(), "a mapping of our own can always be unmapped");
        }
    }
}

/// The address of a range, and its length.
fn address(segment: &Segment, range: &Range<u64>) -> Result<(*mut u8, usize), SegmentError> {
    let bytes = range.end.saturating_sub(range.start);
    let start = segment.range(range.start, bytes);
    let outside = SegmentError::OutOfRange { bytes: range.end, max: segment.bytes() };
    Ok((start.ok_or(outside)?, bytes as usize))
}

/// Gives a range private copies of its pages.
fn copy(segment: &Segment, range: Range<u64>) -> Result<(), SegmentError> {
    if range.is_empty() {
        return Ok(());
    }
    let page = rustix::param::page_size() as u64;
    let pages = range.start - range.start % page..range.end.next_multiple_of(page);
    let (start, length) = address(segment, &pages)?;
    let copied = rustix::io::retry_on_intr(|| {
        // SAFETY: the range is within our mapping; a page that is copied keeps its bytes.
        unsafe { rustix::mm::madvise(start.cast(), length, Advice::LinuxPopulateWrite) }
    });
    match copied {
        Ok(()) => Ok(()),
        // Kernels before 5.14 cannot do this: a write to each page does the same.
        Err(Errno::INVAL) => touch(segment, range, page),
        Err(errno) => Err(SegmentError::system("copy pages", range.end - range.start, errno)),
    }
}

/// Rewrites a byte of each page of a range with its own value.
fn touch(segment: &Segment, range: Range<u64>, page: u64) -> Result<(), SegmentError> {
    let mut at = range.start;
    while at < range.end {
        let (byte, _) = address(segment, &(at..at + 1))?;
        // SAFETY: the byte is within our mapping and within the range, which is lent to the daemon:
        // nobody in this process has a reference to it. The accesses are volatile, so they are not
        // optimized away.
        unsafe { byte.write_volatile(byte.read_volatile()) };
        at = (at - at % page) + page;
    }
    Ok(())
}

/// Replaces a range of whole pages by zero pages, which are allocated only when they are touched.
fn clear(segment: &Segment, range: &Range<u64>) -> Result<(), SegmentError> {
    let (start, length) = address(segment, range)?;
    // SAFETY: the pages are within our mapping. All of their bytes are lent to the daemon, so
    // nothing in this process refers to them, and their contents may be anything.
    let mapped = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        rustix::mm::mmap_anonymous(start.cast(), length, access, flags)
    };
    mapped.map(drop).map_err(|errno| SegmentError::system("replace pages", length as u64, errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment of four pages, as its maker and as the daemon map it.
    fn shared() -> (Segment, Segment, Reserve) {
        let bytes = 4 * rustix::param::page_size() as u64;
        let name = "gradwire-test-reserve";
        let (maker, fd) = Segment::create(name, bytes, HugePages::Never).unwrap();
        let reserve = Reserve::of(&maker, std::os::fd::AsFd::as_fd(&fd), HugePages::Never).unwrap();
        (maker, Segment::open(fd, bytes).unwrap(), reserve)
    }

    fn byte(segment: &Segment, at: u64) -> u8 {
        // SAFETY: it is within the mapping, and this thread alone uses it.
        unsafe { segment.range(at, 1).unwrap().read_volatile() }
    }

    fn set(segment: &Segment, at: u64, value: u8) {
        // SAFETY: as above.
        unsafe { segment.range(at, 1).unwrap().write_volatile(value) }
    }

    #[test]
    fn memory_taken_back_is_private() {
        for copied in [true, false] {
            let (maker, daemon, reserve) = shared();
            let page = rustix::param::page_size() as u64;
            let all = 0..4 * page;
            let lent = page / 2..3 * page + 7;
            all.clone().for_each(|at| set(&maker, at, at as u8 | 1));
            reserve.replace(&maker).unwrap();
            reserve.settle(&maker, lent.clone(), copied).unwrap();
            let before: Vec<u8> = all.clone().map(|at| byte(&maker, at)).collect();
            for (at, now) in all.clone().zip(&before) {
                let cleared = !copied && (page..3 * page).contains(&at);
                assert_eq!(*now, if cleared { 0 } else { at as u8 | 1 }, "byte {at}");
            }
            lent.clone().for_each(|at| set(&daemon, at, 0));
            let after: Vec<u8> = all.clone().map(|at| byte(&maker, at)).collect();
            assert_eq!(before, after, "copied: {copied}");
            // Nor does the daemon see the maker's writes.
            set(&maker, 4 * page - 1, 0);
            assert_eq!(byte(&daemon, 4 * page - 1), (4 * page - 1) as u8 | 1);
        }
    }

    #[test]
    fn pages_are_copied_by_touching_on_old_kernels() {
        let (maker, daemon, reserve) = shared();
        let page = rustix::param::page_size() as u64;
        reserve.replace(&maker).unwrap();
        touch(&maker, 5..2 * page + 1, page).unwrap();
        (0..4 * page).for_each(|at| set(&daemon, at, 9));
        assert_eq!([5, page, 2 * page].map(|at| byte(&maker, at)), [0; 3]);
        assert_eq!(byte(&maker, 3 * page), 9, "nobody asked for this one");
        assert!(reserve.settle(&maker, 0..5 * page, true).is_err(), "out of range");
    }

    #[test]
    fn an_unused_reserve_is_unmapped() {
        let (maker, _daemon, reserve) = shared();
        let start = reserve.start.lock().unwrap();
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = format!("{:x}-", start.as_ptr().addr());
        assert!(maps().contains(&line));
        drop(reserve);
        assert!(!maps().lines().any(|l| l.starts_with(&line) && l.contains("test-reserve")));
        assert_eq!(byte(&maker, 0), 0);
    }
}
