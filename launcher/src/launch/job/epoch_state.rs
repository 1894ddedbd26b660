//! What the launcher knows about the epochs of a job, between their phases.

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::Failure;

use crate::launch::{
    elastic::Elastic,
    membership::{Change, Membership},
    plan::Node,
};

/// What has ended the last epoch, and what the launcher does about it.
#[derive(Debug)]
pub(super) struct Epochs {
    /// The members and those that may become members.
    pub(super) members: Membership,
    /// When the epoch began to form or to run.
    pub(super) began: Duration,
    /// Why the last epoch ended, and when.
    pub(super) why: String,
    pub(super) ended: Duration,
    /// Whether it ended for a change, and not because of a failure.
    pub(super) is_change: bool,
    /// A rank that was in the last epoch waits for the next one.
    pub(super) goes_on: bool,
    /// What has been done to end it.
    pub(super) force: Force,
    /// Since when no epoch has lasted, and how many have ended early.
    pub(super) trouble: Option<(Duration, u32)>,
    /// The agent of the host that ended the last epoch: its daemon did not start, or other daemons
    /// did not reach it, although the launcher does.
    pub(super) unusable: Option<usize>,
    /// The end of the pause after epochs that did not last.
    pub(super) pause: Duration,
    /// The next epoch forms at this time, or later.
    pub(super) not_before: Duration,
    /// The user has been told what the job waits for.
    pub(super) has_told: bool,
    /// The change of which the daemons of this epoch know.
    pub(super) announced: Change,
    /// The first rank that has ended without an error. No further epoch forms.
    pub(super) finished: Option<u32>,
    /// The failure of the epoch before, and the agent whose daemon has reported it.
    pub(super) failure: Option<(usize, Failure)>,
    /// How many ranks were lost.
    pub(super) lost: u32,
    /// The members that have left the running epoch, and wait for the next one, since when.
    pub(super) waiting: BTreeMap<u32, Duration>,
    /// How many epochs have ended because of losses of daemons alone.
    pub(super) restarts: u32,
    /// Why no further epoch may form.
    pub(super) end: Option<UsedUp>,
}

/// A limit of the user that the job has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UsedUp {
    /// `--reset-limit`.
    Resets,
    /// `recovery.restarts`.
    Restarts,
}

/// What has been done to end an epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Force {
    #[default]
    None,
    /// The process that the daemons blame was killed.
    Blamed,
    /// The daemons, too.
    Daemons,
}

/// The first and the longest pause between epochs that do not last.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

impl Epochs {
    /// An epoch has ended, and has lasted or not. Sets the pause before the next one, and returns
    /// how many have ended early.
    pub(super) fn count_short(&mut self, lasted: bool, now: Duration) -> u32 {
        let (since, short) = match self.trouble {
            Some((since, short)) if !lasted => (since, short + 1),
            _ => (now, 0),
        };
        self.trouble = Some((since, short));
        let pause = PAUSES.0.saturating_mul(1 << short.min(16)).min(PAUSES.1);
        self.pause = if short == 0 { now } else { now + pause };
        self.not_before = self.pause;
        short
    }

    pub(super) fn new(rules: Elastic, nodes: &[Node]) -> Self {
        Self {
            members: Membership::new(rules, nodes),
            began: Duration::ZERO,
            why: String::new(),
            ended: Duration::ZERO,
            is_change: false,
            goes_on: false,
            force: Force::None,
            trouble: None,
            unusable: None,
            pause: Duration::ZERO,
            not_before: Duration::ZERO,
            has_told: false,
            announced: Change::default(),
            finished: None,
            failure: None,
            lost: 0,
            waiting: BTreeMap::new(),
            restarts: 0,
            end: None,
        }
    }
}
