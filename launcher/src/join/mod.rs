//! `gradwire join`: makes a job of the tasks that another launcher has started, such as `srun` or
//! `mpirun`.
//!
//! ```text
//! task ── gradwire join ──► service of the host's first task ──► gradwired
//! task ── gradwire join ──────────────┘ (meeting)
//! ```
//!
//! Every task runs `gradwire join` and gets the variables with which a rank attaches. The hosts
//! exchange nothing for that: all tasks draw the same conclusions from their variables
//! ([`placement`]). So the daemons agree on the address of the coordinator, on the host of rank 0.
//!
//! The service outlives the task that has started it, since other ranks of the host may still need
//! the daemon. It ends with the daemon, and ends the daemon when no task is left (CLEAN).
//!
//! A pod of Kubernetes is one task for the whole host, and so is a host of BytePS. There,
//! `gradwire join` starts the daemon and the ranks itself, and stays: a pod ends with its first
//! process.
//!
//! - [`placement`]: the place of a task, and the job that follows from it
//! - `tasks`: which rank a task of `srun` or `mpirun` is
//! - `kubernetes`: the same for a pod
//! - `byteps`: the same for a host of BytePS
//! - `known`: what a task knows about its job
//! - `given`: what users give: a rendezvous and a secret
//! - `meeting`: where the tasks of a host meet
//! - `service`: the daemon of a host
//! - `ranks`: the ranks of a pod, or of a host of BytePS

mod byteps;
mod given;
mod known;
mod kubernetes;
mod meeting;
pub mod placement;
mod ranks;
mod service;
mod tasks;

use std::{
    collections::HashMap,
    ffi::{OsStr, OsString},
    io,
    process::{ExitCode, Stdio},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::Command,
    time::timeout,
};

pub use self::known::{Join, UNKNOWN_LAUNCHER};
use self::meeting::Answer;
use crate::error::CommandError;

/// How much longer a task waits than the start time limit, to learn the reason of a failure.
const REASON: Duration = Duration::from_secs(2);

/// Why this host has nothing to do in the job that the variables describe, if that is so: Gradwire
/// needs no scheduler of BytePS.
pub fn idle(environment: &HashMap<String, String>) -> Option<String> {
    byteps::idle(&placement::Variables(environment))
}

impl Join<'_> {
    /// Joins the job. Returns the variables of this rank, by name.
    ///
    /// # Errors
    /// [`CommandError`] if the job does not form in time.
    pub async fn join(&self) -> Result<Vec<(String, String)>, CommandError> {
        let limit = self.settings.start.timeout + REASON;
        let answer = match self.placement.local {
            0 => Some(self.start_service(limit).await?),
            _ => meeting::ask(&self.place(), self.pid, limit)
                .await
                .map_err(|error| CommandError::failed(error.to_string()))?,
        };
        let Some(answer) = answer else {
            let first = self.placement.rank - self.placement.local;
            let what = format!(
                "rank {first}, which starts the daemon of this host, did not answer within {} s",
                self.settings.start.timeout.as_secs_f64()
            );
            let hint = "has it called init(), and has the job not ended yet? See its output. For \
                        more time, set launch.start_timeout_ms";
            return Err(CommandError::failed(what).hint(hint));
        };
        let text = answer.map_err(|text| {
            let (what, hint) = text.split_once('\n').unwrap_or((&text, ""));
            CommandError::failed(what).hint(hint)
        })?;
        self.placement.agree(&text).map_err(|what| {
            let hint = "start all tasks of a job with one command, and don't change its variables";
            CommandError::usage(what).hint(hint)
        })?;
        Ok(self.attaching(&text, &self.placement))
    }

    /// Starts the service of this host in a process of its own, which lives on.
    async fn start_service(&self, limit: Duration) -> Result<Answer, CommandError> {
        let failed = |error: io::Error| {
            let what = format!("the service of this host can't be started: {error}");
            CommandError::failed(what).hint(crate::error::limits_hint(&error).unwrap_or_default())
        };
        let own = std::env::current_exe().map_err(failed)?;
        let mut service = Command::new(own)
            .args(["join-service", &self.pid.to_string(), &self.session.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            // Ctrl-C is for the tasks.
            .process_group(0)
            .spawn()
            .map_err(failed)?;
        let Some(output) = service.stdout.take() else { return Ok(Err(String::new())) };
        let mut lines = BufReader::new(output).lines();
        let mut text = String::new();
        let read = async {
            while let Some(line) = lines.next_line().await? {
                if line == service::END {
                    return Ok::<_, io::Error>(true);
                }
                text.push_str(&line);
                text.push('\n');
            }
            Ok(false)
        };
        // The service has a limit of its own; this one is for a service that is stopped.
        let is_whole = timeout(limit + REASON, read).await;
        let is_whole = is_whole.is_ok_and(|read| read.unwrap_or(false));
        if !is_whole {
            return Ok(Err("the service of this host has ended; see its output".to_owned()));
        }
        Ok(match text.strip_prefix('+') {
            Some(variables) => Ok(variables.to_owned()),
            None => Err(text.strip_prefix('-').unwrap_or(&text).trim_end().to_owned()),
        })
    }

    /// Joins the job with the ranks of this host, each of which runs this program, and waits for
    /// them. Returns the exit code of the first one that failed, or 0.
    ///
    /// # Errors
    /// [`CommandError`] if the job does not form in time, or the program can't be run.
    pub async fn run_ranks(
        &self,
        program: &OsStr,
        arguments: &[OsString],
    ) -> Result<ExitCode, CommandError> {
        ranks::run(self, program, arguments).await
    }

    /// Serves the tasks of this host, until none is left or the job has ended.
    ///
    /// # Errors
    /// [`CommandError`] if there can't be a meeting.
    pub async fn serve(&self) -> Result<ExitCode, CommandError> {
        service::run(self).await
    }
}
