//! What a training process links: it makes the process a rank of a job, and gives it collectives
//! on tensors in shared memory.
//!
//! ```no_run
//! # fn main() -> Result<(), gradwire_worker::GradwireError> {
//! use gradwire_worker::{AllreduceOptions, Session};
//!
//! let session = Session::from_env()?; // the variables that `gradwire run` sets
//! let mut gradient = session.zeros::<f32>(&[1024])?; // in shared memory: never copied
//! gradient.as_mut_slice().fill(session.rank() as f32);
//! session.allreduce(&mut gradient, AllreduceOptions::named("layer1.weight"))?; // the average
//! # Ok(())
//! # }
//! ```
//!
//! - [`Session`]: attaching, ranks, tensors, leaving
//! - collectives: [`Session::allreduce`], [`Session::broadcast`], [`Session::barrier`], each
//!   blocking or with a [`Handle`]
//! - [`Tensor`], [`Buffer`]: memory that the daemon sees, too
//! - [`optimizer`]: the order in which gradients go, and their accumulation; framework-free
//! - `tch` (feature `tch`): a distributed optimizer around one of tch
//!
//! What it keeps:
//!
//! - **TELL** The first cause of a failure reaches every waiting and every later call.
//! - **WAIT** No wait is silent: each ends with an outcome, with the session, or at a deadline, and
//!   the connection and the daemon's heartbeat are watched meanwhile.
//! - **BOUND** At most 4096 operations are in flight; a further one waits for room.
//! - **TRUST** What the daemon says is checked where it arrives.
//!
//! The daemon does the work: there is no reduction, no network and no runtime in here.

#![deny(unsafe_code)]

mod collectives;
mod element;
mod error;
mod handle;
mod launch;
mod link;
#[expect(unsafe_code, reason = "the one room where shared memory becomes slices")]
mod memory;
pub mod optimizer;
mod session;
mod shared;
#[cfg(feature = "tch")]
pub mod tch;
mod tickets;
mod watch;

pub use collectives::{AllreduceOptions, BroadcastOptions};
pub use element::Element;
pub use error::GradwireError;
pub use gradwire_proto::{DType, Failure, FailureKind, JobId, ReduceOp, Secret, Shape, TensorName};
pub use gradwire_shm::{arena::ArenaStats, segment::HugePages};
pub use half;
pub use handle::{Handle, WaitError};
pub use link::Node;
pub use memory::{Buffer, Payload, Tensor};
pub use session::{Session, SessionBuilder, Stats};
