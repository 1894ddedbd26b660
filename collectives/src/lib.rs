//! Collectives as data: schedules, the algorithms that generate them, their proofs and their costs.
//!
//! An algorithm is a pure function from the shape of the cluster to a [`Schedule`]: for each
//! participant an ordered list of steps with their dependencies. The daemon executes a schedule.
//! The verifier proves it correct: the tests do that for every algorithm, for 1 to 130 nodes and
//! racks of all shapes, and also run it in memory. The cost model prices the algorithm, and its
//! closed forms are tested against the schedules. A new algorithm is one file of the
//! [catalog](algorithms::catalog). This crate does no I/O, reads no clock and starts no thread.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - `bytes`: parsing and printing of sizes
//! - [`schedule`]: the language
//! - [`layout`]: where the elements of a step are, in its message and in the piece
//! - [`execution`]: how a participant runs its schedule
//! - [`links`]: the rates of lines and links between participants
//! - [`topology`]: the participants and their groups in each tier
//! - [`algorithms`]: one file each in the catalog; most choose a tree for each block
//! - [`rules`]: which algorithms a user allows, for which collective and size
//! - [`verify`](mod@verify): the proof that every result holds every contribution exactly once
//!   (ONE)
//! - [`cost`]: what an algorithm costs
//! - [`select`](mod@select): the choice of an algorithm
#![forbid(unsafe_code)]

pub mod algorithms;
pub mod cost;
pub mod execution;
pub mod layout;
pub mod links;
pub mod rules;
pub mod schedule;
pub mod select;
pub mod topology;
pub mod verify;

mod bytes;

pub use algorithms::{
    Algorithm, Kind, Roles, Section, Spec, SpecError, Symmetry, generate, generate_sections,
    symmetry,
};
pub use cost::{CostModel, LinkCost, Pipeline, price, price_in_pipeline};
pub use execution::{Plan, Progress, SendQueue};
pub use links::{Links, MAX_LINE_MBIT, MAX_LINKED};
pub use rules::{Rules, RulesError};
pub use schedule::{Action, Block, Schedule, Step, StepView, Steps};
pub use select::{Choice, select};
pub use topology::Topology;
pub use verify::{Graph, Report, VerifyError, verify};
