//! What the workers request.
//!
//! - `submit`: checks a submission, and the memory that a worker allocates for a result
//! - `reader`: the task that reads the workers' rings
//! - `attach`: the Unix socket: a worker's identity, its memory, its leaving and its death

pub(crate) mod attach;
pub(crate) mod reader;
mod submit;
