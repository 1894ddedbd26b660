//! How long a cluster takes, without the cluster: the real schedules on a model of hosts and links.
//!
//! Each connection is a flow, and flows share links fairly. What a daemon does next is decided by
//! the code that daemons run (`gradwire_collectives::execution`). So what is simulated is what
//! runs. This crate does no I/O and reads no clock: the same input gives the same result.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - [`fair`]: max-min fair rates
//! - [`report`]: what a run has shown
//! - [`config`]: how daemons and their connections behave
//! - [`fault`]: what goes wrong, and when
//! - [`network`]: hosts and links
//! - [`job`]: operations, and who orders them
//! - [`setup`]: what is simulated, and how
//! - `collapse`: whether a host stands for others
//! - [`training`]: training steps, ordered by the coordinator's engine
//! - [`priced`]: runs operations by the cost model alone
//! - `buckets`: lines that let bursts through
//! - `earliest`: the earliest of many times
//! - `flows`: connections as flows of chunks
//! - `few`: a map with few entries
//! - `lane`: the data thread of a daemon
//! - `path`: the way that took longest
//! - [`engine`]: runs operations, event by event
//! - [`plan`]: training steps on a cluster as it grows
//! - [`memory`]: how much a run will need
//! - [`plain`]: the model of the papers' formulas
//! - [`input`]: what to simulate, as TOML
//! - [`table`]: results with the bounds that they have to keep
//! - [`paper`]: published results, simulated again
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
