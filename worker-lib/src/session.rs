//! A rank's membership in a job.

use std::{
    fmt,
    net::SocketAddr,
    os::fd::RawFd,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use gradwire_proto::{
    Compression, DType, Ending, Failure, FailureKind, JobId, Shape,
    pb::{self, worker_message::Message},
};
use gradwire_shm::arena::{Arena, ArenaStats};
use parking_lot::{Mutex, MutexGuard};

use crate::{
    element::Element,
    error::{GradwireError, Result},
    gate::{Bar, Gate},
    link::{Node, World},
    memory::{Buffer, Memory, Payload, SharedBuffer, Tensor},
    naming::Names,
    process_set::{ProcessSet, ProcessSets},
    shared::{FAREWELL, Shared},
    watch::Threads,
};

/// A rank of a job, attached to its node's daemon. Cheap to clone; clones are the same rank. It
/// leaves the job in good order when [`Session::shutdown`] is called. If its last clone and last
/// handle are dropped without that call, this rank has failed, and all other ranks receive that
/// (TELL). This happens if `main` returns early because of an error.
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
    /// What the operations that this clone starts wait behind.
    gate: Option<Arc<Bar>>,
}

struct Inner {
    shared: Arc<Shared>,
    arena: Arena,
    world: World,
    job: JobId,
    /// The process that has the threads and the right to the connection.
    process: u32,
    threads: Mutex<Option<Threads>>,
    names: Mutex<Names>,
    sets: Mutex<ProcessSets>,
    limits: Limits,
}

/// The limits of a session's calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The largest object that this rank gives to others, in bytes.
    pub(crate) object_bytes: u64,
    /// The most bytes of one tensor that may be adopted; `None` if none may.
    pub(crate) adopt_bytes: Option<u64>,
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
    /// Those of them whose tensors were copied from ordinary memory.
    pub copied_bytes: u64,
    /// Sparse allreduces that moved rows.
    pub sparse_rows: u64,
    /// Sparse allreduces that moved the dense tensor, because that was smaller.
    pub sparse_dense: u64,
    /// How full the shared memory is.
    pub arena: ArenaStats,
}

fn same_process(made_in: u32, used_in: u32) -> Result<()> {
    if made_in == used_in { Ok(()) } else { Err(GradwireError::Forked { made_in, used_in }) }
}

impl Session {
    /// A session of a worker that has attached.
    pub(crate) fn new(
        shared: Arc<Shared>,
        arena: Arena,
        world: World,
        job: JobId,
        process: u32,
        threads: Threads,
        limits: Limits,
    ) -> Self {
        let sets = Mutex::new(ProcessSets::new(world.size, world.rank));
        let (threads, names) = (Mutex::new(Some(threads)), Mutex::default());
        let inner = Inner { shared, arena, world, job, process, threads, names, sets, limits };
        Self { inner: Arc::new(inner), gate: None }
    }

    /// The same rank, for operations whose tensors are still being written: what this clone starts
    /// is checked, and has its name and its handle, at once. The daemon gets it when the gate is
    /// opened. A blocking call also waits for that.
    #[must_use]
    pub fn behind(&self, gate: &Gate) -> Self {
        Self { inner: self.inner.clone(), gate: Some(gate.bar()) }
    }

    /// This rank's number in the job, from 0.
    pub fn rank(&self) -> u32 {
        self.inner.world.rank
    }

    /// How many ranks the job has.
    pub fn size(&self) -> u32 {
        self.inner.world.size
    }

    /// This rank's number on its node, from 0.
    pub fn local_rank(&self) -> u32 {
        self.inner.world.local_rank
    }

    /// How many ranks this node has.
    pub fn local_size(&self) -> u32 {
        self.inner.world.local_size
    }

    /// This node's number among the nodes that have this local rank.
    pub fn cross_rank(&self) -> u32 {
        self.inner.world.cross_rank
    }

    /// How many nodes have this local rank.
    pub fn cross_size(&self) -> u32 {
        self.inner.world.cross_size
    }

    /// The job's nodes, in the order of their ranks.
    pub fn nodes(&self) -> &[Node] {
        &self.inner.world.nodes
    }

    /// How f32 travels in reductions between nodes (`data.compression`).
    pub fn compression(&self) -> Compression {
        self.inner.world.compression
    }

    /// The name of this rank's node; empty if the daemon does not know it.
    pub fn host(&self) -> &str {
        self.inner.world.host()
    }

    /// The epoch: the number of this formation of the world.
    pub fn epoch(&self) -> u64 {
        self.inner.world.epoch.0
    }

    /// The address at which the coordinator serves.
    pub fn coordinator(&self) -> SocketAddr {
        self.inner.world.coordinator
    }

    /// The job's id.
    pub fn job(&self) -> &JobId {
        &self.inner.job
    }

    /// What this session has done so far.
    pub fn stats(&self) -> Stats {
        let (operations, in_flight, [bytes, copied_bytes]) = self.inner.shared.counts();
        let [sparse_rows, sparse_dense] =
            self.inner.shared.sparse.each_ref().map(|count| count.load(Relaxed));
        let arena = self.inner.arena.stats();
        Stats { operations, in_flight, bytes, copied_bytes, sparse_rows, sparse_dense, arena }
    }

    /// A tensor of zeros in shared memory. `shape` is outermost first; empty for a single number.
    ///
    /// # Errors
    /// A shape that is too large, or no memory.
    pub fn zeros<T: Element>(&self, shape: &[usize]) -> Result<Tensor<T>> {
        let dims: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        Ok(Tensor::new(self.buffer(T::DTYPE, Shape::new(&dims)?)?))
    }

    /// A tensor in shared memory with a copy of `values`. `shape` must have as many elements.
    ///
    /// # Errors
    /// Another number of values than the shape has, a shape that is too large, or no memory.
    pub fn tensor<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Tensor<T>> {
        let dims: Vec<u64> = shape.iter().map(|&d| d as u64).collect();
        let mut tensor = Tensor::new(self.buffer_unfilled(T::DTYPE, Shape::new(&dims)?)?);
        if tensor.as_slice().len() != values.len() {
            let text = format!(
                "shape {shape:?} has {} elements, {} were given",
                tensor.as_slice().len(),
                values.len()
            );
            return Err(GradwireError::Invalid(text));
        }
        tensor.as_mut_slice().copy_from_slice(values);
        tensor.memory().mark_copied();
        Ok(tensor)
    }

    /// Like [`Session::zeros`], for an element type that is known at run time only.
    ///
    /// # Errors
    /// Those of [`Session::zeros`].
    pub fn buffer(&self, dtype: DType, shape: Shape) -> Result<Buffer> {
        let mut buffer = self.buffer_unfilled(dtype, shape)?;
        // A block may have been another tensor's before.
        buffer.bytes_mut().fill(0);
        Ok(buffer)
    }

    /// Like [`Session::buffer`], but it contains whatever was in that memory before. This saves a
    /// pass over memory that is written completely anyway.
    ///
    /// # Errors
    /// Those of [`Session::zeros`].
    pub fn buffer_unfilled(&self, dtype: DType, shape: Shape) -> Result<Buffer> {
        self.check_process()?;
        self.inner.shared.check()?;
        let bytes = shape.elements() * dtype.size() as u64;
        let block = self.inner.arena.allocate(bytes).or_else(|error| {
            self.inner.shared.check()?; // the first cause, not its consequence (TELL)
            Err(GradwireError::from(error))
        });
        Ok(Buffer::new(self.inner.shared.noted(block)?, dtype, shape))
    }

    /// Makes memory that the program has already a buffer of bytes, at the same addresses. Then
    /// operations read and write it without a copy. It must be exactly a mapping of the file `fd`,
    /// from that file's first byte on, such as the memory of a tensor that a framework has moved
    /// into shared memory. The descriptor becomes one of the new, sealed memory.
    ///
    /// The addresses still belong to the program. Each operation on the buffer needs an owner that
    /// keeps them mapped ([`SharedBuffer::kept_by`](crate::SharedBuffer::kept_by)). The memory and
    /// its contents stay the program's when the last clone of the buffer is dropped, and after the
    /// session's end.
    ///
    /// Nothing may write to the memory during this call: such a write may be lost.
    ///
    /// # Errors
    /// [`GradwireError`] if it is no such mapping, if there is no memory, or if the daemon does not
    /// take it; or if there are too many ([`Session::may_adopt`]). The memory is usable all the
    /// same.
    pub fn adopt(&self, start: usize, bytes: u64, fd: RawFd) -> Result<SharedBuffer> {
        self.check_process()?;
        self.inner.shared.check()?;
        let shape = Shape::new(&[bytes])?;
        let block = self.inner.arena.adopt(start, bytes, fd)?;
        Ok(Buffer::new(block, DType::U8, shape).into_shared())
    }

    /// Whether a buffer is memory of this session. Operations refuse that of another one.
    pub fn owns(&self, buffer: &SharedBuffer) -> bool {
        buffer.memory().is_in(&self.inner.arena)
    }

    /// The most bytes of one tensor that may be adopted; `None` if none may (`worker.adopt`).
    pub fn adopt_max_bytes(&self) -> Option<u64> {
        self.inner.limits.adopt_bytes
    }

    /// Whether memory may be adopted now. There are at most half of `worker.max_segments` adopted
    /// buffers at a time.
    pub fn may_adopt(&self) -> bool {
        self.inner.limits.adopt_bytes.is_some() && self.inner.arena.may_adopt()
    }

    /// Leaves the job: notifies the daemon and waits for its answer. Operations in flight fail on
    /// the other ranks, and later calls on all clones fail. Calling it again is no error.
    ///
    /// # Errors
    /// [`GradwireError::Failed`] if the job failed before, [`GradwireError::Timeout`] if the
    /// daemon did not answer within 5 s.
    pub fn shutdown(&self) -> Result<()> {
        self.check_process()?;
        self.inner.end(Message::Detach(pb::Detach {}))
    }

    /// Notes that the program has made a step. The metrics of the daemon then show how many steps
    /// this rank makes, and how long ago the last one was. It takes no system call. Optimizers of
    /// Gradwire call it by themselves.
    pub fn mark_step(&self) {
        if self.check_process().is_ok() {
            self.inner.shared.control.mark_step();
        }
    }

    /// Gives up: every waiting and every later call of this process fails with the reason, and the
    /// daemon reports to all other ranks that this one is lost (TELL).
    pub fn abort(&self, reason: &str) {
        if self.check_process().is_err() {
            return;
        }
        let failure = Failure::new(FailureKind::Cancelled, reason).host(self.host());
        self.inner.shared.give_up(failure);
    }

    /// The set of all ranks.
    pub fn global_process_set(&self) -> ProcessSet {
        self.sets().all()
    }

    /// The process sets of this session.
    pub(crate) fn sets(&self) -> MutexGuard<'_, ProcessSets> {
        self.inner.sets.lock()
    }

    /// The counters for names of operations.
    pub(crate) fn names(&self) -> MutexGuard<'_, Names> {
        self.inner.names.lock()
    }

    /// Counts a sparse allreduce.
    pub(crate) fn count_sparse(&self, dense: bool) {
        self.inner.shared.sparse[usize::from(dense)].fetch_add(1, Relaxed);
    }

    /// The largest object that this rank gives to others.
    pub(crate) fn max_object_bytes(&self) -> u64 {
        self.inner.limits.object_bytes
    }

    /// Refuses memory of another session: its places belong to other tensors here.
    pub(crate) fn check_memory<'a>(&self, all: impl IntoIterator<Item = &'a Memory>) -> Result<()> {
        if all.into_iter().all(|memory| memory.is_in(&self.inner.arena)) {
            return Ok(());
        }
        let text = "a tensor was made by another session, perhaps one that was shut down; make it \
                    with this session and copy the values";
        Err(GradwireError::Invalid(text.to_owned()))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.inner.shared
    }

    /// The gate of this clone.
    pub(crate) fn gate(&self) -> Option<&Bar> {
        self.gate.as_deref()
    }

    pub(crate) fn shared_arc(&self) -> Arc<Shared> {
        self.inner.shared.clone()
    }

    /// Refuses to work in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        same_process(self.inner.process, std::process::id())
    }
}

/// What the other ranks receive about a rank whose session ends without [`Session::shutdown`] and
/// without an error before: for example when the program leaves `main` early for a reason of its
/// own.
const DROPPED: &str =
    "it dropped its session without shutdown(), as a program does that ends early";

impl Inner {
    /// Ends the session with a last message.
    fn end(&self, farewell: Message) -> Result<()> {
        let threads = self.threads.lock().take();
        let Some(threads) = threads else { return Ok(()) };
        let result = self.say_farewell(farewell);
        self.shared.finish(Ending::Finished);
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
        // A forked child has neither the threads nor the right to use the connection.
        if self.process == std::process::id() {
            // There is no caller to return an error to; the daemon sees the connection's end in any
            // case.
            let reason = self.shared.last_error().unwrap_or_else(|| DROPPED.to_owned());
            let _ = self.end(Message::GiveUp(pb::GiveUp { reason }));
            self.shared.forget();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { job, world, .. } = &*self.inner;
        write!(f, "Session(job {job}, rank {} of {})", world.rank, world.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_may_share_a_session_and_pass_its_parts_on() {
        fn shared<T: Send + Sync>() {}
        shared::<Session>();
        shared::<Tensor<f32>>();
        shared::<crate::SharedBuffer>();
        shared::<crate::ProcessSet>();
    }

    #[test]
    fn a_forked_child_is_refused() {
        assert!(same_process(7, 7).is_ok());
        let text = same_process(7, 8).unwrap_err().to_string();
        assert!(text.contains("process 7") && text.contains("process 8"), "{text}");
    }
}
