//! Puts new memory with the same bytes in the place of a segment.
//!
//! A segment can be opened only once, so the successor of a daemon that has ended gets new memory.
//! It has the same addresses in this process: everything that points into the segment stays valid.
//! The daemon that has the old memory sees nothing that happens afterwards, and changes nothing.

use std::os::fd::{AsFd, OwnedFd};

use rustix::mm::MremapFlags;

use super::{
    Segment, SegmentError,
    adopt::{self, Adopted, Contents},
    reserve::Reserve,
};

impl Segment {
    /// Puts the mapping of `new`, a segment of the same size, in the place of this one. The old
    /// mapping is gone.
    ///
    /// # Errors
    /// [`SegmentError`] if the kernel refuses. Then nothing has changed.
    pub(super) fn replace(&self, mut new: Self) -> Result<(), SegmentError> {
        let (bytes, length) = (self.bytes(), self.bytes() as usize);
        if new.bytes() != bytes {
            return Err(SegmentError::OutOfRange { bytes: new.bytes(), max: bytes });
        }
        // SAFETY: the source is exactly the mapping of `new`, which nobody else has. The target is
        // exactly that of this segment, and stays accessible meanwhile. If `new` does not have the
        // same bytes, the memory changes like memory that another process writes to.
        let moved = unsafe {
            let (from, to) = (new.pointer(), self.pointer());
            rustix::mm::mremap_fixed(from, length, length, MremapFlags::MAYMOVE, to)
        };
        moved.map_err(|errno| SegmentError::system("take the place of memory", bytes, errno))?;
        // Its mapping is that of this segment now.
        new.unmaps = false;
        Ok(())
    }
}

/// New memory for a segment.
#[derive(Debug)]
pub(crate) struct Successor {
    pub(crate) segment: Segment,
    pub(crate) reserve: Reserve,
    pub(crate) memory: OwnedFd,
}

impl Successor {
    /// Copies the bytes of a segment. Nobody writes to them from now until
    /// [`Successor::take_place`]: such a write may be lost.
    ///
    /// # Errors
    /// [`SegmentError`] if the size differs, or if the program has unmapped adopted memory.
    pub(crate) fn copy(
        &self,
        old: &Segment,
        adopted: Option<&Adopted>,
    ) -> Result<(), SegmentError> {
        let (start, bytes) = (old.as_ptr().cast_const(), old.bytes());
        let Some(place) = adopted else {
            // SAFETY: the old segment owns its mapping, and nobody else has the new one. A write of
            // somebody who violates the contract is copied or not.
            return unsafe { Contents(start).copy_to(&self.segment, bytes) };
        };
        place.check(start.addr(), bytes)?;
        // SAFETY: it was mapped a moment ago; the kernel notices if it is not any more.
        unsafe { adopt::write(self.memory.as_fd(), start, bytes) }
    }

    /// Puts the memory in the place of a segment and of its reserve.
    ///
    /// # Errors
    /// [`SegmentError`] if the kernel refuses, or if the program has unmapped adopted memory. Then
    /// nothing has changed.
    pub(crate) fn take_place(
        self,
        old: &Segment,
        reserve: &Reserve,
        adopted: Option<&mut Adopted>,
    ) -> Result<(), SegmentError> {
        let Self { segment, reserve: new, memory } = self;
        reserve.renew(new, || match adopted {
            Some(place) => place.replace(old, segment, &memory),
            None => old.replace(segment),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segment::HugePages;

    const BYTES: u64 = 3 * 4096;

    fn made(bytes: u64) -> Successor {
        let (segment, memory) =
            Segment::create("gradwire-test-renew", bytes, HugePages::Never).unwrap();
        let reserve = Reserve::of(&segment, memory.as_fd(), HugePages::Never).unwrap();
        Successor { segment, reserve, memory }
    }

    fn byte(segment: &Segment, at: u64) -> &std::sync::atomic::AtomicU32 {
        segment.flag(at).unwrap()
    }

    #[test]
    fn new_memory_takes_the_place_of_the_old() {
        use std::sync::atomic::Ordering::Relaxed;
        let Successor { segment, reserve, memory } = made(BYTES);
        let first = Segment::open(memory, BYTES).unwrap();
        byte(&segment, 4096).store(1, Relaxed);
        for taken_back in [false, true] {
            let start = segment.as_ptr();
            if taken_back {
                reserve.replace(&segment).unwrap();
                reserve.settle(&segment, 0..BYTES, true).unwrap();
            }
            let next = made(BYTES);
            let second = Segment::open(next.memory.try_clone().unwrap(), BYTES).unwrap();
            next.copy(&segment, None).unwrap();
            next.take_place(&segment, &reserve, None).unwrap();
            assert!(segment.as_ptr() == start && !reserve.is_used());
            assert_eq!(byte(&segment, 4096).load(Relaxed), 1);
            byte(&second, 8192).store(2, Relaxed);
            byte(&first, 8192).store(3, Relaxed);
            assert_eq!(byte(&segment, 8192).load(Relaxed), 2);
            byte(&segment, 0).store(4, Relaxed);
            assert_eq!((byte(&first, 0), byte(&second, 0)).0.load(Relaxed), 0);
            assert_eq!(byte(&second, 0).load(Relaxed), 4);
            byte(&segment, 0).store(0, Relaxed);
        }
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let (old, new) = (made(BYTES), made(2 * BYTES));
        assert!(new.take_place(&old.segment, &old.reserve, None).is_err());
        byte(&old.segment, 0).store(1, std::sync::atomic::Ordering::Relaxed);
    }
}
