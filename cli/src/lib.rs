//! The `gradwire` command: it starts jobs, measures, and shows what is going on; it trains nothing.
//!
//! A job is started by one *launcher* (`gradwire run`) and one *agent* for each host (`gradwire
//! agent`), this machine included, so that local and remote are one mechanism. The launcher
//! decides, agents start, watch and end processes. When either is gone the other ends the job.
//!
//! - [`args`]: the command line
//! - [`launch`]: the launcher
//! - [`agent`]: the agent
//! - [`protocol`]: what they say to each other; [`signals`]: what ends them from outside
//! - [`mod@bench`]: measurements, which are ranks themselves
//! - [`coordinator`], [`status`], [`show`]: the other commands

#![forbid(unsafe_code)]

pub mod agent;
pub mod args;
pub mod bench;
pub mod coordinator;
pub mod error;
pub mod launch;
pub mod protocol;
pub mod show;
pub mod signals;
pub mod status;
