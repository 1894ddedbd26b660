//! What the launcher's agent says of the ranks' processes: only who has started a process learns
//! how it ended. To us the connection of a rank that crashed ends like that of one that just
//! exited, and like that of one that was ended together with everything else.

use std::{
    collections::BTreeMap,
    sync::{Condvar, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use gradwire_proto::Rank;

/// How long the agent may take to tell how a process ended whose connection has.
const PATIENCE: Duration = Duration::from_millis(500);

/// How often it is looked meanwhile whether somebody else has ended the job.
const LOOK: Duration = Duration::from_millis(20);

/// What the launcher's agent tells of the processes here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word {
    /// A rank's process has ended.
    Ended {
        /// Which.
        rank: Rank,
        /// How, if not well: `was killed by SIGKILL`.
        failed: Option<String>,
    },
    /// All processes of this host are about to be asked to end, for this reason.
    Stopping(String),
}

/// How a rank's process ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Nobody tells.
    Unknown,
    /// With exit code 0.
    Well,
    /// As the agent says: `was killed by SIGKILL`.
    Badly(String),
    /// All processes of this host are being ended, for this reason.
    Stopped(String),
}

impl Fate {
    /// What is told of a rank that has not left the job, and what to do about it.
    pub(super) fn text(&self, pid: u32) -> (String, &'static str) {
        let memory = "see its output, and the kernel's log for the out-of-memory killer";
        let ended = |how: &str| format!("its process (pid {pid}) {how} without leaving the job");
        match self {
            Self::Unknown => (ended("ended") + ": killed or crashed", memory),
            Self::Well => (
                ended("ended with exit code 0"),
                "shut down before the process ends; os._exit() and exec() don't do that",
            ),
            Self::Badly(how) if how.contains("SIGKILL") => (ended(how), memory),
            Self::Badly(how) => (ended(how), "see its output"),
            Self::Stopped(why) => (ended(&format!("was asked to end ({why}) and did so")), ""),
        }
    }
}

/// The fates of this node's ranks.
#[derive(Debug, Default)]
pub(crate) struct Fates {
    told: Mutex<Told>,
    news: Condvar,
}

#[derive(Debug, Default)]
struct Told {
    /// Whether there is anybody who tells.
    by_agent: bool,
    ends: BTreeMap<u32, Fate>,
    stopped: Option<String>,
}

impl Fates {
    fn lock(&self) -> MutexGuard<'_, Told> {
        self.told.lock().expect("no panic while it is held")
    }

    /// Whether there is an agent that tells.
    pub(crate) fn expect(&self, by_agent: bool) {
        self.lock().by_agent = by_agent;
        self.news.notify_all();
    }

    /// A rank's process has ended.
    pub(crate) fn ended(&self, local_rank: u32, fate: Fate) {
        self.lock().ends.insert(local_rank, fate);
        self.news.notify_all();
    }

    /// All processes of this host are being ended.
    pub(crate) fn stop(&self, why: String) {
        self.lock().stopped.get_or_insert(why);
        self.news.notify_all();
    }

    /// How the process of a rank ended whose connection has; waits a moment for somebody to tell,
    /// unless it is of no interest any more.
    pub(crate) fn of(&self, local_rank: u32, interesting: impl Fn() -> bool) -> Fate {
        let deadline = Instant::now() + PATIENCE;
        let mut told = self.lock();
        loop {
            if let Some(why) = &told.stopped {
                return Fate::Stopped(why.clone());
            }
            if let Some(fate) = told.ends.get(&local_rank) {
                return fate.clone();
            }
            if !told.by_agent || !interesting() || Instant::now() >= deadline {
                return Fate::Unknown;
            }
            (told, _) = self.news.wait_timeout(told, LOOK).expect("no panic while it is held");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fate_is_waited_for_where_somebody_tells_it() {
        let fates = Fates::default();
        assert_eq!(fates.of(3, || true), Fate::Unknown, "nobody would tell");
        fates.expect(true);
        assert_eq!(fates.of(3, || false), Fate::Unknown, "it is of no interest");
        assert_eq!(fates.of(3, || true), Fate::Unknown, "WAIT");
        std::thread::scope(|scope| {
            scope.spawn(|| fates.ended(3, Fate::Well));
            assert_eq!(fates.of(3, || true), Fate::Well);
        });
        fates.stop("so it is".to_owned());
        assert_eq!(fates.of(4, || true), Fate::Stopped("so it is".to_owned()));
    }
}
