//! From one epoch of an elastic job to the next.
//!
//! The daemons of an epoch end with it, and the ranks that are left attach to their successors. The
//! memory of a rank stays where it is: the arena moves its segments, which the old daemon has seen,
//! into new ones at the same addresses, and hands these over. Then the ranks tell each other what
//! they know ([`crate::formation`]), the process sets come back, and the program goes on.
//!
//! Only then can calls reach the new epoch. Until then they fail with the end of the old one. If
//! the new epoch ends before that, everything begins again, up to `elastic.timeout_ms` (WAIT).

use std::{
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::Duration,
};

use gradwire_proto::{EPOCH_MEETING, Failure, ProcessSetId, pb::worker_message::Message};

use crate::{
    elastic::{Change, Elastic, Rejoined, Turn},
    epoch::Membership,
    error::{GradwireError, Result},
    formation::{Formation, Hello, KnownSet},
    handle::{Handle, WaitError},
    handover,
    options::{AllgatherOptions, Common},
    session::Session,
    shared::{Shared, end::gives_up},
    waits::{self, Limit},
};

/// How often a wait looks whether it must end.
const SLICE: Duration = Duration::from_millis(50);

/// What a process waits for.
pub(crate) fn awaited(worker: u32) -> String {
    format!("the next epoch of the job with this process (worker {worker})")
}

/// Waits for an operation of a new epoch.
fn wait_for<R>(mut handle: Handle<R>, limit: &Limit<'_>) -> Result<R> {
    loop {
        match handle.wait_timeout(SLICE) {
            Ok(result) => return Ok(result),
            Err(WaitError::Failed(error)) => return Err(error),
            Err(WaitError::Timeout { handle: again, .. }) => handle = again,
        }
        limit.check("other ranks have not attached yet")?;
    }
}

impl Session {
    /// Whether the job is elastic: it goes on after a loss, and its size may change.
    pub fn is_elastic(&self) -> bool {
        self.elastic().is_some()
    }

    /// What the launcher wants to change. The program then calls [`Session::rejoin`] on all ranks,
    /// at a moment that they agree on. `None` after that, and if there is nothing to change.
    pub fn pending_change(&self) -> Option<Change> {
        *self.shared().change.lock()
    }

    /// Tells the launcher that this process was asked to leave the job, once. The other ranks leave
    /// the epoch at their next commit ([`Session::pending_change`]), and the next one does not
    /// include this process, which the launcher then ends.
    ///
    /// Returns false if that can't be: the job is not elastic or has ended, or the launcher can't
    /// be told, because standard error is not the pipe that it made, and no copy of that is
    /// left.
    pub fn ask_to_leave(&self) -> bool {
        let Some(elastic) = self.elastic() else { return false };
        if elastic.closed.load(SeqCst)
            || self.shared().check().is_err_and(|error| !error.is_recoverable())
        {
            return false;
        }
        let mut leaves = elastic.leaves.lock();
        *leaves = *leaves || waits::tell_that_it_leaves(&elastic.launch.stderr);
        *leaves
    }

    /// Whether SIGTERM makes this rank leave an elastic job (`elastic.drain_on_term`).
    pub fn drains_on_term(&self) -> bool {
        self.elastic().is_some_and(|elastic| elastic.launch.tuning.elastic.drain_on_term)
    }

    /// Where ranks can meet in this epoch, such as for another library: an address of rank 0's
    /// host, and a port that was free there when the epoch began. `None` if the job is not elastic.
    pub fn meeting_point(&self) -> Option<SocketAddr> {
        let membership = self.membership();
        let port = *membership.meeting_port.get()?;
        Some(SocketAddr::new(membership.world.coordinator.ip(), port))
    }

    /// Continues in the next epoch of an elastic job, after a recoverable error or for a change of
    /// the membership. If this epoch has not ended, leaves it first: then all ranks must call it.
    /// Waits until an epoch has formed that includes this process.
    ///
    /// The rank, the size and the nodes may be others afterwards. Tensors, adopted memory and
    /// process sets stay valid; only a process set of which a member is lost can't be used any
    /// more. Unnamed operations are counted from the beginning. Calls and handles of other threads
    /// fail. If another thread rejoins already, waits for it and returns the same.
    ///
    /// # Errors
    /// [`GradwireError::Invalid`] in a job that is not elastic, [`GradwireError::Timeout`] after
    /// `elastic.timeout_ms`, [`GradwireError::Closed`] after [`Session::shutdown`], the failure of
    /// an epoch that ended with an error that is not recoverable, or if the daemon refuses this
    /// process, or if memory is exhausted. It may be called again.
    ///
    /// # Safety
    /// The memory of tensors moves, at the same addresses. During the call no other thread writes
    /// to a tensor of this session, or unmaps adopted memory: a write may be lost, although the
    /// thread has a reference to the tensor.
    #[track_caller]
    pub unsafe fn rejoin(&self) -> Result<Rejoined> {
        // SAFETY: the caller promises the same.
        unsafe { self.rejoin_unless(&AtomicBool::new(false)) }
    }

    /// Like [`Session::rejoin`]; ends with an error within about 100 ms once `cancel` is true.
    ///
    /// # Errors
    /// As for [`Session::rejoin`].
    ///
    /// # Safety
    /// As for [`Session::rejoin`].
    #[track_caller]
    pub unsafe fn rejoin_unless(&self, cancel: &AtomicBool) -> Result<Rejoined> {
        self.check_process()?;
        let elastic = self.elastic().ok_or_else(|| {
            let text = "the job is not elastic, so it has no further epoch; start it with \
                        `gradwire run --min-np N`";
            GradwireError::Invalid(text.to_owned())
        })?;
        let stopped = || {
            if elastic.closed.load(SeqCst) {
                return Some(GradwireError::Closed);
            }
            cancel.load(Relaxed).then(|| waits::cancelled("rejoining the job"))
        };
        let within = elastic.launch.tuning.elastic.timeout;
        let limit = Limit::new(awaited(elastic.worker), within, &stopped);
        let session = self.called_at(self.site());
        let old = session.membership();
        let mut turn = loop {
            if let Some(turn) = elastic.turn.try_lock_for(SLICE) {
                break turn;
            }
            limit.check("another thread rejoins")?;
        };
        // Another thread was faster.
        let current = session.membership().world.epoch;
        if let Some(rejoined) = turn.rejoined.clone().filter(|_| current > old.world.epoch) {
            return Ok(rejoined);
        }
        limit.check("")?;
        match old.shared.check() {
            Ok(()) => old.leave(),
            Err(error) if error.is_recoverable() => old.close(),
            Err(error) => return Err(error),
        }
        // SAFETY: the caller promises the same.
        let rejoined = unsafe { session.next_epoch(elastic, &mut turn, &limit) };
        old.shared.noted(rejoined)
    }

    /// Forms the first epoch of this process, to which it has attached. If that ends, joins the
    /// next one.
    pub(crate) fn first_epoch(&self, limit: &Limit<'_>) -> Result<()> {
        let Some(elastic) = self.elastic() else { return Ok(()) };
        let mut turn = elastic.turn.lock();
        let membership = self.membership();
        match self.form(elastic, &membership, limit) {
            Err(GradwireError::Recoverable(failure)) => membership.follow(&failure),
            formed => return formed.map(drop),
        }
        // SAFETY: nobody has a tensor, because no caller has the session yet.
        unsafe { self.next_epoch(elastic, &mut turn, limit) }.map(drop)
    }

    /// Joins the next epoch that forms.
    ///
    /// # Safety
    /// As for [`Session::rejoin`].
    unsafe fn next_epoch(
        &self,
        elastic: &Elastic,
        turn: &mut Turn,
        limit: &Limit<'_>,
    ) -> Result<Rejoined> {
        loop {
            let (shared, world) =
                waits::attach_after(turn.attached, &elastic.launch, self.counts(), limit)?;
            turn.attached = world.epoch;
            let silence = elastic.launch.tuning.worker.daemon_timeout;
            let next = Arc::new(Membership::start(shared, world, self.arena(), silence)?);
            // SAFETY: the caller promises the same.
            let renewed = unsafe { self.renew_memory(elastic, &next.shared) };
            let formed = renewed.and_then(|()| self.form(elastic, &next, limit));
            match formed {
                Ok(rejoined) => {
                    turn.rejoined = Some(rejoined.clone());
                    return Ok(rejoined);
                }
                Err(error) => {
                    next.abandon(&error);
                    if !error.is_recoverable() {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// Moves the memory to the daemon of a new epoch.
    ///
    /// # Safety
    /// As for [`Session::rejoin`].
    unsafe fn renew_memory(&self, elastic: &Elastic, shared: &Arc<Shared>) -> Result<()> {
        let (register, release) = handover::functions(shared, &elastic.launch.tuning);
        // SAFETY: no operation is in flight: the old epoch has ended, and nothing else reaches the
        // new one yet. The caller promises the rest.
        let renewed = unsafe { self.arena().renew(register, release) };
        renewed.map(drop).or_else(|error| {
            shared.check()?; // the first cause, not its consequence (TELL)
            Err(error.into())
        })
    }

    /// Makes an epoch to which this process has attached the current one, once all ranks know each
    /// other.
    fn form(
        &self,
        elastic: &Elastic,
        next: &Arc<Membership>,
        limit: &Limit<'_>,
    ) -> Result<Rejoined> {
        let session = self.pinned_to(next.clone());
        let old = self.membership();
        let epoch = next.world.epoch.0;
        let hello = {
            let mut past = self.past();
            let hello = past.hello(elastic.worker, old.sets.lock().known());
            past.enter(epoch);
            hello
        };
        let (hellos, port) = session.introduce(&hello, limit)?;
        let formation = Formation::of(&hellos).map_err(|what| {
            GradwireError::Protocol(format!(
                "what the ranks of epoch {epoch} said is wrong: {what}"
            ))
        })?;
        let _ = next.workers.set(formation.workers.clone());
        let _ = next.meeting_port.set(port);
        let back = session.register(&formation, limit)?;
        let place = (next.world.size, next.world.rank);
        let sets = old.sets.lock().renewed(place, &formation, &back);
        *next.sets.lock() = sets;
        let vote = self.past().form(epoch, &formation, &hello);
        self.replace_membership(next.clone());
        Ok(Rejoined { epoch, newcomers: formation.newcomers, vote })
    }

    /// Exchanges what the ranks know, and the port of rank 0 for a meeting of the ranks.
    fn introduce(&self, hello: &Hello, limit: &Limit<'_>) -> Result<(Vec<Hello>, u16)> {
        let broken = |why: String| GradwireError::Protocol(format!("a rank's introduction: {why}"));
        let port = if self.rank() == 0 { free_port() } else { 0 };
        let own =
            postcard::to_allocvec(&(hello, port)).map_err(|error| broken(error.to_string()))?;
        let own = self.tensor(&own, &[own.len()])?;
        let common = Common { name: Some(EPOCH_MEETING.to_owned()), ..Common::default() };
        let handle = self.allgather_async(own, AllgatherOptions { common, op: None })?;
        let (_, all) = wait_for(handle, limit)?;
        let mut rest = all.tensor.as_slice();
        let mut hellos: Vec<(Hello, u16)> = Vec::with_capacity(all.rows.len());
        for bytes in all.rows {
            let (one, others) =
                rest.split_at_checked(bytes).ok_or_else(|| broken("it is cut off".into()))?;
            rest = others;
            hellos.push(postcard::from_bytes(one).map_err(|error| broken(error.to_string()))?);
        }
        let (hellos, ports): (Vec<Hello>, Vec<u16>) = hellos.into_iter().unzip();
        Ok((hellos, ports.first().copied().unwrap_or_default()))
    }

    /// Registers the process sets that come back; returns them with their new numbers.
    fn register(
        &self,
        formation: &Formation,
        limit: &Limit<'_>,
    ) -> Result<Vec<(KnownSet, ProcessSetId)>> {
        let add = |set: &KnownSet| self.add_process_set_async(&formation.ranks_of(set));
        let handles = formation.sets.iter().map(add).collect::<Result<Vec<_>>>()?;
        let mut back = Vec::with_capacity(handles.len());
        for (known, handle) in formation.sets.iter().zip(handles) {
            back.push((known.clone(), wait_for(handle, limit)?.now().number()));
        }
        Ok(back)
    }
}

/// A TCP port of this host that no process uses now; 0 if the system has none.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0))
        .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)));
    listener.and_then(|listener| listener.local_addr()).map_or(0, |address| address.port())
}

impl Membership {
    /// Ends a membership that did not become the current one.
    fn abandon(&self, error: &GradwireError) {
        match error {
            GradwireError::Recoverable(failure) => self.follow(failure),
            // The program wants it, or can try again: the other ranks go on without this one.
            GradwireError::Closed | GradwireError::Timeout { .. } => self.leave(),
            error => {
                let reason = format!("it could not join the job again: {error}");
                let _ = self.end(Message::GiveUp(gives_up(reason, None)));
            }
        }
        // Nobody else uses it.
        self.shared.forget();
    }

    /// Ends a membership that has failed before the ranks knew each other. The daemon may have
    /// failed only an operation, and must know that this process is not the cause (TELL).
    fn follow(&self, failure: &Failure) {
        let reason = format!("it could not join the job: {failure}");
        let _ = self.end(Message::GiveUp(gives_up(reason, Some(failure))));
    }
}
