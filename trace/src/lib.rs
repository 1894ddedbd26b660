//! What threads do and when, to be read while they go on.
//!
//! - [`ring`]: the newest records of one or several writers, in memory that may be shared
//! - [`event`]: what a record says
//! - [`names`]: numbers for the names of tensors
//! - [`tracer`]: the rings of a process, and whether anything is recorded at all
//! - [`time`]: the clock that all processes of a machine share
//!
//! While nobody traces, a recording thread reads one flag. While somebody does, it writes to memory
//! and never waits: the oldest records are overwritten, and the reader counts what it has missed
//! (BOUND).

#![forbid(unsafe_code)]

pub mod event;
pub mod names;
pub mod ring;
pub mod time;
pub mod tracer;

pub use event::{Event, Kind};
pub use tracer::{Recorder, Tracer, Track};
