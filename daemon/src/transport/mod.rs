//! Bytes between nodes: TCP, some connections per lane and pair of nodes.
//!
//! - [`frame`]: what is on the wire
//! - [`handshake`]: how two daemons make sure of each other
//! - `connections`: which connections are dialled, and when again (pure)
//! - `window`: how large a connection's buffers are (pure)
//! - `stream`: one connection

pub(crate) mod connections;
pub mod frame;
pub mod handshake;
pub(crate) mod stream;
pub(crate) mod window;
