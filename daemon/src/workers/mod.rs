//! The attached training processes of this node, and what they are told.
//!
//! - `outbox`: messages to a worker over its socket
//! - `fate`: how the workers' processes end, as the launcher's agent says
//! - `worker`: one attached worker
//! - `slots`: all of them, by local rank

pub(crate) mod fate;
pub(crate) mod outbox;
pub(crate) mod slots;
pub(crate) mod worker;
