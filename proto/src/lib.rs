//! The types that every part of Gradwire shares: the messages of `gradwire.v1`, and the domain
//! types that they become once they are checked.
//!
//! Invariant TRUST starts here: a message from a socket is only data until a conversion of this
//! crate has accepted it. After that it is not checked again. There is no I/O in this crate.
//!
//! The modules, lowest first; each imports only from those above it in this list:
//!
//! - [`pb`]: the generated messages
//! - [`float8`]: the two 8-bit floats
//! - [`rack`]: the check of rack labels
//! - [`endpoints`]: where a node's data plane listens
//! - [`types`]: ranks, names, shapes, element types: values that are always valid
//! - [`compression`]: the wire type of elements between nodes
//! - [`request`]: what a rank asks for, and how two requests differ
//! - [`agreed`]: what all ranks agreed on, its flows and their routes
//! - [`failure`]: one failure, with the same text everywhere
//! - [`convert`]: from wire to domain types, the only place where wire values are checked
//! - [`auth`]: proofs of the job's secret
//! - [`beat`]: heartbeats as datagrams
//! - [`clock`]: round trips and clock offsets, from heartbeats

pub mod agreed;
pub mod auth;
pub mod beat;
pub mod clock;
pub mod compression;
pub mod convert;
pub mod endpoints;
pub mod failure;
pub mod float8;
pub mod numbered;
pub mod pb;
pub mod rack;
pub mod request;
pub mod types;

pub use agreed::{Agreed, Expected, Flow, Impossible, NO_PART, Route};
pub use auth::Secret;
pub use convert::WireError;
pub use endpoints::{Endpoints, InvalidEndpoints, MAX_ENDPOINTS};
pub use failure::{Details, Ending, Failure, FailureKind, SEE_OUTPUT};
pub use float8::{F8E4m3, F8E5m2};
pub use rack::{InvalidRackLabel, MAX_LABEL_BYTES, MAX_TIERS, check_rack_label};
pub use request::{Part, Request};
pub use types::{
    Collective, Compression, DType, Epoch, JobId, NodeId, Priority, ProcessSetId, Rank, ReduceOp,
    Sequence, Shape, SpecId, TensorId, TensorName, TypeError,
};

/// The version of the messages of this crate. It must be the same on both sides of a connection.
pub const PROTOCOL: u32 = 16;

/// What a node sends first on its connection to the coordinator, before HTTP/2. So the coordinator
/// can tell nodes from viewers without reading any further.
pub const NODE_PREFACE: &[u8; 14] = b"NODE gradwire\n";

/// The name of the first operation of an epoch, in which its ranks meet.
pub const EPOCH_MEETING: &str = "gradwire.epoch";

/// The name of the operation in which the ranks of an epoch meet before they receive the state of
/// Python's `elastic.run` or of an optimizer that skips lost steps, only the first time in that
/// epoch. A new rank may never come there.
pub const FUNCTION_MEETING: &str = "allgather_object.elastic.begin";

/// The name of a vote.
pub const VOTE: &str = "gradwire.vote";

/// The release of Gradwire.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The most lanes of a daemon (BOUND).
pub const MAX_LANES: u32 = 16;

/// The largest control message, in bytes; a larger one is refused before it is read.
pub const MAX_CONTROL_MESSAGE: usize = 4 << 20;

/// The largest report of a node, in bytes (BOUND).
pub const MAX_REPORT: usize = 2048;
