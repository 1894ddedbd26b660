//! Whether this process can do nothing until one of its operations ends. If no rank can do
//! anything, the job is in a deadlock, which the coordinator then ends
//! (docs/decisions/034-provable-deadlocks.md).
//!
//! A process is stuck only if that is certain: every thread that could start an operation is in a
//! wait without a limit, for an operation that has not ended, and nothing waits behind a gate.
//! Neither a wait with a deadline counts, nor a thread of which nothing is known.

use std::{fs, ops::Deref, sync::Arc};

use gradwire_proto::TensorName;
use rustix::thread::Pid;

use crate::{
    shared::Shared,
    waiters::{On, Waiter},
    watch,
};

/// A wait without a limit, until it is dropped.
///
/// For bindings that divide such a wait into short ones. They also know which other threads of the
/// program could start operations.
#[derive(Debug)]
pub struct EndlessWait(Endless<Arc<Shared>>);

/// A wait without a limit, until it is dropped.
#[derive(Debug)]
pub(crate) struct Endless<S: Deref<Target = Shared>> {
    shared: S,
    thread: Pid,
}

/// Whether a process has threads that are not in a wait and could start an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Others {
    None,
    /// Only the system's list of threads can tell.
    Unknown,
}

impl EndlessWait {
    pub(crate) fn new(shared: Arc<Shared>, on: On) -> Self {
        Self(Endless::new(shared, on))
    }

    /// The present moment, for [`EndlessWait::say_stuck`]. It changes whenever an operation ends.
    pub fn moment(&self) -> u32 {
        self.0.shared.control.epoch()
    }

    /// Tells the daemon that this process can do nothing until an operation ends, if that is so.
    /// The caller has made sure, after `moment`, that no thread could start an operation except
    /// those that are in an endless wait.
    pub fn say_stuck(&self, moment: u32) {
        self.0.shared.say_stuck(moment, Others::None);
    }

    /// Takes that back.
    pub fn take_back(&self) {
        self.0.shared.control.take_back_stuck();
    }
}

impl<S: Deref<Target = Shared>> Endless<S> {
    pub(crate) fn new(shared: S, on: On) -> Self {
        let thread = shared.waiters.enter(on);
        Self { shared, thread }
    }
}

impl<S: Deref<Target = Shared>> Drop for Endless<S> {
    fn drop(&mut self) {
        self.shared.leave_endless(self.thread);
    }
}

impl Shared {
    /// Ends the last wait without a limit of a thread.
    fn leave_endless(&self, thread: Pid) {
        let mut waiters = self.waiters.0.lock();
        if let Some(at) = waiters.iter().rposition(|waiter| waiter.thread == thread) {
            waiters.remove(at);
        }
        // Under the lock, so that no other thread says it afterwards.
        self.control.take_back_stuck();
    }

    /// Tells the daemon that this process can do nothing until an operation ends, if that is
    /// certain. Otherwise does nothing. The epoch was read before anything was found out: if
    /// anything has ended since, the daemon sees that this is out of date.
    pub(crate) fn say_stuck(&self, epoch: u32, others: Others) {
        self.collect();
        if self.ended().is_some() {
            return;
        }
        let waiters = self.waiters.0.lock();
        let Some(ticket) = self.awaited(&waiters) else { return };
        if others == Others::None || !has_others(&waiters) {
            self.control.say_stuck(epoch, ticket);
        }
    }

    /// The first ticket that is waited for, if each of these waits for something that has not
    /// ended, and nothing else of this library could go on.
    fn awaited(&self, waiters: &[Waiter]) -> Option<u64> {
        let tasks = self.tasks.lock();
        let runs = |name: &TensorName| tasks.keys().any(|(_, running)| running == name);
        let lasts = |waiter: &Waiter| match &waiter.on {
            On::Ticket(ticket) => !self.is_over(*ticket),
            On::Task(name) => runs(name),
        };
        let in_parts: usize = waiters.iter().map(|waiter| waiter.parts).sum();
        let all = waiters.iter().all(lasts) && in_parts == tasks.len() && self.is_all_submitted();
        let ticket = |waiter: &Waiter| match waiter.on {
            On::Ticket(ticket) => Some(ticket),
            On::Task(_) => None,
        };
        waiters.iter().filter_map(ticket).min().filter(|_| all)
    }
}

/// Whether this process has threads that may start an operation.
fn has_others(waiters: &[Waiter]) -> bool {
    let waits = |thread: i32| waiters.iter().any(|w| w.thread.as_raw_nonzero().get() == thread);
    let Ok(all) = fs::read_dir("/proc/self/task") else { return true };
    all.into_iter().any(|entry| {
        let Ok(entry) = entry else { return true };
        let thread = entry.file_name().to_str().and_then(|name| name.parse().ok());
        if thread.is_some_and(waits) {
            return false;
        }
        let name = fs::read_to_string(entry.path().join("comm"));
        // A thread that has just ended can't start anything.
        name.is_ok_and(|name| !watch::THREADS.contains(&name.trim_end()))
    })
}
