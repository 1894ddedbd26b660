//! Runs one recorded rank alone: without other ranks, network and daemons, any number of times.
//!
//! A training process attaches to a daemon, submits operations and gets results. Here the daemon is
//! `serve.rs`: it speaks the same protocol over the same shared memory, and takes each result from
//! the record. So nothing in the process is different, and every framework and language works.
//! [`script`] decides which recorded call a submission is; it knows no socket and no file.
//!
//! - TRUST: the record is checked by its reader (`gradwire_worker::record`), the process by
//!   `gradwire_shm`.
//! - TELL: if a call differs from the recorded one, all waiting and later calls fail with both.
//! - BOUND: at most [`script::AHEAD`] recorded calls are known that the program has not made.

#![forbid(unsafe_code)]

mod job;
pub mod script;
mod serve;

pub use gradwire_worker::record::reader::recorded_ranks;
pub use job::{Replay, Summary};
