//! Checks whether hosts, and the network between them, are fit for a job: `gradwire doctor`.
//!
//! An *agent* on each host, started as for a job, answers with the facts of its host. Then the
//! agents connect to each other, all at once, and measure in pairs: each agent is in one pair at a
//! time, so that pairs don't disturb each other. What all of that means is decided at the end, from
//! the facts alone.
//!
//! It changes nothing on a host and leaves nothing there (CLEAN). An agent ends with the connection
//! to the launcher, and after [`limits::LIFE`] in any case (WAIT).
//!
//! Modules, lowest first:
//!
//! - [`limits`]: how long each step may take, and how much it may send
//! - [`facts`]: what is known of hosts and pairs (data)
//! - [`messages`]: what launcher and agent say to each other (data)
//! - [`rounds`]: who measures with whom, and when (pure)
//! - [`findings`]: what facts mean, and what to do (pure)
//! - [`agent`]: reads the facts of a host, connects and measures
//! - [`launch`]: starts the agents, asks them, and gathers their answers

#![forbid(unsafe_code)]

pub mod agent;
pub mod facts;
pub mod findings;
pub mod launch;
pub mod limits;
pub mod messages;
pub mod rounds;
