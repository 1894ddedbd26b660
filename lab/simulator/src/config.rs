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
    /// Bytes of a connection that the system buffers before they are sent.
    pub socket: u64,
    /// Bytes of a frame in addition to the chunk.
    pub header: u64,
}

impl Default for Transport {
    fn default() -> Self {
        Self { chunk: 256 << 10, lanes: 2, streams: 1, socket: 256 << 10, header: 32 }
    }
}

impl Transport {
    /// Whole messages on one connection, forwarded only once they have arrived completely.
    pub const WHOLE: Self =
        Self { chunk: u64::MAX / 4, lanes: 1, streams: 1, socket: 0, header: 0 };

    /// Whether messages are whole, even if their blocks are not contiguous in the piece.
    pub(crate) fn is_whole(&self) -> bool {
        self.chunk >= Self::WHOLE.chunk
    }
}

/// Processor seconds of a lane. If all are 0, only links limit the speed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Processor {
    /// For each byte that is sent.
    pub send: f64,
    /// For each byte that is received.
    pub receive: f64,
    /// For each received byte that is reduced.
    pub reduce: f64,
    /// For each byte that the node's own ranks contribute.
    pub local: f64,
    /// For each byte of a result, after all of it has arrived.
    pub publish: f64,
    /// For each frame, on either side.
    pub frame: f64,
}

impl Processor {
    /// Whether lanes limit the speed.
    pub fn is_limit(&self) -> bool {
        let Self { send, receive, reduce, frame, .. } = *self;
        send + receive + reduce + frame > 0.0
    }
}

/// Time added by ranks and the coordinator.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Control {
    /// Seconds of a call outside its operations: until the coordinator knows that it can begin, and
    /// from the last result until the ranks continue.
    pub call: f64,
    /// Seconds from the coordinator's order until the hosts receive it.
    pub order: f64,
    /// Seconds from the end of an operation until its credit is returned.
    pub done: f64,
    /// Operations in flight (`negotiation.credit_pieces`).
    pub credit: u32,
}

impl Default for Control {
    fn default() -> Self {
        Self { call: 0.0, order: 0.0, done: 0.0, credit: 8 }
    }
}

/// Effects of TCP beyond fair sharing of links.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tcp {
    /// Bytes of the initial window, and of each sender's burst at a receiver.
    pub window: u64,
    /// Capacity of the last queue before a receiver, in bytes.
    pub buffer: u64,
    /// Least seconds until lost data is sent again.
    pub timeout: f64,
    /// Seconds of a round trip.
    pub round_trip: f64,
}

impl Default for Tcp {
    fn default() -> Self {
        Self { window: 15_000, buffer: 400_000, timeout: 0.2, round_trip: 50e-6 }
    }
}
