//! Calls without tensors: barriers, joins and process sets.

use gradwire_proto::{Collective, ProcessSetId, Request};

use super::{Call, Finished, Started, Target};
use crate::{
    epoch::Membership,
    error::{GradwireError, Result},
    formation::KnownSet,
    handle::Handle,
    options::{BarrierOptions, Common, JoinOptions},
    process_set::{Members, ProcessSet},
    session::Session,
};

impl Session {
    /// Returns once every rank has called it.
    #[track_caller]
    pub fn barrier(&self) -> Result<()> {
        self.barrier_with(BarrierOptions::default())
    }

    /// Starts [`Session::barrier`] without waiting for it.
    #[track_caller]
    pub fn barrier_async(&self) -> Result<Handle<()>> {
        self.barrier_with_async(BarrierOptions::default())
    }

    /// Like [`Session::barrier`], for the ranks of a process set.
    #[track_caller]
    pub fn barrier_with(&self, options: BarrierOptions) -> Result<()> {
        self.barrier_with_async(options)?.wait()
    }

    /// Starts [`Session::barrier_with`] without waiting for it.
    #[track_caller]
    pub fn barrier_with_async(&self, options: BarrierOptions) -> Result<Handle<()>> {
        let started = self.start_empty(options.common, Request::barrier())?;
        Ok(self.handle(started, |_| Ok(())))
    }

    /// Reports that this rank has no more data, and waits until all ranks have done so. Until then
    /// the other ranks continue without it: averages are over the ranks that take part, gathered
    /// tensors have no rows of this rank, and an operation that needs it fails with that reason.
    /// Returns the rank that joined last. Afterwards unnamed operations are counted from the
    /// beginning, because ranks have made different numbers of them.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also while an operation of several parts (objects, sparse
    /// allreduces, Adasum, large slices) of this rank is in flight.
    #[track_caller]
    pub fn join(&self, options: JoinOptions) -> Result<u32> {
        self.join_async(options)?.wait()
    }

    /// Starts [`Session::join`] without waiting for it. This rank must not start anything in the
    /// process set until it has waited for the handle.
    #[track_caller]
    pub fn join_async(&self, options: JoinOptions) -> Result<Handle<u32>> {
        // A joined rank would not submit the remaining parts.
        if self.tasks() > 0 {
            let text = format!(
                "rank {} can't join while {} of its operations of several parts (objects, sparse \
                 allreduces, Adasum, large slices) are in flight; wait for their handles first",
                self.rank(),
                self.tasks()
            );
            return Err(GradwireError::Invalid(text));
        }
        let common = Common { name: Some(Request::JOIN.to_owned()), ..options.common };
        let started = self.start_empty(common, Request::empty(Collective::Join))?;
        let (membership, set) = (started.membership.clone(), started.set);
        Ok(self.handle(started, move |finished| membership.joined(set, &finished)))
    }

    /// Creates a process set of these ranks, in any order. All ranks of the job must call it with
    /// the same ranks, whether they are members or not, and none of them may have joined.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if `ranks` is empty, or contains a rank twice or one
    /// that is not in the job.
    #[track_caller]
    pub fn add_process_set(&self, ranks: &[u32]) -> Result<ProcessSet> {
        self.add_process_set_async(ranks)?.wait()
    }

    /// Starts [`Session::add_process_set`] without waiting for it.
    #[track_caller]
    pub fn add_process_set_async(&self, ranks: &[u32]) -> Result<Handle<ProcessSet>> {
        let session = self.pinned();
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        let wrong = if ranks.is_empty() {
            Some("a process set needs at least one rank".to_owned())
        } else if let Some(rank) = ranks.iter().find(|rank| **rank >= session.size()) {
            let last = session.size() - 1;
            Some(format!(
                "process set contains rank {rank}, but the job has only ranks 0 to {last}"
            ))
        } else {
            let twice = ranks.windows(2).find(|pair| pair[0] == pair[1]);
            twice.map(|pair| format!("process set contains rank {} twice", pair[0]))
        };
        if let Some(text) = wrong {
            return Err(GradwireError::Invalid(text));
        }
        let list = ranks.iter().map(|&rank| u64::from(rank)).collect();
        let request = Request { list, ..Request::empty(Collective::AddProcessSet) };
        let started = session.start_empty(Common::default(), request)?;
        let membership = started.membership.clone();
        Ok(session.handle(started, move |finished| membership.added(&ranks, &finished)))
    }

    /// Removes a process set. All ranks of the job must call it, members or not, and nothing may be
    /// in flight in the set.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also for the set of all ranks, and while an operation of
    /// several parts (objects, sparse allreduces, Adasum, large slices) of this rank is in flight
    /// in the set.
    #[track_caller]
    pub fn remove_process_set(&self, set: ProcessSet) -> Result<()> {
        self.remove_process_set_async(set)?.wait()
    }

    /// Starts [`Session::remove_process_set`] without waiting for it.
    #[track_caller]
    pub fn remove_process_set_async(&self, set: ProcessSet) -> Result<Handle<()>> {
        self.remove_later(set, false)
    }

    /// Removes a process set together with the operations that wait in it. An operation that only
    /// some of its ranks have submitted fails on those ranks. An operation that all of them have
    /// submitted is done first. All ranks of the job must call it, members or not.
    #[track_caller]
    pub fn give_up_process_set_async(&self, set: ProcessSet) -> Result<Handle<()>> {
        self.remove_later(set, true)
    }

    #[track_caller]
    fn remove_later(&self, set: ProcessSet, give_up: bool) -> Result<Handle<()>> {
        let members = self.membership().sets.lock().check(&set)?;
        if members.number() == ProcessSetId::GLOBAL {
            let text = "the process set of all ranks can't be removed".to_owned();
            return Err(GradwireError::Invalid(text));
        }
        // As for a join. Operations that are given up fail with that reason and end.
        let tasks = self.tasks_of(members.number());
        if tasks > 0 && !give_up {
            let text = format!(
                "rank {} can't remove {set} while {tasks} of its operations of several parts \
                 (objects, sparse allreduces, Adasum, large slices) are in flight there; wait for \
                 their handles first",
                self.rank()
            );
            return Err(GradwireError::Invalid(text));
        }
        let mut list = vec![u64::from(members.number().0)];
        list.extend(give_up.then_some(Request::GIVE_UP));
        let request = Request { list, ..Request::empty(Collective::RemoveProcessSet) };
        let started = self.start_empty(Common::default(), request)?;
        let membership = started.membership.clone();
        Ok(self.handle(started, move |_| {
            membership.sets.lock().remove(members.number());
            membership.names.lock().removed(members.number());
            Ok(())
        }))
    }

    #[track_caller]
    fn start_empty(&self, common: Common, request: Request) -> Result<Started> {
        let call: Call = self.call(common, request)?;
        self.start(call, &[], Target::InPlace)
    }
}

impl Membership {
    fn joined(&self, set: ProcessSetId, finished: &Finished) -> Result<u32> {
        self.names.lock().joined(set);
        let last = u32::try_from(finished.aux).ok().filter(|rank| *rank < self.world.size);
        last.ok_or_else(|| {
            let text =
                format!("it reported that rank {} joined last, which does not exist", finished.aux);
            GradwireError::Protocol(text)
        })
    }

    fn added(&self, ranks: &[u32], finished: &Finished) -> Result<ProcessSet> {
        let refused = || {
            let text = format!("it gave a new process set the invalid number {}", finished.aux);
            GradwireError::Protocol(text)
        };
        let id = u32::try_from(finished.aux).map_err(|_| refused())?;
        let set = ProcessSet::new(Members::new(ProcessSetId(id), ranks, self.world.rank));
        let workers = ranks.iter().map(|rank| self.worker(*rank)).collect();
        let known = KnownSet { epoch: self.world.epoch.0, id, workers };
        if self.sets.lock().add(set.clone(), known) { Ok(set) } else { Err(refused()) }
    }
}
