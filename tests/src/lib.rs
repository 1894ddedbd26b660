//! What the whole-system tests share. The tests themselves are in `tests/tests/`.
//!
//! - [`cluster`]: a coordinator, daemons and ranks, all real, in one process: ranks are threads
//!   here, so that many small jobs cost little
//! - [`launched`]: jobs as a user starts them, with a process for each of their parts
//! - [`mod@reference`]: what a collective must give, computed plainly
//! - [`calls`]: a collective call as data: made through the public API, checked against the
//!   reference
//! - [`script`]: random jobs of such calls, made of a seed
//! - [`raw`]: a worker made by hand, which says and writes what no real one would

#![forbid(unsafe_code)]

pub mod calls;
pub mod cluster;
pub mod launched;
pub mod raw;
pub mod reference;
pub mod script;
