//! A thread of a session for work that nobody waits for yet: making shared memory.

use std::sync::mpsc;

use parking_lot::Mutex;

use crate::watch;

const NAME: &str = "gw-adopt";

/// What the thread runs.
pub(crate) type Task = Box<dyn FnOnce() + Send>;

/// Runs tasks in their order on a thread, which starts with the first task and ends with this.
#[derive(Default)]
pub(crate) struct Background(Mutex<Option<mpsc::Sender<Task>>>);

impl Background {
    /// Runs a task after those before it.
    pub(crate) fn run(&self, task: Task) {
        let mut thread = self.0.lock();
        if thread.is_none() {
            let (sender, tasks) = mpsc::channel::<Task>();
            let run = move || tasks.into_iter().for_each(|task| task());
            *thread = watch::spawn(NAME, run).ok().map(|_| sender);
        }
        // Without a thread, the caller runs the task itself.
        match &*thread {
            Some(sender) => sender.send(task).unwrap_or_else(|mpsc::SendError(task)| task()),
            None => task(),
        }
    }
}
