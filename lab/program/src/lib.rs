//! The laboratory: commands that measure and simulate, and that no training job needs.
//!
//! The program is `gradwire-lab`. `gradwire simulate …` and the other commands here run it where it
//! is installed. Modules, lowest first:
//!
//! - [`process`]: what the system knows of a process
//! - [`cluster_file`]: reads cluster files, and refines a measured cluster
//! - [`probe`]: `gradwire probe`
//! - [`simulate`]: `gradwire simulate`
//! - [`coordinator`]: the coordinator of one job as a process of its own
//! - [`negotiation`]: `gradwire bench negotiation`
//! - [`resources`]: `gradwire bench resources`
//! - [`args`]: the command line

#![forbid(unsafe_code)]

pub mod args;
pub mod cluster_file;
pub mod coordinator;
pub mod negotiation;
pub mod probe;
mod probe_calls;
pub mod process;
pub mod resources;
pub mod simulate;
