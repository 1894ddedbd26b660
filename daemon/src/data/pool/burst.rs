//! A short measurement of this machine, on the first helper, while nobody waits for it.
//!
//! It finds what waking a thread takes, and the number of threads beyond which a reduction gets no
//! faster, because the memory is the limit. Both only decide how work is divided, never a result.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    time::{Duration, Instant},
};

use gradwire_kernels::Combine;
use gradwire_proto::{DType, ReduceOp};
use parking_lot::Mutex;

use super::handover::Handover;
use crate::model::memory;

/// The most time of the whole measurement. It ends without an answer if it would take longer.
const LONGEST: Duration = Duration::from_millis(20);

/// The time for each number of threads, and how often each is tried: something else may run at the
/// same time, so the best counts.
const SLICE: Duration = Duration::from_micros(500);
const TRIES: usize = 2;

/// How long a helper is waited for, and how often it is woken.
const LATEST: Duration = Duration::from_micros(200);
const WAKES: usize = 8;

/// The memory is in blocks of this size: one half is added to the other. It is not in any cache
/// when a block's turn comes again.
const BLOCK: usize = 256 << 10;
const BLOCKS_EACH: usize = 32;
const MOST_BLOCKS: usize = 1024;

/// Rates of at least this part of the best one count as equal: the difference is not worth a
/// thread, and may be chance.
const SAME: f64 = 0.95;

/// What has been found; `None` if it could not be measured.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The bytes that a thread touches in the time that it takes to wake one.
    pub(super) worth: Option<u64>,
    /// The number of threads that are as fast as any number.
    pub(super) threads: Option<usize>,
}

/// Measures on the first of `helpers` helpers: the best number of threads only if `all`.
pub(super) fn measure(handover: &Handover, helpers: usize, all: bool) -> Found {
    let mut found = Found { worth: None, threads: None };
    if helpers < 2 {
        return found;
    }
    let began = Instant::now();
    let wake = waking(handover);
    let blocks = fill(handover, helpers, if all { helpers } else { 1 });
    let next = AtomicUsize::new(0);
    let mut rates: Vec<(usize, f64)> =
        numbers(if all { helpers } else { 1 }).map(|threads| (threads, 0.0)).collect();
    for _ in 0..TRIES {
        for (threads, best) in &mut rates {
            if began.elapsed() + SLICE < LONGEST
                && let Some(rate) = rate(handover, *threads, &blocks, &next)
            {
                *best = best.max(rate);
            }
        }
    }
    // What could not be measured says nothing about higher numbers either.
    rates.truncate(rates.iter().take_while(|(_, rate)| *rate > 0.0).count());
    if let Some((_, alone)) = rates.first() {
        found.worth = Some((wake.as_secs_f64() * alone) as u64);
    }
    found.threads = enough(&rates);
    tracing::debug!(?wake, ?rates, took = ?began.elapsed(), "measured the node's memory");
    found
}

/// The numbers of threads to try, up to `most`.
fn numbers(most: usize) -> impl Iterator<Item = usize> {
    let powers = (0..usize::BITS).map(|power| 1usize << power);
    powers.flat_map(|one| [one, one + one / 2]).skip(1).take_while(move |&number| number <= most)
}

/// The fewest threads that are about as fast as any number, if more would be slower or not faster.
fn enough(rates: &[(usize, f64)]) -> Option<usize> {
    let best = rates.iter().map(|(_, rate)| *rate).reduce(f64::max)?;
    let (last, _) = rates.last()?;
    let enough = rates.iter().find(|(_, rate)| *rate >= SAME * best)?.0;
    (enough < *last).then_some(enough)
}

/// The least time from waking a helper to its first instruction.
fn waking(handover: &Handover) -> Duration {
    let one = |_| {
        // The helper has just done something, and goes to sleep.
        std::thread::sleep(LATEST / 4);
        let (me, came) = (std::thread::current().id(), Mutex::new(None));
        let is_here = AtomicBool::new(false);
        let began = Instant::now();
        handover.run(2, 1, &|_| {
            if std::thread::current().id() == me {
                while !is_here.load(Relaxed) && began.elapsed() < LATEST {
                    std::hint::spin_loop();
                }
            } else {
                came.lock().get_or_insert(began.elapsed());
                is_here.store(true, Relaxed);
            }
        });
        came.into_inner().unwrap_or(LATEST)
    };
    (0..WAKES).map(one).min().unwrap_or(LATEST)
}

type Block = Mutex<Vec<u8>>;

/// Memory for `threads` threads, which all helpers write to.
fn fill(handover: &Handover, helpers: usize, threads: usize) -> Vec<Block> {
    let count = (threads * BLOCKS_EACH).min(MOST_BLOCKS);
    let blocks: Vec<Block> = (0..count).map(|_| Mutex::default()).collect();
    // Not zeros, because zeroed pages have no memory until they are written.
    handover.run(count, helpers - 1, &|at| *blocks[at].lock() = vec![1; BLOCK]);
    blocks
}

/// The bytes per second that `threads` threads touch; `None` if they did not run at once.
fn rate(handover: &Handover, threads: usize, blocks: &[Block], next: &AtomicUsize) -> Option<f64> {
    let sum = Combine { dtype: DType::F32, op: ReduceOp::Sum };
    let rates = Mutex::new(Vec::new());
    let start = Instant::now();
    handover.run(threads, threads - 1, &|_| {
        let (began, mut touched) = (Instant::now(), 0);
        while start.elapsed() < SLICE {
            let mut block = blocks[next.fetch_add(1, Relaxed) % blocks.len()].lock();
            let (target, source) = block.split_at_mut(BLOCK / 2);
            memory::combine(sum, target, source, false);
            touched += BLOCK + BLOCK / 2;
        }
        if touched > 0 {
            rates.lock().push(touched as f64 / began.elapsed().as_secs_f64());
        }
    });
    let rates = rates.into_inner();
    (rates.len() == threads).then(|| rates.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_are_used_only_if_faster() {
        let of = |rates: &[f64]| {
            let rates: Vec<_> = numbers(128).zip(rates.iter().copied()).collect();
            enough(&rates)
        };
        // The machine with 16 cores for which this was built: all of them pay.
        assert_eq!(of(&[1.0, 1.9, 2.5, 3.1, 3.9, 4.4, 6.0, 7.2]), None);
        // Eight threads are as fast as twelve, and faster than six.
        assert_eq!(of(&[1.0, 1.9, 2.5, 3.1, 3.9, 4.4, 4.5, 4.3]), Some(8));
        assert_eq!(of(&[1.0, 1.0, 0.9]), Some(1));
        assert_eq!((of(&[1.0]), of(&[])), (None, None));
        assert_eq!(numbers(16).collect::<Vec<_>>(), [1, 2, 3, 4, 6, 8, 12, 16]);
        assert_eq!(numbers(5).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }
}
