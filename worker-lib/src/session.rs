//! A rank's membership in a job.

use std::{
    fmt,
    net::Shutdown,
    os::fd::AsFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{
    DType, Failure, FailureKind, JobId, Secret, Shape,
    pb::{self, worker_message::Message},
};
use gradwire_shm::{
    arena::{Arena, ArenaConfig, ArenaStats},
    control::WorkerControl,
    segment::HugePages,
};

use crate::{
    element::Element,
    error::{GradwireError, Result},
    launch::{Launch, Tuning, bad},
    link::{self, Node, World},
    memory::{Buffer, Tensor},
    shared::{End, Shared},
    watch::Threads,
};

/// How long the daemon may take to let this rank go.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long a spinning waiter spins where there are cores to spare.
const SPIN: Duration = Duration::from_micros(50);

/// A rank of a job, attached to its node's daemon. Cheap to clone; clones are the same rank. It
/// leaves the job in good order when [`Session::shutdown`] is called. A session whose last clone
/// and last handle are dropped without it has failed, and all other ranks are told so (TELL): that
/// is what happens to a `main` that returns early because of an error.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    arena: Arena,
    world: World,
    job: JobId,
    /// The process that has the threads and the right to the connection.
    process: u32,
    threads: Mutex<Option<Threads>>,
    /// How many operations of each kind had no name: all ranks count alike.
    unnamed: [AtomicU64; 3],
}

/// What a session has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Operations that were submitted.
    pub operations: u64,
    /// Those that have not ended.
    pub in_flight: usize,
    /// Bytes of all submitted operations' tensors.
    pub bytes: u64,
    /// The shared memory.
    pub arena: ArenaStats,
}

/// Makes a session other than from the launcher's variables alone.
#[derive(Debug, Clone)]
#[must_use = "nothing happens before `attach`"]
pub struct SessionBuilder {
    launch: Launch,
    cancel: Option<Arc<AtomicBool>>,
}

impl SessionBuilder {
    /// How much the arena grows at a time, in bytes, 64 KiB at least. Larger tensors get memory of
    /// their own. 64 MiB where not set.
    pub fn arena_segment_bytes(mut self, bytes: u64) -> Self {
        self.launch.tuning.segment_bytes = bytes;
        self
    }

    /// The most shared memory, in bytes. What the machine has, where not set.
    pub fn arena_max_bytes(mut self, bytes: u64) -> Self {
        self.launch.tuning.max_bytes = Some(bytes);
        self
    }

    /// What the arena is made of. [`HugePages::Advise`] where not set.
    pub fn huge_pages(mut self, huge: HugePages) -> Self {
        self.launch.tuning.huge_pages = huge;
        self
    }

    /// How long a waiter spins before it sleeps. 50 µs where not set and there are more than two
    /// cores for each local rank, otherwise 0: spinning costs others their core.
    pub fn spin(mut self, spin: Duration) -> Self {
        self.launch.tuning.spin = Some(spin);
        self
    }

    /// How long the job may take to start (WAIT). 30 s where not set.
    pub fn start_timeout(mut self, timeout: Duration) -> Self {
        self.launch.tuning.start_timeout = timeout;
        self
    }

    /// After how long without a sign of life the daemon counts as lost (WAIT). 4 s where not set.
    pub fn daemon_timeout(mut self, timeout: Duration) -> Self {
        self.launch.tuning.silence = timeout;
        self
    }

    /// Set it to true to end [`SessionBuilder::attach`] within 100 ms.
    pub fn cancel(mut self, cancel: Arc<AtomicBool>) -> Self {
        self.cancel = Some(cancel);
        self
    }

    /// Attaches to the daemon and returns once all ranks of the job have.
    ///
    /// # Errors
    /// [`GradwireError`]: nobody answers, the daemon refuses, time is up, or there is no memory.
    pub fn attach(self) -> Result<Session> {
        let Self { launch, cancel } = self;
        if launch.tuning.segment_bytes < 1 << 16 {
            let given = launch.tuning.segment_bytes.to_string();
            return Err(bad("arena_segment_bytes", &given, "it must be 65536 at least"));
        }
        let process = std::process::id();
        let (control, fd) =
            WorkerControl::create(&format!("gradwire-{}-{process}-control", launch.job))?;
        let cancelled = || cancel.as_ref().is_some_and(|flag| flag.load(Relaxed));
        let (stream, world, doorbell) = link::attach(&launch, fd.as_fd(), &cancelled)?;
        let Launch { job, tuning, .. } = launch;
        let spin = tuning.spin.unwrap_or_else(|| default_spin(world.local_size));
        let shared = Arc::new(Shared::new(control, stream, doorbell, spin));
        let arena = arena(&shared, job.clone(), &tuning);
        let threads = Mutex::new(Some(Threads::start(&shared, tuning.silence)?));
        let unnamed = Default::default();
        Ok(Session(Arc::new(Inner { shared, arena, world, job, process, threads, unnamed })))
    }
}

fn same_process(made_in: u32, used_in: u32) -> Result<()> {
    if made_in == used_in { Ok(()) } else { Err(GradwireError::Forked { made_in, used_in }) }
}

fn default_spin(local_ranks: u32) -> Duration {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    if cores > 2 * local_ranks as usize { SPIN } else { Duration::ZERO }
}

/// An arena whose segments the daemon gets before anything lies in them.
fn arena(shared: &Arc<Shared>, job: JobId, tuning: &Tuning) -> Arena {
    let mut config = ArenaConfig::new(job);
    config.segment_bytes = tuning.segment_bytes;
    config.max_bytes = tuning.max_bytes.unwrap_or(config.max_bytes);
    config.huge = tuning.huge_pages;
    let (max_segments, within) = (tuning.max_segments, tuning.start_timeout);
    let shared = shared.clone();
    let register = move |id: gradwire_shm::segment::SegmentId, segment: &_, fd| {
        let segment: &gradwire_shm::segment::Segment = segment;
        if id.0 >= max_segments {
            let text = format!(
                "this rank may have {max_segments} segments; raise worker.max_segments or worker.arena_segment_bytes"
            );
            return Err(text.into());
        }
        let add = pb::AddSegment { segment: id.0, bytes: segment.bytes() };
        shared.send(Message::AddSegment(add), Some(&fd))?;
        shared.wait_for_segment(id.0, within)?;
        Ok(())
    };
    Arena::new(config, Box::new(register))
}

impl Session {
    /// Attaches as the rank that the launcher's variables say (`GRADWIRE_JOB`, `GRADWIRE_SECRET`,
    /// `GRADWIRE_SOCKET`, `GRADWIRE_LOCAL_RANK`; settings `GRADWIRE_WORKER__…`).
    ///
    /// # Errors
    /// [`GradwireError::NotLaunched`] if they are not there; otherwise as
    /// [`SessionBuilder::attach`].
    pub fn from_env() -> Result<Self> {
        Self::builder_from_env()?.attach()
    }

    /// As [`Session::from_env`], with settings of its own before it attaches.
    ///
    /// # Errors
    /// [`GradwireError::NotLaunched`], or a variable that can't be used.
    pub fn builder_from_env() -> Result<SessionBuilder> {
        Ok(SessionBuilder { launch: Launch::from_env()?, cancel: None })
    }

    /// A session of `job` as rank number `local_rank` of the node whose daemon listens at `socket`:
    /// a path, or `@` and a name in the abstract namespace.
    pub fn builder(
        job: JobId,
        secret: Secret,
        socket: impl Into<String>,
        local_rank: u32,
    ) -> SessionBuilder {
        let socket = socket.into();
        let launch = Launch { job, secret, socket, local_rank, tuning: Tuning::default() };
        SessionBuilder { launch, cancel: None }
    }

    /// This rank's number in the job, from 0.
    pub fn rank(&self) -> u32 {
        self.0.world.rank
    }

    /// How many ranks the job has.
    pub fn size(&self) -> u32 {
        self.0.world.size
    }

    /// This rank's number on its node, from 0.
    pub fn local_rank(&self) -> u32 {
        self.0.world.local_rank
    }

    /// How many ranks this node has.
    pub fn local_size(&self) -> u32 {
        self.0.world.local_size
    }

    /// This node's number among the nodes that have this local rank.
    pub fn cross_rank(&self) -> u32 {
        self.0.world.cross_rank
    }

    /// How many nodes have this local rank.
    pub fn cross_size(&self) -> u32 {
        self.0.world.cross_size
    }

    /// The job's nodes, in the order of their ranks.
    pub fn nodes(&self) -> &[Node] {
        &self.0.world.nodes
    }

    /// The name of this rank's node; empty where the daemon does not know it.
    pub fn host(&self) -> &str {
        self.0.world.host()
    }

    /// Which formation of the world this is.
    pub fn epoch(&self) -> u64 {
        self.0.world.epoch.0
    }

    /// The job's id.
    pub fn job(&self) -> &JobId {
        &self.0.job
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let (operations, in_flight, bytes) = self.0.shared.counts();
        Stats { operations, in_flight, bytes, arena: self.0.arena.stats() }
    }

    /// A tensor of zeros in shared memory. `shape` is outermost first; empty for a single number.
    ///
    /// # Errors
    /// A shape that is too large, or no memory.
    pub fn zeros<T: Element>(&self, shape: &[usize]) -> Result<Tensor<T>> {
        let dims: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        Ok(Tensor::new(self.buffer(T::DTYPE, Shape::new(&dims)?)?))
    }

    /// A tensor in shared memory with a copy of `values`, as many as `shape` says.
    ///
    /// # Errors
    /// Another number of values than the shape has, a shape that is too large, or no memory.
    pub fn tensor<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Tensor<T>> {
        let mut tensor = self.zeros(shape)?;
        if tensor.as_slice().len() != values.len() {
            let text = format!(
                "shape {shape:?} has {} elements, {} were given",
                tensor.as_slice().len(),
                values.len()
            );
            return Err(GradwireError::Invalid(text));
        }
        tensor.as_mut_slice().copy_from_slice(values);
        Ok(tensor)
    }

    /// As [`Session::zeros`], for an element type that is known at run time only.
    ///
    /// # Errors
    /// As there.
    pub fn buffer(&self, dtype: DType, shape: Shape) -> Result<Buffer> {
        self.check_process()?;
        self.0.shared.check()?;
        let bytes = shape.elements() * dtype.size() as u64;
        let block = self.0.arena.allocate(bytes).or_else(|error| {
            self.0.shared.check()?; // the first cause is better than what came of it (TELL)
            Err(GradwireError::from(error))
        });
        let block = self.0.shared.noted(block)?;
        let mut buffer = Buffer::new(block, dtype, shape);
        // A block may have been another tensor's before.
        buffer.bytes_mut().fill(0);
        Ok(buffer)
    }

    /// Leaves the job: tells the daemon and waits until it has let this rank go. Whatever is in
    /// flight fails on the other ranks, and later calls on all clones fail. Calling it again is
    /// no error.
    ///
    /// # Errors
    /// [`GradwireError::Failed`] if the job failed before, [`GradwireError::Timeout`] if the
    /// daemon did not answer within 5 s.
    pub fn shutdown(&self) -> Result<()> {
        self.check_process()?;
        self.0.end(Message::Detach(pb::Detach {}))
    }

    /// Gives up: every waiting and every later call of this process fails with the reason, and the
    /// daemon tells all other ranks that this one is lost (TELL).
    pub fn abort(&self, reason: &str) {
        if self.check_process().is_err() {
            return;
        }
        let shared = &self.0.shared;
        let failure = Failure::new(FailureKind::Cancelled, reason).host(self.host());
        let _ = shared.giving_up.set(failure.clone());
        let give_up = pb::GiveUp { reason: reason.to_owned() };
        let _ = shared.send(Message::GiveUp(give_up), None);
        // The daemon may be writing to our tensors now. It takes the half-closed connection for
        // our death, stops, and closes its half; then the watcher ends the session.
        let _ = shared.stream.shutdown(Shutdown::Write);
        let deadline = Instant::now() + FAREWELL;
        while shared.ended().is_none() && Instant::now() < deadline {
            let seen = shared.control.epoch();
            if shared.ended().is_none() {
                shared.control.wait(seen, Duration::from_millis(50), Duration::ZERO);
            }
        }
        shared.finish(End::Failed(failure));
    }

    pub(crate) fn shared(&self) -> &Shared {
        &self.0.shared
    }

    /// Refuses to work in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        same_process(self.0.process, std::process::id())
    }

    /// The next number for an operation without a name; `kind` is a collective's wire number.
    pub(crate) fn next_unnamed(&self, kind: usize) -> u64 {
        self.0.unnamed.get(kind).map_or(0, |counter| counter.fetch_add(1, Relaxed)) + 1
    }
}

/// What the other ranks are told of a rank whose session ends without [`Session::shutdown`] and
/// without an error before: a program that leaves `main` early for a reason of its own does so.
const DROPPED: &str =
    "it dropped its session without shutdown(), as a program does that ends early";

impl Inner {
    /// Ends the session with a last message.
    fn end(&self, farewell: Message) -> Result<()> {
        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(threads) = threads else { return Ok(()) };
        let result = self.say_farewell(farewell);
        self.shared.finish(End::Closed);
        threads.join(&self.shared);
        result
    }

    fn say_farewell(&self, farewell: Message) -> Result<()> {
        self.shared.check()?;
        let answered = matches!(farewell, Message::Detach(_));
        self.shared.send(farewell, None)?;
        if !answered {
            return Ok(());
        }
        let deadline = Instant::now() + FAREWELL;
        loop {
            let seen = self.shared.control.epoch();
            match self.shared.check() {
                Ok(()) => {}
                Err(GradwireError::Closed) => return Ok(()),
                Err(error) => return Err(error),
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = "the daemon's farewell".to_owned();
                return Err(GradwireError::Timeout { what, after: FAREWELL });
            }
            self.shared.control.wait(seen, left, Duration::ZERO);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // A forked child has neither the threads nor the right to speak on the connection.
        if self.process == std::process::id() {
            // Nobody is left to tell here; the daemon sees the connection's end in any case.
            let reason = self.shared.last_error().unwrap_or_else(|| DROPPED.to_owned());
            let _ = self.end(Message::GiveUp(pb::GiveUp { reason }));
            self.shared.forget();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { job, world, .. } = &*self.0;
        write!(f, "Session(job {job}, rank {} of {})", world.rank, world.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handle::Handle;

    #[test]
    fn threads_may_share_a_session_and_pass_its_parts_on() {
        fn shared<T: Send + Sync>() {}
        shared::<Session>();
        shared::<SessionBuilder>();
        shared::<Tensor<f32>>();
        shared::<Handle<Buffer>>();
    }

    #[test]
    fn a_forked_child_is_told_so() {
        assert!(same_process(7, 7).is_ok());
        let text = same_process(7, 8).unwrap_err().to_string();
        assert!(text.contains("process 7") && text.contains("process 8"), "{text}");
    }
}
