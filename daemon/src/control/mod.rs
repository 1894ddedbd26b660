//! Executes the decisions of the coordinator: the stream to it, and all that depends on the stream.
//! Runs on the control thread, except `heartbeat`, `report`, `explain`, `recording` and `trace`.
//!
//! - `liveness`: when the coordinator last sent a message, and the offset of its clock
//! - `dial`: connects to the coordinator
//! - `connect`: opens the stream to the coordinator
//! - `at_once`: small operations inside this node that need no order
//! - `registry`: maps ids to names and messages to domain types; the only place that checks the
//!   coordinator's messages (TRUST)
//! - `mesh`: dials and accepts data connections, and hands them to their lanes
//! - `node`: the state that all threads share, and the handling of the lanes' events
//! - `notices`: what the launcher's agent tells this daemon
//! - `report`: reports on this node for viewers of the job
//! - `stuck`: finds out that no rank of this node can go on
//! - `explain`: what the ranks of this node do, for explanations of waits
//! - `recording`: the flight recording of this node
//! - `trace` and `sending`: this node's part of a trace
//! - `heartbeat`: heartbeats to and from the coordinator
//! - `dispatch`: executes the orders of the coordinator
//! - `client`: the stream: joins, sends the node's messages, passes on received ones

mod at_once;
pub(crate) mod client;
pub(crate) mod connect;
mod dial;
pub(crate) mod dispatch;
pub(crate) mod explain;
pub(crate) mod heartbeat;
pub(crate) mod liveness;
mod mesh;
pub(crate) mod node;
mod notices;
pub(crate) mod recording;
pub(crate) mod registry;
mod report;
mod sending;
pub(crate) mod stuck;
pub(crate) mod trace;
