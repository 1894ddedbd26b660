//! The `gradwire` command.
//!
//! The work is done elsewhere: `gradwire-launcher` starts jobs, `gradwire-bench` measures them.
//! Modules, lowest first:
//!
//! - [`cluster`]: nodes in racks, collectives and tables
//! - [`process`]: runtime, environment, settings, logs, output
//! - [`algorithms`]: `gradwire algorithms`
//! - [`explain`]: `gradwire explain`
//! - [`find`]: finds the jobs of this host
//! - [`doctor`]: `gradwire doctor`
//! - [`check_build`]: `gradwire run --check-build`
//! - [`join`]: `gradwire join` and `gradwire secret`
//! - [`lab`]: commands that `gradwire-lab` runs
//! - [`replay`]: `gradwire run --record` and `gradwire replay`
//! - [`show`]: `gradwire config show`
//! - [`status`]: `gradwire status`
//! - [`progress`]: `gradwire run --progress`
//! - [`top`]: `gradwire top`
//! - [`report`]: `gradwire report`
//! - [`trace`]: `gradwire trace`
//! - [`why`]: `gradwire why`
//! - [`job`]: a job that a command starts
//! - [`role`]: the hidden commands
//! - [`args`]: the command line
//! - [`mod@reference`]: the generated pages of the book
//! - [`familiar`]: options of other launchers

#![forbid(unsafe_code)]

pub mod algorithms;
pub mod args;
pub mod check_build;
pub mod cluster;
pub mod completions;
pub mod demo;
pub mod doctor;
pub mod explain;
pub mod familiar;
pub mod find;
pub mod job;
pub mod join;
pub mod lab;
pub mod process;
pub mod progress;
pub mod reference;
pub mod replay;
pub mod report;
pub mod role;
pub mod show;
pub mod status;
pub mod top;
pub mod trace;
pub mod why;
