//! Owns the engine: one task passes events to it, executes its commands and runs its timers.
//!
//! - `streams`: messages to and from nodes
//! - `reports`: reports of waits and of jobs that stand still
//!
//! Nothing here waits for a node. Each node has a bounded queue of messages, and a node that does
//! not read them is lost (BOUND).

mod reports;
mod streams;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gradwire_proto::{
    Ending, Failure, JobId, NodeId, Secret,
    auth::Claim,
    beat::Suspension,
    clock::Clock,
    numbered::Received,
    pb::{self, coordinator_message::Message},
};
use gradwire_settings::{Settings, Watchdog as WatchdogLimits, variables::VariableError};
use gradwire_telemetry::{
    Rate, Target,
    catalog::{HOST, JOB},
};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::{
    convert,
    engine::Engine,
    explaining::Explaining,
    history::History,
    inbox::{Inbound, OVER, Peer},
    meeting::Meeting,
    metrics::{self, WaitMetrics},
    model::{
        Command, ConnectionId, EngineConfig, Event, Phase,
        command::{Execute, Node, RefusalKind, Severity},
        event::Noticed,
        status::milliseconds,
        text,
    },
    timeline::Timeline,
    traces::Traces,
    tuning::{self, Tuning, TuningFile},
    watchdog::Watchdog,
};

/// How long the end of a job waits for the disk.
const KEEP_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a new stream may take to join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The most events that are answered together.
const BATCH: usize = 1024;

/// Limits how often refused nodes are logged.
static REFUSALS: Rate = Rate::new();

/// The state of a running coordinator, for health checks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Health {
    /// The phase of the job; ready means [`Phase::Running`].
    pub phase: Phase,
    /// The reason for the phase.
    pub reason: String,
    /// The metrics endpoints of the daemons, once all have joined.
    pub daemons: Arc<[Target]>,
}

/// The configuration of a coordinator.
#[derive(Debug, Clone)]
pub struct CoordinatorConfig {
    /// The configuration of the engine.
    pub engine: EngineConfig,
    /// The secret that every process of the job knows.
    pub secret: Secret,
    /// How long a new stream may take to join.
    pub join_timeout: Duration,
    /// How long it may take to tell the nodes that the job is over.
    pub grace: Duration,
    /// Receives the phase, for a readiness endpoint.
    pub health: Option<watch::Sender<Health>>,
    /// Where measured times are kept for the next job.
    tuning: Option<Tuning>,
    /// When a job stands still.
    pub watchdog: WatchdogLimits,
}

impl CoordinatorConfig {
    /// The configuration for a job of `nodes` nodes, of which the last `servers` have no ranks.
    ///
    /// # Errors
    /// [`VariableError`] if a setting is invalid.
    pub fn new(
        job: JobId,
        secret: Secret,
        (nodes, servers): (u32, u32),
        settings: &Settings,
    ) -> Result<Self, VariableError> {
        Ok(Self {
            engine: EngineConfig::new(job, nodes, servers, settings)?,
            secret,
            join_timeout: JOIN_TIMEOUT,
            grace: settings.launch.grace,
            health: None,
            tuning: Tuning::of(settings),
            watchdog: settings.watchdog.clone(),
        })
    }
}

struct Session {
    peer: Peer,
    /// Its number, once it has been sent the world; operations and heartbeats follow.
    node: Option<NodeId>,
    /// Whether too many messages wait for it; then it gets only the last message of the job.
    overrun: bool,
    /// How many messages it has sent. They are counted here and not where they are read, so that
    /// the last messages of an earlier stream count exactly once (ONE).
    received: Received,
}

/// The engine, the nodes' queues and the clock.
pub(crate) struct Runtime {
    engine: Engine,
    job: JobId,
    secret: Secret,
    epoch: u64,
    heartbeat_interval: Duration,
    heartbeat_timeout: Duration,
    start: Instant,
    clock: Clock,
    nodes: BTreeMap<ConnectionId, Session>,
    /// The reports of the nodes when the job ended.
    last_reports: Option<BTreeMap<u32, pb::NodeReport>>,
    waits: WaitMetrics,
    history: History,
    timeline: Arc<Mutex<Timeline>>,
    explaining: Explaining,
    meeting: Meeting,
    watchdog: Watchdog,
    /// Whether some rank is paused.
    is_paused: bool,
    /// The wait that is reported first.
    stall_warning: Duration,
    /// The metrics endpoints of the daemons.
    daemons: Arc<[Target]>,
    health: Option<watch::Sender<Health>>,
    outcome: Option<Ending>,
    inbox: mpsc::Sender<Inbound>,
    traces: Arc<Traces>,
    tuning: Option<Tuning>,
    /// The tuning file of this cluster, once the world is complete.
    tuning_file: Option<TuningFile>,
}

impl Runtime {
    /// A runtime for the inbox to which `inbox` sends.
    pub(crate) fn new(
        config: CoordinatorConfig,
        inbox: mpsc::Sender<Inbound>,
        traces: Arc<Traces>,
        timeline: Arc<Mutex<Timeline>>,
    ) -> Self {
        Self {
            job: config.engine.job.clone(),
            secret: config.secret,
            epoch: config.engine.epoch.0,
            heartbeat_interval: config.engine.heartbeat_interval,
            heartbeat_timeout: config.engine.heartbeat_timeout,
            start: Instant::now(),
            clock: Clock::new(),
            nodes: BTreeMap::new(),
            last_reports: None,
            waits: WaitMetrics::default(),
            history: History::default(),
            timeline,
            explaining: Explaining::default(),
            meeting: Meeting::new(&config.engine, Instant::now()),
            watchdog: Watchdog::new(config.watchdog),
            is_paused: false,
            stall_warning: config.engine.stall_warning,
            daemons: Arc::default(),
            health: config.health,
            outcome: None,
            inbox,
            traces,
            tuning: config.tuning,
            tuning_file: None,
            engine: Engine::new(config.engine),
        }
    }

    /// Serves until the job is over or `cancel` is cancelled.
    pub(crate) async fn drive(
        &mut self,
        inbox: &mut mpsc::Receiver<Inbound>,
        cancel: CancellationToken,
    ) -> Ending {
        let mut next_beat = self.start + self.heartbeat_interval;
        let mut suspension = Suspension::new(self.start.into_std());
        self.show();
        loop {
            let due = self.engine.next_deadline().map(|after| self.start + after);
            let wakes = [Some(next_beat), due, self.explaining.deadline()];
            let wake = wakes.into_iter().flatten().min().unwrap_or(next_beat);
            tokio::select! {
                biased;
                () = cancel.cancelled() => {
                    self.step(Event::Cancel { why: "the coordinator was asked to end".into() });
                }
                Some(inbound) = inbox.recv() => self.take(inbound),
                () = sleep_until(wake) => {}
            }
            // Messages that have already arrived are answered together, without waiting for more.
            for _ in 0..BATCH {
                let Ok(inbound) = inbox.try_recv() else { break };
                self.take(inbound);
            }
            let now = Instant::now();
            if let Some(time) = suspension.check(now.into_std(), self.heartbeat_timeout) {
                self.meeting.restart(now);
                self.step(Event::Suspended { time });
            }
            if due.is_some_and(|due| now >= due) {
                self.step(Event::Tick);
            }
            if now >= next_beat {
                self.watch();
                self.remember();
                self.beat(self.traces.is_wanted(), |_| true);
                next_beat = now + self.heartbeat_interval;
            }
            self.step(Event::Drained);
            self.explained(now);
            self.show();
            if let Some(outcome) = self.outcome.take() {
                return outcome;
            }
        }
    }

    /// Serves, after the end of the job, until every node has received its last message, at most
    /// `until` then (TELL). A node whose stream breaks meanwhile gets it on another one.
    pub(crate) async fn finish(&mut self, inbox: &mut mpsc::Receiver<Inbound>, until: Instant) {
        while !self.nodes.is_empty()
            && let Ok(Some(inbound)) = timeout_at(until, inbox.recv()).await
        {
            self.take(inbound);
        }
        self.nodes.clear();
        turn_away(inbox);
    }

    fn take(&mut self, inbound: Inbound) {
        match inbound {
            Inbound::Join { connection, join, proven, peer } => {
                let received = Received::default();
                let session = Session { peer, node: None, overrun: false, received };
                self.nodes.insert(connection, session);
                self.step(Event::Joined { connection, join, proven });
            }
            Inbound::Event(Event::Lost { connection, why, may_return }) => {
                self.step(Event::Lost { connection, why, may_return });
                if !may_return || !self.engine.awaits(connection) {
                    self.nodes.remove(&connection);
                }
            }
            Inbound::Ended { node, why } => {
                if let Some(connection) = self.engine.connection(node) {
                    self.step(Event::Lost { connection, why, may_return: false });
                    self.nodes.remove(&connection);
                }
            }
            Inbound::Event(event) => {
                if let Some(connection) = event.connection() {
                    self.count(connection);
                }
                self.step(event);
            }
            Inbound::Failed { connection, failure, noticed_ns } => {
                self.count(connection);
                let noticed = self.noticed(noticed_ns);
                self.step(Event::Failed { connection, failure, noticed });
            }
            Inbound::Heartbeat { connection, received } => {
                self.count(connection);
                self.step(Event::MessageReceived { connection });
                self.confirm(connection, received);
            }
            Inbound::Trace { connection, batch } => {
                // Messages of a replaced stream are sent again on the new one.
                if self.count(connection) {
                    self.traces.give(&batch);
                }
                self.step(Event::MessageReceived { connection });
            }
            Inbound::Traced { by: Some(connection) } => {
                self.beat(self.traces.is_wanted(), |to| to == connection);
            }
            Inbound::Traced { by: None } => {
                // Nodes send the names of tensors when they begin to record, and a new reader needs
                // them.
                if self.traces.has_new_reader() {
                    self.beat(false, |_| true);
                }
                self.beat(self.traces.is_wanted(), |_| true);
            }
            Inbound::Explain { reply, save } => self.ask(Some(reply), false, save),
            Inbound::Overdue { connection } => {
                self.count(connection);
                self.step(Event::MessageReceived { connection });
                self.ask(None, true, false);
            }
            Inbound::Explained { connection, explained } => {
                self.count(connection);
                self.step(Event::MessageReceived { connection });
                if let Some(node) = self.nodes.get(&connection).and_then(|it| it.node) {
                    self.explaining.answered(node, explained);
                }
            }
            Inbound::Inspect(reply) => {
                // The caller may be gone.
                let _ = reply.send(self.snapshot());
            }
        }
    }

    /// When a node noticed something, by what it says about this coordinator's clock.
    fn noticed(&self, noticed_ns: u64) -> Noticed {
        let trips = self.nodes.values().map(|session| session.peer.newest.lock().round_trip);
        let ago = Duration::from_nanos(self.clock.now_ns().saturating_sub(noticed_ns));
        let at = (noticed_ns > 0).then(|| self.start.elapsed().saturating_sub(ago));
        Noticed { at, trip: trips.max().unwrap_or_default() }
    }

    /// Sends every node of the world a message. Returns as [`Runtime::send`].
    fn send_to_world(&mut self, message: Message) -> Vec<Event> {
        self.send(&[convert::message(message)], |_, session| session.node.is_some())
    }

    /// The current snapshot for viewers.
    pub(crate) fn snapshot(&self) -> pb::StatusResponse {
        let uptime = self.start.elapsed();
        let mut reports = self.last_reports.clone().unwrap_or_else(|| self.reports());
        let mut status = self.engine.status(&reports, uptime);
        let nodes = status.nodes.len();
        for (number, node) in (0..).zip(&mut status.nodes) {
            node.report = reports.remove(&number);
            let Some(report) = &mut node.report else { continue };
            // Ranks and nodes that do not exist are left out (TRUST).
            report.ranks.truncate(node.slots as usize);
            report.ranks.iter_mut().for_each(|rank| rank.rank += node.first_rank);
            report.peers.retain(|peer| (peer.node as usize) < nodes);
            report.partly.clear();
            report.more_partly = 0;
        }
        pb::StatusResponse {
            uptime_ms: milliseconds(uptime),
            lags: self.history.lags(),
            decisions: self.history.decisions(),
            events: self.history.events(),
            ..status
        }
    }

    /// The latest reports of the nodes, by number.
    fn reports(&self) -> BTreeMap<u32, pb::NodeReport> {
        let reports = self.nodes.values().filter_map(|session| {
            let newest = session.peer.newest.lock();
            let (report, received) = newest.report.as_ref()?;
            let age_ms = milliseconds(received.elapsed());
            Some((session.node?.0, pb::NodeReport { age_ms, ..report.clone() }))
        });
        reports.collect()
    }

    /// Adds the latest reports to the timeline, if it is time to. Called with each heartbeat.
    fn remember(&self) {
        let at = self.start.elapsed();
        let mut timeline = self.timeline.lock();
        if self.engine.phase() == Phase::Running && timeline.is_due(at) {
            timeline.add(at, &self.reports(), &self.history.waited_for());
        }
    }

    fn happened(&mut self, what: impl Into<String>) {
        self.history.happened(self.start.elapsed(), what.into());
    }

    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let now = self.start.elapsed();
            let output = self.engine.step(event, now);
            metrics::measures(&output.measures, &mut self.waits);
            self.history.waited(&output.measures.waits.ranks);
            if !output.reason.is_empty() {
                tracing::debug!(reason = output.reason, "decided");
                let decided = output.decided.unwrap_or_else(|| vec![output.reason]);
                // A failure is shown once, and not among the decisions.
                if matches!(self.engine.phase(), Phase::Forming | Phase::Running) {
                    decided.into_iter().for_each(|text| self.history.decided(now, text));
                }
            }
            for command in output.commands {
                events.extend(self.execute(command));
            }
        }
    }

    /// Executes a command. Returns what follows, such as nodes that do not read their messages.
    fn execute(&mut self, command: Command) -> Vec<Event> {
        match command {
            Command::Welcome { connection, node, world } => {
                // Every node gets the same world, so the first message is enough.
                if self.waits.is_empty() {
                    let hosts = world.nodes.iter().map(|node| node.host.as_str());
                    self.waits = WaitMetrics::new(hosts);
                    self.daemons = targets(&self.job, &world.nodes);
                    let nodes = text::count(world.nodes.len(), "node");
                    self.happened(format!("the world is complete: {nodes}"));
                }
                self.recall(&world.nodes);
                let Some(there) = self.nodes.get_mut(&connection) else { return Vec::new() };
                there.node = Some(node);
                let claim = Claim::World {
                    nonce: &there.peer.nonce,
                    job: self.job.as_str(),
                    epoch: world.epoch.0,
                };
                let proof = self.secret.prove(&claim).to_vec();
                let trace = self.traces.is_wanted();
                let world = pb::World { trace, ..convert::world(&world, node.0, proof) };
                self.send(&[convert::message(Message::World(world))], |to, _| to == connection)
            }
            Command::Resume { connection, earlier, received } => {
                self.resume(connection, earlier, received).into_iter().collect()
            }
            Command::Moved { node, data_address } => {
                let moved = pb::Moved { node: node.0, data_address };
                self.send(&[convert::message(Message::Moved(moved))], |_, there| {
                    there.node.is_some()
                })
            }
            Command::Refuse { connection, kind, text } => {
                self.happened(format!("refused a node: {text}"));
                if kind == RefusalKind::Job {
                    // It reports that itself, or waits for the end of this job.
                    tracing::info!(reason = text, "refused a node");
                } else if let Some(left_out) = REFUSALS.admits() {
                    tracing::warn!(reason = text, left_out, "refused a node");
                }
                if let Some(node) = self.nodes.remove(&connection) {
                    node.peer.outbox.greet(Err(refusal(kind, text)));
                }
                Vec::new()
            }
            Command::Execute(execute) => self.answer(*execute),
            Command::Abort(failure) => {
                // Viewers show the cause once, beside the events.
                self.happened("the job failed");
                self.end(Message::Abort(pb::Abort { failure: Some(failure.into()) }))
            }
            Command::Shutdown => self.end(Message::Shutdown(pb::Shutdown {})),
            Command::Report { severity, text } => {
                match severity {
                    Severity::Info => tracing::info!("{text}"),
                    Severity::Warning => tracing::warn!("{text}"),
                }
                self.happened(text);
                Vec::new()
            }
            Command::Stalled { texts } => {
                for text in texts {
                    self.happened(text);
                }
                self.explain(None, true, false)
            }
            Command::Finish(outcome) => {
                match &outcome {
                    Ending::Finished => tracing::info!("the job is finished"),
                    Ending::Failed(failure) => log_failure(failure),
                }
                self.outcome = Some(outcome);
                Vec::new()
            }
        }
    }

    /// Reads the times of earlier jobs on this cluster, once. A slow disk delays nothing.
    fn recall(&mut self, nodes: &[Node]) {
        let Some(tuning) = self.tuning.take() else { return };
        let file = tuning.file(nodes);
        self.tuning_file = Some(file.clone());
        let inbox = self.inbox.clone();
        tuning::on_a_thread(move || {
            let learned = file.read();
            // The job may be over.
            let _ = inbox.blocking_send(Inbound::Event(Event::Recalled(learned)));
        });
    }

    /// Keeps the measured times for the next job, unless the disk is too slow.
    pub(crate) async fn keep_times(&mut self) {
        let Some(file) = self.tuning_file.take() else { return };
        let learned = self.engine.learned();
        if learned.is_empty() {
            return;
        }
        let (done_in, done) = oneshot::channel();
        tuning::on_a_thread(move || {
            file.write(&learned);
            let _ = done_in.send(());
        });
        if timeout(KEEP_TIMEOUT, done).await.is_err() {
            tracing::warn!("measured times are not kept: the disk is too slow");
        }
    }

    fn answer(&mut self, execute: Execute) -> Vec<Event> {
        for failed in &execute.failures {
            tracing::info!(set = %failed.set, failure = %failed.failure, "tensor failed");
            self.happened(format!("a tensor failed: {}", failed.failure));
        }
        let messages = convert::execute(execute);
        let bytes: usize = messages.iter().map(|message| message.encoded_len()).sum();
        metrics::sent(bytes * self.nodes.len());
        self.send(&messages, |_, session| session.node.is_some())
    }

    /// Updates the metrics and the health checks.
    fn show(&self) {
        metrics::counts(&self.engine.counts(), self.epoch);
        let Some(health) = &self.health else { return };
        let phase = self.engine.phase();
        health.send_if_modified(|shown| {
            if shown.phase == phase && phase != Phase::Forming {
                return false;
            }
            let daemons = self.daemons.clone();
            let now = Health { phase, reason: self.engine.why(), daemons };
            let changed = *shown != now;
            *shown = now;
            changed
        });
    }
}

/// The metrics endpoints of the daemons of these nodes.
fn targets(job: &JobId, nodes: &[Node]) -> Arc<[Target]> {
    let target = |(at, node): (usize, &Node)| {
        let labels =
            [(JOB.name, job.to_string()), (HOST.name, node.host.clone()), ("node", at.to_string())];
        Some(Target { address: node.metrics_address?, labels: labels.into() })
    };
    nodes.iter().enumerate().filter_map(target).collect()
}

/// Refuses nodes that join while the job ends (TELL).
fn turn_away(inbox: &mut mpsc::Receiver<Inbound>) {
    inbox.close();
    while let Ok(inbound) = inbox.try_recv() {
        if let Inbound::Join { peer, .. } = inbound {
            peer.outbox.greet(Err(Status::unavailable(OVER)));
        }
    }
}

/// Logs the failure of the job at level info, because the ranks and the launcher report it.
fn log_failure(failure: &Failure) {
    tracing::info!(kind = ?failure.kind, %failure, "the job failed");
}

fn refusal(kind: RefusalKind, text: String) -> Status {
    match kind {
        RefusalKind::Secret => Status::unauthenticated(text),
        RefusalKind::Version | RefusalKind::Epoch => Status::failed_precondition(text),
        // The next job of the same tasks may succeed a moment later.
        RefusalKind::Job => Status::aborted(text),
        RefusalKind::Invalid => Status::invalid_argument(text),
        RefusalKind::Taken => Status::already_exists(text),
        RefusalKind::Over => Status::unavailable(text),
    }
}
