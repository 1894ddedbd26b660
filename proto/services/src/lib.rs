//! What programs exchange besides the messages of a training process: the services of
//! `gradwire.v1`, the messages of launcher and agents, and those for a collector of OpenTelemetry.
//!
//! A training process needs none of this, so it is not in `gradwire-proto`. Both are built with the
//! same features for everyone, so the programs and the Python package share one build.
//!
//! - [`launch`]: the messages between launcher, agents and daemons
//! - [`coordinator_client`], [`inspect_client`]: calling the services (feature `client`)
//! - [`otlp`]: the messages for a collector of OpenTelemetry (feature `client`)
//! - [`inspect_server`]: serving them (feature `server`)
//! - [`shared`]: a message that several streams send or keep
//! - [`broadcast`]: a message for many nodes, and its service (feature `server`)
//! - [`session_client`]: opens the stream of a node (feature `client`)

#[cfg(feature = "server")]
pub mod broadcast;
#[cfg(any(feature = "client", feature = "server"))]
mod generated;
pub mod launch;
#[cfg(feature = "client")]
pub mod otlp;
#[cfg(feature = "client")]
pub mod session_client;
#[cfg(any(feature = "client", feature = "server"))]
pub mod shared;

#[cfg(feature = "client")]
pub use generated::{coordinator_client, inspect_client};
#[cfg(feature = "server")]
pub use generated::{coordinator_server, inspect_server};

/// The file descriptors of the `gradwire.v1` package, for gRPC reflection.
#[cfg(feature = "server")]
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("../generated/descriptors.bin");
