//! Checks whether hosts, and the network between them, are fit for a job: `gradwire doctor`.
//!
//! An *agent* on each host, started like in a job, answers with the facts of its host. Then the
//! agents connect to each other, all at once, and measure in pairs: each agent is in one pair at a
//! time, so that pairs don't disturb each other. At the end, the findings are derived from the
//! facts alone.
//!
//! It changes nothing on a host and leaves nothing there (CLEAN). An agent ends with the connection
//! to the launcher, at the latest after [`limits::LIFE`] (WAIT).
//!
//! Modules, lowest first:
//!
//! - [`limits`]: how long each step may take, and how much it may send
//! - [`facts`]: facts about hosts and pairs (data)
//! - [`messages`]: messages between launcher and agent (data)
//! - [`rounds`]: which pairs measure in which round (pure)
//! - [`choice`]: the interface of each host that all others reach (pure)
//! - [`findings`]: what the facts mean, and what to do (pure)
//! - [`agent`]: reads the facts of a host, connects and measures
//! - [`launch`]: starts the agents, asks them, and gathers their answers

#![forbid(unsafe_code)]

pub mod agent;
pub mod choice;
pub mod facts;
pub mod findings;
pub mod launch;
pub mod limits;
pub mod messages;
pub mod rounds;
