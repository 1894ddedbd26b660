//! The common code of the tests of the whole system, which are in `tests/tests/`.
//!
//! - [`cluster`]: a real coordinator, real daemons and real ranks in one process; ranks are threads
//!   here, so that many small jobs are cheap
//! - [`epochs`]: an elastic job of real daemons, whose epochs a test starts and ends
//! - [`launched`]: jobs as a user starts them, with a process for each part
//! - [`calls`]: a collective call as data: made through the public API, checked against the
//!   reference
//! - [`script`]: random jobs of such calls, made from a seed
//! - [`sample`]: a running job as its coordinator reports it
//! - [`place`]: a folder to run the real `gradwire` in, with fakes of its daemon and ssh
//! - [`raw`]: a simulated worker that sends and writes what a real worker never would

#![forbid(unsafe_code)]

pub mod calls;
pub mod cluster;
pub mod epochs;
pub mod launched;
pub mod place;
pub mod raw;
pub mod sample;
pub mod script;
