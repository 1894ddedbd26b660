//! Decides what runs, in which order, and why.
//!
//! One coordinator serves one job. Every node's daemon holds one stream to it, says which tensors
//! its ranks have submitted, and is told what to run. The coordinator never sees a byte of a
//! tensor and never waits for a cycle: what becomes ready is answered at once, and what becomes
//! ready together is answered together.
//!
//! - [`engine`]: decides; pure
//! - [`runtime`]: owns the engine, the timers and the nodes' streams; carries out what it decides
//! - [`grpc`]: the services; proofs and limits
//! - `beats`: heartbeats that come as datagrams
//! - [`convert`]: between messages and the engine's types, checked (TRUST)
//! - [`host`]: the coordinator as a daemon hosts it, from variables and settings
//! - [`metrics`]: every metric, declared once
//!
//! What is absent on purpose: persistence (a job that loses its coordinator ends), and any
//! knowledge of how the bytes move.
#![forbid(unsafe_code)]

pub mod convert;
pub mod engine;
pub mod grpc;
pub mod host;
pub mod metrics;
pub mod runtime;

mod beats;
mod error;

pub use engine::{EngineConfig, Phase};
pub use error::CoordinatorError;
pub use grpc::{Door, Said};
pub use runtime::{Coordinator, CoordinatorConfig, Health, run};
