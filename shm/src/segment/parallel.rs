//! Divides work on much memory among several threads.
//!
//! Filling pages and copying them takes the kernel and a processor far longer than the memory
//! needs, so several threads are faster than one. They take shares until nothing is left, so a
//! thread that is late, or that the system refuses, delays nobody.

use std::{
    ops::Range,
    panic,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    thread,
};

use super::HUGE_PAGE;

/// What a thread takes at a time, in bytes: much longer work than the start of a thread.
const SHARE: u64 = 2 * HUGE_PAGE;

/// The most threads: more are slower, because the kernel's locks are the limit.
const MAX_THREADS: u64 = 8;

/// A thread that works on memory.
pub(super) fn thread() -> thread::Builder {
    thread::Builder::new().name("gw-memory".into())
}

/// Does `work` for all parts of a range, on as many threads as there are processors. The parts
/// begin at multiples of [`SHARE`] from the start. After an error the rest is left out.
///
/// # Errors
/// The first error of a thread.
pub(super) fn in_shares<E: Send>(
    range: Range<u64>,
    work: impl Fn(Range<u64>) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let shares = range.end.saturating_sub(range.start).div_ceil(SHARE);
    let processors = || thread::available_parallelism().map_or(1, |number| number.get() as u64);
    // Counting the processors takes longer than a small share.
    let threads = if shares > 1 { processors().min(MAX_THREADS).min(shares) } else { 1 };
    let next = AtomicU64::new(0);
    let run = || {
        loop {
            let share = next.fetch_add(1, Relaxed);
            if share >= shares {
                return Ok(());
            }
            let start = range.start + share * SHARE;
            work(start..range.end.min(start + SHARE))
                .inspect_err(|_| next.store(shares, Relaxed))?;
        }
    };
    thread::scope(|scope| {
        let start = |_| thread().spawn_scoped(scope, run).ok();
        let helpers: Vec<_> = (1..threads).map_while(start).collect();
        let done = run();
        let join = |helper: thread::ScopedJoinHandle<'_, _>| {
            helper.join().unwrap_or_else(|cause| panic::resume_unwind(cause))
        };
        helpers.into_iter().map(join).fold(done, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn every_byte_is_in_one_share() {
        for range in [0..0, 5..6, 0..SHARE, 3..SHARE + 4, 7..40 * SHARE + 1] {
            let done = Mutex::new(Vec::new());
            let note = |share| {
                done.lock().push(share);
                Ok::<_, ()>(())
            };
            in_shares(range.clone(), note).unwrap();
            let mut done = done.into_inner();
            done.sort_by_key(|share| share.start);
            let end = done.iter().fold(range.start, |at, share| {
                assert!(share.start == at && share.end > at && share.end - at <= SHARE);
                share.end
            });
            assert_eq!(end, range.end);
        }
    }

    #[test]
    fn an_error_ends_the_work() {
        let done = AtomicU64::new(0);
        let work = |share: Range<u64>| {
            done.fetch_add(1, Relaxed);
            if share.start == 2 * SHARE { Err(share.start) } else { Ok(()) }
        };
        assert_eq!(in_shares(0..1000 * SHARE, work), Err(2 * SHARE));
        assert!(done.into_inner() < 1000);
    }
}
