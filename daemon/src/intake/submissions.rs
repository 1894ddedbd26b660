//! The thread that reads the workers' rings (`gw-intake`) and watches that they are alive.
//!
//! It sleeps on the workers' doorbells and is woken only when it says that it sleeps; while
//! anything comes in nobody makes a system call for it.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, Mutex, Weak,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use gradwire_shm::control::{Heartbeats, SubmissionReader};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::{Worker, WorkerEnd, take};
use crate::{
    node::Node,
    queue::{LocalTensor, TensorKey},
};

/// Records that are read from one ring before the next one's turn.
const TURN: usize = 256;

/// How often the workers' heartbeats are looked at.
const CHECK: Duration = Duration::from_millis(100);

/// A worker's ring and signs of life.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) worker: Arc<Worker>,
    pub(crate) reader: SubmissionReader,
    pub(crate) heartbeats: Heartbeats,
    pub(crate) doorbell: OwnedFd,
}

/// The other threads' end of the intake.
#[derive(Debug)]
pub(crate) struct Intake {
    sources: Sender<Source>,
    again: Sender<(TensorKey, LocalTensor)>,
    waiting: Mutex<Option<Waiting>>,
    bell: Arc<OwnedFd>,
}

fn ring(bell: &impl AsFd) {
    // A full counter is a bell that rings already.
    let _ = rustix::io::write(bell, &1u64.to_ne_bytes());
}

fn silence(bell: &impl AsFd) {
    let _ = rustix::io::read(bell, &mut [0u8; 8]);
}

impl Intake {
    pub(crate) fn new() -> io::Result<Self> {
        let (sources, new) = channel();
        let (again, later) = channel();
        let bell = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let waiting = Mutex::new(Some(Waiting { new, later }));
        Ok(Self { sources, again, waiting, bell })
    }

    /// Reads this worker's ring from now on.
    pub(crate) fn add(&self, source: Source) {
        // The intake ends only with the daemon.
        let _ = self.sources.send(source);
        ring(&*self.bell);
    }

    /// Submits what had to wait for its name to be free. It is done by the intake's thread as
    /// everything is: what is announced and who has joined must be told in the order in which the
    /// queue saw it.
    pub(crate) fn again(&self, key: TensorKey, local: LocalTensor) {
        let _ = self.again.send((key, local));
        ring(&*self.bell);
    }

    /// Starts the thread; it ends when the node is gone. A second start does nothing.
    pub(crate) fn start(&self, node: Weak<Node>) -> io::Result<()> {
        let Some(waiting) = self.waiting.lock().expect("no panic while it is held").take() else {
            return Ok(());
        };
        let reader = Reader { node, waiting, bell: self.bell.clone(), sources: Vec::new() };
        std::thread::Builder::new().name("gw-intake".into()).spawn(move || reader.run())?;
        Ok(())
    }
}

/// What other threads have for the intake's.
#[derive(Debug)]
struct Waiting {
    new: Receiver<Source>,
    later: Receiver<(TensorKey, LocalTensor)>,
}

struct Watched {
    source: Source,
    beats: u32,
    since: Instant,
}

struct Reader {
    node: Weak<Node>,
    waiting: Waiting,
    bell: Arc<OwnedFd>,
    sources: Vec<Watched>,
}

impl Reader {
    fn run(mut self) {
        let (mut checked, mut looked) = (Instant::now(), Instant::now());
        while let Some(node) = self.node.upgrade() {
            while let Ok((key, local)) = self.waiting.later.try_recv() {
                take::again(&node, key, local);
            }
            while let Ok(source) = self.waiting.new.try_recv() {
                self.sources.push(Watched { source, beats: 0, since: Instant::now() });
            }
            let came = self.read(&node);
            if checked.elapsed() >= CHECK {
                checked = Instant::now();
                self.check(&node);
                node.tell_cramped(checked);
                // Waits that began together are told of together.
                if looked.elapsed() >= node.config.stall_warning / 10 {
                    looked = Instant::now();
                    node.tell_stalls(looked);
                }
            }
            if !came {
                drop(node);
                self.sleep();
            }
        }
    }

    /// Takes what has come. False when nothing had.
    fn read(&mut self, node: &Node) -> bool {
        let mut came = false;
        self.sources.retain_mut(|watched| {
            let Source { worker, reader, .. } = &mut watched.source;
            for _ in 0..TURN {
                let taken = match reader.pop() {
                    Ok(None) => return true,
                    Ok(Some(submission)) => take::take(node, worker, submission),
                    Err(error) => Err(error.to_string()),
                };
                came = true;
                if let Err(why) = taken {
                    node.worker_failed(worker, &WorkerEnd::Nonsense(why));
                    return false;
                }
            }
            true
        });
        came
    }

    fn sleep(&self) {
        let empty = self.sources.iter().filter(|w| !w.source.reader.prepare_sleep()).count() == 0;
        if empty {
            let mut bells = vec![PollFd::new(&*self.bell, PollFlags::IN)];
            bells.extend(
                self.sources.iter().map(|w| PollFd::new(&w.source.doorbell, PollFlags::IN)),
            );
            let timeout = Timespec { tv_sec: 0, tv_nsec: CHECK.subsec_nanos().into() };
            // Interrupted or not: it looks at everything again.
            let _ = poll(&mut bells, Some(&timeout));
            silence(&*self.bell);
        }
        for watched in &self.sources {
            watched.source.reader.awake();
            silence(&watched.source.doorbell);
        }
    }

    /// A worker whose heartbeats stand still is there and does nothing: stopped, or swapped out.
    fn check(&mut self, node: &Node) {
        let Some(limit) = node.job.world().map(|w| w.heartbeat_timeout) else { return };
        self.sources.retain_mut(|watched| {
            let beats = watched.source.heartbeats.count();
            watched.source.heartbeats.beat();
            if beats != watched.beats {
                watched.beats = beats;
                watched.since = Instant::now();
            }
            let worker = &watched.source.worker;
            if node.workers.get(worker.local_rank).is_none() {
                return false;
            }
            let silent = watched.since.elapsed();
            if silent <= limit {
                return true;
            }
            let why = format!(
                "no sign of life for {:.1} s{}",
                silent.as_secs_f64(),
                state_of(worker.pid)
            );
            node.worker_failed(worker, &WorkerEnd::Silent(why));
            false
        });
    }
}

/// What the system says of a process, for a text: `; it is stopped (SIGSTOP)`, or nothing.
fn state_of(pid: u32) -> &'static str {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which is in parentheses and may hold anything.
    match stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next()) {
        Some('T' | 't') => "; the process is stopped (SIGSTOP or a debugger)",
        Some('D') => "; the process waits for a disk or a file system",
        _ => "",
    }
}
