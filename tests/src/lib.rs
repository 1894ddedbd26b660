//! What the tests of the whole system share. The tests themselves are in `tests/tests/`.
//!
//! - [`cluster`]: a real coordinator, real daemons and real ranks in one process; ranks are threads
//!   here, so that many small jobs cost little
//! - [`launched`]: jobs as a user starts them, with a process for each part
//! - [`mod@reference`]: the right result of a collective, computed in a simple way
//! - [`calls`]: a collective call as data: made through the public API, checked against the
//!   reference
//! - [`script`]: random jobs of such calls, made from a seed
//! - [`sample`]: a running job as its coordinator shows it
//! - [`place`]: a folder to run the real `gradwire` in, with stand-ins for its daemon and ssh
//! - [`raw`]: a worker made by hand, which sends and writes what no real worker would

#![forbid(unsafe_code)]

pub mod calls;
pub mod cluster;
pub mod launched;
pub mod place;
pub mod raw;
pub mod reference;
pub mod sample;
pub mod script;
