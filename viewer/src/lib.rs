//! Shows a running job to people and programs.
//!
//! The coordinator makes snapshots. This crate derives the same figures from them for all viewers:
//! `gradwire status`, `gradwire top` and the status page, which it serves over HTTP. For `gradwire
//! trace` and for spans it joins the events that nodes and ranks record. It changes nothing in a
//! job. The feature `serve` adds what is served; commands need only the rest.
//!
//! - [`view`]: the figures for people; pure
//! - [`json`]: the state of a job for programs; pure
//! - [`over_time`]: the last minutes of a job for charts; pure
//! - [`rank`]: what one rank does now; pure
//! - [`trace`]: joins the events of all nodes, and writes a file for Perfetto; pure
//! - [`flight`]: what the flight recordings of a job say; pure
//! - [`spans`]: sends steps as spans to a collector
//! - [`access`]: access control; pure
//! - [`board`]: the JSON of the newest snapshot, made once for all viewers
//! - [`pages`]: the page and the API

#![forbid(unsafe_code)]

#[cfg(feature = "serve")]
pub mod access;
#[cfg(feature = "serve")]
pub mod board;
pub mod flight;
pub mod json;
#[cfg(feature = "serve")]
pub mod over_time;
#[cfg(feature = "serve")]
pub mod pages;
#[cfg(feature = "serve")]
pub mod rank;
#[cfg(feature = "serve")]
pub mod spans;
pub mod trace;
pub mod view;
