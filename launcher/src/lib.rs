//! Starts the processes of a job on this machine and on others, watches them, and ends them.
//!
//! A job is started by one *launcher* (`gradwire run`) and one *agent* for each host (`gradwire
//! agent`), this machine included, so that local and remote are one mechanism. The launcher
//! decides. Agents start, watch and end processes. When either is gone, the other ends the job.
//!
//! Modules, lowest first:
//!
//! - [`error`]: the error of a command
//! - [`args`]: the options of every command that starts a job
//! - [`run_file`]: the files that list the running jobs
//! - [`nearby`]: the daemons of this host, and what they say about their ranks
//! - [`secrets`]: the secrets of running jobs, for commands
//! - [`signals`]: signals that ask this process to end
//! - [`processes`]: the descendants of this process, and the end of them all
//! - [`outer`]: the variables of a job around this one
//! - `slurm`: Slurm's lists
//! - `machine`: the GPUs and cores of this machine
//! - [`allocation`]: the hosts that a batch system has given to this job
//! - [`reach`]: how a host is reached, and why it can't be
//! - [`messages`]: reads the messages of the other side
//! - [`agent`]: the agent
//! - [`join`]: makes a job of the tasks of another launcher
//! - [`launch`]: the launcher

#![forbid(unsafe_code)]

pub mod agent;
pub mod allocation;
pub mod args;
pub mod error;
pub mod join;
pub mod launch;
mod machine;
pub mod messages;
pub mod nearby;
pub mod outer;
pub mod processes;
pub mod reach;
pub mod run_file;
pub mod secrets;
pub mod signals;

mod slurm;
