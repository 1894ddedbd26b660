//! What moves where, and why that is right: collectives as data.
//!
//! An algorithm is a pure function from the shape of the cluster to a [`Schedule`]: for each
//! participant an ordered list of steps with their dependencies. The executor runs a schedule, the
//! verifier proves it, the cost model prices it and the simulator plays it, so what is priced is
//! what runs, and a new algorithm is one file, proven before it moves a byte. This crate does no
//! I/O, reads no clock and starts no thread.
//!
//! - [`schedule`]: the language
//! - [`topology`]: who takes part, and in which racks
//! - [`algorithms`]: one file each; most are a choice of one tree per block
//! - [`verify`](mod@verify): the proof that every result holds every contribution exactly once (ONE)
//! - [`interpret`]: runs schedules in memory, in any order that the dependencies allow
//! - [`cost`], [`select`](mod@select): what an algorithm costs, and which one to take
//! - [`kernels`]: the arithmetic on bytes, the only room here with `unsafe` in it
#![deny(unsafe_code)]

pub mod algorithms;
pub mod cost;
pub mod interpret;
pub mod kernels;
pub mod schedule;
pub mod select;
pub mod topology;
pub mod verify;

pub use algorithms::{Algorithm, Kind, UnknownAlgorithm, generate};
pub use cost::{CostModel, LinkCost, Row, price, price_in_a_row};
pub use schedule::{Action, Block, Schedule, Step};
pub use select::{Choice, select};
pub use topology::Topology;
pub use verify::{Report, VerifyError, verify};
