//! Executes what is decided elsewhere: the stream to the coordinator, and what depends on it. Runs
//! on the control thread, except `heartbeat`, `report` and `trace`.
//!
//! - `liveness`: when the coordinator last sent something, and the clocks of both
//! - `connect`: opens the stream to the coordinator
//! - `registry`: ids and names, messages and domain types; the only place where the coordinator's
//!   messages are checked (TRUST)
//! - `client`: the stream: joins, sends what the node reports, passes on what it receives
//! - `mesh`: dials and accepts data connections, and hands them to their lanes
//! - `node`: what all threads share, and how events of the lanes are handled
//! - `report`: what this node does, for those who watch the job
//! - `trace` and `sending`: what this node has done, for those who trace the job
//! - `heartbeat`: heartbeats to and from the coordinator
//! - `dispatch`: executes the orders of the coordinator

pub(crate) mod client;
pub(crate) mod connect;
pub(crate) mod dispatch;
pub(crate) mod heartbeat;
pub(crate) mod liveness;
mod mesh;
pub(crate) mod node;
pub(crate) mod registry;
mod report;
mod sending;
pub(crate) mod trace;
