//! The memory that a worker and its node's daemon share, so that no tensor byte ever crosses a
//! socket inside a node.
//!
//! The worker makes the memory and hands it over; the daemon maps it and trusts nothing in it. A
//! hostile worker may write anything into the shared pages at any moment (TRUST): the daemon copies
//! each word out once, checks the copy, and reports impossible values as errors. The seals of
//! [`segment`] ensure that a worker cannot even make the daemon fault.
//!
//! ```text
//!  worker                                                daemon
//!  ┌──────────────────────┐   handover: frames + fds    ┌──────────────────────┐
//!  │ Arena ─ ArenaBlock   │ ──────────────────────────► │ Segment::open        │
//!  │ WorkerControl        │                             │ DaemonControl::open  │
//!  │   submit ────────────┼──► submission ring ────────►┼─ SubmissionReader    │
//!  │   pop, wait ◄────────┼─── completion ring ◄────────┼─ CompletionWriter    │
//!  │   beat ──────────────┼──► heartbeat counter ──────►┼─ Heartbeats          │
//!  └──────────────────────┘                             └──────────────────────┘
//! ```
//!
//! - [`segment`]: sealed, reserved, mapped memory
//! - [`arena`]: tensors in segments, worker side
//! - [`control`]: the control page with its two rings, both sides; its layout is drawn there
//! - [`flight`]: the memory of a daemon's flight recording, and its file
//! - [`handover`]: frames and file descriptors over the Unix socket
//! - [`ring`] and [`backing`]: the ring algorithms over any atomic words, so that a model
//!   checker can run them
//! - [`spin`]: how long a thread spins before it sleeps
//!
//! Each module that touches memory says under "Soundness" why its safe functions are sound.
//! [`handover`], [`ring`] and [`backing`] contain no unsafe code.
//!
//! All memory is anonymous: nothing has a path, so nothing is left behind when both processes have
//! ended, however they ended (CLEAN).

pub mod arena;
pub mod backing;
pub mod control;
pub mod flight;
pub mod handover;
pub mod ring;
pub mod segment;
pub mod spin;
