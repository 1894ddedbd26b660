//! An elastic job of real daemons, in processes of their own. A test starts and ends its epochs as
//! the launcher would, and plays the training processes.

use std::{
    io::{BufRead, BufReader, Write},
    net::SocketAddr,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use gradwire_proto::{JobId, Secret, pb};
use gradwire_services::launch::{
    HERE, Notice, REPORTS_ARE_READ, ServiceReport, from_line, to_line,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::{
    cluster::PATIENCE,
    launched::programs,
    raw::{Attaching, RawWorker},
};

/// An elastic job. Its training processes have numbers, which they keep.
#[derive(Debug)]
pub struct ElasticJob {
    job: JobId,
    secret: Secret,
    /// More variables of its daemons.
    pub variables: Vec<(&'static str, String)>,
}

impl ElasticJob {
    /// A job without daemons, whose ranks need not send heartbeats during a test.
    ///
    /// # Panics
    /// If its id is invalid.
    #[expect(clippy::new_without_default, reason = "each job is another one")]
    pub fn new() -> Self {
        static JOBS: AtomicU32 = AtomicU32::new(0);
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let job = JobId::new(&format!("test-elastic-{}-{number}", std::process::id()));
        let variables = vec![
            ("GRADWIRE_JOB__TIMEOUT_MS", "61000".to_owned()),
            ("GRADWIRE_HEARTBEAT__TIMEOUT_MS", "60000".to_owned()),
        ];
        Self { job: job.expect("a valid id"), secret: Secret::generate(), variables }
    }

    /// The job's id and its secret.
    pub fn identity(&self) -> (&JobId, &Secret) {
        (&self.job, &self.secret)
    }

    /// The socket of a host, in all epochs.
    pub fn socket(&self, host: usize) -> String {
        format!("@gradwire-{}-{host}", self.job)
    }

    /// Starts the daemons of an epoch. `hosts` are the numbers of the workers on each host.
    ///
    /// # Errors
    /// If a daemon does not start.
    pub fn start(&self, epoch: u64, hosts: &[&[u32]]) -> Result<Vec<DaemonProcess>> {
        let mut daemons: Vec<DaemonProcess> = Vec::new();
        for host in 0..hosts.len() {
            let coordinator = daemons.first().and_then(|first| first.grpc);
            daemons.push(self.daemon(epoch, hosts, host, coordinator)?);
        }
        Ok(daemons)
    }

    /// Starts the daemon of one host. Without the address of the `coordinator`, it hosts it.
    ///
    /// # Errors
    /// If it does not start.
    pub fn daemon(
        &self,
        epoch: u64,
        hosts: &[&[u32]],
        host: usize,
        coordinator: Option<SocketAddr>,
    ) -> Result<DaemonProcess> {
        let workers: Vec<_> = hosts[host].iter().map(ToString::to_string).collect();
        let ranks: usize = hosts.iter().map(|workers| workers.len()).sum();
        let coordinator = coordinator.map_or_else(|| HERE.to_owned(), |at| at.to_string());
        let mut child = Command::new(programs::gradwired())
            .env("GRADWIRE_JOB", self.job.as_str())
            .env("GRADWIRE_SECRET", self.secret.to_hex())
            .env("GRADWIRE_COORDINATOR", coordinator)
            .env("GRADWIRE_NODES", hosts.len().to_string())
            .env("GRADWIRE_RANKS", ranks.to_string())
            .env("GRADWIRE_HOST", format!("node-{host}"))
            .env("GRADWIRE_ADDRESS", "127.0.0.1")
            .env("GRADWIRE_SLOTS", workers.len().to_string())
            .env("GRADWIRE_ORDER", host.to_string())
            .env("GRADWIRE_SOCKET", self.socket(host))
            .env("GRADWIRE_ELASTIC", "1")
            .env("GRADWIRE_EPOCH", epoch.to_string())
            .env("GRADWIRE_WORKERS", workers.join(","))
            .env("GRADWIRE_SURVIVORS", "0")
            .env(REPORTS_ARE_READ, "1")
            .envs(self.variables.iter().map(|(name, value)| (*name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let notices = child.stdin.take();
        let (sender, reports) = mpsc::channel();
        let output = BufReader::new(child.stdout.take().context("its output is a pipe")?);
        thread::spawn(move || {
            for report in output.lines().map_while(Result::ok) {
                // The test may have ended.
                let _ = sender.send(from_line(&report));
            }
        });
        let mut daemon = DaemonProcess { child, notices, reports, grpc: None };
        match daemon.report()? {
            ServiceReport::Serving { grpc, .. } => daemon.grpc = grpc,
            other => bail!("the daemon did not start: {other:?}"),
        }
        Ok(daemon)
    }

    /// Asks the daemon of a host to attach a worker.
    ///
    /// # Errors
    /// If no daemon listens there.
    pub fn ask(&self, host: usize, worker: u32) -> Result<Attaching> {
        let change = |attach: &mut pb::Attach| attach.worker = Some(worker);
        Attaching::begin(&self.socket(host), self.identity(), change)
    }

    /// Attaches a worker once the epoch has begun.
    ///
    /// # Errors
    /// If the daemon does not attach it.
    pub fn attach(&self, host: usize, worker: u32) -> Result<(RawWorker, pb::Attached)> {
        self.ask(host, worker)?.finish()
    }
}

/// The daemon of a host in an epoch. Killed on drop.
#[derive(Debug)]
pub struct DaemonProcess {
    child: Child,
    notices: Option<ChildStdin>,
    reports: Receiver<Result<ServiceReport, gradwire_services::launch::NotAMessage>>,
    /// The address of the coordinator, if it is in this process.
    pub grpc: Option<SocketAddr>,
}

impl DaemonProcess {
    /// Its next report to the launcher.
    ///
    /// # Errors
    /// If none comes.
    pub fn report(&self) -> Result<ServiceReport> {
        Ok(self.reports.recv_timeout(PATIENCE).context("no report of a daemon")??)
    }

    /// Sends it a notice, as the agent does.
    ///
    /// # Errors
    /// If it has ended.
    pub fn notify(&mut self, notice: &Notice) -> Result<()> {
        let notices = self.notices.as_mut().context("its input is a pipe")?;
        Ok(notices.write_all(to_line(notice).as_bytes())?)
    }

    /// Sends it a signal.
    ///
    /// # Errors
    /// If the system refuses it.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill_process(Pid::from_child(&self.child), signal)?)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// If it does not end.
    pub fn ended(&mut self) -> Result<ExitStatus> {
        let begin = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(begin.elapsed() < PATIENCE, "a daemon does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for DaemonProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
