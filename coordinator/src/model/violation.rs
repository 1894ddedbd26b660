//! What a node must not do.

use gradwire_proto::Rank;

/// What a node did that ends the job.
#[derive(Debug)]
pub(crate) enum Violation {
    /// The protocol does not allow it.
    Protocol(String),
    /// It asks for more than there is room for (BOUND).
    Resource(String),
    /// A rank leaves that has joined and waits for the others.
    LeftInJoin(Rank),
}
