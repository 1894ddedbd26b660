//! Violations of the protocol by a node.

use gradwire_proto::Rank;

/// A violation by a node, which ends the job.
#[derive(Debug)]
pub(crate) enum Violation {
    /// Something that the protocol does not allow.
    Protocol(String),
    /// A request that exceeds a limit (BOUND).
    Resource(String),
    /// A rank left while it waited in a join.
    LeftInJoin(Rank),
}
