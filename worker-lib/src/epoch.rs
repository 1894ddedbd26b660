//! What belongs to one epoch of a session: the connection to a daemon with its threads, the place
//! of this rank in the world, and the names and process sets that are valid there.
//!
//! A session has one membership at a time. In an elastic job it gets another one when it rejoins;
//! the arena and its tensors stay. Handles and calls that have begun keep the membership that they
//! began with. So they fail with the end of their own epoch, and nothing of theirs reaches a later
//! one.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use gradwire_proto::{
    Ending, Failure, FailureKind, Rank,
    pb::{self, worker_message::Message},
};
use gradwire_shm::arena::Arena;
use parking_lot::Mutex;

use crate::{
    error::{GradwireError, Result},
    link::World,
    naming::Names,
    process_set::ProcessSets,
    shared::{
        Shared,
        end::{FAREWELL, gives_up},
    },
    watch::Threads,
};

/// This rank in one epoch.
pub(crate) struct Membership {
    pub(crate) shared: Arc<Shared>,
    pub(crate) world: World,
    pub(crate) names: Mutex<Names>,
    pub(crate) sets: Mutex<ProcessSets>,
    /// In an elastic job, once the ranks know each other: the workers, by rank.
    pub(crate) workers: OnceLock<Vec<u32>>,
    /// A port of rank 0's host for other libraries; known at the same time.
    pub(crate) meeting_port: OnceLock<u16>,
    threads: Mutex<Option<Threads>>,
}

impl Membership {
    /// The membership of a process that has attached. Starts its threads; a daemon without a
    /// heartbeat for `silence` is lost.
    pub(crate) fn start(
        shared: Arc<Shared>,
        world: World,
        arena: &Arena,
        silence: Duration,
    ) -> Result<Self> {
        let threads = Threads::start(&shared, arena, silence).inspect_err(|error| {
            // TELL: other ranks already depend on this one, and would not learn the reason.
            let _ = shared.send(Message::GiveUp(gives_up(error.to_string(), None)), None);
            shared.hang_up();
        })?;
        let sets = Mutex::new(ProcessSets::new(world.size, world.rank));
        let (threads, names) = (Mutex::new(Some(threads)), Mutex::default());
        let (workers, meeting_port) = Default::default();
        Ok(Self { shared, world, names, sets, workers, meeting_port, threads })
    }

    /// The number of a rank as a worker. If the ranks never change, both numbers are the same.
    pub(crate) fn worker(&self, rank: u32) -> u32 {
        let worker = self.workers.get().and_then(|workers| workers.get(rank as usize));
        worker.copied().unwrap_or(rank)
    }

    /// Leaves an epoch that goes on, for the next one.
    pub(crate) fn leave(&self) {
        let what = format!("it has left epoch {} to join the next one", self.world.epoch.0);
        let left = Failure::new(FailureKind::RankLeft, what).rank(Rank(self.world.rank));
        // Calls of other threads fail with it.
        self.shared.will_end(left);
        // An error is the end of the epoch, too.
        let _ = self.end(Message::Detach(pb::Detach {}));
    }

    /// Ends the threads after the end of the epoch.
    pub(crate) fn close(&self) {
        if let Some(threads) = self.threads.lock().take() {
            self.shared.finish(Ending::Finished);
            threads.join(&self.shared);
        }
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
