//! What belongs to one epoch of a session: the connection to a daemon with its threads, the place
//! of this rank in the world, and the names and process sets that are valid there.
//!
//! A session has one membership at a time. In an elastic job it gets another one when it rejoins;
//! the arena and its tensors stay. Handles and calls that have begun keep the membership that they
//! began with. So they fail with the end of their own epoch, and nothing of theirs reaches a later
//! one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_proto::{Ending, pb::worker_message::Message};
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    link::World,
    naming::Names,
    process_set::ProcessSets,
    shared::{FAREWELL, Shared},
    watch::Threads,
};

/// This rank in one epoch.
pub(crate) struct Membership {
    pub(crate) shared: Arc<Shared>,
    pub(crate) world: World,
    pub(crate) names: Mutex<Names>,
    pub(crate) sets: Mutex<ProcessSets>,
    threads: Mutex<Option<Threads>>,
}

impl Membership {
    /// The membership of a process that has attached.
    pub(crate) fn new(shared: Arc<Shared>, world: World, threads: Threads) -> Self {
        let sets = Mutex::new(ProcessSets::new(world.size, world.rank));
        let (threads, names) = (Mutex::new(Some(threads)), Mutex::default());
        Self { shared, world, names, sets, threads }
    }

    /// Ends the membership with a last message.
    pub(crate) fn end(&self, farewell: Message) -> Result<()> {
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
