//! Moves bytes between nodes: TCP, with a few connections per lane and pair of nodes.
//!
//! - [`frame`]: the format on the wire
//! - [`handshake`]: how two daemons authenticate each other
//! - `connections`: decides which connections are dialled, and when they are dialled again (pure)
//! - `window`: the sizes of a connection's buffers (pure)
//! - `line`: the rate of this host's line
//! - `patience`: how long making a connection may take (pure)
//! - `paths`: the system's measurements of the paths to the peers
//! - `places`: where the nodes listen
//! - [`sent`]: what a connection has sent and the peer may not have (pure)
//! - `stream`: one connection

pub(crate) mod connections;
pub mod frame;
pub mod handshake;
pub(crate) mod line;
pub(crate) mod paths;
pub(crate) mod patience;
pub(crate) mod places;
pub mod sent;
pub(crate) mod stream;
pub(crate) mod window;
