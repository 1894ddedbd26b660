//! The orders for a lane, and its reports.

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_collectives::algorithms::probe::Pattern;
use gradwire_proto::{Failure, NodeId, Sequence};
use gradwire_trace::Tracer;

use super::{piece::Piece, pool::Pool};
use crate::transport::{frame::Totals, paths::Paths, window::Window};

/// The reports of a lane to the rest of the daemon.
pub(crate) trait LaneEvents: std::fmt::Debug + Send + Sync + 'static {
    /// The order for the piece has arrived.
    fn ordered(&self, piece: &Piece);
    /// The first byte of the piece is about to move, or has moved on this node.
    fn begun(&self, piece: &Piece);
    /// The piece has been published on this node. `complete` is when its result was complete;
    /// `None` if it was published as it was computed.
    fn finished(&self, piece: &Piece, complete: Option<Instant>);
    /// The time that a probe has taken on this node.
    fn measured(&self, sequence: Sequence, time: Duration);
    fn failed(&self, failure: Failure);
    /// The bytes sent to and received from a peer since the last call.
    fn moved(&self, peer: NodeId, sent: u64, received: u64);
    /// A connection of this lane broke. Another connection may replace it.
    fn disconnected(&self, connection: Disconnected);
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Disconnected {
    pub(crate) peer: NodeId,
    pub(crate) lane: u32,
    /// Its number among the lane's connections with that peer.
    pub(crate) number: u32,
    /// The counts of this and the earlier connections.
    pub(crate) totals: Totals,
    /// The peer has closed it: it is probably leaving, and is dialled again only when it is needed.
    pub(crate) is_closed: bool,
    /// An operation needs it.
    pub(crate) is_needed: bool,
}

/// A connection that has passed its handshake.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) peer: NodeId,
    /// Its number among the lane's connections with that peer.
    pub(crate) number: u32,
    pub(crate) stream: std::net::TcpStream,
    /// Its send buffer, if the size adapts to the path.
    pub(crate) window: Option<Window>,
    /// The number of the dialler's attempt.
    pub(crate) attempt: u32,
    /// The dialler's counts of the earlier connections; `None` on the dialler itself.
    pub(crate) theirs: Option<Totals>,
}

#[derive(Debug)]
pub(crate) enum Order {
    Start(Piece),
    Measure {
        sequence: Sequence,
        pattern: Pattern,
    },
    /// Ranks have allocated memory for their results: pieces that waited for this can be published.
    Allocated,
    /// A connection with a peer is ready.
    Connected(Connected),
    /// A node has only these addresses now: connections from and to others are broken.
    Moved(NodeId, Arc<[IpAddr]>),
    #[cfg(test)]
    Panic,
    /// Drops everything and ends.
    Stop,
}

#[derive(Debug, Clone)]
pub(crate) struct LaneConfig {
    pub(crate) index: u32,
    pub(crate) me: NodeId,
    /// The hosts of all nodes, for messages.
    pub(crate) hosts: Arc<[String]>,
    /// The measurements of the connections.
    pub(crate) paths: Arc<Paths>,
    pub(crate) epoch: u32,
    /// Bytes that are reduced, sent and received at once.
    pub(crate) chunk: u64,
    /// How long a piece may go without progress.
    pub(crate) limit: Duration,
    /// How long a broken connection may be missing; `None` if the job fails when it was in use.
    pub(crate) recovery: Option<Duration>,
    /// Records the lane's events while the job is traced.
    pub(crate) tracer: Arc<Tracer>,
    /// Results of at least this size bypass the cache on their way to the ranks.
    pub(crate) streaming_bytes: u64,
    /// The helpers of all lanes.
    pub(crate) pool: Arc<Pool>,
}
