//! How daemons and their connections behave.

/// How a daemon moves bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transport {
    /// The largest chunk (`data.chunk_bytes`).
    pub chunk: u64,
    /// Data threads (`data.lanes`).
    pub lanes: u32,
    /// Connections of each lane with each peer (`data.streams`).
    pub streams: u32,
    /// Bytes that the system takes of a connection before they have gone.
    pub socket: u64,
    /// Bytes of a frame besides the chunk.
    pub header: u64,
}

impl Default for Transport {
    fn default() -> Self {
        Self { chunk: 256 << 10, lanes: 2, streams: 1, socket: 256 << 10, header: 32 }
    }
}

impl Transport {
    /// Whole messages on one connection, which are sent on when all of them has come.
    pub const WHOLE: Self =
        Self { chunk: u64::MAX / 4, lanes: 1, streams: 1, socket: 0, header: 0 };

    /// Whether messages are whole, also those whose blocks do not follow each other in the piece.
    pub(crate) fn is_whole(&self) -> bool {
        self.chunk >= Self::WHOLE.chunk
    }
}

/// Seconds that a lane's processor takes. 0 everywhere: only links are a limit.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Processor {
    /// For each byte that is sent.
    pub send: f64,
    /// For each byte that is received.
    pub receive: f64,
    /// For each received byte that is reduced.
    pub reduce: f64,
    /// For each byte that ranks of the node contribute.
    pub local: f64,
    /// For each byte of a result, once all of it is there.
    pub publish: f64,
    /// For each frame, on either side.
    pub frame: f64,
}

impl Processor {
    /// Whether lanes are a limit.
    pub fn is_limit(&self) -> bool {
        let Self { send, receive, reduce, frame, .. } = *self;
        send + receive + reduce + frame > 0.0
    }
}

/// What ranks and the coordinator add.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Control {
    /// Seconds that a call takes besides its operations: until the coordinator knows that it can
    /// begin, and from the last result until the ranks go on.
    pub call: f64,
    /// Seconds from the coordinator's order until hosts have it.
    pub order: f64,
    /// Seconds from done to the next credit.
    pub done: f64,
    /// Operations in flight (`negotiation.credit_pieces`).
    pub credit: u32,
}

impl Default for Control {
    fn default() -> Self {
        Self { call: 0.0, order: 0.0, done: 0.0, credit: 8 }
    }
}

/// What TCP does besides sharing links fairly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tcp {
    /// Bytes of a first window, and of each sender's burst at a receiver.
    pub window: u64,
    /// Bytes that the last queue before a receiver has room for.
    pub buffer: u64,
    /// Seconds until what was lost is sent again, at least.
    pub timeout: f64,
    /// The time of a round trip.
    pub round_trip: f64,
}

impl Default for Tcp {
    fn default() -> Self {
        Self { window: 15_000, buffer: 400_000, timeout: 0.2, round_trip: 50e-6 }
    }
}
