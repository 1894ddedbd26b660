//! What the system knows about this process, from `/proc`: the usual `process_*` metrics, and the
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

/// The prefix of the names of Gradwire's threads, of which there are few (BOUND).
const OURS: &str = "gw-";

/// The ticks that each living thread has used, by its number and start time: numbers are reused.
type Used = BTreeMap<(i32, u64), u64>;

#[derive(Debug)]
struct Threads {
    used: Used,
    /// By the name of the thread.
    counters: BTreeMap<String, TimeCounter>,
}

/// The threads of this process. All endpoints share them, so the time of a thread counts once.
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
    /// Adds what each thread has used since the last call, except for threads that have ended.
    fn add(&mut self, stats: impl Iterator<Item = Stat>) {
        let mut now = Used::new();
        for stat in stats {
            let thread = (stat.pid, stat.starttime);
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

/// Updates the metrics.
pub(crate) fn collect() {
    if let Err(error) = read() {
        tracing::debug!(%error, "can't read the resource usage of this process");
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
    // Locked before reading, so that two endpoints do not add the same time.
    let mut threads = THREADS.lock();
    threads.add(process.tasks()?.flatten().filter_map(|task| task.stat().ok()));
    Ok(())
}
