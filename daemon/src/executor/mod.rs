//! Runs schedules: the data plane. Bytes are read, reduced and written here, on threads of their
//! own (`gw-lane-N`), never on the control runtime.
//!
//! Operation number s runs on lane s mod lanes of every node, over that lane's connections; within
//! a lane every started piece makes progress whenever it can, so the smallest unfinished number
//! can always go on (ORD). How many pieces are under way is bounded by the coordinator's credit
//! (BOUND).
//!
//! - `plan`: a schedule made ready to run, and how far a run has come (pure)
//! - `ranges`: which bytes of a block have been dealt with (pure)
//! - `piece`: one piece: inputs, staging, progress
//! - `staging`: where its result takes shape, in the form in which it travels
//! - `stall`: when a piece is late, and which node is at fault (pure)
//! - `lane`: the thread

pub(crate) mod lane;
pub(crate) mod piece;
pub(crate) mod plan;
mod ranges;
mod staging;
pub(crate) mod stall;

#[cfg(test)]
pub(crate) mod tests;
