//! What is decided elsewhere and carried out here: the stream to the coordinator, and what hangs on
//! it. Runs on the control thread, but for `heartbeat`.
//!
//! - `liveness`: when the coordinator last sent something
//! - `connect`: opens the stream to the coordinator
//! - `registry`: ids and names, messages and domain types; the only place where the coordinator's
//!   messages are checked (TRUST)
//! - `client`: the stream: joins, sends what the node reports, hands on what comes
//! - `mesh`: dials and accepts data connections, and hands them to their lanes
//! - `node`: what all threads share, and what becomes of what the lanes find out
//! - `heartbeat`: heartbeats to and from the coordinator
//! - `dispatch`: carries out what the coordinator orders

pub(crate) mod client;
pub(crate) mod connect;
pub(crate) mod dispatch;
pub(crate) mod heartbeat;
pub(crate) mod liveness;
mod mesh;
pub(crate) mod node;
pub(crate) mod registry;
