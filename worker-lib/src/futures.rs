//! Wakes tasks that wait for operations as futures.
//!
//! Nobody reads the completion ring while no thread waits. So the first task that waits starts the
//! thread `gw-futures`, which waits for all tasks and wakes them. It ends with the session.

use std::{sync::Arc, task::Waker, time::Duration};

use crate::{
    error::Result,
    shared::{Shared, end::Unwatched},
    waiters::LOOK_AROUND,
    watch,
};

impl Shared {
    /// Wakes a task when an operation has ended. If the operation may have ended before, the caller
    /// must check that afterwards.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn wake_later(self: &Arc<Self>, ticket: u64, waker: &Waker) -> Result<()> {
        let mut waiting = self.wakers.waiting.lock();
        waiting.tasks.insert(ticket, waker.clone());
        if waiting.thread.is_none() {
            let shared = self.clone();
            waiting.thread = Some(watch::spawn("gw-futures", move || shared.wake_tasks())?);
        }
        self.wakers.added.notify_all();
        Ok(())
    }

    /// Forgets the task that waits for an operation.
    pub(crate) fn wake_no_more(&self, ticket: u64) {
        let task = self.wakers.waiting.lock().tasks.remove(&ticket);
        drop(task); // may run code of the program
    }

    /// Wakes tasks until the session has ended.
    fn wake_tasks(&self) {
        // WAIT: a waker is code of the program, and may panic.
        let _unwatched = Unwatched(self);
        loop {
            let seen = self.control.epoch();
            // Without the lock: it drops memory, which may run code of the program.
            self.collect();
            let over = self.check().is_err();
            let mut waiting = self.wakers.waiting.lock();
            let mut woken = Vec::new();
            waiting.tasks.retain(|ticket, waker| {
                let ended = over || self.is_over(*ticket);
                woken.extend(ended.then(|| waker.clone()));
                !ended
            });
            let idle = waiting.tasks.is_empty();
            if idle && woken.is_empty() && !over {
                self.wakers.added.wait_for(&mut waiting, LOOK_AROUND);
                continue;
            }
            drop(waiting);
            let any = !woken.is_empty();
            woken.into_iter().for_each(Waker::wake);
            if over {
                return;
            }
            if !any {
                self.control.wait(seen, LOOK_AROUND, Duration::ZERO);
            }
        }
    }
}
