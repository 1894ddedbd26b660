//! The types that all parts of the daemon share. Nothing here waits, reads or sends.
//!
//! - `hint`: hints for errors of the system
//! - `elastic`: the epoch of an elastic job
//! - `world`: the nodes of the job
//! - `members`: the ranks that take part in a collective, and their nodes
//! - `memory`: the workers' memory, the only module with unsafe code
//! - `agreement`: the agreement on a tensor, and the part of it that concerns this node
//! - `tensor`: a tensor that local ranks have submitted
//! - `blocked`: what a rank is blocked by
//! - `operation`: the orders of the coordinator
//! - `job`: the job's identity and phase, and the messages to the coordinator

pub(crate) mod agreement;
pub(crate) mod blocked;
pub(crate) mod elastic;
pub(crate) mod hint;
pub(crate) mod job;
pub(crate) mod members;
#[expect(unsafe_code, reason = "the only module that accesses the workers' memory")]
pub(crate) mod memory;
pub(crate) mod operation;
pub(crate) mod tensor;
pub(crate) mod world;

/// Whole milliseconds, for messages.
pub(crate) fn milliseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
