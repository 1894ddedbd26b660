//! Traces of threads, which can be read while the threads run.
//!
//! - [`ring`]: the newest records of one or several writers, in memory that may be shared
//! - [`event`]: the contents of a record
//! - [`names`]: numbers for the names of tensors
//! - [`tracer`]: the rings of a process, and whether anything is recorded at all
//! - [`time`]: the clock that all processes of a machine share
//! - [`flight`]: the last operations of a node's ranks, and the last events of its daemon
//!
//! While tracing is off, a recording thread reads one flag. While it is on, the thread writes to
//! memory and never waits: the oldest records are overwritten, and the reader counts its losses
//! (BOUND).

#![forbid(unsafe_code)]

pub mod event;
pub mod flight;
pub mod names;
pub mod ring;
pub mod time;
pub mod tracer;

pub use event::{Event, Kind};
pub use tracer::{Recorder, Tracer, Track};
