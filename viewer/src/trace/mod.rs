//! A trace of a job: what all ranks and nodes have done, on one line of time.
//!
//! - [`found`]: slices and arrows
//! - `clocks`: the clocks of the nodes
//! - [`join`]: from the events of nodes to slices and arrows
//! - `chrome`: one event of a file in the Trace Event Format
//! - [`file`](mod@file): from slices and arrows to such a file
//!
//! [`crate::spans`] makes spans of the same slices.

mod chrome;
mod clocks;
pub mod file;
pub mod found;
pub mod join;
#[cfg(test)]
pub(crate) mod recorded;
#[cfg(test)]
mod tests;
