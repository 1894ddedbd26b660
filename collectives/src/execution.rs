//! How a participant runs its schedule: what it may do next, and in which order. Pure: no sockets,
//! no memory, no clock. The lanes of the daemon run this code, and so does the simulator.
//!
//! - [`plan`]: a schedule prepared for execution
//! - [`rounding`]: which sums are rounded
//! - [`ranges`]: which bytes of a message have been handled
//! - [`progress`]: which bytes each step has finished
//! - [`queue`]: the order in which the connections to one peer take the next chunk

pub mod plan;
pub mod progress;
pub mod queue;
pub mod ranges;
pub mod rounding;

pub use plan::{Plan, PlannedStep, StepPart, Work};
pub use progress::{Chunk, MIN_PAYLOAD, Progress, whole};
pub use queue::{HandedOut, SendQueue};
pub use ranges::Ranges;
pub use rounding::Unrounded;

#[cfg(test)]
mod tests;
