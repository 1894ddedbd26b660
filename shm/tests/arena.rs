//! The arena: growth, limits, hand-over, and blocks that never share a byte.

use std::{
    collections::BTreeMap,
    error::Error,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    thread,
};

use gradwire_proto::JobId;
use gradwire_shm::{
    arena::{ALIGNMENT, Arena, ArenaConfig, ArenaError, RegisterError, SPARE},
    segment::{HugePages, Segment, SegmentError, SegmentId},
};

const MIB: u64 = 1 << 20;

fn config(segment_bytes: u64, max_bytes: u64) -> ArenaConfig {
    let job = JobId::new("shm-test-arena").unwrap();
    ArenaConfig {
        segment_bytes,
        max_bytes: Some(max_bytes),
        huge: HugePages::Never,
        ..ArenaConfig::new(job)
    }
}

/// The segments that the daemon has, by number.
type Daemon = Arc<Mutex<BTreeMap<SegmentId, Segment>>>;

fn arena(segment_bytes: u64, max_bytes: u64) -> (Arena, Daemon) {
    let daemon = Daemon::default();
    let (adding, removing) = (Arc::clone(&daemon), Arc::clone(&daemon));
    let register = Box::new(move |id, segment: &Segment, fd| {
        let segment = Segment::open(fd, segment.bytes()).map_err(refused)?;
        let before = adding.lock().unwrap().insert(id, segment);
        assert!(before.is_none(), "segment {id} is there twice");
        Ok(())
    });
    let release = Box::new(move |id| {
        assert!(removing.lock().unwrap().remove(&id).is_some(), "segment {id} is gone");
    });
    (Arena::new(config(segment_bytes, max_bytes), register, release), daemon)
}

fn refused(why: impl Into<Box<dyn Error + Send + Sync>>) -> RegisterError {
    RegisterError::Refused(why.into())
}

#[test]
fn the_daemon_sees_the_workers_bytes() {
    let (arena, daemon) = arena(MIB, 64 * MIB);
    let blocks: Vec<_> = (0..40u64).map(|i| arena.allocate(i * 10_007).unwrap()).collect();
    for (i, block) in (0u8..).zip(&blocks) {
        // SAFETY: the block is ours and has this many bytes.
        unsafe { block.as_ptr().write_bytes(i, block.bytes() as usize) };
    }
    let daemon = daemon.lock().unwrap();
    assert!(daemon.len() > 2, "the arena has grown");
    for (i, block) in (0u8..).zip(&blocks) {
        assert_eq!(block.bytes(), u64::from(i) * 10_007);
        assert_eq!(block.offset() % ALIGNMENT, 0);
        assert_eq!(block.as_ptr().addr() as u64 % ALIGNMENT, 0);
        let start = daemon[&block.segment()].range(block.offset(), block.bytes()).unwrap();
        // SAFETY: `range` has checked it, and nobody writes now.
        let bytes = unsafe { std::slice::from_raw_parts(start, block.bytes() as usize) };
        assert!(bytes.iter().all(|&b| b == i), "block {i} was overwritten");
    }
}

#[test]
fn freed_memory_is_reused_and_counted_right() {
    let (arena, daemon) = arena(MIB, 64 * MIB);
    for _ in 0..100 {
        let (a, b) = (arena.allocate(MIB / 2).unwrap(), arena.allocate(MIB / 2).unwrap());
        assert_eq!(arena.stats().used, MIB);
        drop((b, a));
        let whole = arena.allocate(MIB).unwrap();
        assert_eq!((whole.segment(), whole.offset()), (SegmentId(0), 0));
    }
    let stats = arena.stats();
    assert_eq!((stats.segments, stats.reserved, stats.used), (1, MIB, 0));
    assert_eq!(daemon.lock().unwrap().len(), 1);
}

#[test]
fn a_large_tensor_gets_a_segment_of_its_own() {
    let (arena, _daemon) = arena(MIB, 64 * MIB);
    let large = arena.allocate(5 * MIB + 1).unwrap();
    assert_eq!(large.offset(), 0);
    assert_eq!(arena.stats().reserved, 6 * MIB, "a multiple of 2 MiB");
}

#[test]
fn a_full_arena_refuses_and_says_how_full_it_is() {
    let (arena, _daemon) = arena(4 * MIB, 6 * MIB);
    let first = arena.allocate(4 * MIB).unwrap();
    let second = arena.allocate(2 * MIB).unwrap(); // a smaller segment, up to the limit
    let error = arena.allocate(64).unwrap_err();
    let ArenaError::Full { used, reserved, .. } = error else { panic!("{error}") };
    assert_eq!((used, reserved), (6 * MIB, 6 * MIB));
    assert!(error.to_string().contains("of at most 6291456 bytes"), "{error}");
    drop(first);
    assert!(arena.allocate(3 * MIB).is_ok());
    for bytes in [u64::MAX, u64::MAX - 63, 1 << 62] {
        assert!(matches!(arena.allocate(bytes), Err(ArenaError::Full { .. })));
    }
    let register = Box::new(|_, _: &_, _| unreachable!("nothing is made"));
    let job = JobId::new("shm-test-arena").unwrap();
    let endless = Arena::new(ArenaConfig::new(job), register, Box::new(drop));
    let error = endless.allocate(u64::MAX).unwrap_err();
    assert!(matches!(error, ArenaError::Segment(SegmentError::Size { .. })), "{error}");
    drop(second);
}

#[test]
fn a_segment_that_is_not_handed_over_is_not_used() {
    let refuse = Arc::new(AtomicBool::new(true));
    let refusing = Arc::clone(&refuse);
    let register = Box::new(move |id, _: &Segment, _| {
        assert_eq!(id, SegmentId(0), "the number of a refused segment is free again");
        if refusing.load(SeqCst) { Err(refused("the daemon said no")) } else { Ok(()) }
    });
    let arena = Arena::new(config(MIB, MIB), register, Box::new(drop));
    let error = arena.allocate(10).unwrap_err().to_string();
    assert_eq!(error, "segment 0 of 1048576 bytes could not be handed over: the daemon said no");
    assert_eq!(arena.stats().reserved, 0);
    refuse.store(false, SeqCst);
    assert!(arena.allocate(10).is_ok());
}

/// BOUND. One tensor is alive at a time, and each is a little larger than the last.
#[test]
fn tensors_that_grow_take_twice_their_memory() {
    let (arena, daemon) = arena(8 * MIB, 1 << 40);
    let mut most = 0;
    for bytes in (0..24).map(|step| 9 * MIB + step * 4 * MIB) {
        let block = arena.allocate(bytes).unwrap();
        let stats = arena.stats();
        assert!(stats.reserved <= 2 * bytes + SPARE, "{stats:?} for {bytes}");
        most = most.max(stats.segments);
        drop(block);
    }
    assert_eq!(daemon.lock().unwrap().len() as u32, arena.stats().segments);
    assert!(most < 8, "{most}");
}

#[test]
fn a_full_arena_gives_back_what_is_empty() {
    let (arena, daemon) = arena(4 * MIB, 30 * MIB);
    let small = arena.allocate(100).unwrap();
    for bytes in (5..26).map(|mib| mib * MIB) {
        drop(arena.allocate(bytes).unwrap());
    }
    assert!(arena.stats().reserved <= 30 * MIB, "BOUND");
    // The small tensor keeps its segment.
    assert!(daemon.lock().unwrap().contains_key(&small.segment()));
    let error = arena.allocate(29 * MIB).unwrap_err();
    assert!(error.to_string().contains("128 of them in use; raise worker.arena_max_bytes"));
}

#[test]
fn unused_memory_goes_back_after_a_while() {
    let (arena, daemon) = arena(MIB, 1 << 40);
    let keep = arena.allocate(10).unwrap();
    let large = arena.allocate(100 * MIB).unwrap();
    drop(large);
    // A program may allocate it again at once.
    arena.give_back();
    assert!(arena.stats().reserved >= 100 * MIB);
    arena.give_back();
    arena.give_back();
    assert!(arena.stats().reserved <= SPARE, "{:?}", arena.stats());
    assert!(daemon.lock().unwrap().contains_key(&keep.segment()));
    let again = arena.allocate(70 * MIB).unwrap();
    assert_eq!(again.segment(), SegmentId(1), "the number is used again");
}

#[test]
fn a_mapping_that_is_relied_on_stays() {
    let (arena, daemon) = arena(MIB, 1 << 40);
    let large = arena.allocate(100 * MIB).unwrap();
    let (id, (start, bytes)) = (large.segment(), large.mapping());
    assert_eq!((start, bytes), (large.as_ptr(), 104 * MIB));
    drop(large);
    (0..3).for_each(|_| arena.give_back());
    assert!(daemon.lock().unwrap().contains_key(&id));
}

#[test]
fn a_number_without_an_answer_is_not_used_again() {
    let silent = Arc::new(AtomicBool::new(true));
    let is_silent = Arc::clone(&silent);
    let register = Box::new(move |_, _: &Segment, _| match is_silent.load(SeqCst) {
        true => Err(RegisterError::Unanswered("no answer within 1 s".into())),
        false => Ok(()),
    });
    let arena = Arena::new(config(MIB, 8 * MIB), register, Box::new(drop));
    let error = arena.allocate(10).unwrap_err();
    assert!(matches!(error, ArenaError::Unanswered { segment: SegmentId(0), .. }), "{error}");
    silent.store(false, SeqCst);
    assert_eq!(arena.allocate(10).unwrap().segment(), SegmentId(1));
}

#[test]
fn memory_is_located_by_its_address() {
    let (arena, _daemon) = arena(MIB, 64 * MIB);
    let (a, b) = (arena.allocate(MIB).unwrap(), arena.allocate(1000).unwrap());
    let inside = b.as_ptr().wrapping_add(40).cast_const();
    assert_eq!(arena.locate(inside, 960), Some((b.segment(), b.offset() + 40)));
    assert_eq!(arena.locate(a.as_ptr(), MIB), Some((SegmentId(0), 0)));
    assert_eq!(arena.locate(a.as_ptr().wrapping_add(1), MIB), None, "past the end");
    assert_eq!(arena.locate(a.as_ptr(), u64::MAX), None);
    let elsewhere = 7u64;
    assert_eq!(arena.locate((&raw const elsewhere).cast(), 8), None);
    assert_eq!(arena.locate(std::ptr::null(), 0), None);
}

#[test]
fn a_block_outlives_its_arena() {
    let (arena, daemon) = arena(MIB, MIB);
    let block = arena.allocate(100).unwrap();
    drop((arena, daemon));
    // SAFETY: the block keeps its memory.
    unsafe { block.as_ptr().write_bytes(1, 100) };
}

#[test]
fn threads_allocate_at_once() {
    let (arena, daemon) = arena(MIB, 64 * MIB);
    thread::scope(|scope| {
        for id in 0u8..4 {
            let arena = arena.clone();
            scope.spawn(move || {
                for round in 0..200u64 {
                    let bytes = (round * 7919 + u64::from(id) * 104_729) % (MIB / 2);
                    let block = arena.allocate(bytes).unwrap();
                    // SAFETY: only this thread uses the block, which has this many bytes.
                    let memory = unsafe {
                        block.as_ptr().write_bytes(id, bytes as usize);
                        std::slice::from_raw_parts(block.as_ptr(), bytes as usize)
                    };
                    thread::yield_now();
                    assert!(memory.iter().all(|&b| b == id));
                }
            });
        }
    });
    assert_eq!(arena.stats().used, 0);
    let ids: Vec<u32> = daemon.lock().unwrap().keys().map(|id| id.0).collect();
    assert_eq!(ids, (0..ids.len() as u32).collect::<Vec<_>>());
}
