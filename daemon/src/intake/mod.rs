//! What the workers ask for.
//!
//! - `submit`: what becomes of a submission, and of the room that a worker makes for a result
//! - `reader`: the task that reads the workers' rings
//! - `attach`: the Unix socket: who a worker is, its memory, its leaving and its death

pub(crate) mod attach;
pub(crate) mod reader;
mod submit;
