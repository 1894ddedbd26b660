//! One rank's eyes: itself, and on each node the first rank's for the daemon and the coordinator.

use gradwire_launcher::error::CommandError;
use gradwire_worker::Session;

use super::{calls::Counter, figures::Seen};

use crate::process::{Beside, Usage};

/// Processes that are watched.
#[derive(Debug)]
pub struct Watch {
    eyes: Vec<Eye>,
}

#[derive(Debug)]
struct Eye {
    pid: u32,
    counter: Option<Counter>,
    before: Usage,
    seen: Seen,
}

impl Watch {
    /// Those that this rank looks after.
    ///
    /// # Errors
    /// [`CommandError`] if this rank has no daemon beside it.
    pub fn of(session: &Session) -> Result<Self, CommandError> {
        let rank = session.rank();
        let nodes = session.nodes();
        let own = nodes.iter().find(|n| (n.first_rank..n.first_rank + n.slots).contains(&rank));
        let host = own.map_or_else(String::new, |node| node.host.clone());
        let eye = |name: String, pid| Eye {
            pid,
            counter: None,
            before: Usage::default(),
            seen: Seen { host: host.clone(), process: name, ..Seen::default() },
        };
        let mut eyes = Vec::new();
        if own.is_some_and(|node| node.first_rank == rank) {
            let beside = Beside::look()?;
            eyes.push(eye("daemon".to_owned(), beside.daemon));
            eyes.extend(beside.coordinator.map(|pid| eye("coordinator".to_owned(), pid)));
        }
        eyes.push(eye(format!("rank {rank}"), std::process::id()));
        Ok(Self { eyes })
    }

    /// Everybody sleeps from now on.
    ///
    /// # Errors
    /// [`CommandError`] if a process is gone.
    pub fn idle_begins(&mut self) -> Result<(), CommandError> {
        for eye in &mut self.eyes {
            eye.before = Usage::of(eye.pid)?;
        }
        Ok(())
    }

    /// Everybody has slept until now.
    ///
    /// # Errors
    /// As [`Self::idle_begins`].
    pub fn idle_ends(&mut self) -> Result<(), CommandError> {
        for eye in &mut self.eyes {
            let now = Usage::of(eye.pid)?;
            eye.seen.idle_cpu = (now.cpu - eye.before.cpu).max(0.0);
            eye.seen.idle_waits = now.waits.saturating_sub(eye.before.waits);
        }
        Ok(())
    }

    /// So many steps have been done.
    ///
    /// # Errors
    /// As [`Self::idle_begins`].
    pub fn look(&mut self, steps: u32) -> Result<(), CommandError> {
        for eye in &mut self.eyes {
            eye.seen.looks.insert(steps, Usage::of(eye.pid)?.into());
        }
        Ok(())
    }

    /// System calls are counted from now on, where that is possible.
    pub fn calls_begin(&mut self) {
        for eye in &mut self.eyes {
            match Counter::start(eye.pid) {
                Ok(counter) => eye.counter = Some(counter),
                Err(why) => eye.seen.uncounted = Some(why),
            }
        }
    }

    /// And no longer.
    pub fn calls_end(&mut self) {
        for eye in &mut self.eyes {
            let Some(counter) = eye.counter.take() else { continue };
            match counter.stop() {
                Ok(calls) => eye.seen.calls = Some(calls),
                Err(why) => eye.seen.uncounted = Some(why),
            }
        }
    }

    /// All of it.
    pub fn seen(self) -> Vec<Seen> {
        self.eyes.into_iter().map(|eye| eye.seen).collect()
    }
}
