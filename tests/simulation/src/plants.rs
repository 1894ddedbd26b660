//! Faults that are planted in the simulated surroundings of the state machines, one at a time, to
//! prove that the predicates find them.

/// A planted fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// An agent reports the end of a daemon that it has only asked to end.
    NoFence,
    /// After a loss, a rank takes its own voice for the answer of the vote.
    VoteSplit,
    /// The workers of a node get their ranks in the reverse order.
    RankOrder,
    /// A daemon accepts connections and frames of other epochs.
    StaleFrame,
    /// A piece writes over sent bytes that the peer may not have.
    Overwritten,
    /// A daemon attaches a worker that is not in its epoch.
    Stranger,
    /// A process set comes back without a member that is lost.
    DeadMember,
    /// Two daemons of an epoch host a coordinator.
    TwoCoordinators,
    /// The launcher forgets its deadlines after the first epoch.
    LostWakeup,
    /// A result is written before its piece is complete.
    PartialResult,
    /// A connection that was made again begins at a frame, not at the byte where it had ended.
    ResentFrame,
    /// A daemon that opens another stream has not counted the last message.
    ReplayedMessage,
    /// On another stream, the coordinator takes everything that it has sent for received.
    DroppedMessage,
    /// A daemon starts operations that have come together in the reverse order.
    OperationOrder,
    /// A daemon tells its workers what it sees itself instead of the common cause.
    OwnCause,
    /// A daemon whose epoch has failed neither tells its workers nor ends.
    Silence,
}

impl Plant {
    /// All of them, with the labels of the predicates that find each.
    pub const ALL: &[(Self, &[&str])] = &[
        (Self::NoFence, &["FENCE"]),
        (Self::VoteSplit, &["VOTE", "STATE"]),
        (Self::RankOrder, &["RANKS"]),
        (Self::StaleFrame, &["EPOCH"]),
        (Self::Overwritten, &["ONE", "VOTE"]),
        (Self::Stranger, &["MEMBER"]),
        (Self::DeadMember, &["SETS"]),
        (Self::TwoCoordinators, &["COORDINATOR"]),
        (Self::LostWakeup, &["WAIT"]),
        (Self::PartialResult, &["INPUT"]),
        (Self::ResentFrame, &["ONE"]),
        (Self::ReplayedMessage, &["ORD", "TELL"]),
        (Self::DroppedMessage, &["WAIT"]),
        (Self::OperationOrder, &["ORD"]),
        (Self::OwnCause, &["TELL"]),
        (Self::Silence, &["WAIT"]),
    ];

    /// The planted fault of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().map(|(plant, _)| *plant).find(|plant| format!("{plant:?}") == name)
    }
}
