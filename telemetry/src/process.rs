//! What the system knows of this process, from `/proc`: the usual `process_*` metrics, and the
//! processor time by thread.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use procfs::{
    ProcResult,
    process::{LimitValue, Process, Stat},
};

use crate::{
    TimeCounter,
    catalog::{OTHER, PROCESS},
};

/// The threads of Gradwire have names that begin with this. There are few of them (BOUND).
const OURS: &str = "gw-";

/// A thread: its number may be used again, but not at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Thread {
    number: i32,
    started: u64,
}

/// The ticks that each living thread had used.
type Used = BTreeMap<Thread, u64>;

#[derive(Debug)]
struct Threads {
    used: Used,
    /// By the name of the thread.
    counters: BTreeMap<String, TimeCounter>,
}

/// The threads of this process. Its endpoints share them, so what a thread uses counts once.
static THREADS: Mutex<Threads> =
    Mutex::new(Threads { used: Used::new(), counters: BTreeMap::new() });

/// The ticks that a process or thread has used.
fn ticks(stat: &Stat) -> u64 {
    stat.utime + stat.stime
}

fn seconds(ticks: u64) -> f64 {
    ticks as f64 / procfs::ticks_per_second().max(1) as f64
}

impl Threads {
    /// Adds what each thread has used since the last call. What a thread used between the last call
    /// and its end is not seen.
    fn add(&mut self, stats: impl Iterator<Item = Stat>) {
        let mut now = Used::new();
        for stat in stats {
            let thread = Thread { number: stat.pid, started: stat.starttime };
            let (used, before) = (ticks(&stat), self.used.get(&thread).copied());
            now.insert(thread, used);
            let name = if stat.comm.starts_with(OURS) { stat.comm } else { OTHER.to_owned() };
            let counter = self
                .counters
                .entry(name)
                .or_insert_with_key(|name| PROCESS.thread_seconds.series([name]));
            counter.add_seconds(seconds(used.saturating_sub(before.unwrap_or_default())));
        }
        self.used = now;
    }
}

/// Sets the metrics to what they are now.
pub(crate) fn collect() {
    if let Err(error) = read() {
        tracing::debug!(%error, "the system does not tell what this process uses");
    }
}

fn read() -> ProcResult<()> {
    let process = Process::myself()?;
    let stat = process.stat()?;
    PROCESS.cpu.set_seconds(seconds(ticks(&stat)));
    PROCESS.resident.set(stat.rss as f64 * procfs::page_size() as f64);
    PROCESS.threads.set(stat.num_threads as f64);
    PROCESS.start_time.set(procfs::boot_time_secs()? as f64 + seconds(stat.starttime));
    PROCESS.open_fds.set(process.fd_count()? as f64);
    PROCESS.max_fds.set(match process.limits()?.max_open_files.soft_limit {
        LimitValue::Value(most) => most as f64,
        LimitValue::Unlimited => f64::INFINITY,
    });
    // Held meanwhile, so that two endpoints do not add the same time. A thread may end while it is
    // read.
    let mut threads = THREADS.lock();
    threads.add(process.tasks()?.flatten().filter_map(|task| task.stat().ok()));
    Ok(())
}
