//! A running job as people and programs look at it.
//!
//! The coordinator makes snapshots. What follows from them is the same for all viewers: `gradwire
//! status`, `gradwire top` and the status page, which this crate serves over HTTP. For `gradwire
//! trace` and for spans it joins what nodes and ranks record. It changes nothing in a job.
//! What is served is the feature `serve`; commands need the rest alone.
//!
//! - [`view`]: the figures that people look at; pure
//! - [`json`]: the state of a job for programs; pure
//! - [`trace`]: what all nodes have done, and a file of it for Perfetto; pure
//! - [`spans`]: sends steps as spans to a collector
//! - [`access`]: who may see the page; pure
//! - [`board`]: the JSON of the newest snapshot, made once for all viewers
//! - [`pages`]: the page and the interface for programs

#![forbid(unsafe_code)]

#[cfg(feature = "serve")]
pub mod access;
#[cfg(feature = "serve")]
pub mod board;
pub mod json;
#[cfg(feature = "serve")]
pub mod pages;
#[cfg(feature = "serve")]
pub mod spans;
pub mod trace;
pub mod view;
