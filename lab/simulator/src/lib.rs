//! Simulates how long a cluster takes: the real schedules on a model of hosts and links.
//!
//! Each connection is a flow, and flows share links fairly. The daemons' own code
//! (`gradwire_collectives::execution`) decides what happens next, so the simulation runs what a job
//! runs. This crate does no I/O and reads no clock: equal inputs give equal results.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - [`fair`]: max-min fair rates
//! - [`report`]: the outcome of a run
//! - [`config`]: how daemons and their connections behave
//! - [`fault`]: faults and their times
//! - [`network`]: hosts and links
//! - [`job`]: operations, and the director that orders them
//! - [`setup`]: what is simulated, and how
//! - `collapse`: simulates one host on behalf of its class
//! - [`training`]: training steps, ordered by the coordinator's engine
//! - [`priced`]: runs operations by the cost model alone
//! - `buckets`: lines that pass bursts
//! - `earliest`: the minimum of many times
//! - `flows`: connections as flows of chunks
//! - `few`: a map with few entries
//! - `lane`: the data thread of a daemon
//! - `path`: the critical path
//! - [`engine`]: runs operations, event by event
//! - [`plan`]: training steps on a cluster as it grows
//! - [`memory`]: the memory that a run will need
//! - [`plain`]: the model of the papers' formulas
//! - [`input`]: what to simulate, as TOML
//! - [`table`]: results with their bounds
//! - [`paper`]: published results, reproduced by simulation
#![forbid(unsafe_code)]

mod buckets;
mod collapse;
pub mod config;
mod earliest;
pub mod engine;
pub mod fair;
pub mod fault;
mod few;
mod flows;
pub mod input;
pub mod job;
mod lane;
pub mod memory;
pub mod network;
pub mod paper;
mod path;
pub mod plain;
pub mod plan;
pub mod priced;
pub mod report;
pub mod setup;
pub mod table;
pub mod training;

pub use engine::{Setup, run};
