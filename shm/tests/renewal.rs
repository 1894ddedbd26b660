//! The memory of an arena moves to the successor of a daemon that has ended.

use std::{
    collections::BTreeMap,
    ffi::c_void,
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    ptr::{self, NonNull},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::SeqCst},
    },
    thread,
};

use gradwire_proto::JobId;
use gradwire_shm::{
    arena::{self, Arena, ArenaBlock, ArenaConfig, ArenaError, Register, RegisterError, Release},
    segment::{HugePages, Segment, SegmentId},
};
use rustix::{
    fs::MemfdFlags,
    mm::{MapFlags, ProtFlags},
};

const MIB: u64 = 1 << 20;

/// A daemon: the segments that it has, by number.
#[derive(Clone, Default)]
struct Daemon {
    segments: Arc<Mutex<BTreeMap<SegmentId, Segment>>>,
    /// The segment that it refuses, and whether it answers at all.
    refused: Arc<Mutex<Option<(SegmentId, bool)>>>,
}

impl Daemon {
    fn refusing(id: SegmentId, answers: bool) -> Self {
        let daemon = Self::default();
        *daemon.refused.lock().unwrap() = Some((id, answers));
        daemon
    }

    /// How an arena reaches it.
    fn functions(&self) -> (Register, Release) {
        let (adding, removing) = (self.clone(), self.clone());
        let register = move |id, segment: &Segment, fd: OwnedFd| {
            match *adding.refused.lock().unwrap() {
                Some((refused, true)) if refused == id => {
                    return Err(RegisterError::Refused("no room".into()));
                }
                Some((refused, false)) if refused == id => {
                    return Err(RegisterError::Unanswered("it has ended".into()));
                }
                _ => {}
            }
            let segment = Segment::open(fd, segment.bytes()).unwrap();
            let before = adding.segments.lock().unwrap().insert(id, segment);
            assert!(before.is_none(), "segment {id} is there twice");
            Ok(())
        };
        let release = move |id| {
            let gone = removing.segments.lock().unwrap().remove(&id);
            assert!(gone.is_some(), "segment {id} is not there");
        };
        (Box::new(register), Box::new(release))
    }

    fn renew(&self, arena: &Arena) -> Result<arena::Renewed, ArenaError> {
        let (register, release) = self.functions();
        // SAFETY: nobody writes to a block during the call, nor unmaps adopted memory.
        unsafe { arena.renew(register, release) }
    }

    fn numbers(&self) -> Vec<u32> {
        self.segments.lock().unwrap().keys().map(|id| id.0).collect()
    }

    /// The byte in the middle of a block, as the daemon sees it.
    fn byte(&self, block: &ArenaBlock) -> *mut u8 {
        let segments = self.segments.lock().unwrap();
        let at = block.offset() + block.bytes() / 2;
        segments[&block.segment()].range(at, 1).unwrap()
    }

    fn get(&self, block: &ArenaBlock) -> u8 {
        // SAFETY: it is within the segment, and nobody writes now.
        unsafe { self.byte(block).read_volatile() }
    }

    fn set(&self, block: &ArenaBlock, value: u8) {
        // SAFETY: as above.
        unsafe { self.byte(block).write_volatile(value) };
    }
}

fn arena(first: &Daemon) -> Arena {
    let job = JobId::new("shm-test-renewal").unwrap();
    let config =
        ArenaConfig { segment_bytes: MIB, huge: HugePages::Never, ..ArenaConfig::new(job) };
    let (register, release) = first.functions();
    Arena::new(config, register, release)
}

fn fill(block: &ArenaBlock, value: u8) {
    // SAFETY: the block is ours and has this many bytes.
    unsafe { block.as_ptr().write_bytes(value, block.bytes() as usize) };
}

fn holds(block: &ArenaBlock, value: u8) -> bool {
    // SAFETY: as above, and nobody writes now.
    let bytes = unsafe { std::slice::from_raw_parts(block.as_ptr(), block.bytes() as usize) };
    bytes.iter().all(|&byte| byte == value)
}

#[test]
fn contents_and_addresses_stay() {
    let daemons: [Daemon; 4] = Default::default();
    let arena = arena(&daemons[0]);
    let mut blocks: Vec<_> = (0..30).map(|i| arena.allocate(i * 40_009 + 1).unwrap()).collect();
    let mut values: Vec<u8> = (1..31).collect();
    blocks.iter().zip(&values).for_each(|(block, value)| fill(block, *value));
    for (next, old) in (1..).zip(0..3) {
        let before = arena.stats();
        let addresses: Vec<_> = blocks.iter().map(ArenaBlock::as_ptr).collect();
        let renewed = daemons[next].renew(&arena).unwrap();
        assert_eq!((renewed.segments, renewed.retired), (before.segments, 0));
        assert_eq!((renewed.bytes, arena.stats()), (before.reserved, before));
        for ((block, value), address) in blocks.iter().zip(&values).zip(addresses) {
            assert!(holds(block, *value) && block.as_ptr() == address && !block.is_retired());
            assert_eq!(daemons[next].get(block), *value);
            // The old daemon neither changes the memory nor sees changes.
            daemons[old].set(block, 99);
            assert!(holds(block, *value));
            fill(block, value + 1);
            assert_eq!((daemons[old].get(block), daemons[next].get(block)), (99, value + 1));
        }
        values.iter_mut().for_each(|value| *value += 1);
        // Free ranges are used again, and the arena grows, for the new daemon.
        let more = arena.allocate(3 * MIB).unwrap();
        fill(&more, 200);
        assert_eq!(
            (daemons[next].get(&more), daemons[old].numbers().len()),
            (200, before.segments as usize)
        );
        blocks.push(more);
        values.push(200 - next as u8);
        fill(&blocks[blocks.len() - 1], 200 - next as u8);
    }
    drop(blocks);
    assert_eq!(arena.stats().used, 0);
}

#[test]
fn segments_without_blocks_are_dropped() {
    let (first, second) = (Daemon::default(), Daemon::default());
    let arena = arena(&first);
    let (gone, kept) = (arena.allocate(5 * MIB).unwrap(), arena.allocate(6 * MIB).unwrap());
    drop(gone);
    let renewed = second.renew(&arena).unwrap();
    assert_eq!((renewed.segments, renewed.bytes, renewed.retired), (1, 6 * MIB, 0));
    assert_eq!((second.numbers(), first.numbers()), (vec![kept.segment().0], vec![0, 1]));
    assert_eq!(arena.allocate(MIB).unwrap().segment(), SegmentId(0), "the number is free");
}

#[test]
fn a_pinned_segment_is_retired() {
    let (first, second) = (Daemon::default(), Daemon::default());
    let arena = arena(&first);
    let (pinned, beside) = (arena.allocate(MIB / 4).unwrap(), arena.allocate(MIB / 4).unwrap());
    let other = arena.allocate(7 * MIB).unwrap();
    pinned.mapping();
    fill(&pinned, 7);
    let renewed = second.renew(&arena).unwrap();
    assert_eq!((renewed.segments, renewed.retired), (1, 1));
    assert_eq!([&pinned, &beside, &other].map(ArenaBlock::is_retired), [true, true, false]);
    assert!(holds(&pinned, 7) && arena.locate(pinned.as_ptr(), 1).is_none());
    let stats = arena.stats();
    assert_eq!((stats.retired, stats.used, stats.segments), (MIB, 7 * MIB, 1));
    assert_eq!((pinned.mapping(), second.numbers()), ((pinned.as_ptr(), MIB), vec![1]));
    // Its mapping and its number stay; nothing is allocated there.
    drop((pinned, beside));
    assert_eq!(arena.allocate(2 * MIB).unwrap().segment(), SegmentId(2));
    assert_eq!(Daemon::default().renew(&arena).unwrap().retired, 0, "only once");
    assert_eq!(arena.stats().retired, MIB);
}

#[test]
fn a_failed_renewal_can_be_repeated() {
    for answers in [true, false] {
        let first = Daemon::default();
        let arena = arena(&first);
        let blocks = [1, 2, 3].map(|value| {
            let block = arena.allocate(5 * MIB).unwrap();
            fill(&block, value);
            block
        });
        let error = Daemon::refusing(SegmentId(1), answers).renew(&arena).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(if answers { "no room" } else { "it has ended" }), "{text}");
        assert!(blocks.iter().zip(1..).all(|(block, value)| holds(block, value)));
        let [one, two, _] = &blocks;
        assert!(!two.is_retired() && arena.locate(one.as_ptr(), 1).is_some());
        let last = Daemon::default();
        assert_eq!(last.renew(&arena).unwrap().segments, 3);
        for (block, value) in blocks.iter().zip(1..) {
            assert!(holds(block, value));
            assert_eq!(last.get(block), value);
        }
    }
}

#[test]
fn a_number_without_an_answer_is_free_again() {
    let arena = arena(&Daemon::refusing(SegmentId(0), false));
    assert!(matches!(arena.allocate(1), Err(ArenaError::Unanswered { .. })));
    assert_eq!(arena.allocate(1).unwrap().segment(), SegmentId(1));
    Daemon::default().renew(&arena).unwrap();
    assert_eq!(arena.allocate(1).unwrap().segment(), SegmentId(0));
}

#[test]
fn memory_that_was_taken_back_moves_too() {
    let (first, second) = (Daemon::default(), Daemon::default());
    let arena = arena(&first);
    let (lent, beside) = (arena.allocate(MIB).unwrap(), arena.allocate(MIB).unwrap());
    fill(&lent, 1);
    fill(&beside, 2);
    // SAFETY: nothing refers to the bytes.
    unsafe { arena::take_back([(&lent, 0..MIB)]) }.unwrap();
    fill(&lent, 3);
    second.renew(&arena).unwrap();
    assert_eq!((second.get(&lent), second.get(&beside)), (3, 2));
    second.set(&lent, 4);
    // SAFETY: as above. It can be taken back from the new daemon, too.
    unsafe { arena::take_back([(&lent, 0..MIB)]) }.unwrap();
    second.set(&lent, 5);
    // SAFETY: the block has this byte, and nobody writes there now.
    assert_eq!(unsafe { lent.as_ptr().add(MIB as usize / 2).read_volatile() }, 4);
}

#[test]
fn threads_allocate_and_free_meanwhile() {
    let arena = arena(&Daemon::default());
    let (done, total) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        for id in 0u8..3 {
            let (arena, done, total) = (&arena, &done, &total);
            scope.spawn(move || {
                let mut kept = Vec::new();
                for round in 0u64.. {
                    if done.load(SeqCst) && round > 50 {
                        break;
                    }
                    // A block is written once, before the next renewal may begin: allocations wait
                    // for the end of one, and the main thread for `total`.
                    let bytes = (round * 7919 + u64::from(id) * 104_729) % (MIB / 4) + 1;
                    let block = arena.allocate(bytes).unwrap();
                    kept.push(block);
                    if kept.len() > 8 {
                        kept.swap_remove(round as usize % 8);
                    }
                    total.fetch_add(1, SeqCst);
                }
            });
        }
        for _ in 0..20 {
            let before = total.load(SeqCst);
            while total.load(SeqCst) < before + 30 {
                thread::yield_now();
            }
            Daemon::default().renew(&arena).unwrap();
        }
        done.store(true, SeqCst);
    });
    assert_eq!(arena.stats().used, 0);
    let all = arena.allocate(arena.stats().reserved.min(MIB)).unwrap();
    fill(&all, 1);
}

/// Memory of a framework: a mapped file. Unmapped on drop.
struct Array {
    fd: OwnedFd,
    start: *mut c_void,
}

const SIZE: usize = 5 * 4096 + 40;

impl Array {
    fn new(value: u8) -> Self {
        let fd = rustix::fs::memfd_create("gradwire-test-array", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, SIZE as u64).unwrap();
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), SIZE, access, MapFlags::SHARED, &fd, 0) };
        let array = Self { fd, start: start.unwrap() };
        // SAFETY: it is mapped, and only this thread uses it.
        unsafe { array.start.cast::<u8>().write_bytes(value, SIZE) };
        array
    }

    fn place(&self, adoption: arena::Adoption) -> Result<ArenaBlock, ArenaError> {
        let start = NonNull::new(self.start.cast()).unwrap();
        // SAFETY: only this thread uses the memory and the file. Tests that unmap the memory before
        // the block is dropped do not use the block any more.
        unsafe { adoption.take_place(start, self.fd.as_fd(), start, Arc::new(())) }
    }

    fn adopt(&self, arena: &Arena) -> Result<ArenaBlock, ArenaError> {
        self.place(arena.adoption(SIZE as u64)?.make()?)
    }

    /// The file behind the descriptor, and the mapped file.
    fn files(&self) -> (u64, u64) {
        let inode = rustix::fs::fstat(&self.fd).unwrap().st_ino;
        let address = self.start.addr();
        let at =
            format!("/proc/self/map_files/{address:x}-{:x}", address + SIZE.next_multiple_of(4096));
        (inode, std::fs::metadata(at).map_or(inode, |mapped| mapped.ino()))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        // SAFETY: the range is exactly our mapping.
        unsafe { rustix::mm::munmap(self.start, SIZE) }.unwrap();
    }
}

#[test]
fn adopted_memory_moves_with_its_descriptor() {
    let daemons: [Daemon; 3] = Default::default();
    let arena = arena(&daemons[0]);
    let array = Array::new(1);
    let block = array.adopt(&arena).unwrap();
    for daemon in &daemons[1..] {
        let before = array.files();
        let renewed = daemon.renew(&arena).unwrap();
        assert_eq!((renewed.segments, renewed.retired), (1, 0));
        let after = array.files();
        assert!(after.0 != before.0 && after.0 == after.1, "{before:?} {after:?}");
        assert!(holds(&block, 1) && daemon.get(&block) == 1 && !block.is_retired());
        daemon.set(&block, 1);
    }
    assert_eq!((arena.stats().adopted, daemons[0].numbers().len()), (1, 1));
    drop(block);
    assert_eq!((arena.stats().adopted, daemons[2].numbers()), (0, vec![]));
    // SAFETY: it is mapped, and only this thread uses it.
    assert_eq!(unsafe { array.start.cast::<u8>().read_volatile() }, 1);
}

#[test]
fn a_closed_descriptor_is_left_alone() {
    let arena = arena(&Daemon::default());
    let mut array = Array::new(1);
    let block = array.adopt(&arena).unwrap();
    // Another file has the number now.
    let other = rustix::fs::memfd_create("gradwire-test-other", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::dup3(&other, &mut array.fd, rustix::io::DupFlags::CLOEXEC).unwrap();
    let daemon = Daemon::default();
    assert_eq!(daemon.renew(&arena).unwrap().segments, 1);
    assert_eq!(array.files().0, rustix::fs::fstat(&other).unwrap().st_ino);
    assert!(holds(&block, 1) && daemon.get(&block) == 1);
}

#[test]
fn refused_adopted_memory_is_the_programs() {
    let first = Daemon::default();
    let arena = arena(&first);
    let arrays = [1, 2, 3].map(Array::new);
    let [one, two, three] = arrays.each_ref().map(|array| array.adopt(&arena).unwrap());
    // The program has unmapped the third one, which is not noticed before.
    let [first_array, second_array, third_array] = arrays;
    drop(third_array);
    let second = Daemon::refusing(SegmentId(1), true);
    let renewed = second.renew(&arena).unwrap();
    assert_eq!((renewed.segments, renewed.retired, arena.stats().adopted), (1, 2, 1));
    assert_eq!([&one, &two, &three].map(ArenaBlock::is_retired), [false, true, true]);
    assert!(holds(&two, 2) && holds(&one, 1) && second.numbers() == [0]);
    // It can be adopted again while its block lives, under a number of its own.
    let again = second_array.adopt(&arena).unwrap();
    assert!(again.segment() == SegmentId(3) && second.get(&again) == 2 && two.is_retired());
    drop((two, three));
    assert_eq!(arena.stats().adopted, 2);
    assert!(holds(&again, 2) && first_array.adopt(&arena).is_err(), "it is shared already");
}

#[test]
fn memory_made_for_the_old_daemon_is_refused() {
    let (first, second) = (Daemon::default(), Daemon::default());
    let arena = arena(&first);
    let array = Array::new(5);
    let made = arena.adoption(SIZE as u64).unwrap().make().unwrap();
    second.renew(&arena).unwrap();
    let refused = array.place(made).unwrap_err();
    assert!(matches!(refused, ArenaError::Ended { .. }), "{refused}");
    assert_eq!((first.numbers(), second.numbers(), arena.stats().adopted), (vec![], vec![], 0));
    let block = array.adopt(&arena).unwrap();
    assert_eq!((second.get(&block), block.segment()), (5, SegmentId(0)));
}
