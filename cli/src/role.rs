//! The hidden commands: the parts of a job that other processes of it start.

use std::{ffi::OsString, process::ExitCode};

use clap::Subcommand;
use gradwire_launcher::{agent, error::CommandError};
use rustix::process::Signal;
use tokio::runtime::Builder;

use crate::{
    join,
    process::{built, check_threads, runtime},
};

/// The threads of the agent of `gradwire doctor`; a daemon has two for data by default.
const AGENT_THREADS: usize = 2;

/// What this process is in a job, or in a check of hosts.
#[derive(Debug, Subcommand)]
pub enum Role {
    /// Serve one launcher on standard input and output.
    #[command(hide = true)]
    Agent,
    /// Serve one `gradwire doctor` on standard input and output.
    #[command(hide = true)]
    DoctorAgent,
    /// Start the daemon of a host and serve its tasks, for `gradwire join`.
    #[command(hide = true)]
    JoinService {
        /// The process id of the task that has started this.
        task: u32,
        /// How many jobs it has been in.
        session: u32,
    },
    /// Become a program whose life is tied to its parent's.
    #[command(hide = true)]
    ExecChild {
        /// When the parent dies, the program gets SIGTERM instead of SIGKILL: it notifies others
        /// before it ends.
        #[arg(long)]
        gently: bool,
        /// The parent's process id.
        parent: u32,
        /// The program and its arguments.
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<OsString>,
    },
}

impl Role {
    /// Plays the role until it ends. Returns the exit code.
    ///
    /// # Errors
    /// [`CommandError`] if it can't begin, or fails.
    pub fn run(self) -> Result<ExitCode, CommandError> {
        match self {
            Self::Agent => {
                check_threads()?;
                // One thread, the main one: a child gets its death signal when the thread that
                // started it ends.
                let work = agent::run(tokio::io::stdin(), tokio::io::stdout());
                let runtime = runtime()?;
                let code = runtime.block_on(work);
                // A read of standard input may still be under way; nobody waits for it.
                runtime.shutdown_background();
                Ok(code)
            }
            Self::DoctorAgent => {
                check_threads()?;
                // Several threads: several connections carry bytes at the same time.
                let runtime = built(Builder::new_multi_thread().worker_threads(AGENT_THREADS))?;
                let ended = runtime
                    .block_on(gradwire_doctor::agent::run(tokio::io::stdin(), tokio::io::stdout()));
                runtime.shutdown_background();
                ended.map(|()| ExitCode::SUCCESS).map_err(CommandError::failed)
            }
            // One thread, for the same reason as an agent.
            Self::JoinService { task, session } => join::serve(task, session),
            Self::ExecChild { gently, parent, command } => match command.split_first() {
                Some((program, args)) => {
                    let signal = if gently { Signal::TERM } else { Signal::KILL };
                    Err(agent::exec::exec_child(signal, parent, program, args))
                }
                None => Err(CommandError::usage("no program is given")),
            },
        }
    }
}
