//! Bytes between nodes: TCP, some connections per lane and pair of nodes, made when a schedule first
//! needs them.
//!
//! - [`frame`]: what is on the wire
//! - [`handshake`]: how two daemons make sure of each other
//! - `mesh`: dials and accepts, and hands what has passed the handshake to its lane
//! - `lines`: which connections are dialled, and when again (pure)
//! - `link`: a lane's connections to one peer, which share what is to be sent
//! - `stream`: one of them
//! - `window`: how large its buffers are (pure)

pub mod frame;
pub mod handshake;
mod lines;
pub(crate) mod link;
pub(crate) mod mesh;
pub(crate) mod stream;
pub(crate) mod window;
