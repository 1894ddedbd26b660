//! Bytes between nodes: TCP, one connection per lane and pair of nodes, made when a schedule first
//! needs it.
//!
//! - [`frame`]: what is on the wire
//! - [`handshake`]: how two daemons make sure of each other
//! - `mesh`: dials and accepts, and hands what has passed the handshake to its lane
//! - `link`: one connection as its lane sees it

pub mod frame;
pub mod handshake;
pub(crate) mod link;
pub(crate) mod mesh;
