//! The `gradwire` command.
//!
//! The work is done elsewhere: `gradwire-launcher` starts jobs, `gradwire-bench` measures them.
//! Modules, lowest first:
//!
//! - [`cluster`]: nodes in racks, collectives and tables
//! - [`cluster_file`]: a measured cluster as a file
//! - [`algorithms`]: `gradwire algorithms`
//! - [`explain`]: `gradwire explain`
//! - [`find`]: finds the jobs of this host
//! - [`doctor`]: `gradwire doctor`
//! - [`probe`]: `gradwire probe`
//! - [`simulate`]: `gradwire simulate`
//! - [`show`]: `gradwire config show`
//! - [`status`]: `gradwire status`
//! - [`top`]: `gradwire top`
//! - [`coordinator`]: `gradwire coordinator`
//! - [`args`]: the command line

#![forbid(unsafe_code)]

pub mod algorithms;
pub mod args;
pub mod cluster;
pub mod cluster_file;
pub mod coordinator;
pub mod doctor;
pub mod explain;
pub mod find;
pub mod probe;
mod probe_calls;
pub mod show;
pub mod simulate;
pub mod status;
pub mod top;
pub mod trace;
