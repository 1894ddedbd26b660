//! One host's agent: starts processes when it is told to, passes on what they write, tells how
//! they end, and ends them all (CLEAN) when it is told to, when its standard input ends (the
//! launcher died, ssh dropped), when the launcher is silent for too long, or when it is itself
//! asked to end.
//!
//! It decides nothing about the job. The same program runs on this machine and behind ssh.
//!
//! - [`split`]: output becomes lines
//! - [`processes`]: who descends from here, and the end of them all
//! - [`exec`]: the last step before a program runs
//! - [`host`]: does this host have what the job needs

pub mod exec;
pub mod host;
pub mod processes;
pub mod split;

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    process::Command,
    signal::unix::{SignalKind, signal},
    sync::mpsc,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use self::{host::Checked, split::Splitter};
use crate::error::tell;
use crate::protocol::{
    Begin, Ended, MessageError, Order, Reader, Report, Role, Start, Stream, encode,
};

/// How many reports may wait for the launcher (BOUND). When it is full, whoever writes output
/// waits, so nothing is lost.
const REPORTS: usize = 256;

/// How long the output of a process that has ended is waited for: whoever inherited its pipes
/// may keep them open forever.
const DRAIN: Duration = Duration::from_millis(500);

/// How long the last reports may take to be written to a launcher that does not read.
const FLUSH: Duration = Duration::from_secs(1);

/// How often ended orphans are reaped.
const REAP: Duration = Duration::from_secs(5);

/// The agent's processes that have not been reaped yet, by role.
type Alive = BTreeMap<Role, u32>;

#[derive(Debug)]
struct Agent {
    begin: Begin,
    programs: Checked,
    born: Instant,
    reports: mpsc::Sender<Report>,
    ended: mpsc::Sender<(Role, Ended)>,
    alive: Alive,
    /// Tells the daemon which ranks have ended, and how.
    daemon: Option<mpsc::Sender<(u32, Ended)>>,
}

/// Serves one launcher over `input` and `output`, until everything it started has ended.
pub async fn run<R, W>(input: R, output: W) -> ExitCode
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let born = Instant::now();
    let (reports, queue) = mpsc::channel(REPORTS);
    let writer = tokio::spawn(pass_on(queue, output));
    let mut orders = Reader::new(input);
    let code = match begin(&mut orders).await {
        Ok((begin, programs, ready)) => {
            let (ended, ends) = mpsc::channel(REPORTS);
            let _ = reports.send(ready).await;
            let agent = Agent {
                begin,
                programs,
                born,
                reports: reports.clone(),
                ended,
                alive: Alive::new(),
                daemon: None,
            };
            agent.serve(orders, ends).await
        }
        Err(refused) => {
            let _ = reports.send(refused).await;
            ExitCode::FAILURE
        }
    };
    drop(reports);
    let _ = timeout(FLUSH, writer).await;
    code
}

/// The first order, and whether this host can carry it out.
async fn begin<R: AsyncRead + Unpin>(
    orders: &mut Reader<R>,
) -> Result<(Begin, Checked, Report), Report> {
    let refused = |what: String, hint: &str| Report::Refused { what, hint: hint.to_owned() };
    let begin = match orders.next::<Order>().await {
        Some(Ok(Order::Begin(begin))) => begin,
        Some(Ok(_)) => return Err(refused("the first order is not Begin".to_owned(), "")),
        Some(Err(error)) => {
            let version = gradwire_proto::VERSION;
            let what = format!("gradwire {version} does not understand its launcher: {error}");
            return Err(refused(what, "install the same release on every host"));
        }
        None => return Err(refused("the launcher gave no order".to_owned(), "")),
    };
    let programs = host::check(&begin).map_err(|(what, hint)| refused(what, &hint))?;
    processes::adopt_orphans()
        .map_err(|error| refused(format!("can't become a subreaper: {error}"), ""))?;
    let port = host::free_port().map_err(|error| refused(format!("no free port: {error}"), ""))?;
    let ready = Report::Ready { address: host::ssh_address(), port };
    Ok((begin, programs, ready))
}

/// Writes reports in order. A launcher that is gone is noticed at the other pipe; what is left
/// for it is thrown away, so that nobody waits for it.
async fn pass_on(mut queue: mpsc::Receiver<Report>, mut output: impl AsyncWrite + Unpin) {
    let (mut batch, mut gone) = (Vec::with_capacity(REPORTS), false);
    // What waits is written in one go: a line is small, and a write is not.
    while queue.recv_many(&mut batch, REPORTS).await > 0 {
        let mut bytes = Vec::new();
        for report in batch.drain(..) {
            encode(&mut bytes, &report);
        }
        gone = gone || send(&mut output, &bytes).await.is_err();
    }
}

async fn send(output: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> std::io::Result<()> {
    output.write_all(bytes).await?;
    output.flush().await
}

impl Agent {
    async fn serve<R: AsyncRead + Unpin>(
        mut self,
        mut orders: Reader<R>,
        mut ends: mpsc::Receiver<(Role, Ended)>,
    ) -> ExitCode {
        let grace = Duration::from_millis(self.begin.grace_ms);
        let silence = match self.begin.silence_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        let signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [Ok(mut int), Ok(mut term), Ok(mut hup)] = signals.map(signal) else {
            return ExitCode::FAILURE;
        };
        let mut reap = interval(REAP);
        reap.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = tokio::time::Instant::now();
        let grace = loop {
            tokio::select! {
                order = orders.next::<Order>() => {
                    heard = tokio::time::Instant::now();
                    match order {
                        Some(Ok(Order::Stop { grace_ms })) => break Duration::from_millis(grace_ms),
                        Some(Ok(order)) => self.obey(order),
                        Some(Err(error)) => {
                            self.complain(&error);
                            break grace;
                        }
                        None => break grace,
                    }
                }
                Some((role, ended)) = ends.recv() => {
                    self.alive.remove(&role);
                    self.tell_daemon(role, ended);
                }
                () = sleep(silence.saturating_sub(heard.elapsed())) => {
                    tell("gradwire agent: no sign of life from the launcher; ending everything");
                    break grace;
                }
                _ = int.recv() => break grace,
                _ = term.recv() => break grace,
                _ = hup.recv() => break grace,
                _ = reap.tick() => processes::reap_orphans(&self.alive.values().copied().collect()),
            }
        };
        self.stop(grace, &mut orders, &mut ends).await;
        ExitCode::SUCCESS
    }

    fn complain(&self, error: &MessageError) {
        tell(format_args!("gradwire agent on {}: {error}; ending everything", self.begin.host));
    }

    fn obey(&mut self, order: Order) {
        let report = match order {
            // Most are signs of life, whose answer nobody waits for: none piles up (BOUND).
            Order::Clock => {
                let _ = self.reports.try_send(Report::Clock { at_us: self.now() });
                return;
            }
            Order::Start(start) => {
                let role = start.role;
                match self.start(start) {
                    Ok(pid) => Report::Started { role, pid, at_us: self.now() },
                    Err(what) => Report::Failed { role, what },
                }
            }
            Order::Begin(_) | Order::Stop { .. } => return,
        };
        // Output may fill the queue; an order to stop must be heard even then, so nobody waits here.
        let reports = self.reports.clone();
        tokio::spawn(async move { reports.send(report).await });
    }

    fn now(&self) -> u64 {
        micros(self.born)
    }

    /// The daemon can't know of the end of a rank that never attached, and others may wait for it.
    fn tell_daemon(&self, role: Role, ended: Ended) {
        if let (Role::Rank(rank), Some(daemon)) = (role, &self.daemon) {
            // A daemon that does not read is about to be found dead by itself.
            let _ = daemon.try_send((rank, ended));
        }
    }

    fn start(&mut self, start: Start) -> Result<u32, String> {
        if self.alive.contains_key(&start.role) {
            return Err(format!("{} already runs on host {}", start.role, self.begin.host));
        }
        let own =
            std::env::current_exe().map_err(|error| format!("can't find gradwire: {error}"))?;
        let program: PathBuf = match start.role {
            Role::Daemon => self.programs.gradwired.clone(),
            Role::Rank(_) => self.programs.program.clone(),
        };
        let mut command = Command::new(own);
        command
            .arg("exec-child")
            .arg(std::process::id().to_string())
            .arg(program)
            .args(start.args)
            .envs(&self.begin.environment)
            .envs(&start.environment)
            .current_dir(&self.programs.directory)
            .stdin(if start.role == Role::Daemon { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // CLEAN: a group of its own, so that its children can be asked to end with it.
            .process_group(0);
        let mut child = command.spawn().map_err(|error| {
            format!("{} can't be started on host {}: {error}", start.role, self.begin.host)
        })?;
        let pid = child.id().unwrap_or_default();
        if let Some(stdin) = child.stdin.take() {
            let (ranks, queue) = mpsc::channel(REPORTS);
            tokio::spawn(say_ended(queue, stdin));
            self.daemon = Some(ranks);
        }
        let (role, born) = (start.role, self.born);
        let (reports, ended) = (self.reports.clone(), self.ended.clone());
        let (out, err) = (child.stdout.take(), child.stderr.take());
        let out = tokio::spawn(pump(role, Stream::Stdout, out, reports.clone()));
        let err = tokio::spawn(pump(role, Stream::Stderr, err, reports.clone()));
        tokio::spawn(async move {
            let status = child.wait().await;
            let at_us = micros(born);
            let how = status.map_or(Ended::Code(1), Into::into);
            let _ = ended.send((role, how)).await;
            // What it wrote comes before its end.
            let _ = timeout(DRAIN, async { (out.await, err.await) }).await;
            let _ = reports.send(Report::Exited { role, pid, ended: how, at_us }).await;
        });
        self.alive.insert(role, pid);
        Ok(pid)
    }

    /// SIGTERM to every process group, the grace period, then SIGKILL to every descendant. A
    /// second Stop, which can only be shorter, ends the grace period.
    async fn stop<R: AsyncRead + Unpin>(
        &mut self,
        grace: Duration,
        orders: &mut Reader<R>,
        ends: &mut mpsc::Receiver<(Role, Ended)>,
    ) {
        for pid in self.alive.values() {
            let group = i32::try_from(*pid).ok().and_then(Pid::from_raw);
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::TERM);
            }
        }
        let own = self.alive.values().copied().collect();
        tokio::select! {
            _ = processes::all_gone(&own, grace) => {}
            () = hurried(orders) => {}
        }
        if !processes::kill_all(&own).await {
            tell(format_args!("gradwire agent: processes on {} can't be killed", self.begin.host));
        }
        while !self.alive.is_empty() {
            let Ok(Some((role, _))) = timeout(DRAIN, ends.recv()).await else { break };
            self.alive.remove(&role);
        }
        let _ = timeout(FLUSH, self.reports.send(Report::Stopped)).await;
    }
}

/// Writes a line for each rank: `ended <rank>`, or `failed <rank> <how>`.
async fn say_ended(mut ranks: mpsc::Receiver<(u32, Ended)>, mut daemon: impl AsyncWrite + Unpin) {
    while let Some((rank, ended)) = ranks.recv().await {
        let line = match ended.is_well() {
            true => format!("ended {rank}\n"),
            false => format!("failed {rank} {ended}\n"),
        };
        if send(&mut daemon, line.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Comes back at the second Stop; never, if there is none.
async fn hurried<R: AsyncRead + Unpin>(orders: &mut Reader<R>) {
    loop {
        match orders.next::<Order>().await {
            Some(Ok(Order::Stop { .. })) => return,
            Some(Ok(_)) => {}
            Some(Err(_)) | None => std::future::pending().await,
        }
    }
}

async fn pump(
    role: Role,
    stream: Stream,
    pipe: Option<impl AsyncRead + Unpin>,
    reports: mpsc::Sender<Report>,
) {
    let Some(mut pipe) = pipe else { return };
    let mut splitter = Splitter::default();
    let mut bytes = vec![0; split::MAX_STRETCH];
    loop {
        let lines = match pipe.read(&mut bytes).await {
            Ok(0) | Err(_) => break,
            Ok(length) => splitter.push(&bytes[..length]),
        };
        for (text, end) in lines {
            let _ = reports.send(Report::Output { role, stream, text, end }).await;
        }
    }
    if let Some((text, end)) = splitter.finish() {
        let _ = reports.send(Report::Output { role, stream, text, end }).await;
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
