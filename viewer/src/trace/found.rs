//! The results of joining events: slices and arrows on a common timeline.

/// Where something happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Track {
    /// All threads of a node's daemon except lanes.
    Control { node: u32 },
    /// A lane of a node's daemon.
    Lane { node: u32, lane: u32 },
    /// A thread of a rank.
    Thread { rank: u32, thread: u32 },
    /// The steps of a rank.
    Steps { rank: u32 },
}

/// The activity that a slice shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// A step of a rank. The title is its number.
    Step,
    /// A rank submits a tensor.
    Submit,
    /// A rank waits for a tensor.
    Wait,
    /// From the completion of a tensor until its rank notices.
    WakeUp,
    /// A thread of a rank, between two waits.
    Compute,
    /// A tensor waits until all ranks of the node have submitted it.
    Gather,
    /// A tensor waits until the coordinator has ordered it.
    Negotiate,
    /// A later part of a tensor waits for its turn.
    Credit,
    /// A piece waits for its lane.
    Queue,
    /// A piece, from its order to its end.
    Piece,
    /// A lane reduces.
    Reduce,
    /// A lane sends.
    Send,
    /// A lane receives.
    Receive,
    /// A lane writes results.
    Publish,
}

impl What {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Submit => "submit",
            Self::Wait => "wait",
            Self::WakeUp => "wake-up",
            Self::Compute => "compute",
            Self::Gather => "gather",
            Self::Negotiate => "negotiate",
            Self::Credit => "credit",
            Self::Queue => "queue",
            Self::Piece => "piece",
            Self::Reduce => "reduce",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::Publish => "publish",
        }
    }
}

/// Something with a duration. Times are in nanoseconds of the coordinator's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// The activity.
    pub what: What,
    /// The track.
    pub track: Track,
    /// The tensor, the first tensor of a piece, or the number of a step; empty if there is none.
    pub title: String,
    /// When it began.
    pub at_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
    /// The ticket of a submission.
    pub ticket: Option<u64>,
    /// The operation.
    pub operation: Option<u64>,
    /// The other node.
    pub peer: Option<u32>,
    /// How many bytes were moved.
    pub bytes: u64,
}

impl Slice {
    /// A slice with a title and no other details.
    pub fn new(what: What, track: Track, title: String, at_ns: u64, duration_ns: u64) -> Self {
        let (ticket, operation, peer) = (None, None, None);
        Self { what, track, title, at_ns, duration_ns, ticket, operation, peer, bytes: 0 }
    }

    /// When it ended.
    pub fn end_ns(&self) -> u64 {
        self.at_ns.saturating_add(self.duration_ns)
    }
}

/// Leads from one slice to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Arrow {
    /// From a submission to the first operation that moves a part of it.
    Submitted { rank: u32, ticket: u64, operation: u64 },
    /// The first message of an operation between two nodes.
    Message { operation: u64, from: u32, to: u32 },
}

/// A result of joining events.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Found {
    /// A slice.
    Slice(Slice),
    /// An arrow begins on this track at this time.
    From(Arrow, Track, u64),
    /// An arrow ends on this track at this time.
    To(Arrow, Track, u64),
    /// A rank has ended a step.
    Stepped { rank: u32, step: u64, at_ns: u64 },
    /// An operation moves a part of a rank's submission.
    Part { rank: u32, ticket: u64, operation: u64 },
    /// Another estimate of a node's clock is in use: how far it is ahead, and its largest error.
    Clock { node: u32, ahead_ns: i64, error_ns: u64 },
    /// A node has lost events, at the latest at this time.
    Lost { node: u32, events: u64, at_ns: u64 },
}
