//! The record of a rank: what it has received from collectives, in a file from which `gradwire
//! replay` gives it the same again.
//!
//! All results pass one place on their way to the program: where an operation ends in the table of
//! this session (`shared.rs`). There the recorder copies them, before the program can change
//! them. A separate thread compresses and writes them ([`writer`]). [`mod@format`] has the layout
//! of the file, and [`reader`] reads it.
//!
//! - BOUND: at most [`writer::AHEAD`] bytes wait to be written. After that, the ends of operations
//!   wait for the disk. The file has a limit, too.
//! - TRUST: [`reader`] checks everything that it reads.

pub mod format;
pub mod reader;
pub(crate) mod session;
pub mod writer;
