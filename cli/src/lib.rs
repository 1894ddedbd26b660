//! The `gradwire` command: words become a command, and a command becomes an exit code.
//!
//! The work is done elsewhere: `gradwire-launcher` starts jobs, `gradwire-bench` measures them.
//! Modules, lowest first:
//!
//! - [`show`]: `gradwire config show`
//! - [`status`]: `gradwire status`
//! - [`coordinator`]: `gradwire coordinator`
//! - [`args`]: the command line

#![forbid(unsafe_code)]

pub mod args;
pub mod coordinator;
pub mod show;
pub mod status;
