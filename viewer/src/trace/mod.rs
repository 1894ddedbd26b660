//! A trace of a job: the activities of all ranks and nodes on a common timeline.
//!
//! - [`found`]: slices and arrows
//! - `clocks`: the clocks of the nodes
//! - [`join`]: turns the events of nodes into slices and arrows
//! - `chrome`: one line of a file in the Trace Event Format
//! - [`file`](mod@file): writes slices and arrows to such a file
//!
//! [`crate::spans`] turns the same slices into spans.

mod chrome;
mod clocks;
pub mod file;
pub mod found;
pub mod join;
#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;
