//! The types that all parts of the daemon share. Nothing here waits, reads or sends.
//!
//! - `hint`: what to do where the system has refused something
//! - `world`: the nodes of the job
//! - `members`: ranks that do something together, and where they are
//! - `memory`: the workers' memory, the only module with unsafe code
//! - `agreement`: what was agreed on for a tensor, and which bytes of it concern this node
//! - `tensor`: a tensor that local ranks have submitted
//! - `operation`: what the coordinator orders
//! - `job`: which job this is, where it stands, and what this node reports to the coordinator

pub(crate) mod agreement;
pub(crate) mod hint;
pub(crate) mod job;
pub(crate) mod members;
#[expect(unsafe_code, reason = "the only module that accesses the workers' memory")]
pub(crate) mod memory;
pub(crate) mod operation;
pub(crate) mod tensor;
pub(crate) mod world;
