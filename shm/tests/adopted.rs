//! Memory of the program that an arena adopts as a segment.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    os::fd::{AsFd, OwnedFd},
    ptr::{self, NonNull},
    sync::{Arc, Mutex},
};

use gradwire_proto::JobId;
use gradwire_shm::{
    arena::{self, Arena, ArenaBlock, ArenaConfig, ArenaError, Owner, RegisterError},
    segment::{HugePages, Segment, SegmentError, SegmentId},
};
use rustix::{
    fs::MemfdFlags,
    mm::{MapFlags, ProtFlags},
};

const SIZE: usize = 5 * 4096 + 40;

/// The segments that the daemon has, by number.
type Daemon = Arc<Mutex<BTreeMap<SegmentId, Segment>>>;

fn arena() -> (Arena, Daemon) {
    let daemon = Daemon::default();
    let (adding, removing) = (Arc::clone(&daemon), Arc::clone(&daemon));
    let register = Box::new(move |id, _: &Segment, fd| {
        let before = adding.lock().unwrap().insert(id, Segment::open(fd, u64::MAX).unwrap());
        assert!(before.is_none(), "segment {id} is there twice");
        Ok(())
    });
    let release = Box::new(move |id| {
        assert!(removing.lock().unwrap().remove(&id).is_some(), "segment {id} is gone");
    });
    let job = JobId::new("shm-test-adopted").unwrap();
    let config = ArenaConfig { huge: HugePages::Never, ..ArenaConfig::new(job) };
    (Arena::new(config, register, release), daemon)
}

/// Memory of a framework: a mapped file. Unmapped on drop.
struct Array {
    fd: OwnedFd,
    start: *mut c_void,
}

impl Array {
    fn new(value: u8) -> Self {
        Self::at(ptr::null_mut(), MapFlags::SHARED, value)
    }

    fn at(address: *mut c_void, flags: MapFlags, value: u8) -> Self {
        let fd = rustix::fs::memfd_create("gradwire-test-array", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, SIZE as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at an address of the kernel's choice or where nothing is.
        let start = unsafe { rustix::mm::mmap(address, SIZE, access, flags, &fd, 0) }.unwrap();
        let array = Self { fd, start };
        array.set(value);
        array
    }

    fn set(&self, value: u8) {
        // SAFETY: it is mapped, and only this thread uses it.
        unsafe { self.start.cast::<u8>().write_bytes(value, SIZE) };
    }

    fn get(&self, at: usize) -> u8 {
        assert!(at < SIZE);
        // SAFETY: as above.
        unsafe { self.start.cast::<u8>().add(at).read_volatile() }
    }

    fn adopt(&self, arena: &Arena) -> Result<ArenaBlock, ArenaError> {
        adopt(arena, self.start, SIZE, &self.fd, Arc::new(()))
    }
}

fn adopt(
    arena: &Arena,
    start: *mut c_void,
    bytes: usize,
    fd: &OwnedFd,
    owner: Owner,
) -> Result<ArenaBlock, ArenaError> {
    let adoption = arena.adoption(bytes as u64)?.make()?;
    let start = NonNull::new(start.cast()).unwrap();
    // SAFETY: only this thread uses the memory and the file. Tests that unmap the memory before the
    // block is dropped do not use the block any more.
    unsafe { adoption.take_place(start, fd.as_fd(), start, owner) }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the range is exactly our mapping.
        unsafe { rustix::mm::munmap(self.start, SIZE) }.unwrap();
    }
}

fn write(daemon: &Daemon, id: SegmentId, value: u8) {
    let daemon = daemon.lock().unwrap();
    let start = daemon[&id].range(0, SIZE as u64).unwrap();
    // SAFETY: `range` has checked it, and nothing else uses it now.
    unsafe { start.write_bytes(value, SIZE) };
}

#[test]
fn numbers_are_reused_and_memory_stays_usable() {
    let (arena, daemon) = arena();
    let plain = arena.allocate(10).unwrap();
    let arrays = [1, 2, 3].map(Array::new);
    let [first, second, third] = arrays.each_ref().map(|array| array.adopt(&arena).unwrap());
    assert_eq!(plain.segment(), SegmentId(0));
    assert_eq!([&first, &second, &third].map(|block| block.segment().0), [1, 2, 3]);
    let stats = arena.stats();
    assert_eq!((stats.segments, stats.adopted, stats.adopted_bytes), (1, 3, 3 * 6 * 4096));
    write(&daemon, second.segment(), 20);
    assert_eq!([0, 1, 2].map(|at: usize| arrays[at].get(SIZE - 1)), [1, 20, 3]);
    let located = arena.locate(arrays[2].start.cast::<u8>().wrapping_add(8), 100);
    assert_eq!(located, Some((SegmentId(3), 8)));
    drop(second);
    assert_eq!(daemon.lock().unwrap().len(), 3);
    arrays[1].set(21);
    // The next adopted segment reuses the number, and so does a segment of the arena.
    let again = arrays[1].adopt(&arena).unwrap();
    assert_eq!((again.segment(), arrays[1].get(7)), (SegmentId(2), 21));
    drop(first);
    let large = arena.allocate(64 << 20).unwrap();
    assert_eq!(large.segment(), SegmentId(1));
    drop((third, again));
    assert_eq!(arena.stats().adopted_bytes, 0);
    assert_eq!([0, 1, 2].map(|at: usize| arrays[at].get(0)), [1, 21, 3]);
    arrays.iter().for_each(|array| array.set(9));
    assert!(arena.allocate(100).is_ok());
    drop((plain, large, arena));
}

#[test]
fn a_block_in_use_is_taken_back() {
    let (arena, daemon) = arena();
    let (array, idle) = (Array::new(1), Array::new(2));
    let (block, other) = (array.adopt(&arena).unwrap(), idle.adopt(&arena).unwrap());
    // SAFETY: this thread has no reference to the memory.
    unsafe { arena::take_back([(&block, 0..SIZE as u64)]) }.unwrap();
    // A daemon that is resumed later reaches neither of them.
    write(&daemon, block.segment(), 50);
    assert_eq!((array.get(0), array.get(SIZE - 1)), (1, 1));
    array.set(3);
    assert_eq!(idle.get(0), 2);
    drop((block, other));
    assert_eq!((array.get(100), idle.get(100)), (3, 2));
    // Another session.
    let (next, theirs) = self::arena();
    let block = array.adopt(&next).unwrap();
    assert_eq!(array.get(SIZE - 1), 3);
    write(&theirs, block.segment(), 60);
    assert_eq!(array.get(SIZE - 1), 60);
}

/// The program may unmap its memory at any time. Memory mapped there later is not touched.
#[test]
fn unmapped_memory_is_not_taken_back() {
    let (arena, daemon) = arena();
    let array = Array::new(1);
    let block = array.adopt(&arena).unwrap();
    let address = array.start;
    drop(array);
    // SAFETY: this thread has no reference to the memory.
    unsafe { arena::take_back([(&block, 0..SIZE as u64)]) }.unwrap();
    let other = Array::at(address, MapFlags::SHARED | MapFlags::FIXED_NOREPLACE, 7);
    assert_eq!(other.start, address);
    // SAFETY: this thread has no reference to the memory.
    unsafe { arena::take_back([(&block, 0..SIZE as u64)]) }.unwrap();
    write(&daemon, block.segment(), 50);
    drop(block);
    assert_eq!((other.get(0), other.get(SIZE - 1)), (7, 7));
}

#[test]
fn a_refused_segment_leaves_the_memory_unchanged() {
    let no = || RegisterError::Refused("the daemon said no".into());
    let register = Box::new(move |_, _: &Segment, _| Err(no()));
    let release = Box::new(|_| unreachable!("it was never handed over"));
    let job = JobId::new("shm-test-adopted").unwrap();
    let arena = Arena::new(ArenaConfig::new(job), register, release);
    let array = Array::new(4);
    let error = array.adopt(&arena).unwrap_err().to_string();
    assert_eq!(error, "segment 0 of 24576 bytes could not be handed over: the daemon said no");
    assert_eq!((array.get(0), array.get(SIZE - 1)), (4, 4));
    array.set(5);
    let (other, _daemon) = self::arena();
    let block = array.adopt(&other).unwrap();
    assert_eq!((block.bytes(), array.get(0)), (SIZE as u64, 5));
    assert_eq!(arena.stats(), arena::ArenaStats::default());
}

#[test]
fn other_memory_is_refused() {
    let (arena, daemon) = arena();
    let array = Array::new(1);
    let other = Array::new(2);
    let inner = array.start.wrapping_byte_add(4096);
    let last = ptr::with_exposed_provenance_mut(usize::MAX - 4095);
    for (start, bytes, fd) in [
        (array.start, 4096, &array.fd),
        (inner, SIZE - 4096, &array.fd),
        (array.start, SIZE, &other.fd),
        (last, 4096, &array.fd),
    ] {
        let error = adopt(&arena, start, bytes, fd, Arc::new(())).unwrap_err();
        assert!(matches!(error, ArenaError::Segment(SegmentError::NotAMapping { .. })), "{error}");
    }
    assert!(adopt(&arena, array.start, usize::MAX, &array.fd, Arc::new(())).is_err());
    assert_eq!((arena.stats().adopted, daemon.lock().unwrap().len()), (0, 0));
    assert!(array.adopt(&arena).is_ok());
}

/// Its results would go to one of the two owners only.
#[test]
fn shared_memory_is_not_adopted_again() {
    let (arena, daemon) = arena();
    let array = Array::new(1);
    let block = array.adopt(&arena).unwrap();
    let error = array.adopt(&arena).unwrap_err();
    assert!(matches!(error, ArenaError::AlreadyShared { segment: SegmentId(0), .. }), "{error}");
    write(&daemon, block.segment(), 5);
    assert_eq!(array.get(SIZE - 1), 5, "the first owner has it still");
    assert_eq!((arena.stats().adopted, daemon.lock().unwrap().len()), (1, 1));
    // Nor is memory of the arena itself.
    let own = arena.allocate(SIZE as u64).unwrap();
    let error = adopt(&arena, own.as_ptr().cast(), SIZE, &array.fd, Arc::new(())).unwrap_err();
    assert!(matches!(error, ArenaError::AlreadyShared { segment: SegmentId(1), .. }), "{error}");
    drop(block);
    assert!(array.adopt(&arena).is_ok());
}

/// Notes, when it is dropped, how many segments the daemon has.
struct LastOwner(Daemon, Arc<Mutex<Option<usize>>>);

impl Drop for LastOwner {
    fn drop(&mut self) {
        *self.1.lock().unwrap() = Some(self.0.lock().unwrap().len());
    }
}

#[test]
fn an_owner_is_dropped_after_the_block() {
    let (arena, daemon) = arena();
    let (array, left) = (Array::new(1), Arc::default());
    let owner = Arc::new(LastOwner(daemon, Arc::clone(&left)));
    let block = adopt(&arena, array.start, SIZE, &array.fd, owner).unwrap();
    assert_eq!(*left.lock().unwrap(), None);
    drop(block);
    assert_eq!(*left.lock().unwrap(), Some(0), "the daemon does not use the memory any more");
}

/// BOUND: adopted segments leave numbers for the arena's own.
#[test]
fn the_number_of_adopted_segments_is_limited() {
    let (register, release) = (Box::new(|_, _: &Segment, _| Ok(())), Box::new(drop));
    let job = JobId::new("shm-test-adopted").unwrap();
    let config = ArenaConfig { huge: HugePages::Never, max_adopted: 2, ..ArenaConfig::new(job) };
    let arena = Arena::new(config, register, release);
    let arrays = [1, 2, 3].map(Array::new);
    let first = arrays[0].adopt(&arena).unwrap();
    assert!(arena.may_adopt());
    let second = arrays[1].adopt(&arena).unwrap();
    assert!(!arena.may_adopt());
    let refused = arrays[2].adopt(&arena).unwrap_err();
    assert!(matches!(refused, ArenaError::Adopted { max: 2 }), "{refused}");
    assert_eq!(arrays[2].get(0), 3);
    let plain = arena.allocate(100).unwrap();
    drop(first);
    assert!(arena.may_adopt());
    let third = arrays[2].adopt(&arena).unwrap();
    drop((second, third, plain));
    assert_eq!(arena.stats().adopted, 0);
}
