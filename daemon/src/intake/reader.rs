//! The task that reads the workers' rings and checks their heartbeats.
//!
//! It runs on the control thread, so a submission is announced without waking another thread. It
//! sleeps on the workers' doorbells, which ring only if it has marked itself as asleep: a busy
//! intake costs no system call. While ranks submit often, and there are enough cores, it spins
//! instead of sleeping, so that a small operation costs no wake-up of the daemon.

use std::{
    future::poll_fn,
    io,
    os::fd::OwnedFd,
    sync::{Arc, Weak},
    task::{Context, Poll},
    time::{Duration, Instant},
};

use gradwire_proto::{Failure, FailureKind, beat::Suspension};
use gradwire_shm::{
    control::{Heartbeats, SubmissionReader},
    spin::SpinBudget,
};
use tokio::{
    io::{Interest, unix::AsyncFd},
    sync::mpsc::UnboundedReceiver,
    task::yield_now,
    time::{Interval, MissedTickBehavior, interval},
};

use super::submit;
use crate::{
    control::{
        node::{Node, Resubmitted},
        stuck, trace,
    },
    workers::{
        process_state::{is_stopped, state_of},
        start::{Limits, Start},
        worker::Worker,
    },
};

/// How many records are read from one ring before the next ring.
const TURN: usize = 256;

/// How often the workers' heartbeats are checked.
const CHECK: Duration = Duration::from_millis(100);

/// After this time without a heartbeat, the task checks whether the worker's process has ended. The
/// end of its connection shows this at once, unless a child holds the connection.
const ENDED: Duration = Duration::from_secs(1);

/// The longest spin, whatever the setting: new workers and their heartbeats wait meanwhile (WAIT).
const LONGEST_SPIN: Duration = Duration::from_millis(1);

/// A worker's ring and heartbeats.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) worker: Arc<Worker>,
    pub(crate) reader: SubmissionReader,
    pub(crate) heartbeats: Heartbeats,
    pub(crate) doorbell: OwnedFd,
}

/// Starts the task; it ends when the node is gone.
pub(crate) fn start(
    node: Weak<Node>,
    added: UnboundedReceiver<Source>,
    resubmitted: UnboundedReceiver<Resubmitted>,
) {
    let budget = SpinBudget::default();
    tokio::spawn(Reader { node, added, resubmitted, sources: Vec::new(), budget }.run());
}

struct Watched {
    worker: Arc<Worker>,
    reader: SubmissionReader,
    heartbeats: Heartbeats,
    /// An eventfd that is never read: each ring is an event. The worker could make a read block
    /// (TRUST), or ring so often that reading never ends (BOUND).
    doorbell: AsyncFd<OwnedFd>,
    beats: u32,
    since: Instant,
}

impl Watched {
    fn new(source: Source) -> Result<Self, (Arc<Worker>, io::Error)> {
        let Source { worker, reader, heartbeats, doorbell } = source;
        #[expect(deprecated, reason = "an OwnedFd is what its unsafe successor asks for")]
        match AsyncFd::with_interest(doorbell, Interest::READABLE) {
            Ok(doorbell) => {
                let since = Instant::now();
                Ok(Self { worker, reader, heartbeats, doorbell, beats: 0, since })
            }
            Err(error) => Err((worker, error)),
        }
    }

    /// Whether the doorbell has rung since the last call. If not, its next ring wakes the task.
    fn has_rung(&self, context: &mut Context<'_>) -> bool {
        let mut rung = false;
        while let Poll::Ready(ready) = self.doorbell.poll_read_ready(context) {
            rung = true;
            match ready {
                Ok(mut ring) => ring.clear_ready(),
                // The reactor has ended, and the task ends, too.
                Err(_) => break,
            }
        }
        rung
    }
}

struct Reader {
    node: Weak<Node>,
    /// Bounded by the slots of the node.
    added: UnboundedReceiver<Source>,
    /// Bounded by the submissions that ranks may have in flight.
    resubmitted: UnboundedReceiver<Resubmitted>,
    sources: Vec<Watched>,
    /// How long it spins.
    budget: SpinBudget,
}

impl Reader {
    async fn run(mut self) {
        let mut clock = interval(CHECK);
        clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut checked, mut looked) = (Instant::now(), Instant::now());
        let mut suspension = Suspension::new(checked);
        let (mut stuck, mut start) = (stuck::Reporter::default(), Start::default());
        let _panics =
            self.node.upgrade().map(|n| n.report_panic("the reader of the workers' rings"));
        while let Some(node) = self.node.upgrade() {
            while let Ok(source) = self.added.try_recv() {
                self.add(&node, source);
            }
            while let Ok((key, local)) = self.resubmitted.try_recv() {
                submit::resubmit(&node, key, local);
            }
            let came = self.read(&node);
            if checked.elapsed() >= CHECK {
                checked = Instant::now();
                for worker in node.workers.all() {
                    worker.outbox.flush();
                }
                if let Some(limit) = node.job.world().map(|world| world.heartbeat_timeout) {
                    if suspension.check(checked, limit).is_some() {
                        self.sources.iter_mut().for_each(|watched| watched.since = checked);
                        start.restart(checked);
                        if let Some(operations) = node.operations() {
                            operations.pending.restart(checked);
                        }
                    }
                    self.check(&node, limit);
                    check_start(&node, &mut start, checked, limit);
                }
                node.report_overdue_allocations(checked);
                stuck.look(&node, checked);
                node.end_stall(checked);
                // Checked rarely, so that waits that began together are reported together.
                if looked.elapsed() >= node.config.stall_warning / 10 {
                    looked = Instant::now();
                    node.report_stalls(looked);
                }
            }
            let spin = node.config.spin.min(LONGEST_SPIN);
            drop(node);
            if came {
                // Lets other tasks run, above all the sender of announcements.
                yield_now().await;
                continue;
            }
            let since = Instant::now();
            if !self.spin(spin).await && self.sleep(&mut clock).await {
                self.budget.slept(spin, since.elapsed());
            }
        }
    }

    fn add(&mut self, node: &Node, source: Source) {
        match Watched::new(source) {
            Ok(watched) => self.sources.push(watched),
            Err((worker, error)) => {
                let what = format!("the system refuses to watch a worker's doorbell: {error}");
                let failure = Failure::new(FailureKind::Resource, what).rank(worker.rank);
                node.job.report(failure.host(node.config.host.clone()));
            }
        }
    }

    /// Reads submissions. Returns false if there are none.
    fn read(&mut self, node: &Arc<Node>) -> bool {
        let mut came = false;
        self.sources.retain_mut(|watched| {
            let Watched { worker, reader, .. } = watched;
            for _ in 0..TURN {
                let taken = match reader.pop() {
                    Ok(None) => return true,
                    Ok(Some(submission)) => {
                        trace::sample(node, worker);
                        submit::take(node, worker, submission)
                    }
                    Err(error) => Err(error.to_string()),
                };
                came = true;
                if let Err(why) = taken {
                    node.worker_failed(worker, worker.sent_nonsense(&why));
                    return false;
                }
            }
            true
        });
        came
    }

    /// Spins until a worker submits, for at most `allowed`. Other tasks run meanwhile. Returns
    /// whether one has submitted.
    async fn spin(&self, allowed: Duration) -> bool {
        let Some(spin) = self.budget.begin(allowed) else { return false };
        loop {
            let submitted = || self.sources.iter().any(|watched| !watched.reader.is_empty());
            if let Some(came) = spin.look(submitted) {
                return came;
            }
            yield_now().await;
        }
    }

    /// Sleeps until a doorbell rings, a request arrives, or it is time to check the workers.
    /// Returns whether a doorbell rang.
    async fn sleep(&mut self, clock: &mut Interval) -> bool {
        let empty = self.sources.iter().filter(|w| !w.reader.prepare_sleep()).count() == 0;
        let (mut added, mut resubmitted) = (None, None);
        let mut has_rung = !empty;
        if empty {
            let sources = &self.sources;
            let rung = poll_fn(|context| {
                // Checks all of them, so that each can wake the task.
                let rings = sources.iter().filter(|watched| watched.has_rung(context)).count();
                if rings > 0 { Poll::Ready(()) } else { Poll::Pending }
            });
            tokio::select! {
                () = rung => has_rung = true,
                Some(source) = self.added.recv() => added = Some(source),
                request = self.resubmitted.recv() => resubmitted = request,
                _ = clock.tick() => {}
            }
        }
        for watched in &self.sources {
            watched.reader.awake();
        }
        let Some(node) = self.node.upgrade() else { return false };
        if let Some(source) = added {
            self.add(&node, source);
        }
        if let Some((key, local)) = resubmitted {
            submit::resubmit(&node, key, local);
        }
        has_rung
    }

    /// Whether the job is suspended as a whole, as by Ctrl-Z: it has only this node, and all its
    /// workers are stopped. None of them has left and waits for the end of the job. An agent
    /// suspends a daemon that it has started, but ranks also start daemons themselves.
    fn is_suspended(&self, node: &Node) -> bool {
        let is_alone = node.job.world().is_some_and(|world| world.nodes.len() == 1);
        // In an elastic job, stopped processes are replaced.
        is_alone
            && node.config.elastic.is_none()
            && self.sources.len() == node.config.slots as usize
            && self.sources.iter().all(|watched| is_stopped(watched.worker.pid))
    }

    /// Reports workers without new heartbeats, which may be stopped or swapped out.
    fn check(&mut self, node: &Node, limit: Duration) {
        let is_silent = |watched: &Watched| watched.since.elapsed() > limit / 2;
        if self.sources.iter().any(is_silent) && self.is_suspended(node) {
            self.sources.iter_mut().for_each(|watched| watched.since = Instant::now());
        }
        self.sources.retain_mut(|watched| {
            let beats = watched.heartbeats.count();
            watched.heartbeats.beat();
            if beats != watched.beats {
                watched.beats = beats;
                watched.since = Instant::now();
            }
            let worker = &watched.worker;
            if node.workers.get(worker.local_rank).is_none() {
                return false;
            }
            let silent = watched.since.elapsed();
            if silent > ENDED && worker.has_ended() {
                node.worker_failed(worker, node.died(worker, None));
                return false;
            }
            if silent <= limit {
                return true;
            }
            let why =
                format!("no heartbeat for {:.1} s{}", silent.as_secs_f64(), state_of(worker.pid));
            node.worker_failed(worker, worker.silent(&why));
            false
        });
    }
}

/// Ends the job or the epoch if a rank does not come in time.
fn check_start(node: &Node, start: &mut Start, now: Instant, heartbeat_timeout: Duration) {
    if node.job.ending().is_some() {
        return;
    }
    let limits = Limits {
        new: node.config.start_timeout,
        survivor: node.config.elastic_timeout,
        stopped: heartbeat_timeout,
    };
    let overdue = start.overdue(node.liveness.has_begun(), || node.missing(), now, limits);
    if let Some((missing, overdue)) = overdue {
        node.missed(&missing, overdue);
    }
}
