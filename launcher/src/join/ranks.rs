//! The ranks of a pod, or of a host of BytePS, which may have none. The first process of a pod
//! starts them and the daemon, and must stay: when it ends, the system kills all others, and a
//! daemon that is killed can't tell other hosts why.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    process::{ExitCode, Stdio},
    time::Duration,
};

use gradwire_proto::{Rank, SEE_OUTPUT};
use gradwire_services::launch::{Notice, ProcessEnd, to_line};
use rustix::process::Signal;
use tokio::{
    io::AsyncWriteExt,
    process::{Child, ChildStdin, Command},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep_until},
};

use super::{
    known::Join,
    service::{self, Blamed},
};
use crate::{
    agent::host::threads,
    error::{CommandError, limits_hint, print_line},
    processes::{self, Which},
    signals::{Endings, Passed, passed},
};

/// How long the other ranks may report an error before they are asked to end.
const REPORTING: Duration = Duration::from_secs(5);

/// The interval at which ended orphans are reaped.
const REAP: Duration = Duration::from_secs(1);

/// Runs the ranks of this host until all have ended, and the daemon as long as it is needed.
pub(super) async fn run(
    join: &Join<'_>,
    program: &OsStr,
    arguments: &[OsString],
) -> Result<ExitCode, CommandError> {
    let system = |error: std::io::Error| CommandError::system(&error);
    // Before anything is started, so that no signal and no process is missed.
    let mut endings = Endings::listen().map_err(system)?;
    let signals = Passed::listen().map_err(system)?;
    processes::adopt_orphans().map_err(system)?;
    let program = which::which(program).map_err(|error| {
        let failed = CommandError::failed(format!("can't run {}: {error}", program.display()));
        CommandError { code: 127, ..failed }
    })?;
    let (mut daemon, job, blamed) = tokio::select! {
        started = service::start(join) => started?,
        signal = endings.next() => {
            processes::kill_all(&BTreeSet::new(), Which::All).await;
            return Ok(ProcessEnd::Signal(signal).exit_code().into());
        }
    };
    let grace = join.settings.launch.grace;
    let (ranks, notices) = (Ranks::default(), daemon.stdin.take());
    let is_server = join.placement.slots == 0;
    let mut pod = Pod { endings, signals, grace, ranks, blamed, notices, is_server, code: None };
    for local in 0..join.placement.slots {
        match pod.ranks.start(join, local, &job, program.as_os_str(), arguments) {
            Ok((rank, pid)) => pod.notify(Notice::Started { rank, pid }).await,
            Err(error) => {
                processes::kill_all(&BTreeSet::new(), Which::All).await;
                return Err(error);
            }
        }
    }
    pod.until_ended(&mut daemon).await;
    pod.await_daemon(&mut daemon).await;
    // Processes that ranks have left behind.
    processes::kill_all(&BTreeSet::new(), Which::All).await;
    Ok(pod.code.unwrap_or(0).into())
}

struct Pod {
    endings: Endings,
    signals: Passed,
    grace: Duration,
    ranks: Ranks,
    blamed: Blamed,
    /// The daemon's standard input. It can't see by itself how ranks end, above all those that end
    /// before they attach (TELL).
    notices: Option<ChildStdin>,
    /// Whether this host has no ranks.
    is_server: bool,
    /// The exit code of the pod, once a rank has failed or a signal has ended it.
    code: Option<u8>,
}

impl Pod {
    async fn notify(&mut self, notice: Notice) {
        if let Some(daemon) = &mut self.notices {
            // The end of a daemon is noticed elsewhere.
            let _ = daemon.write_all(to_line(&notice).as_bytes()).await;
        }
    }

    /// Waits for all ranks. After a signal or the first failure, perhaps of another pod, the others
    /// end in time (WAIT).
    async fn until_ended(&mut self, daemon: &mut Child) {
        let (mut daemon_runs, mut has_failed, mut consequence) = (true, false, None);
        let mut reap = interval(REAP);
        reap.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // When the ranks are asked to end, and when they are killed.
        let (mut ask, mut kill): (Option<Instant>, Option<Instant>) = (None, None);
        while !self.ranks.alive.is_empty() {
            tokio::select! {
                Some(Ok((rank, end))) = self.ranks.ends.join_next() => {
                    self.ranks.alive.remove(&rank);
                    self.notify(Notice::Ended { rank: Rank(rank), end }).await;
                    if end.is_well() || self.code.is_some() {
                        continue;
                    }
                    if self.awaits_blamed(rank) {
                        // It ends because of the other rank, whose end counts more (TELL).
                        consequence.get_or_insert(end.exit_code());
                        ask.get_or_insert(Instant::now() + REPORTING);
                    } else {
                        let hint = if end.hint() == SEE_OUTPUT { "" } else { end.hint() };
                        print_line(CommandError::failed(format!("rank {rank} {end}")).hint(hint));
                        self.code = Some(end.exit_code());
                        ask = Some(Instant::now() + REPORTING);
                    }
                }
                ended = daemon.wait(), if daemon_runs => {
                    daemon_runs = false;
                    // The daemon has said why. If it ended well, all ranks have left.
                    has_failed = !ended.is_ok_and(|status| status.success());
                    if has_failed && self.code.is_none() {
                        ask = Some(Instant::now() + REPORTING);
                    }
                }
                signal = self.endings.next() => {
                    let now = Instant::now();
                    if self.code.is_none() {
                        self.code = Some(ProcessEnd::Signal(signal).exit_code());
                    }
                    // A second signal kills the ranks at once.
                    match kill {
                        None => ask = Some(now),
                        Some(_) => kill = Some(now),
                    }
                }
                signal = self.signals.next() => {
                    if let Some(signal) = passed(signal) {
                        self.ranks.signal(signal);
                    }
                }
                () = at(ask), if ask.is_some() => {
                    (ask, kill) = (None, Some(Instant::now() + self.grace));
                    if self.code.is_none() {
                        let what = "the job has failed, so the ranks of this host are ended";
                        print_line(CommandError::failed(what));
                        self.code = Some(1);
                    }
                    self.ranks.signal(Signal::TERM);
                }
                () = at(kill), if kill.is_some() => {
                    kill = None;
                    self.ranks.signal(Signal::KILL);
                }
                _ = reap.tick() => {
                    let own = self.ranks.alive.values().copied().chain(daemon.id());
                    processes::reap_orphans(&own.collect());
                }
            }
        }
        self.code = self.code.or(consequence).or(has_failed.then_some(1));
    }

    /// Whether the daemon has blamed another rank of this host that has not ended yet.
    fn awaits_blamed(&self, rank: u32) -> bool {
        let blamed = *self.blamed.borrow();
        blamed.is_some_and(|blamed| blamed != rank && self.ranks.alive.contains_key(&blamed))
    }

    /// Waits for the daemon: other hosts may need it, above all if it hosts the coordinator. After
    /// a failure or a signal, it is ended in time.
    async fn await_daemon(&mut self, daemon: &mut Child) {
        let limit = self.code.map(|_| Instant::now() + self.grace);
        tokio::select! {
            ended = daemon.wait() => {
                // Without ranks, nothing else has told this host how the job has ended.
                if self.is_server && self.code.is_none() && !ended.is_ok_and(|end| end.success()) {
                    print_line(CommandError::failed("the job has failed; see the other hosts"));
                    self.code = Some(1);
                }
                return;
            }
            () = at(limit), if limit.is_some() => {}
            signal = self.endings.next() => {
                self.code = self.code.or(Some(ProcessEnd::Signal(signal).exit_code()));
            }
        }
        service::end(daemon, self.grace).await;
    }
}

async fn at(time: Option<Instant>) {
    if let Some(time) = time {
        sleep_until(time).await;
    }
}

/// The ranks that run.
#[derive(Default)]
struct Ranks {
    /// The process ids, by the numbers of the ranks.
    alive: BTreeMap<u32, u32>,
    ends: JoinSet<(u32, ProcessEnd)>,
}

impl Ranks {
    /// Starts the rank with number `local` of this host. `job` has the variables of the job.
    fn start(
        &mut self,
        join: &Join<'_>,
        local: u32,
        job: &str,
        program: &OsStr,
        arguments: &[OsString],
    ) -> Result<(Rank, u32), CommandError> {
        let place = join.placement.beside(local);
        let own = std::env::current_exe().map_err(|error| CommandError::system(&error))?;
        let for_programs: BTreeMap<_, _> = join.for_programs_at(&place).into_iter().collect();
        let mut child = Command::new(own)
            .arg("exec-child")
            .arg(std::process::id().to_string())
            .arg(program)
            .args(arguments)
            .envs(threads(&BTreeMap::new(), &for_programs))
            .envs(for_programs)
            .envs(join.attaching(job, &place))
            .stdin(Stdio::null())
            // A group of its own, so that its children can be asked to end with it.
            .process_group(0)
            .spawn()
            .map_err(|error| {
                let what = format!("rank {} can't be started: {error}", place.rank);
                CommandError::failed(what).hint(limits_hint(&error).unwrap_or_default())
            })?;
        // The id is known until the process has been waited for.
        let pid = child.id().unwrap_or_default();
        self.alive.insert(place.rank, pid);
        self.ends.spawn(async move {
            let end = child.wait().await.map_or(ProcessEnd::Code(1), Into::into);
            (place.rank, end)
        });
        Ok((Rank(place.rank), pid))
    }

    fn signal(&self, signal: Signal) {
        for pid in self.alive.values() {
            processes::signal(*pid, signal);
        }
    }
}
