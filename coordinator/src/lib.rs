//! Decides which operations run, in which order, and why.
//!
//! One coordinator serves one job. The daemon of every node holds one stream to it, announces which
//! tensors its ranks have submitted, and receives what to run. The coordinator never sees a byte of
//! a tensor. It has no cycle: tensors that become ready are answered at once, and those that become
//! ready together are answered together.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - `error`: what can go wrong with the coordinator itself
//! - [`model`]: the types of the engine; pure
//! - `membership`: who is in the job, how it begins and ends
//! - `agreement`: who has announced which tensor, and whether all ranks ask for the same
//! - `dispatch`: what goes out next, how much at a time, and how
//! - `probe`: what the links between nodes are measured with, and what follows from it; pure
//! - [`engine`]: passes events to these handlers; pure
//! - [`convert`]: between messages and the engine's types, checked (TRUST)
//! - [`metrics`]: what is recorded of it
//! - `history`: what has happened lately; pure
//! - `inbox`: what goes from sessions to the runtime
//! - [`session`]: the sessions of nodes: challenge, proof, messages
//! - `heartbeat`: heartbeats that come as datagrams
//! - `snapshot`: what people see, as a message; pure
//! - `viewers`: those who watch the job
//! - `traces`: those who read all that its nodes do
//! - [`inspection`]: how people look at the job
//! - `connection`: a connection that has a place as long as it lasts
//! - [`grpc`]: the services on the wire
//! - `accept`: accepts connections, on a thread of its own, and serves those who look
//! - `tuning`: the file with what earlier jobs have measured
//! - [`runtime`]: owns the engine, the timers and the nodes' queues; carries out what is decided
//! - [`server`]: a coordinator on its socket
//! - [`host`]: the coordinator as a daemon hosts it, from variables and settings
//!
//! What is absent on purpose: persistence of a job (one that loses its coordinator ends), and any
//! knowledge of how the bytes move.
#![forbid(unsafe_code)]

pub mod convert;
pub mod engine;
pub mod grpc;
pub mod host;
pub mod inspection;
pub mod metrics;
pub mod model;
pub mod runtime;
pub mod server;
pub mod session;

mod accept;
mod agreement;
mod connection;
mod dispatch;
mod error;
mod heartbeat;
mod history;
mod inbox;
mod membership;
mod probe;
mod snapshot;
mod traces;
mod tuning;
mod viewers;

pub use error::CoordinatorError;
pub use inspection::Inspection;
pub use model::{EngineConfig, Phase};
pub use runtime::{CoordinatorConfig, Health};
pub use server::{Coordinator, run};
pub use session::{SessionAcceptor, SessionStream};
pub use traces::Traced;
pub use viewers::Watched;
