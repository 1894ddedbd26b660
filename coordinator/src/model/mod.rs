//! The types that the handlers of the engine share; pure.
//!
//! - [`event`], [`command`]: what goes into the engine and what comes out
//! - [`config`]: what is fixed before the start
//! - [`status`]: what people see
//! - [`learned`]: what jobs have measured, for the next one
//! - [`network`]: what was measured of the links between nodes
//! - `process_set`: groups of ranks, by node
//! - `plan`: the flows of a tensor with their routes; `lengths`: how long they are; `round`: one
//!   tensor on its way
//! - `violation`: what a node may not do
//! - `text`: ranks, names and times in texts
//!
//! Nothing here decides anything, except how a value is checked or written.

pub mod command;
pub mod config;
pub mod event;
pub mod learned;
pub mod network;
pub mod report;
pub mod status;

pub(crate) mod lengths;
pub(crate) mod plan;
pub(crate) mod process_set;
pub(crate) mod round;
pub(crate) mod text;
pub(crate) mod violation;

pub use command::{Command, Output};
pub use config::EngineConfig;
pub use event::{ConnectionId, Event};
pub use status::{Phase, Status};
