//! The helpers of the lanes: threads (`gw-reduce`) that do a part of a large reduction or
//! publication.
//!
//! A lane cuts what it has to do into shares of whole cache lines, posts them, and takes part. The
//! result of an element does not depend on the share that it is in, so all numbers of threads give
//! the same bits (SAME). A lane goes on only when all shares have ended, so INPUT holds as without
//! helpers, and a lane that has stopped has no helper in a rank's memory.
//!
//! Helpers sleep when there is nothing to do. Waking one costs system calls and time, so a thread
//! takes part only if it saves more than that: `cut`.
//!
//! - `handover`: how a thread hands shares to helpers; the only module here with unsafe code
//! - `processors`: how many threads this machine has room for
//! - `burst`: a short measurement at the start: what waking costs, and how many threads pay

mod burst;
#[expect(unsafe_code, reason = "work that borrows from the thread that hands it over")]
mod handover;
mod processors;

use std::{
    fmt, io,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::JoinHandle,
};

use parking_lot::Mutex;

pub(crate) use self::processors::Processors;
use self::{
    burst::Found,
    handover::{Handover, Helped},
};
use crate::metrics;

/// The primitives of `handover`.
mod primitives {
    pub(super) use std::sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    };
}

/// The name of every helper: together they are one series of the processor time (BOUND).
const NAME: &str = "gw-reduce";

/// The number of shares for each thread. If a thread is late, the others wait for at most one of
/// its shares.
const SHARES_EACH: u64 = 4;

/// Shares are multiples of this size: a page, where the processor stops to fetch ahead, and a
/// multiple of all elements and cache lines.
const GRAIN: u64 = 4096;

/// The fewest bytes to touch for which waking a thread pays, until waking has been measured: about
/// 25 µs of a core.
const WORTH: u64 = 256 << 10;

/// The threads of a node for tensor bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Threads {
    /// The lanes; they are threads of the node, too.
    pub(crate) lanes: u32,
    /// All of them, with the lanes, if the settings say how many.
    pub(crate) set: Option<u32>,
    /// The ranks of this node.
    pub(crate) ranks: u32,
}

/// The helpers of all lanes of a daemon. Dropping it ends them.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    handover: Handover,
    helpers: AtomicUsize,
    /// The fewest bytes to touch for which waking a thread pays.
    worth: AtomicU64,
}

impl Pool {
    /// Starts the helpers, if there is room for threads beside the lanes.
    ///
    /// # Errors
    /// An error of the system, if it refuses a thread.
    pub(crate) fn start(
        threads: Threads,
        processors: impl FnOnce() -> Processors,
    ) -> io::Result<Self> {
        let Threads { lanes, set, ranks } = threads;
        let wanted = set.unwrap_or_else(|| processors().threads(lanes, ranks));
        let helpers = wanted.saturating_sub(lanes) as usize;
        let pool = Self::with(helpers, WORTH);
        metrics::reducing_threads(lanes as usize + helpers);
        tracing::debug!(lanes, helpers, "threads for tensor bytes");
        for number in 0..helpers {
            let shared = pool.shared.clone();
            pool.spawn(number, move || {
                if number == 0 {
                    shared.adapt(lanes as usize, set.is_none());
                }
            })?;
        }
        Ok(pool)
    }

    /// Starts a helper, which does something else first.
    fn spawn(&self, number: usize, first: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let shared = self.shared.clone();
        let run = move || {
            first();
            shared.handover.help(number, |Helped { shares, wakes }| {
                metrics::helped(shares);
                metrics::woken(wakes);
            });
        };
        let name = NAME.to_owned();
        self.threads.lock().push(std::thread::Builder::new().name(name).spawn(run)?);
        Ok(())
    }

    /// A pool without threads so far.
    fn with(helpers: usize, worth: u64) -> Self {
        let shared = Shared {
            handover: Handover::new(helpers),
            helpers: AtomicUsize::new(helpers),
            worth: AtomicU64::new(worth),
        };
        Self { shared: Arc::new(shared), threads: Mutex::default() }
    }

    /// A pool with helpers that take part in whatever can be cut.
    #[cfg(test)]
    pub(crate) fn eager(helpers: usize) -> Arc<Self> {
        let pool = Self::with(helpers, 1);
        (0..helpers).for_each(|number| pool.spawn(number, || {}).unwrap());
        Arc::new(pool)
    }

    /// Calls `work` with parts of a range of bytes that begins at 0, in any order and on several
    /// threads if that pays. Parts are multiples of 64 bytes, except the last one, and have at most
    /// `most` bytes. `touched` is how many bytes are read and written for the whole range.
    ///
    /// # Panics
    /// If `work` does, once nobody works on the range any more.
    pub(crate) fn run(
        &self,
        bytes: u64,
        touched: u64,
        most: u64,
        work: &(dyn Fn(Range<u64>) + Sync),
    ) {
        let Cut { share, helpers } = self.cut(bytes, touched, most);
        let part = |at: u64| work(at * share..bytes.min((at + 1) * share));
        let shares = bytes.div_ceil(share);
        if helpers == 0 {
            (0..shares).for_each(part);
            return;
        }
        let wakes =
            self.shared.handover.run(shares as usize, helpers, &|number| part(number as u64));
        metrics::woken(wakes);
    }

    /// Like [`Pool::run`], with parts of `target` and the index of their first byte.
    ///
    /// # Panics
    /// As [`Pool::run`].
    pub(crate) fn run_on(
        &self,
        target: &mut [u8],
        touched: u64,
        most: u64,
        work: &(dyn Fn(usize, &mut [u8]) + Sync),
    ) {
        let Cut { share, helpers } = self.cut(target.len() as u64, touched, most);
        let share = share as usize;
        if helpers == 0 {
            for (number, part) in target.chunks_mut(share).enumerate() {
                work(number * share, part);
            }
            return;
        }
        // Nobody waits for these locks: each part has one share.
        let parts: Vec<Mutex<&mut [u8]>> = target.chunks_mut(share).map(Mutex::new).collect();
        let wakes = self.shared.handover.run(parts.len(), helpers, &|number| {
            work(number * share, &mut parts[number].lock());
        });
        metrics::woken(wakes);
    }

    /// Whether any thread but the lanes works on tensor bytes.
    pub(crate) fn has_helpers(&self) -> bool {
        self.shared.helpers.load(Relaxed) > 0
    }

    fn cut(&self, bytes: u64, touched: u64, most: u64) -> Cut {
        let Shared { helpers, worth, .. } = &*self.shared;
        Cut::of(bytes, touched, most, helpers.load(Relaxed), worth.load(Relaxed))
    }
}

impl Shared {
    /// Measures this machine, as the first helper.
    fn adapt(&self, lanes: usize, may_end_helpers: bool) {
        let helpers = self.helpers.load(Relaxed);
        let Found { worth, threads } = burst::measure(&self.handover, helpers, may_end_helpers);
        if let Some(worth) = worth {
            self.worth.store(worth, Relaxed);
        }
        let kept = threads.map_or(helpers, |threads| helpers.min(threads.saturating_sub(lanes)));
        self.helpers.store(kept, Relaxed);
        self.handover.keep(kept);
        metrics::reducing_threads(lanes + kept);
        let worth = self.worth.load(Relaxed);
        tracing::debug!(lanes, helpers = kept, of = helpers, worth, "threads that pay");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.handover.keep(0);
        for thread in self.threads.lock().drain(..) {
            // Only the measurement could panic; shares can't.
            if thread.join().is_err() {
                tracing::error!("a helper thread panicked outside of any operation");
            }
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("helpers", &self.shared.helpers).finish_non_exhaustive()
    }
}

/// How a range is cut.
#[derive(Debug, PartialEq, Eq)]
struct Cut {
    share: u64,
    /// How many helpers may take part.
    helpers: usize,
}

impl Cut {
    /// With waking in a tree, n threads are awake after about log₂ n times what waking one takes.
    /// The sum of that and of the work of one of them is least where each has about as much work
    /// as waking takes, which is `worth` in bytes.
    fn of(bytes: u64, touched: u64, most: u64, helpers: usize, worth: u64) -> Self {
        let threads = (touched / worth.max(1)).min(helpers as u64 + 1);
        if threads <= 1 {
            return Self { share: most, helpers: 0 };
        }
        let share = bytes.div_ceil(threads * SHARES_EACH).next_multiple_of(GRAIN).min(most);
        let helpers = (threads - 1).min(bytes.div_ceil(share) - 1) as usize;
        Self { share, helpers }
    }
}

#[cfg(test)]
mod modelled;
#[cfg(test)]
mod tests;
