//! The measured coordinator, in its own process, as the launcher starts it.

use std::{io, net::SocketAddr, process::Stdio, time::Duration};

use gradwire_launcher::{error::CommandError, launch::plan::Variables};
use gradwire_services::launch::{ServiceReport, from_line};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::process::Usage;

/// The time limit for starting, and for ending after all nodes have left (WAIT).
const PATIENCE: Duration = Duration::from_secs(30);

/// Descriptors for other purposes than the nodes' streams.
const OTHERS: u64 = 64;

/// A running coordinator; it ends with this process.
#[derive(Debug)]
pub struct Service {
    child: Child,
    pid: u32,
    /// The address at which it serves nodes.
    pub address: SocketAddr,
}

/// Raises the limit of descriptors to the number that `nodes` streams need in each process.
///
/// # Errors
/// [`CommandError`] if the system allows fewer.
pub fn allow(nodes: u32) -> Result<(), CommandError> {
    let needed = u64::from(nodes) + OTHERS;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if let Some(most) = limit.maximum.filter(|most| *most < needed) {
        let what = format!(
            "--nodes {nodes} needs {needed} file descriptors per process, but this system \
             allows {most}"
        );
        return Err(
            CommandError::usage(what).hint("raise the limit (ulimit -Hn), or measure fewer")
        );
    }
    // The coordinator inherits the limit.
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), ..limit })
        .map_err(|error| CommandError::failed(format!("{needed} file descriptors: {error}")))
}

impl Service {
    /// Starts a coordinator. Its later output goes to standard error.
    ///
    /// # Errors
    /// [`CommandError`] if it can't be started or does not serve.
    pub async fn start(variables: &Variables) -> Result<Self, CommandError> {
        let failed = |error: io::Error| {
            CommandError::failed(format!("the coordinator can't be started: {error}"))
        };
        let own = std::env::current_exe().map_err(failed)?;
        let mut child = Command::new(&own)
            // Tied to the life of this process, like a process of an agent (CLEAN).
            .arg("exec-child")
            .arg(std::process::id().to_string())
            .arg(&own)
            .arg("coordinator")
            .envs(variables)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        let out = child.stdout.take().ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let mut lines = BufReader::new(out).lines();
        let line = timeout(PATIENCE, lines.next_line()).await;
        let line = line.ok().and_then(Result::ok).flatten().unwrap_or_default();
        let Ok(ServiceReport::Serving { grpc: Some(address), .. }) = from_line(&line) else {
            return Err(CommandError::failed("the coordinator did not start to serve")
                .hint("its output above says why"));
        };
        // Later lines are not needed, but the coordinator must not block on writing them.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let pid = child.id().unwrap_or_default();
        Ok(Self { child, pid, address })
    }

    /// The resources that it has used so far.
    ///
    /// # Errors
    /// [`CommandError`] if the coordinator has ended.
    pub fn usage(&self) -> Result<Usage, CommandError> {
        Usage::of(self.pid)
    }

    /// Waits for its end, after all nodes have left.
    ///
    /// # Errors
    /// [`CommandError`] if the coordinator does not end properly.
    pub async fn end(mut self) -> Result<(), CommandError> {
        match timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => {
                Err(CommandError::failed(format!("the coordinator ended with {status}")))
            }
            Ok(Err(error)) => Err(CommandError::failed(error)),
            Err(_) => Err(CommandError::failed(format!(
                "the coordinator did not end within {} s after all nodes had left",
                PATIENCE.as_secs()
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_descriptors_are_reported_at_first() {
        assert!(allow(1).is_ok());
        match getrlimit(Resource::Nofile).maximum.and_then(|most| u32::try_from(most).ok()) {
            Some(most) => {
                let error = allow(most).unwrap_err();
                assert!(error.what.contains(&format!("allows {most}")), "{error}");
                assert!(error.hint.contains("ulimit"), "{error}");
            }
            None => assert!(allow(u32::MAX).is_ok()),
        }
    }
}
