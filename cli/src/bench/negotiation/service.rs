//! The coordinator that is measured: a process of its own, as the launcher starts it, and what the
//! system says it uses.

use std::{fs, io, net::SocketAddr, path::Path, process::Stdio, time::Duration};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::Deserialize;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    time::timeout,
};

use crate::{bench::machine, error::CliError, launch::plan::Variables};

/// How long it may take to serve, and to end once everybody has left (WAIT).
const PATIENCE: Duration = Duration::from_secs(30);

/// Descriptors besides those of the nodes' streams.
const OTHERS: u64 = 64;

/// A running coordinator; it ends with this process.
#[derive(Debug)]
pub struct Service {
    child: Child,
    pid: u32,
    /// Where it serves nodes.
    pub address: SocketAddr,
}

/// Allows as many descriptors as `nodes` streams take on either side of them.
///
/// # Errors
/// [`CliError`] if the system allows fewer.
pub fn allow(nodes: u32) -> Result<(), CliError> {
    let needed = u64::from(nodes) + OTHERS;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    if let Some(most) = limit.maximum.filter(|most| *most < needed) {
        let what = format!(
            "--nodes {nodes} takes {needed} file descriptors in one process, and this system \
             allows {most}"
        );
        return Err(CliError::usage(what).hint("raise the limit (ulimit -Hn), or measure fewer"));
    }
    // The coordinator inherits it.
    setrlimit(Resource::Nofile, Rlimit { current: Some(needed), ..limit })
        .map_err(|error| CliError::failed(format!("{needed} file descriptors: {error}")))
}

/// What a process has used so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Usage {
    /// Time on a processor, in seconds.
    pub cpu: f64,
    /// Memory in use, in bytes.
    pub memory: u64,
}

impl Usage {
    /// Of a process.
    ///
    /// # Errors
    /// [`CliError`] if it has ended, or the system does not say.
    pub fn of(pid: u32) -> Result<Self, CliError> {
        let folder = format!("/proc/{pid}");
        let unknown = |error: io::Error| CliError::failed(format!("{folder}: {error}"));
        let status = fs::read_to_string(format!("{folder}/status")).map_err(unknown)?;
        let memory = machine::kibibytes(&status, "VmRSS").unwrap_or_default();
        let threads = fs::read_dir(format!("{folder}/task")).map_err(unknown)?;
        // One that ends meanwhile is not there any more.
        let threads = threads.flatten().filter_map(|thread| on_processor(&thread.path()));
        let cpu = match threads.reduce(|all, thread| all + thread) {
            Some(nanoseconds) => nanoseconds as f64 / 1e9,
            None => {
                let stat = fs::read_to_string(format!("{folder}/stat")).map_err(unknown)?;
                let ticks = ticks(&stat).unwrap_or_default();
                ticks as f64 / rustix::param::clock_ticks_per_second().max(1) as f64
            }
        };
        Ok(Self { cpu, memory })
    }
}

/// Nanoseconds of one thread; none where the kernel does not count them. `schedstat` is exact where
/// `stat` counts in hundredths of a second, more than many a step takes.
fn on_processor(thread: &Path) -> Option<u64> {
    let text = fs::read_to_string(thread.join("schedstat")).ok()?;
    text.split(' ').next()?.parse().ok()
}

/// `utime` and `stime` of `/proc/<pid>/stat`, the 14th and 15th field; the second is a name that may
/// hold anything.
fn ticks(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    Some(user + fields.next()?.parse::<u64>().ok()?)
}

/// What a coordinator says once it serves.
#[derive(Debug, Deserialize)]
struct Serving {
    grpc: SocketAddr,
}

impl Service {
    /// Starts one. What it has to tell besides goes to standard error.
    ///
    /// # Errors
    /// [`CliError`] if it can't be started or does not serve.
    pub async fn start(variables: &Variables) -> Result<Self, CliError> {
        let failed = |error: io::Error| {
            CliError::failed(format!("the coordinator can't be started: {error}"))
        };
        let own = std::env::current_exe().map_err(failed)?;
        let mut child = Command::new(&own)
            // As the agent does: its life is tied to this process's (CLEAN).
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
        let Ok(Serving { grpc: address }) = serde_json::from_str(&line) else {
            return Err(CliError::failed("the coordinator does not serve")
                .hint("what it says of that is above"));
        };
        // It may say more; nobody needs it, but it must not wait for a reader.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let pid = child.id().unwrap_or_default();
        Ok(Self { child, pid, address })
    }

    /// What it has used so far.
    ///
    /// # Errors
    /// [`CliError`] if it has ended.
    pub fn usage(&self) -> Result<Usage, CliError> {
        Usage::of(self.pid)
    }

    /// Waits for its end, after all nodes have left.
    ///
    /// # Errors
    /// [`CliError`] if it does not end well.
    pub async fn end(mut self) -> Result<(), CliError> {
        match timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(CliError::failed(format!("the coordinator ended with {status}"))),
            Ok(Err(error)) => Err(CliError::failed(error)),
            Err(_) => Err(CliError::failed(format!(
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
    fn what_a_process_uses_is_read() {
        let stat = "12 (a) S 1 (x) S 1 2 3 4 5 6 7 8 9 10 70 7 0 0";
        assert_eq!(ticks(stat), Some(77));
        assert_eq!(ticks("12 (a) S 1"), None);
        let own = std::process::id();
        let before = Usage::of(own).unwrap();
        assert!(before.memory > 1 << 20, "{before:?}");
        let mut sum = 0_u64;
        while Usage::of(own).unwrap().cpu <= before.cpu {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let error = Usage::of(u32::MAX).unwrap_err();
        assert!(error.what.starts_with("/proc/4294967295: "), "{error}");
    }

    #[test]
    fn too_few_descriptors_are_told_before_anything_starts() {
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
