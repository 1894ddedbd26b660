//! The types that the handlers of the engine share; pure.
//!
//! - [`event`], [`command`]: the input and the output of the engine
//! - [`config`]: the configuration of the engine
//! - [`status`]: what viewers see
//! - [`learned`]: measured times, kept for the next job
//! - [`network`]: the measured links between nodes
//! - `process_set`: groups of ranks, by node
//! - `plan`: the flows of a tensor with their routes; `lengths`: how long they are; `round`: one
//!   agreed tensor
//! - `violation`: how a node can break the protocol
//! - `text`: ranks, names and times in texts
//!
//! Nothing here makes decisions, except how a value is checked or written.

pub mod command;
pub mod config;
pub mod event;
pub mod learned;
pub mod network;
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
pub use status::Phase;
