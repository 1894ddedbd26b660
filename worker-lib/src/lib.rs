//! The library for training processes. It makes the process a rank of a job, and provides
//! collectives on tensors in shared memory.
//!
//! ```no_run
//! # fn main() -> Result<(), gradwire_worker::GradwireError> {
//! use gradwire_worker::{AllreduceOptions, Session};
//!
//! let session = Session::from_env()?; // the variables that `gradwire run` sets
//! let mut gradient = session.zeros::<f32>(&[1024])?; // in shared memory: never copied
//! gradient.as_mut_slice().fill(session.rank() as f32);
//! session.allreduce(&mut gradient, AllreduceOptions::named("layer1.weight"))?; // the average
//! session.shutdown() // at the end of main: a rank that ends without it has failed
//! # }
//! ```
//!
//! In `Cargo.toml`, beside a checkout of Gradwire (Rust 1.95 or later):
//!
//! ```toml
//! [dependencies]
//! gradwire-worker = { path = "../gradwire/worker-lib" }
//! ```
//!
//! All ranks call the same collectives; a rank waits for the calls of its peers. Each collective
//! has a blocking form and a form that returns a [`Handle`]. Its options are a name, a priority and
//! a process set:
//!
//! | | in place | with a new result |
//! |---|---|---|
//! | reductions | [`allreduce`](Session::allreduce), [`reduce`](Session::reduce) | [`allreduce_to`](Session::allreduce_to), [`reducescatter`](Session::reducescatter) |
//! | moves | [`broadcast`](Session::broadcast) | [`allgather`](Session::allgather), [`gather`](Session::gather), [`scatter`](Session::scatter), [`alltoall`](Session::alltoall) |
//! | groups | [`grouped_allreduce`](Session::grouped_allreduce) | [`grouped_allreduce_to`](Session::grouped_allreduce_to), [`grouped_allgather`](Session::grouped_allgather), [`grouped_reducescatter`](Session::grouped_reducescatter) |
//! | messages | [`receive_into`](Session::receive_into) | [`send`](Session::send), [`receive`](Session::receive) |
//! | ranks | [`barrier`](Session::barrier), [`join`](Session::join) | [`add_process_set`](Session::add_process_set), [`remove_process_set`](Session::remove_process_set) |
//! | of several parts | [`adasum`](Session::adasum) | [`sparse_allreduce`](Session::sparse_allreduce), [`broadcast_object`](Session::broadcast_object), [`allgather_object`](Session::allgather_object) |
//!
//! A collective fails as [`Session::allreduce`] does, unless its documentation says more. Roots and
//! peers must be members of the process set, and groups have 1 to 1024 tensors. The call of an
//! asynchronous form fails only if nothing was started; the error has the tensors ([`NotStarted`]).
//!
//! ```no_run
//! # fn main() -> Result<(), gradwire_worker::GradwireError> {
//! # use gradwire_worker::*;
//! # let session = Session::from_env()?;
//! // Ranks may give different numbers of rows. The result has the number for each rank.
//! let found = session.tensor(&[1.5f32, 2.5], &[1, 2])?;
//! let all = session.allgather(&found, AllgatherOptions::default())?;
//! println!("{:?} rows, {:?}", all.rows, all.tensor.as_slice());
//!
//! // An operation of some ranks only. All ranks create the process set.
//! let even: Vec<u32> = (0..session.size()).step_by(2).collect();
//! let even = session.add_process_set(&even)?;
//! if even.includes(session.rank()) {
//!     let options = AllreduceOptions::named("loss").op(ReduceOp::Max).process_set(&even);
//!     session.allreduce_slice(&mut [0.25f64], options)?;
//! }
//!
//! // A message that is sent while the program continues.
//! if session.rank() == 0 {
//!     let sent = session.send_async(found, SendOptions::to_rank(1).tag(7))?;
//!     let _found = sent.wait()?;
//! } else if session.rank() == 1 {
//!     let _got: Tensor<f32> = session.receive(ReceiveOptions::from_rank(0).tag(7))?;
//! }
//! session.shutdown()
//! # }
//! ```
//!
//! An elastic job goes on after the loss of ranks or hosts, and its size may change. Then calls
//! fail with a recoverable error, and the ranks that are left rejoin the job in its next epoch. A
//! new process has no model, so each process first gets it from a rank that has it:
//!
//! ```no_run
//! # use gradwire_worker::*;
//! # struct Model { steps: u64 }
//! # impl Model {
//! #     fn gradients(&mut self, session: &Session) -> Result<(), GradwireError> { Ok(()) }
//! #     fn update(&mut self) {}
//! #     fn broadcast(&mut self, session: &Session) -> Result<(), GradwireError> { Ok(()) }
//! # }
//! # fn main() -> Result<(), GradwireError> {
//! # let (session, mut model) = (Session::from_env()?, Model { steps: 0 });
//! let mut synchronized = false;
//! while model.steps < 1000 {
//!     let done = if synchronized {
//!         // Either all ranks update the model, or none does.
//!         let voted = model.gradients(&session).and_then(|()| session.vote(true));
//!         voted.map(|_| model.update())
//!     } else {
//!         model.broadcast(&session) // from a rank that has made the most steps
//!     };
//!     match done {
//!         Ok(()) => synchronized = true,
//!         Err(error) if error.is_recoverable() => {
//!             // SAFETY: no other thread uses tensors.
//!             let rejoined = unsafe { session.rejoin() }?;
//!             if rejoined.vote == Some(true) {
//!                 model.update(); // other ranks have heard the result and do so, too
//!             }
//!             synchronized = !rejoined.newcomers;
//!         }
//!         Err(error) => return Err(error),
//!     }
//! }
//! # session.shutdown()
//! # }
//! ```
//!
//! `examples/elastic.rs` is a complete program, which also lets new ranks in
//! ([`Session::pending_change`]).
//!
//! - [`Session`]: attaching, ranks, tensors, leaving
//! - [`Tensor`], [`Buffer`], [`SharedBuffer`]: memory that is shared with the daemon
//! - [`Gate`]: for operations whose tensors are still being written
//! - [`starters`]: `srun`, `mpirun` and others, which start tasks and not jobs
//! - [`optimizer`]: the order of gradients and their accumulation, for any framework. The crate
//!   `gradwire-tch` has an optimizer for tch.
//!
//! Sizes, counts of rows and indices are `usize`. Counters that only grow are `u64`, and so are the
//! sizes in errors of the wire and of shared memory ([`TypeError`], [`ArenaError`],
//! [`SegmentError`]), which may report what this process can't address. Ranks, tags and nodes have
//! `u32` numbers.
//!
//! Invariants:
//!
//! - **TELL** The first cause of a failure reaches every waiting and every later call.
//! - **VOTE** All ranks get the same result of a vote, also if a loss interrupts it.
//! - **WAIT** Every wait ends: with an outcome, with the session, or at a deadline. Meanwhile the
//!   connection and the daemon's heartbeat are watched.
//! - **BOUND** At most `worker.max_in_flight` operations are in flight (65,536, unless it is set);
//!   further ones are refused. At most [`MAX_HELD`] of them may wait behind gates, which the caller
//!   must ensure.
//! - **TRUST** Messages of the daemon are checked on arrival.
//!
//! # Soundness
//!
//! Safe code can't cause undefined behaviour through this crate, if the daemon keeps its promise to
//! write to a tensor only between the start of an operation and its end. The daemon is trusted with
//! that because it has proven to know the job's secret, and no other process has the memory.
//!
//! - Slices of a tensor need the tensor itself: a blocking call borrows it until the operation has
//!   ended, also if the call panics, and a handle owns it. A leaked handle leaks the tensor.
//! - A [`SharedBuffer`] may have several users, so it has no slices. Its address is a raw pointer,
//!   which only unsafe code can use.
//! - Memory stays mapped while an operation uses it, even if all handles are dropped.
//! - A session that ends early takes the memory of its operations back before any call returns. If
//!   that fails, the process aborts.
//! - All bytes are valid elements ([`Element`], [`Bool`]), whatever the daemon has written. Its
//!   numbers are checked (TRUST).
//! - [`Session::adopt`] and [`Adoption::take_place`] turn addresses into memory and are unsafe.
//! - [`Session::rejoin`] moves the memory of all tensors and is unsafe.
//! - What a forked child writes to a tensor stays in the child. It may see what its parent writes
//!   later; `fork` itself is unsafe for such reasons.
//!
//! The daemon does the work. This crate has no network code and no runtime. Its only arithmetic is
//! for sparse allreduces and Adasum, which consist of other collectives.

#![deny(unsafe_code)]

mod adasum;
#[expect(unsafe_code, reason = "turns addresses of the program into memory")]
mod adopted;
mod background;
mod builder;
mod call_site;
mod collectives;
mod elastic;
mod element;
mod epoch;
mod error;
mod exchange;
// For the simulation of elastic jobs.
mod finite;
mod flight;
#[doc(hidden)]
pub mod formation;
mod futures;
mod gate;
mod handle;
mod handover;
mod inspection;
mod joining;
mod launch;
mod link;
#[expect(unsafe_code, reason = "the only module that turns shared memory into slices")]
mod memory;
mod naming;
mod objects;
pub mod optimizer;
mod options;
mod outcome;
mod panics;
mod pause;
mod pauses;
mod process_set;
pub mod record;
#[expect(unsafe_code, reason = "moves the memory of tensors to another daemon")]
mod rejoin;
mod results;
mod segments;
mod session;
mod shared;
mod sizes;
mod sparse;
mod standard_streams;
pub mod starters;
mod stats;
mod stuck;
mod task;
mod tickets;
mod vote;
mod waiters;
mod waiting;
mod waits;
mod wakers;
mod watch;
pub mod witness;

pub use adopted::{Adoption, Preparation};
pub use builder::SessionBuilder;
pub use call_site::CallSite;
pub use collectives::Gathered;
pub use elastic::{Change, Rejoined};
pub use element::{Bool, Element};
pub use error::GradwireError;
pub use gate::Gate;
pub use gradwire_keys::{Adopt, CheckFinite, CheckGradients, HugePages, StopSignal};
pub use gradwire_proto::{
    Compression, DType, F8E4m3, F8E5m2, Failure, FailureKind, JobId, Rank, ReduceOp, Secret,
    TensorName, TypeError, WireError, auth::SecretError,
};
pub use gradwire_shm::{
    arena::{ArenaError, Owner},
    segment::{SegmentError, SegmentId},
};
pub use half;
pub use handle::{Handle, NotStarted, Start, WaitError};
pub use link::Node;
pub use memory::{Buffer, FromBuffer, Payload, SharedBuffer, Tensor};
pub use naming::MAX_HELD;
pub use num_complex::Complex;
pub use options::{
    AdasumOptions, AllgatherOptions, AllreduceOptions, AlltoallOptions, BarrierOptions,
    BroadcastOptions, GatherOptions, JoinOptions, ObjectKind, ReceiveOptions, ReduceOptions,
    ReduceScatterOptions, ScatterOptions, SendOptions, SparseOptions,
};
pub use pause::Paused;
pub use process_set::ProcessSet;
pub use session::Session;
pub use sparse::{Number, SparseReduced, SparseRows};
pub use stats::{ArenaStats, Stats};
pub use stuck::EndlessWait;
