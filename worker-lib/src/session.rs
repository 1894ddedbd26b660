//! A rank's membership in a job.

use std::{
    fmt, mem,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use gradwire_keys::{CheckFinite, CheckGradients, StopSignal};
use gradwire_proto::{
    Compression, DType, Failure, FailureKind, JobId, Shape,
    pb::{self, worker_message::Message},
};
use gradwire_shm::arena::Arena;
use parking_lot::{Mutex, MutexGuard, RwLock};

use crate::{
    background::Background,
    call_site::CallSite,
    elastic::Elastic,
    element::Element,
    epoch::Membership,
    error::{GradwireError, Result},
    formation::Past,
    gate::{Bar, Gate},
    link::{Node, World},
    memory::{Buffer, Memory, Payload, SharedBuffer, Tensor},
    panics,
    pauses::Pauses,
    process_set::ProcessSet,
    shared::{Shared, end::gives_up},
    sizes,
    stats::{Counts, Stats},
};

/// A rank of a job, attached to its node's daemon. Cheap to clone; clones are the same rank. It
/// leaves the job cleanly when [`Session::shutdown`] is called. If its last clone and last handle
/// are dropped without that call, for example because `main` returns early with an error, this rank
/// has failed, and all other ranks receive the failure (TELL).
#[derive(Clone)]
pub struct Session {
    inner: Arc<Inner>,
    /// The membership of everything that this clone does; by default, that of the moment.
    pinned: Option<Arc<Membership>>,
    /// Holds back the operations that this clone starts.
    gate: Option<Arc<Bar>>,
    /// How long a blocking call of this clone may take.
    limit: Option<Duration>,
    /// Where the program calls this clone, if the caller is not the program.
    site: Option<CallSite>,
}

struct Inner {
    current: RwLock<Arc<Membership>>,
    /// In an elastic job: what leads to the next epoch.
    elastic: Option<Elastic>,
    past: Mutex<Past>,
    counts: Arc<Counts>,
    pauses: Mutex<Pauses>,
    arena: Arena,
    job: JobId,
    /// The process that owns the threads and the connection.
    process: u32,
    limits: Limits,
    background: Background,
}

/// The limits of a session's calls.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The largest object that this rank may send, in bytes.
    pub(crate) object_bytes: usize,
    /// The largest tensor that may be adopted, in bytes; `None` if adopting is off.
    pub(crate) adopt_bytes: Option<usize>,
    /// Whether unnamed operations may be started by any thread.
    pub(crate) any_thread: bool,
    /// When gradients are compared by value.
    pub(crate) check_gradients: CheckGradients,
    /// What happens when this rank contributes a value that is not finite.
    pub(crate) check_finite: CheckFinite,
    /// The signal with which a batch system asks all ranks to stop.
    pub(crate) stop_signal: StopSignal,
}

fn same_process(made_in: u32, used_in: u32) -> Result<()> {
    if made_in == used_in { Ok(()) } else { Err(GradwireError::Forked { made_in, used_in }) }
}

impl Session {
    /// The session of a process that has attached.
    pub(crate) fn new(
        membership: Membership,
        elastic: Option<Elastic>,
        counts: Arc<Counts>,
        arena: Arena,
        job: JobId,
        process: u32,
        limits: Limits,
    ) -> Self {
        let current = RwLock::new(Arc::new(membership));
        let (past, pauses, background) = Default::default();
        let inner = Inner {
            current,
            elastic,
            past,
            counts,
            pauses,
            arena,
            job,
            process,
            limits,
            background,
        };
        Self { inner: Arc::new(inner), pinned: None, gate: None, limit: None, site: None }
    }

    /// The same rank in the epoch of the moment, for a call of several steps that must agree.
    pub(crate) fn pinned(&self) -> Self {
        self.pinned_to(self.membership())
    }

    /// The same rank in one epoch: what this clone does never reaches another one.
    pub(crate) fn pinned_to(&self, membership: Arc<Membership>) -> Self {
        Self { pinned: Some(membership), ..self.clone() }
    }

    /// The next epoch has formed.
    pub(crate) fn replace_membership(&self, next: Arc<Membership>) {
        let old = mem::replace(&mut *self.inner.current.write(), next);
        drop(old); // without the lock
        self.tell_pause_again();
    }

    /// What leads to the next epoch; `None` if the job is not elastic.
    pub(crate) fn elastic(&self) -> Option<&Elastic> {
        self.inner.elastic.as_ref()
    }

    /// What this rank remembers from earlier epochs.
    pub(crate) fn past(&self) -> MutexGuard<'_, Past> {
        self.inner.past.lock()
    }

    /// The pauses of the program.
    pub(crate) fn pauses(&self) -> MutexGuard<'_, Pauses> {
        self.inner.pauses.lock()
    }

    /// What this session counts over all epochs.
    pub(crate) fn counts(&self) -> &Arc<Counts> {
        &self.inner.counts
    }

    /// The membership of what this clone does.
    pub(crate) fn membership(&self) -> Arc<Membership> {
        self.pinned.clone().unwrap_or_else(|| self.inner.current.read().clone())
    }

    /// The same rank, for operations whose tensors are still being written. An operation that the
    /// new clone starts is checked and gets its name and handle at once; it is submitted to the
    /// daemon when the gate is opened. A blocking call waits for that, too.
    #[must_use]
    pub fn behind(&self, gate: &Gate) -> Self {
        Self { gate: Some(gate.bar()), ..self.clone() }
    }

    /// The same rank, whose blocking calls and waits may take this long. A call that takes longer
    /// fails, and this rank has failed, as after [`Session::abort`]: the daemon would still use the
    /// tensor that the call has borrowed. To go on after a time-out, start the operation with a
    /// handle and use [`Handle::wait_timeout`](crate::Handle::wait_timeout).
    ///
    /// ```no_run
    /// # fn main() -> Result<(), gradwire_worker::GradwireError> {
    /// # let session = gradwire_worker::Session::from_env()?;
    /// session.within(std::time::Duration::from_secs(60)).barrier()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn within(&self, limit: Duration) -> Self {
        Self { limit: Some(limit), ..self.clone() }
    }

    /// The same rank, for calls that come from this line of the program. For language bindings, and
    /// for libraries whose callers matter more than their own lines.
    #[must_use]
    pub fn called_at(&self, site: CallSite) -> Self {
        Self { site: Some(site), ..self.clone() }
    }

    /// The line of the program that makes this call.
    #[track_caller]
    pub(crate) fn site(&self) -> CallSite {
        match self.site {
            Some(site) => site,
            None => CallSite::here(),
        }
    }

    /// When a blocking call that begins now must have ended.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        // If it can't be represented, there is none.
        self.limit.and_then(|limit| Instant::now().checked_add(limit))
    }

    /// Gives up, because a blocking call has not ended in time. Returns its error.
    pub(crate) fn out_of_time(&self, membership: &Membership, what: &str) -> GradwireError {
        let limit = self.limit.unwrap_or_default();
        let text = format!("{what} did not complete within {limit:?}");
        let Membership { shared, world, .. } = membership;
        let failure = Failure::new(FailureKind::Timeout, text).host(world.host());
        shared.give_up(failure.clone());
        shared.check().err().unwrap_or(GradwireError::Failed(failure))
    }

    /// This rank's number in the job, from 0.
    pub fn rank(&self) -> u32 {
        self.membership().world.rank
    }

    /// The number of ranks of the job.
    pub fn size(&self) -> u32 {
        self.membership().world.size
    }

    /// This rank's number on its node, from 0.
    pub fn local_rank(&self) -> u32 {
        self.membership().world.local_rank
    }

    /// The number of ranks of this node.
    pub fn local_size(&self) -> u32 {
        self.membership().world.local_size
    }

    /// This node's number among the nodes that have this local rank.
    pub fn cross_rank(&self) -> u32 {
        self.membership().world.cross_rank
    }

    /// The number of nodes that have this local rank.
    pub fn cross_size(&self) -> u32 {
        self.membership().world.cross_size
    }

    /// The job's nodes, in the order of their ranks.
    pub fn nodes(&self) -> Vec<Node> {
        self.membership().world.nodes.clone()
    }

    /// The wire format of f32 in reductions between nodes (`data.compression`).
    pub fn compression(&self) -> Compression {
        self.membership().world.compression
    }

    /// The name of this rank's node; empty if unknown.
    pub fn host(&self) -> String {
        self.membership().world.host().to_owned()
    }

    /// The epoch: the number of this formation of the world.
    pub fn epoch(&self) -> u64 {
        self.membership().world.epoch.0
    }

    /// The coordinator's address.
    pub fn coordinator(&self) -> SocketAddr {
        self.membership().world.coordinator
    }

    /// The job's id.
    pub fn job(&self) -> &JobId {
        &self.inner.job
    }

    /// The counters of this session.
    pub fn stats(&self) -> Stats {
        let shared = self.shared();
        let (operations, in_flight, [bytes, copied_bytes]) = shared.counts();
        let [sparse_rows, sparse_dense] =
            shared.counts.sparse.each_ref().map(|count| count.load(Relaxed));
        let arena = self.inner.arena.stats().into();
        Stats { operations, in_flight, bytes, copied_bytes, sparse_rows, sparse_dense, arena }
    }

    /// A tensor of zeros in shared memory. `shape` is outermost first; empty for a single number.
    ///
    /// # Errors
    /// If the shape is too large, or memory can't be allocated.
    pub fn zeros<T: Element>(&self, shape: &[usize]) -> Result<Tensor<T>> {
        Ok(Tensor::new(self.buffer(T::DTYPE, shape)?))
    }

    /// A tensor in shared memory with a copy of `values`.
    ///
    /// # Errors
    /// If the shape has another number of elements or is too large, or memory can't be allocated.
    pub fn tensor<T: Element>(&self, values: &[T], shape: &[usize]) -> Result<Tensor<T>> {
        let bytes = bytemuck::cast_slice(values);
        Ok(Tensor::new(self.copied(T::DTYPE, sizes::shape(shape)?, bytes)?))
    }

    /// A buffer in shared memory, of one dimension, with a copy of these elements: like
    /// [`Session::tensor`], for an element type that is known only at run time. `bytes` are in the
    /// machine's byte order.
    ///
    /// # Errors
    /// If `bytes` are not whole elements, or memory can't be allocated.
    pub fn buffer_from(&self, dtype: DType, bytes: &[u8]) -> Result<Buffer> {
        self.copied(dtype, sizes::elements(dtype, bytes)?, bytes)
    }

    /// A buffer with a copy of these elements.
    pub(crate) fn copied(&self, dtype: DType, shape: Shape, bytes: &[u8]) -> Result<Buffer> {
        let given = (bytes.len() / dtype.size()) as u64;
        if shape.elements() != given {
            let (dims, expected) = (shape.dims(), shape.elements());
            let text = format!("shape {dims:?} has {expected} elements, but {given} were given");
            return Err(GradwireError::Invalid(text));
        }
        let mut buffer = self.new_buffer(dtype, shape)?;
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer.memory().mark_copied();
        Ok(buffer)
    }

    /// Like [`Session::zeros`], for an element type that is known only at run time.
    pub fn buffer(&self, dtype: DType, shape: &[usize]) -> Result<Buffer> {
        let mut buffer = self.buffer_unfilled(dtype, shape)?;
        // Another tensor may have used the block before.
        buffer.bytes_mut().fill(0);
        Ok(buffer)
    }

    /// Like [`Session::buffer`], but with undefined contents. This saves a pass over memory that
    /// the caller overwrites completely.
    pub fn buffer_unfilled(&self, dtype: DType, shape: &[usize]) -> Result<Buffer> {
        self.new_buffer(dtype, sizes::shape(shape)?)
    }

    /// A buffer with undefined contents.
    pub(crate) fn new_buffer(&self, dtype: DType, shape: Shape) -> Result<Buffer> {
        self.check_process()?;
        let shared = self.shared();
        shared.check()?;
        let bytes = shape.elements() * dtype.size() as u64;
        let block = self.inner.arena.allocate(bytes).or_else(|error| {
            shared.check()?; // the first cause, not its consequence (TELL)
            Err(GradwireError::from(error))
        });
        Ok(Buffer::new(shared.noted(block)?, dtype, shape))
    }

    /// Whether a buffer belongs to this session. Operations refuse buffers of other sessions.
    pub fn owns(&self, buffer: &SharedBuffer) -> bool {
        buffer.memory().is_in(&self.inner.arena)
    }

    /// When an optimizer compares its gradients by value (`checks.gradients`).
    pub fn check_gradients(&self) -> CheckGradients {
        self.inner.limits.check_gradients
    }

    /// The signal with which a batch system asks all ranks to stop, besides SIGTERM
    /// (`worker.stop_signal`).
    pub fn stop_signal(&self) -> StopSignal {
        self.inner.limits.stop_signal
    }

    /// Leaves the job: notifies the daemon and waits for its answer. Operations in flight fail on
    /// the other ranks, and later calls on all clones fail. May be called again.
    ///
    /// A program calls it at the end of `main`: a rank that ends without it has failed. This also
    /// holds for [`std::process::exit`], which does not drop the session. A rank can't come back:
    /// a second session of the same rank in the same job is refused.
    ///
    /// # Errors
    /// [`GradwireError::Failed`] if the job has failed, [`GradwireError::Timeout`] if the daemon
    /// did not answer within 5 s.
    pub fn shutdown(&self) -> Result<()> {
        self.check_process()?;
        if let Some(elastic) = self.elastic() {
            elastic.close();
        }
        self.membership().end(Message::Detach(pb::Detach {}))
    }

    /// Marks a step of the program, for the daemon's metrics about the steps of this rank. Makes no
    /// system call. Gradwire's optimizers call it themselves.
    pub fn mark_step(&self) {
        if self.check_process().is_ok() {
            self.shared().control.mark_step();
        }
    }

    /// Gives up: every waiting and every later call of this process fails with the reason, and all
    /// other ranks receive a failure of this rank (TELL).
    pub fn abort(&self, reason: &str) {
        self.abort_after(reason, None);
    }

    /// As [`Session::abort`], because of a failure that this session has reported. If another rank
    /// is at fault, or the ranks disagree, all other ranks receive that failure instead of one that
    /// blames this rank.
    pub fn abort_after(&self, reason: &str, cause: Option<&Failure>) {
        if self.check_process().is_err() {
            return;
        }
        let failure = Failure::new(FailureKind::Cancelled, reason).host(self.host());
        self.shared().give_up_after(failure, cause);
    }

    /// The failure that the last error of this session reported, if the last error had one.
    pub fn last_failure(&self) -> Option<Failure> {
        self.shared().last_error().and_then(|last| last.cause)
    }

    /// The set of all ranks.
    pub fn global_process_set(&self) -> ProcessSet {
        self.membership().sets.lock().all()
    }

    /// Counts a sparse allreduce.
    pub(crate) fn count_sparse(&self, dense: bool) {
        self.counts().sparse[usize::from(dense)].fetch_add(1, Relaxed);
    }

    /// The largest object that this rank may send, in bytes.
    pub fn max_object_bytes(&self) -> usize {
        self.inner.limits.object_bytes
    }

    /// Refuses memory of other sessions: here its places belong to other tensors. Also refuses
    /// memory that the daemon does not have.
    pub(crate) fn check_memory<'a>(
        &self,
        all: impl IntoIterator<Item = &'a Memory, IntoIter: Clone>,
    ) -> Result<()> {
        let all = all.into_iter();
        let text = if !all.clone().all(|memory| memory.is_in(&self.inner.arena)) {
            "a tensor belongs to another session, perhaps one that was shut down; create a tensor \
             with this session and copy the values"
        } else if all.clone().any(Memory::is_retired) {
            "the memory of a tensor could not be kept in this epoch of the job, because a GPU's \
             driver uses it or the program has unmapped it; create another tensor and copy the \
             values"
        } else {
            return Ok(());
        };
        Err(GradwireError::Invalid(text.to_owned()))
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.inner.arena
    }

    /// The limits of the session's calls.
    pub(crate) fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// The thread for work that the program does not wait for.
    pub(crate) fn background(&self) -> &Background {
        &self.inner.background
    }

    pub(crate) fn shared(&self) -> Arc<Shared> {
        self.membership().shared.clone()
    }

    /// The gate of this clone.
    pub(crate) fn gate(&self) -> Option<&Bar> {
        self.gate.as_deref()
    }

    /// Refuses calls in a forked child.
    pub(crate) fn check_process(&self) -> Result<()> {
        same_process(self.inner.process, std::process::id())
    }
}

/// The failure that other ranks receive if a session ends without [`Session::shutdown`] and without
/// an earlier error, for example if the program leaves `main` early.
const DROPPED: &str =
    "it dropped its session without shutdown(), for example because the program ended early";

impl Drop for Inner {
    fn drop(&mut self) {
        // A forked child does not have the threads and must not use the connection.
        if self.process == std::process::id() {
            let membership = self.current.get_mut();
            let (reason, cause) = match (panics::current(), membership.shared.last_error()) {
                (Some(panicked), _) => (panicked, None),
                (None, Some(last)) => (last.text, last.cause),
                (None, None) => (DROPPED.to_owned(), None),
            };
            // The error is ignored: the daemon sees the end of the connection in any case.
            let _ = membership.end(Message::GiveUp(gives_up(reason, cause.as_ref())));
            membership.shared.forget();
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (job, membership) = (&self.inner.job, self.membership());
        let World { rank, size, .. } = membership.world;
        write!(f, "Session(job {job}, rank {rank} of {size})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_can_share_a_session_and_its_parts() {
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
