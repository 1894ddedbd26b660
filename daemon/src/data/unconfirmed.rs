//! What a lane has sent to its peers and they may not have, on all its connections.
//!
//! A peer that loses a connection gets these bytes again, so they must stay as they were sent. Two
//! things change them: a later step of the same piece writes to their place in the staging buffer,
//! or the piece ends, and its memory belongs to others. Before that, the systems of the peers are
//! asked what they have acknowledged, which a living peer reads even if the connection breaks. Only
//! the rest is copied, usually nothing or the last chunk (BOUND: at most what the sockets hold).

use std::sync::Arc;

use gradwire_proto::NodeId;

use crate::transport::{
    paths::DataSocket,
    sent::{Chunk, Sent},
};

/// A connection with more frames than this asks which of them have arrived (BOUND). The number then
/// follows the frames that remain, so that the cost of asking stays small.
const MANY: usize = 64;

/// What was sent in the slot of a connection.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) sent: Sent,
    /// The current connection.
    pub(super) socket: Option<Arc<DataSocket>>,
    /// With more frames than this, the connection asks which have arrived.
    many: usize,
}

impl Line {
    fn new(remembers: bool) -> Self {
        Self { sent: Sent::new(remembers), socket: None, many: MANY }
    }

    /// Forgets what the peer's system has acknowledged.
    pub(super) fn look(&mut self) {
        let Some(socket) = &self.socket else { return };
        if let Ok(missing) = gradwire_net::unacknowledged(&socket.socket) {
            self.sent.has_arrived(self.sent.written().saturating_sub(missing));
        }
    }

    /// The same if it remembers many frames.
    pub(super) fn shorten(&mut self) {
        if self.sent.remembered() > self.many {
            self.look();
            self.many = MANY + 2 * self.sent.remembered();
        }
    }
}

#[derive(Debug)]
pub(super) struct Unconfirmed {
    /// By peer and number of the connection.
    lines: Vec<Vec<Line>>,
    /// Whether connections continue within a frame; otherwise nothing is remembered.
    remembers: bool,
}

impl Unconfirmed {
    /// Nothing has been sent yet, to any of `nodes` nodes.
    pub(super) fn new(nodes: usize, remembers: bool) -> Self {
        Self { lines: (0..nodes).map(|_| Vec::new()).collect(), remembers }
    }

    /// The slot of a connection with a peer.
    pub(super) fn line(&mut self, peer: NodeId, number: usize) -> &mut Line {
        let lines = &mut self.lines[peer.index()];
        while lines.len() <= number {
            lines.push(Line::new(self.remembers));
        }
        &mut lines[number]
    }

    /// All bytes that were written to a peer, including those written again.
    pub(super) fn moved_to(&self, peer: NodeId) -> u64 {
        self.lines[peer.index()].iter().map(|line| line.sent.moved()).sum()
    }

    /// Whether anything is remembered.
    pub(super) fn remembers(&self) -> bool {
        self.remembers
    }

    /// Keeps what these peers may lack of some chunks, before their bytes change. `copy` gets a
    /// chunk and its first byte to keep.
    pub(super) fn keep(
        &mut self,
        peers: impl Iterator<Item = NodeId>,
        which: impl Fn(&Chunk) -> bool,
        copy: impl Fn(&Chunk, u64) -> Vec<u8>,
    ) {
        for peer in peers {
            for line in &mut self.lines[peer.index()] {
                if line.sent.has(&which) {
                    line.look();
                    line.sent.keep(&which, &copy);
                }
            }
        }
    }
}
