use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::AtomicBool,
    thread,
    time::{Duration, Instant},
};

use super::*;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

#[test]
fn a_thread_takes_part_only_if_that_pays() {
    let cut = |bytes, touched, helpers| {
        let Cut { share, helpers } = Cut::of(bytes, touched, 256 * KIB, helpers, WORTH);
        (share, helpers)
    };
    // Four ranks read and write their tensor: eight bytes are touched for each of the result.
    for (bytes, helpers, expected) in [
        (4 * KIB, 15, (256 * KIB, 0)),
        (32 * KIB, 15, (256 * KIB, 0)),
        (64 * KIB, 15, (8 * KIB, 1)),
        (MIB / 2, 15, (8 * KIB, 15)),
        (4 * MIB, 15, (64 * KIB, 15)),
        (4 * MIB, 3, (256 * KIB, 3)),
        (64 * MIB, 15, (256 * KIB, 15)),
        (64 * MIB, 0, (256 * KIB, 0)),
    ] {
        assert_eq!(cut(bytes, 8 * bytes, helpers), expected, "{bytes} bytes, {helpers} helpers");
    }
    // No helper without a share, and nothing to do.
    assert_eq!(Cut::of(5000, 5000, 256 * KIB, 31, 1), Cut { share: 4096, helpers: 1 });
    assert_eq!(Cut::of(0, 0, 256 * KIB, 31, 1), Cut { share: 256 * KIB, helpers: 0 });
    assert_eq!(Cut::of(100, 100, 64, 31, 0), Cut { share: 64, helpers: 1 });
}

#[test]
fn parts_cover_a_range_once() {
    for helpers in [0, 1, 3, 31] {
        let pool = Pool::eager(helpers);
        for bytes in [0, 1, 63, 4096, 4097, 100_001] {
            for most in [64, 4096, 256 * KIB] {
                let parts = Mutex::new(Vec::new());
                pool.run(bytes, bytes, most, &|part| parts.lock().push(part));
                let mut parts = parts.into_inner();
                parts.sort_unstable_by_key(|part| part.start);
                let mut at = 0;
                for part in parts {
                    assert!(part.start == at && part.start.is_multiple_of(64), "{part:?}");
                    assert!(part.end > at && part.end - at <= most, "{part:?}");
                    at = part.end;
                }
                assert_eq!(at, bytes, "{helpers} helpers, at most {most}");

                let mut target = vec![0u8; bytes as usize];
                pool.run_on(&mut target, bytes, most, &|from, part| {
                    (from..).zip(part).for_each(|(at, byte)| *byte = (at % 251) as u8 + 1);
                });
                let expected = (0..bytes).map(|at| (at % 251) as u8 + 1);
                assert!(target.into_iter().eq(expected), "{helpers} helpers, {bytes} bytes");
            }
        }
    }
}

fn is_helper() -> bool {
    thread::current().name() == Some(NAME)
}

/// Waits until `is_so`.
fn until(is_so: impl Fn() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < Duration::from_secs(20), "no helper has come");
        thread::sleep(Duration::from_micros(100));
    }
}

/// Each of the threads has a share at the same time.
#[test]
fn all_helpers_take_part_in_a_long_job() {
    let pool = Pool::eager(5);
    let helping = AtomicUsize::new(0);
    pool.run(6 * 4096, 1 << 30, 4096, &|_| {
        helping.fetch_add(usize::from(is_helper()), Relaxed);
        until(|| helping.load(Relaxed) == 5);
    });
}

#[test]
fn several_lanes_use_the_helpers_at_once() {
    let pool = Pool::eager(3);
    thread::scope(|scope| {
        for lane in 0..4u64 {
            let pool = &pool;
            scope.spawn(move || {
                for turn in 0..300 {
                    let bytes = (lane + 1) * 5000 + turn * 64;
                    let sum = AtomicU64::new(0);
                    pool.run(bytes, bytes, 4096, &|part| {
                        sum.fetch_add(part.end - part.start, Relaxed);
                    });
                    assert_eq!(sum.into_inner(), bytes);
                }
            });
        }
    });
}

/// INPUT: when a panic reaches the lane, nobody works on its memory any more.
#[test]
fn a_panic_of_a_share_reaches_the_lane() {
    let pool = Pool::eager(2);
    for panics_in_helper in [true, false] {
        let (running, has_panicked) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = |_| {
            running.fetch_add(1, Relaxed);
            let is_wanted = is_helper() == panics_in_helper;
            if is_wanted && !has_panicked.swap(true, Relaxed) {
                running.fetch_sub(1, Relaxed);
                panic!("it was asked to");
            }
            until(|| has_panicked.load(Relaxed));
            thread::sleep(Duration::from_millis(5));
            running.fetch_sub(1, Relaxed);
        };
        let ended = catch_unwind(AssertUnwindSafe(|| pool.run(8 * 4096, 1 << 30, 4096, &work)));
        assert_eq!(running.load(Relaxed), 0);
        let panic = ended.unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"it was asked to"));
    }
    let helped = AtomicBool::new(false);
    pool.run(3 * 4096, 1 << 30, 4096, &|_| {
        helped.fetch_or(is_helper(), Relaxed);
        until(|| helped.load(Relaxed));
    });
}

#[test]
fn there_are_as_many_helpers_as_set() {
    let cores = |cores| move || Processors { cores, at_once: cores };
    for (lanes, set, ranks, cores_here, helpers) in [
        (2, None, 4, 2, 0),
        (1, None, 4, 2, 1),
        (2, None, 1, 8, 0),
        (2, Some(1), 4, 8, 0),
        (2, Some(2), 4, 8, 0),
        (2, Some(5), 1, 2, 3),
    ] {
        let pool = Pool::start(Threads { lanes, set, ranks }, cores(cores_here)).unwrap();
        assert_eq!(pool.threads.lock().len(), helpers, "{lanes} lanes of {set:?}, {ranks} ranks");
    }
}

/// The measurement ends helpers only if the number of threads is automatic, and work goes on
/// meanwhile.
#[test]
fn a_pool_works_while_it_measures() {
    for set in [None, Some(6)] {
        let threads = Threads { lanes: 2, set, ranks: 4 };
        let pool = Pool::start(threads, || Processors { cores: 6, at_once: 6 }).unwrap();
        let began = Instant::now();
        while began.elapsed() < Duration::from_millis(60) {
            let sum = AtomicU64::new(0);
            pool.run(MIB, 8 * MIB, 64 * KIB, &|part| {
                sum.fetch_add(part.end - part.start, Relaxed);
            });
            assert_eq!(sum.into_inner(), MIB);
        }
        let helpers = pool.shared.helpers.load(Relaxed);
        assert!(helpers <= 4 && (set.is_none() || helpers == 4), "{helpers} helpers");
    }
}
