//! Timed rounds of a multithreaded program, with a spinning barrier.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::{Duration, Instant},
};

use crate::measure::{now, seconds};

/// The number of warm-up rounds.
const WARMUP: usize = 2;

/// How often a thread spins before it yields, if each thread has its own core.
const SPINS: u32 = 2000;

/// The work of all threads together.
pub(super) trait Program: Sync {
    /// The bytes of private memory that a thread needs; 0 if it works only in shared memory.
    fn private(&self, thread: usize) -> usize;

    /// One round, as one of the threads. It returns after all threads have finished.
    fn once(&self, thread: usize, private: &mut [u8], barrier: &SpinBarrier);
}

/// Runs at least one and at most `rounds` rounds, for about `longest`. Returns times in seconds.
pub(super) fn times(
    program: &impl Program,
    threads: usize,
    rounds: usize,
    longest: Duration,
) -> Vec<f64> {
    let (barrier, end_at) = (SpinBarrier::new(threads), AtomicUsize::new(usize::MAX));
    let began = Instant::now();
    let (barrier, end_at) = (&barrier, &end_at);
    // Not zeros, because zeroed pages have no memory until they are written.
    let private = |thread| vec![1; program.private(thread)];
    thread::scope(|scope| {
        for thread in 1..threads {
            scope.spawn(move || {
                let mut private = private(thread);
                barrier.wait();
                let mut round = 0;
                while round < end_at.load(Ordering::Relaxed) {
                    program.once(thread, &mut private, barrier);
                    round += 1;
                }
            });
        }
        let (mut times, mut private) = (Vec::new(), private(0));
        barrier.wait();
        // Each time is from the end of one round to the end of the next. If there are more threads
        // than cores, the others may have done half a round before this thread runs again.
        let mut end = now();
        for round in 0.. {
            let late = round >= WARMUP && began.elapsed() > longest;
            let last = late || round + 1 >= WARMUP + rounds.max(1);
            if last {
                // Stored before the barrier that ends this round, so that all threads see it before
                // the next round.
                end_at.store(round + 1, Ordering::Relaxed);
            }
            program.once(0, &mut private, barrier);
            let begin = std::mem::replace(&mut end, now());
            if round >= WARMUP {
                times.push(seconds(begin, end));
            }
            if last {
                break;
            }
        }
        times
    })
}

/// A barrier at which threads spin. They yield if there are fewer cores than threads.
#[derive(Debug)]
pub(super) struct SpinBarrier {
    threads: usize,
    spins: u32,
    arrived: AtomicUsize,
    round: AtomicUsize,
}

impl SpinBarrier {
    pub(super) fn new(threads: usize) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        // If there are too few cores, a spinning thread delays those that it waits for.
        let spins = if threads <= cores { SPINS } else { 0 };
        Self { threads, spins, arrived: AtomicUsize::new(0), round: AtomicUsize::new(0) }
    }

    /// Waits for all threads.
    pub(super) fn wait(&self) {
        let round = self.round.load(Ordering::Acquire);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.threads {
            self.arrived.store(0, Ordering::Relaxed);
            self.round.store(round.wrapping_add(1), Ordering::Release);
            return;
        }
        let mut spins = 0;
        while self.round.load(Ordering::Acquire) == round {
            if spins < self.spins {
                spins += 1;
                std::hint::spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Count(AtomicUsize);

    impl Program for Count {
        fn private(&self, thread: usize) -> usize {
            thread
        }

        fn once(&self, thread: usize, private: &mut [u8], barrier: &SpinBarrier) {
            assert_eq!(private.len(), thread);
            self.0.fetch_add(1, Ordering::Relaxed);
            barrier.wait();
        }
    }

    #[test]
    fn it_stops_in_time_after_at_least_one_round() {
        let count = Count(AtomicUsize::new(0));
        assert_eq!(times(&count, 3, 1000, Duration::ZERO).len(), 1);
        assert_eq!(count.0.into_inner(), 3 * (WARMUP + 1));
        let count = Count(AtomicUsize::new(0));
        assert_eq!(times(&count, 1, 5, Duration::from_secs(3600)).len(), 5);
    }
}
