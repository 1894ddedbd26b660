//! The attached training processes of this node, and the messages to them.
//!
//! - `outbox`: messages to a worker over its socket
//! - `recorded`: what is recorded of the operations of a rank
//! - `pause`: what its program does instead of steps
//! - `call_sites`: the lines of the program that it submits operations from
//! - `observations`: what the workers say about their threads
//! - `last_lines`: what the workers' processes have written last
//! - `process_ends`: how the workers' processes end, as the launcher's agent reports it
//! - `process_state`: what the system knows about a process
//! - `start`: the time limit for ranks to join the job
//! - `worker`: one attached worker
//! - `slots`: all of them, by local rank

pub(crate) mod activity;
pub(crate) mod call_sites;
pub(crate) mod last_lines;
pub(crate) mod observations;
pub(crate) mod outbox;
pub(crate) mod pause;
pub(crate) mod process_ends;
pub(crate) mod process_state;
pub(crate) mod recorded;
pub(crate) mod slots;
pub(crate) mod start;
pub(crate) mod worker;
