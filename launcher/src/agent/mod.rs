//! The agent of one host: it starts processes on order, passes on their output, and reports how
//! they end. It ends them all (CLEAN) on order, when its standard input ends (the launcher died or
//! ssh lost the connection), when the launcher is silent for too long, and when it gets a signal.
//!
//! It decides nothing about the job. The same program runs on this machine and behind ssh.
//!
//! - [`output`], [`split`]: the output of processes becomes lines
//! - [`credit`]: how much output may be on its way
//! - [`last_lines`]: what a rank has written last
//! - [`exec`]: the last step before a program runs
//! - `binding`: the processors of a rank
//! - [`host`]: does this host have what the job needs
//! - [`recording`]: saves the flight recording of a daemon that was killed
//! - [`memory`]: victims of the out-of-memory killer
//! - [`signals`]: signals for the ranks
//! - `writer`: writes reports to the launcher

mod binding;
pub mod credit;
pub mod exec;
pub mod host;
pub mod last_lines;
pub mod memory;
pub mod output;
pub mod recording;
pub mod signals;
pub mod split;
mod writer;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, Instant},
};

use gradwire_proto::{Rank, beat::Suspension};
use gradwire_services::launch::{
    Begin, LineEnd, Notice, Order, ProcessEnd, Report, Role, Start, Stream, Text, signal_name,
    to_line,
};
use rustix::process::{Pid, Signal, getppid};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    process::Command,
    sync::mpsc,
    task::yield_now,
    time::{MissedTickBehavior, interval, sleep, timeout},
};

use self::{
    credit::Credit,
    host::Checked,
    last_lines::AllLastLines,
    memory::Victims,
    output::{Output, Pump},
    recording::Recording,
    signals::Suspended,
    writer::REPORTS,
};
use crate::{
    error::{limits_hint, print_line},
    messages::Reader,
    outer::ERROR_FILE,
    processes::{self, Which},
    run_file,
    signals::{Endings, passed},
};

/// How often, and with which pauses, an agent looks whether its launcher has ended.
const GONE_CHECKS: u32 = 20;
const GONE: Duration = Duration::from_millis(50);

/// How long the system may take to report the end of a killed process.
const REAPED: Duration = Duration::from_millis(500);

/// How long a launcher that has ordered the end may leave our last reports unread. The reader of
/// its own output may be slow; if the launcher itself is gone, writing fails.
const FLUSH: Duration = Duration::from_secs(300);

/// The same for a launcher that may have vanished.
const FLUSH_UNHEARD: Duration = Duration::from_secs(1);

/// How long the report that a process has failed waits until its output has been sent.
const UNREAD: Duration = Duration::from_secs(2);

/// The interval at which ended orphans are reaped, and stopped processes are looked for.
const REAP: Duration = Duration::from_secs(1);

/// How long a rank may be seen stopped after the daemon has ended: 20 s in all. If the ranks have
/// formed a further job by themselves, its other ranks notice that sooner, even on a busy machine,
/// and say more.
const STOPPED: Duration = Duration::from_secs(19);

/// The interval at which the daemon gets what the ranks have written.
const PASS_ON: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Agent {
    begin: Begin,
    programs: Checked,
    born: Instant,
    reports: mpsc::Sender<Report>,
    credit: Credit,
    ended: mpsc::Sender<(Role, ProcessEnd)>,
    /// The ids of processes that have not been reaped yet.
    alive: BTreeMap<Role, u32>,
    /// Since when ranks have been seen stopped after the daemon had ended.
    stopped: BTreeMap<Role, Instant>,
    /// The ids of those that were killed because of that.
    unresponsive: Arc<Mutex<BTreeSet<u32>>>,
    suspended: Suspended,
    /// Notices for the daemon.
    daemon: Option<mpsc::Sender<Notice>>,
    victims: Arc<Victims>,
    recording: Recording,
    last_lines: AllLastLines,
}

/// Why an agent ends everything.
#[derive(Debug)]
struct End {
    why: String,
    /// Whether only this host ends, and not the job.
    alone: bool,
    grace: Duration,
    /// How long the launcher may leave reports unread.
    flush: Duration,
}

/// Serves one launcher over `input` and `output`, until everything it started has ended.
pub async fn run<R, W>(input: R, output: W) -> ExitCode
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let born = Instant::now();
    let (reports, queue) = mpsc::channel(REPORTS);
    let moved = Arc::new(AtomicU64::new(0));
    let writer = tokio::spawn(writer::write(queue, output, moved.clone()));
    let mut orders = Reader::new(input);
    let (code, flush) = match begin(&mut orders).await {
        Ok((begin, programs, ready)) => {
            let (ended, ends) = mpsc::channel(REPORTS);
            let _ = reports.send(ready).await;
            let (reports, alive) = (reports.clone(), BTreeMap::new());
            let (suspended, stopped, unresponsive, daemon, last_lines) = Default::default();
            let victims = Arc::new(Victims::new());
            let credit = Credit::new();
            let recording = Recording::new(&begin.recorder);
            let agent = Agent {
                begin,
                programs,
                born,
                reports,
                credit,
                ended,
                alive,
                stopped,
                unresponsive,
                suspended,
                daemon,
                victims,
                recording,
                last_lines,
            };
            agent.serve(orders, ends).await
        }
        Err(refused) => {
            let _ = reports.send(refused).await;
            (ExitCode::FAILURE, FLUSH)
        }
    };
    drop(reports);
    writer::all_written(writer, &moved, flush).await;
    code
}

/// Receives the first order and checks that this host can carry it out.
async fn begin<R: AsyncRead + Unpin>(
    orders: &mut Reader<R>,
) -> Result<(Begin, Checked, Report), Report> {
    let refused = |what: String, hint: &str| Report::Refused { what, hint: hint.to_owned() };
    let begin = match orders.next::<Order>().await {
        Some(Ok(Order::Begin(begin))) => begin,
        Some(Ok(_)) => return Err(refused("the first order is not Begin".to_owned(), "")),
        Some(Err(error)) => {
            let version = gradwire_proto::VERSION;
            let what = format!("gradwire {version} can't understand the launcher: {error}");
            return Err(refused(what, "install the same release on every host"));
        }
        None => return Err(refused("the launcher sent no order".to_owned(), "")),
    };
    crate::signals::heed()
        .map_err(|error| refused(format!("can't handle signals: {error}"), ""))?;
    let programs = host::check(&begin).map_err(|(what, hint)| refused(what, &hint))?;
    processes::adopt_orphans()
        .map_err(|error| refused(format!("can't become a subreaper: {error}"), ""))?;
    let port = host::free_port().map_err(|error| refused(format!("no free port: {error}"), ""))?;
    let ready = Report::Ready { address: host::reached_address(), port };
    Ok((begin, programs, ready))
}

impl Agent {
    async fn serve<R: AsyncRead + Unpin>(
        mut self,
        mut orders: Reader<R>,
        mut ends: mpsc::Receiver<(Role, ProcessEnd)>,
    ) -> (ExitCode, Duration) {
        let grace = Duration::from_millis(self.begin.grace_ms);
        let silence = match self.begin.silence_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms),
        };
        let Ok(mut endings) = Endings::listen() else {
            return (ExitCode::FAILURE, FLUSH_UNHEARD);
        };
        let mut reap = interval(REAP);
        reap.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut wrote = interval(PASS_ON);
        wrote.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut last_order = Instant::now();
        let mut suspension = Suspension::new(last_order);
        let (launcher, mut is_cut) = (getppid(), false);
        let unheard = |why: String| End { why, alone: false, grace, flush: FLUSH_UNHEARD };
        let end = loop {
            let now = Instant::now();
            // A suspended launcher is silent.
            let is_suspended = self.suspended != Suspended::Nothing;
            if suspension.check(now, silence).is_some() || is_suspended {
                last_order = now;
            }
            let silent = now - last_order;
            if silent >= silence {
                print_line("gradwire agent: the launcher is silent; ending all processes");
                break unheard("the launcher gives no sign of life".to_owned());
            }
            tokio::select! {
                order = orders.next::<Order>() => {
                    last_order = Instant::now();
                    match order {
                        Some(Ok(Order::Stop { grace_ms, why })) => {
                            let grace = Duration::from_millis(grace_ms);
                            break End { why, alone: false, grace, flush: FLUSH };
                        }
                        Some(Ok(order)) => {
                            // The launcher may have heard of an end before this loop did.
                            while let Ok((role, end)) = ends.try_recv() {
                                self.ended(role, end);
                            }
                            self.obey(order);
                        }
                        Some(Err(error)) => {
                            let host = &self.begin.host;
                            print_line(format_args!(
                                "gradwire agent on {host}: {error}; ending all"
                            ));
                            break unheard(format!("the launcher sent an invalid order: {error}"));
                        }
                        None => {
                            is_cut = true;
                            break unheard("the connection to the launcher ended".to_owned());
                        }
                    }
                }
                Some((role, end)) = ends.recv() => self.ended(role, end),
                // Often, because a long time between two checks means that this process was
                // suspended.
                () = sleep((silence - silent).min(silence / 4)) => {}
                signal = endings.next() => {
                    let name = signal_name(signal).unwrap_or("a signal");
                    // The launcher learns of it before the ends that follow.
                    let what = format!("its agent received {name}");
                    let _ = self.reports.try_send(Report::Asked { what, at_us: micros(self.born) });
                    let why = format!("the agent of this host received {name}");
                    break End { alone: true, ..unheard(why) };
                }
                () = sleep(signals::LOOK), if matches!(self.suspended, Suspended::Ranks(_)) => {
                    self.suspended = self.suspended.look(&self.alive);
                }
                _ = reap.tick() => {
                    processes::reap_orphans(&self.alive.values().copied().collect());
                    self.end_stopped();
                    // A job that is suspended as a whole goes on later.
                    if self.suspended == Suspended::Nothing {
                        self.report_stopped_daemon(false);
                    }
                    self.victims.look();
                    self.look_at_daemon();
                }
                _ = wrote.tick() => self.pass_on_last_lines(),
            }
        };
        let flush = end.flush;
        self.stop(end, &mut orders, &mut ends).await;
        if is_cut {
            self.remove_leftovers(launcher).await;
        }
        (ExitCode::SUCCESS, flush)
    }

    fn ended(&mut self, role: Role, end: ProcessEnd) {
        self.alive.remove(&role);
        match role {
            Role::Rank(rank) => {
                self.last_lines.remove(Rank(rank));
                self.notify_daemon(Notice::Ended { rank: Rank(rank), end });
                if !end.is_well() {
                    self.report_stopped_daemon(true);
                }
            }
            Role::Daemon => self.recording.daemon_ended(end),
        }
    }

    /// Reports the daemon as long as it is stopped: it can't say that it is why others fail.
    fn report_stopped_daemon(&self, rank_failed: bool) {
        let daemon = self.alive.get(&Role::Daemon).copied();
        if let Some(pid) = daemon.filter(|pid| processes::is_stopped(*pid)) {
            let at_us = micros(self.born);
            let _ = self.reports.try_send(Report::DaemonStopped { pid, at_us, rank_failed });
        }
    }

    fn obey(&mut self, order: Order) {
        let report = match order {
            // Most are signs of life: if the queue is full, their answers are dropped (BOUND).
            Order::Clock => {
                let _ = self.reports.try_send(Report::Clock { at_us: micros(self.born) });
                return;
            }
            Order::Shown { pieces } => return self.credit.give(pieces),
            Order::Start(start) => {
                let role = start.role;
                // Its daemon serves by now.
                self.look_at_daemon();
                match self.start(start) {
                    Ok(pid) => {
                        if let Role::Rank(rank) = role {
                            self.notify_daemon(Notice::Started { rank: Rank(rank), pid });
                        }
                        Report::Started { role, pid, at_us: micros(self.born) }
                    }
                    Err(what) => Report::Failed { role, what },
                }
            }
            Order::Signal { signal } => {
                if let Some(signal) = passed(signal) {
                    self.suspended = self.suspended.pass_on(signal, &self.alive);
                }
                return;
            }
            // A process that has just ended needs no signal.
            Order::End { role } => return self.signal(role, Signal::TERM),
            Order::Kill { role } => return self.signal(role, Signal::KILL),
            Order::Notify { notice } => return self.notify_daemon(notice),
            Order::Begin(_) | Order::Stop { .. } => return,
        };
        // Output may fill the queue. An order to stop must be read even then, so this does not
        // wait.
        let reports = self.reports.clone();
        tokio::spawn(async move { reports.send(report).await });
    }

    /// Removes the files of a launcher that was killed (CLEAN). A launcher that goes on without
    /// this host still needs them; it is then still the parent of this process.
    async fn remove_leftovers(&self, launcher: Option<Pid>) {
        // Pipes are closed a moment before the end of a process.
        for _ in 0..GONE_CHECKS {
            if getppid() != launcher {
                for path in &self.begin.leftovers {
                    run_file::remove(Path::new(&path.to_os()));
                }
                return;
            }
            sleep(GONE).await;
        }
    }

    fn look_at_daemon(&mut self) {
        if let Some(pid) = self.alive.get(&Role::Daemon) {
            self.recording.look(*pid);
        }
    }

    fn signal(&self, role: Role, signal: Signal) {
        if let Some(pid) = self.alive.get(&role) {
            processes::signal(*pid, signal);
        }
    }

    /// Ends ranks that have been stopped for [`STOPPED`] although the daemon has ended. All ranks
    /// have left the job by then, so that nobody else notices them, and the launcher would wait for
    /// their ends forever (WAIT). A job that is suspended as a whole goes on later.
    fn end_stopped(&mut self) {
        let has_daemon = self.daemon.is_none() || self.alive.contains_key(&Role::Daemon);
        let watches = !has_daemon && self.suspended == Suspended::Nothing;
        let now = Instant::now();
        let all = self.alive.iter().filter(|(_, pid)| watches && processes::is_stopped(**pid));
        let since = |role| self.stopped.get(role).copied().unwrap_or(now);
        let stopped: BTreeMap<Role, Instant> = all.map(|(role, _)| (*role, since(role))).collect();
        for (role, pid) in &self.alive {
            if stopped.get(role).is_some_and(|since| now - *since >= STOPPED) {
                let what = "gradwire: this process has been stopped (SIGSTOP) since it left the \
                            launcher's job, and is ended";
                // The launcher shows it as the last line of the process.
                let _ = self.reports.try_send(Report::Output {
                    role: *role,
                    stream: Stream::Stderr,
                    text: Text::from(what.as_bytes()),
                    end: LineEnd::Newline,
                });
                self.unresponsive.lock().unwrap_or_else(PoisonError::into_inner).insert(*pid);
                processes::kill(*pid);
            }
        }
        self.stopped = stopped;
    }

    /// Tells the daemon what it can't see itself, such as how the process of a rank ended.
    fn notify_daemon(&self, notice: Notice) {
        if let Some(daemon) = &self.daemon {
            // The end of a daemon that does not read is noticed elsewhere.
            let _ = daemon.try_send(notice);
        }
    }

    /// Tells the daemon what the ranks have written last. If the daemon does not read, half of the
    /// queue is kept free for more important notices.
    fn pass_on_last_lines(&self) {
        let Some(daemon) = &self.daemon else { return };
        for notice in self.last_lines.news() {
            if daemon.capacity() > daemon.max_capacity() / 2 {
                let _ = daemon.try_send(notice);
            }
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
            .args(start.args.iter().map(Text::to_os))
            .envs(&self.begin.environment)
            .envs(host::threads(&self.begin.environment, &start.environment))
            .envs(&start.environment)
            .current_dir(&self.programs.directory)
            .stdin(if start.role == Role::Daemon { Stdio::piped() } else { Stdio::null() })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // CLEAN: a group of its own, so that its children can be asked to end with it.
            .process_group(0);
        let error_file =
            start.environment.get(ERROR_FILE).and_then(|file| Path::new(file).parent());
        if error_file.is_some_and(|folder| !folder.is_dir()) {
            // This host doesn't share the folder: the rank would fail once more to write there.
            command.env_remove(ERROR_FILE);
        }
        let mut child = command.spawn().map_err(|error| {
            let hint = limits_hint(&error).map(|hint| format!("; {hint}")).unwrap_or_default();
            format!("{} can't be started on host {}: {error}{hint}", start.role, self.begin.host)
        })?;
        let pid = child.id().unwrap_or_default();
        if let Some(stdin) = child.stdin.take() {
            let (notices, queue) = mpsc::channel(REPORTS + self.alive.len());
            tokio::spawn(notify(queue, stdin));
            self.daemon = Some(notices);
            for (role, pid) in &self.alive {
                if let Role::Rank(rank) = role {
                    self.notify_daemon(Notice::Started { rank: Rank(*rank), pid: *pid });
                }
            }
        }
        let (role, born) = (start.role, self.born);
        let (reports, ended) = (self.reports.clone(), self.ended.clone());
        let last = match role {
            Role::Rank(rank) => Some(self.last_lines.add(Rank(rank))),
            Role::Daemon => None,
        };
        let output =
            |stream| Output::new(role, stream, reports.clone(), self.credit.clone(), last.clone());
        let out = child.stdout.take().map(|pipe| output(Stream::Stdout).start(pipe));
        let err = child.stderr.take().map(|pipe| output(Stream::Stderr).start(pipe));
        let (victims, unresponsive) = (self.victims.clone(), self.unresponsive.clone());
        tokio::spawn(async move {
            let status = child.wait().await;
            let at_us = micros(born);
            let how = status.map_or(ProcessEnd::Code(1), Into::into);
            let how = match unresponsive.lock().unwrap_or_else(PoisonError::into_inner).take(&pid) {
                Some(_) => ProcessEnd::Unresponsive,
                None => victims.end(how),
            };
            let _ = ended.send((role, how)).await;
            // Its output comes before its end. But the launcher must learn in time of a failure,
            // also if nobody reads the output.
            let drain = async |pump: Option<Pump>| {
                if let Some(pump) = pump {
                    pump.drain().await;
                }
            };
            let drained = async { tokio::join!(drain(out), drain(err)) };
            if how.is_well() {
                drained.await;
            } else {
                let _ = timeout(UNREAD, drained).await;
            }
            let _ = reports.send(Report::Exited { role, pid, end: how, at_us }).await;
        });
        self.alive.insert(role, pid);
        Ok(pid)
    }

    /// SIGTERM to everything, the grace period, then SIGKILL to every descendant. A second Stop,
    /// which can only be shorter, ends the grace period.
    async fn stop<R: AsyncRead + Unpin>(
        &mut self,
        end: End,
        orders: &mut Reader<R>,
        ends: &mut mpsc::Receiver<(Role, ProcessEnd)>,
    ) {
        // Yields afterwards, so that the daemon receives the reason before it sees the effects.
        self.notify_daemon(Notice::Stopping { why: end.why, alone: end.alone });
        yield_now().await;
        let own = self.alive.values().copied().collect();
        tokio::select! {
            () = processes::ask_all_to_end(&own, end.grace) => {}
            () = hurried(orders, &self.credit) => {}
        }
        if !processes::kill_all(&own, Which::All).await {
            let host = &self.begin.host;
            print_line(format_args!("gradwire agent: processes on {host} can't be killed"));
        }
        while !self.alive.is_empty() {
            let Ok(Some((role, end))) = timeout(REAPED, ends.recv()).await else { break };
            self.ended(role, end);
        }
        self.credit.end();
        self.recording.finish().await;
        // It comes after the remaining output, which the launcher may take long to read.
        let reports = self.reports.clone();
        tokio::spawn(async move { reports.send(Report::Stopped).await });
    }
}

/// Writes notices to the daemon.
async fn notify(mut notices: mpsc::Receiver<Notice>, mut daemon: impl AsyncWrite + Unpin) {
    while let Some(notice) = notices.recv().await {
        if writer::send(&mut daemon, to_line(&notice).as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Returns at the second Stop; never, if there is none.
async fn hurried<R: AsyncRead + Unpin>(orders: &mut Reader<R>, credit: &Credit) {
    loop {
        match orders.next::<Order>().await {
            Some(Ok(Order::Stop { .. })) => return,
            Some(Ok(Order::Shown { pieces })) => credit.give(pieces),
            Some(Ok(_)) => {}
            Some(Err(_)) | None => std::future::pending().await,
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
