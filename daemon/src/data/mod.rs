//! Runs schedules: the data plane. Bytes are read, reduced and written here, on threads of their
//! own (`gw-lane-N`, `gw-reduce`), never on the control runtime.
//!
//! Operation number s runs on lane s mod lanes of every node, over that lane's connections. Within
//! a lane, every started piece makes progress whenever it can, so the smallest unfinished number
//! can always make progress (ORD). The coordinator's credit limits how many pieces are in flight
//! (BOUND). What a piece may do next, and in which order a link takes its chunks, is decided in
//! `collectives/src/execution/`.
//!
//! - `pool`: the helpers of the lanes
//! - `piece`: one piece: tensors, arithmetic, schedule
//! - `feedback`: what quantizing has lost, for the next time
//! - `groups`: the arithmetic on quantized pieces
//! - `staging`: the memory in which a piece's result is computed, in wire form
//! - `meter`: what a lane does with its time
//! - `running`: a piece in flight
//! - `lateness`: when a piece is late, and which node is at fault (pure)
//! - `unconfirmed`: what was sent and may not have arrived
//! - `arrivals`: the frames that come from one peer
//! - `link`: a lane's connections to one peer, which share what is to be sent
//! - `in_memory`: how fast this machine reduces and copies
//! - `order`: what a lane is ordered to do, and what it reports
//! - `lane`: the thread

mod arrivals;
pub(crate) mod feedback;
mod groups;
mod in_memory;
pub(crate) mod lane;
pub(crate) mod lateness;
mod link;
mod meter;
pub(crate) mod order;
pub(crate) mod piece;
pub(crate) mod pool;
mod running;
mod staging;
mod unconfirmed;

#[cfg(test)]
pub(crate) mod tests;
