//! What is found in the events of nodes: slices and arrows, on one line of time.

/// Where something has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Track {
    /// The threads of the daemon of a node that are no lanes.
    Control {
        /// The node.
        node: u32,
    },
    /// A lane of the daemon of a node.
    Lane {
        /// The node.
        node: u32,
        /// The number of the lane.
        lane: u32,
    },
    /// A thread of a rank.
    Thread {
        /// The rank.
        rank: u32,
        /// The number of the thread.
        thread: u32,
    },
    /// The steps of a rank.
    Steps {
        /// The rank.
        rank: u32,
    },
}

/// What a slice shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// A step of a rank. The title is its number.
    Step,
    /// A rank submits a tensor.
    Submit,
    /// A rank waits for a tensor.
    Wait,
    /// From the news that a tensor is done to its being noticed.
    WakeUp,
    /// A thread of a rank, between two waits.
    Compute,
    /// Until all ranks of the node have submitted a tensor.
    Gather,
    /// Until the coordinator has ordered a tensor.
    Negotiate,
    /// A further piece of a tensor waits for its turn.
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

/// Something that took a while. Times are in nanoseconds of the coordinator's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Slice {
    /// What.
    pub what: What,
    /// Where.
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
    /// A slice about nothing but its title.
    pub fn new(what: What, track: Track, title: String, at_ns: u64, duration_ns: u64) -> Self {
        let (ticket, operation, peer) = (None, None, None);
        Self { what, track, title, at_ns, duration_ns, ticket, operation, peer, bytes: 0 }
    }

    /// When it ended.
    pub fn end_ns(&self) -> u64 {
        self.at_ns.saturating_add(self.duration_ns)
    }
}

/// What leads from one slice to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrow {
    /// From a submission to the first operation that moves a part of it.
    Submitted {
        /// The rank that submitted.
        rank: u32,
        /// Its ticket.
        ticket: u64,
        /// The operation.
        operation: u64,
    },
    /// The first message of an operation between two nodes.
    Message {
        /// The operation.
        operation: u64,
        /// The node that sends.
        from: u32,
        /// The node that receives.
        to: u32,
    },
}

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// Something that took a while.
    Slice(Slice),
    /// An arrow begins here and then.
    From(Arrow, Track, u64),
    /// An arrow ends here and then.
    To(Arrow, Track, u64),
    /// A rank has ended a step.
    Stepped {
        /// The rank.
        rank: u32,
        /// The number of the step.
        step: u64,
        /// When.
        at_ns: u64,
    },
    /// An operation moves a part of what a rank has submitted.
    Part {
        /// The rank.
        rank: u32,
        /// Its ticket.
        ticket: u64,
        /// The operation.
        operation: u64,
    },
    /// Another estimate of a node's clock is in use.
    Clock {
        /// The node.
        node: u32,
        /// How far the clock is ahead of the coordinator's.
        ahead_ns: i64,
        /// The most by which that may be wrong.
        error_ns: u64,
    },
    /// A node has lost events.
    Lost {
        /// The node.
        node: u32,
        /// How many.
        events: u64,
        /// The latest time of an event.
        at_ns: u64,
    },
}
