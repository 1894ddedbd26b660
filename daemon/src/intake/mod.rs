//! The requests of the workers.
//!
//! - `submit`: checks a submission, and the memory that a worker allocates for a result
//! - `reader`: the task that reads the workers' submission rings
//! - `greeting`: checks the first message of a worker
//! - `attach`: the Unix socket: a worker's identity, memory, departure and death

pub(crate) mod attach;
mod greeting;
pub(crate) mod reader;
mod submit;
