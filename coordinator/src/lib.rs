//! Decides which operations run, in which order, and why.
//!
//! One coordinator serves one job. The daemon of every node holds one stream to it, announces which
//! tensors its ranks have submitted, and receives operations to run. The coordinator never sees the
//! data of a tensor. It has no cycle: tensors that become ready are answered at once, and tensors
//! that become ready together are answered together.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - `error`: errors of the coordinator itself
//! - [`model`]: the types of the engine; pure
//! - `membership`: the nodes of the job, how it begins and ends
//! - `agreement`: which nodes have announced which tensor, and whether all ranks request the same
//! - `dispatch`: what is sent out next, how much at a time, and how
//! - `probe`: measures the links between nodes, and derives costs and racks; pure
//! - [`engine`]: passes events to these handlers; pure
//! - [`convert`]: between messages and the engine's types, checked (TRUST)
//! - [`metrics`]: records metrics
//! - `history`: recent decisions and events; pure
//! - [`timeline`]: the last minutes of the job; pure
//! - `explanation`: why the job waits, as text; pure
//! - `explaining`: asks the nodes for explanations; pure
//! - `meeting`: a new rank that does not come to the function of an elastic job; pure
//! - `outbox`: the messages to a node, kept until they have arrived
//! - `inbox`: the messages from sessions to the runtime
//! - [`session`]: the sessions of nodes: challenge, proof, messages
//! - `heartbeat`: heartbeats in datagrams
//! - `viewers`: the viewers of the job
//! - `traces`: the readers of traces
//! - [`inspection`]: the view of the job
//! - `connection`: a connection that holds a place while it lasts
//! - [`grpc`]: the gRPC services
//! - `accept`: accepts connections on its own thread, and serves viewers there
//! - `tuning`: the file with the times of earlier jobs
//! - [`runtime`]: owns the engine, the timers and the nodes' queues; carries out decisions
//! - [`server`]: a coordinator on its socket
//! - [`host`]: a coordinator from variables and settings
//!
//! Absent on purpose: persistence (a job that loses its coordinator ends), and any knowledge of how
//! bytes move.
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
pub mod timeline;

mod accept;
mod agreement;
mod connection;
mod dispatch;
mod error;
mod explaining;
mod explanation;
mod heartbeat;
mod history;
mod inbox;
mod meeting;
mod membership;
mod outbox;
mod permits;
mod probe;
mod traces;
mod tuning;
mod viewers;
mod watchdog;

pub use error::CoordinatorError;
pub use explanation::explanation_text;
pub use inspection::Inspection;
pub use model::{EngineConfig, Phase};
pub use outbox::{Outbox, OutboxStream};
pub use runtime::{CoordinatorConfig, Health};
pub use server::{Coordinator, run};
pub use session::{SessionAcceptor, SessionStream};
pub use traces::Traced;
pub use viewers::Watched;
