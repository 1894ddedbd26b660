//! The flight recordings of a job: what happened first, as text, as a trace and for PyTorch's
//! analyser. Pure.
//!
//! - [`merge`]: the recordings of all hosts on one clock
//! - [`waits`]: which operations were in flight at the end, and which ranks were missing
//! - [`story`]: the same in sentences, with the last operations of ranks that differ
//! - [`file`](mod@file): a file for the viewers of traces
//! - [`torch`]: the files that PyTorch's flight recorder writes
//! - `pickle`: the form of these files

pub mod file;
pub mod merge;
mod pickle;
pub mod story;
#[cfg(test)]
mod tests;
pub mod torch;
pub mod waits;

pub use merge::Job;
