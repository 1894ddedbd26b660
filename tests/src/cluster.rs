//! A whole job in one process: a real coordinator and real daemons on ports that they choose, and
//! ranks that are threads with real sessions over real sockets and shared memory.
//!
//! Every wait in this module has a limit, [`PATIENCE`] by default. A panic in a thread of Gradwire
//! itself fails the job in [`Cluster::finish`], whatever the ranks reported.

use std::{
    collections::{BTreeMap, HashMap},
    net::SocketAddr,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex, Once, PoisonError,
        atomic::{AtomicU32, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use gradwire_coordinator::CoordinatorConfig;
use gradwire_daemon::{Daemon, DaemonConfig};
use gradwire_proto::{Ending, JobId, Secret};
use gradwire_services::launch::Notice;
use gradwire_settings::{Layers, Settings};
use gradwire_worker::{Session, SessionBuilder};
use tokio::{
    net::TcpListener,
    runtime::{Builder, Runtime},
    sync::mpsc::UnboundedReceiver,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// The longest time that any part of a test's job may take.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The job to start.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The number of ranks on each node; none on servers, which come last.
    pub slots: Vec<u32>,
    /// The rack of each node; empty for none.
    pub racks: Vec<String>,
    /// Settings, as `section.key=value`.
    pub set: Vec<String>,
}

impl Plan {
    /// A job with one node for each number, which is the node's number of ranks.
    pub fn nodes(slots: &[u32]) -> Self {
        Self { slots: slots.to_vec(), racks: Vec::new(), set: Vec::new() }
    }

    /// A job with these nodes, whose ranks need not send heartbeats during a test.
    pub fn patient(slots: &[u32]) -> Self {
        Self::nodes(slots).set("job.timeout_ms=61000").set("heartbeat.timeout_ms=60000")
    }

    /// Adds a setting.
    #[must_use]
    pub fn set(mut self, setting: impl Into<String>) -> Self {
        self.set.push(setting.into());
        self
    }

    /// Adds rack labels, one per node.
    #[must_use]
    pub fn racks(mut self, racks: &[impl ToString]) -> Self {
        self.racks = racks.iter().map(ToString::to_string).collect();
        self
    }

    fn settings(&self, order: usize) -> Result<Settings> {
        let mut flags = self.set.clone();
        if let Some(rack) = self.racks.get(order) {
            flags.push(format!("node.rack={rack}"));
        }
        // Small segments, so that many jobs fit on a small machine and arenas grow.
        let small = ("GRADWIRE_WORKER__ARENA_SEGMENT_BYTES".to_owned(), "1MiB".to_owned());
        let layers = Layers { flags, environment: HashMap::from([small]), ..Layers::default() };
        Ok(Settings::load(&layers)?.settings)
    }
}

/// The coordinator, in its own runtime, so that it can be killed or stopped alone.
#[derive(Debug)]
struct Coordinator {
    runtime: Runtime,
    task: JoinHandle<Result<Ending>>,
}

/// A running daemon.
#[derive(Debug)]
pub struct RunningDaemon {
    task: JoinHandle<Result<Ending>>,
    /// Ends the daemon when cancelled.
    pub stop: CancellationToken,
    /// The address of its data plane.
    pub data_address: SocketAddr,
}

/// A running job.
#[derive(Debug)]
pub struct Cluster {
    runtime: Runtime,
    coordinator: Option<Coordinator>,
    /// The address of the coordinator.
    pub coordinator_address: SocketAddr,
    /// Ends the coordinator when cancelled.
    pub stop_coordinator: CancellationToken,
    /// The daemons, in the order of the nodes.
    pub daemons: Vec<RunningDaemon>,
    plan: Plan,
    job: JobId,
    secret: Secret,
}

static JOBS: AtomicU32 = AtomicU32::new(0);

/// The panics in Gradwire's own threads of this process.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The prefix of the names of Gradwire's threads; those of ranks and tests have another one.
const OWN_THREADS: &str = "gw-";

fn watch_for_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            let thread = thread::current();
            if let Some(name) = thread.name().filter(|name| name.starts_with(OWN_THREADS)) {
                let mut panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
                panics.push(format!("{name}: {info}"));
            }
            usual(info);
        }));
    });
}

impl Cluster {
    /// Starts the coordinator and the daemons.
    ///
    /// If a part of the job can't be started.
    /// If a part of the job can't be started.
    pub fn start(plan: &Plan) -> Result<Self> {
        let mut cluster = Self::without_daemons(plan)?;
        for order in 0..plan.slots.len() {
            let daemon = cluster.daemon(order, &[])?;
            cluster.daemons.push(daemon);
        }
        Ok(cluster)
    }

    /// Starts only the coordinator.
    ///
    /// # Errors
    /// If it can't be started.
    pub fn without_daemons(plan: &Plan) -> Result<Self> {
        watch_for_panics();
        let number = JOBS.fetch_add(1, Ordering::Relaxed);
        let job = JobId::new(&format!("test-{}-{number}", std::process::id()))?;
        let secret = Secret::generate();
        let runtime = runtime_of(2, "gw-control")?;
        // One thread, so that a blocking task stops the whole coordinator.
        let alone = runtime_of(1, "gw-coordinator")?;
        let stop_coordinator = CancellationToken::new();
        let listener = alone.block_on(TcpListener::bind("127.0.0.1:0"))?;
        let coordinator_address = listener.local_addr()?;
        let nodes = plan.slots.len() as u32;
        let servers = plan.slots.iter().filter(|&&slots| slots == 0).count() as u32;
        let settings = plan.settings(0)?;
        let config =
            CoordinatorConfig::new(job.clone(), secret.clone(), (nodes, servers), &settings)?;
        let cancel = stop_coordinator.clone();
        let task = alone
            .spawn(async move { Ok(gradwire_coordinator::run(config, listener, cancel).await?) });
        Ok(Self {
            runtime,
            coordinator: Some(Coordinator { runtime: alone, task }),
            coordinator_address,
            stop_coordinator,
            daemons: Vec::new(),
            plan: plan.clone(),
            job,
            secret,
        })
    }

    /// Starts the daemon of a node, with some changed variables.
    ///
    /// # Errors
    /// If the daemon can't be started.
    pub fn daemon(&self, order: usize, changes: &[(&str, String)]) -> Result<RunningDaemon> {
        self.start_daemon(order, changes, None)
    }

    /// Starts the daemon of a node, with an agent that reports on its ranks' processes.
    ///
    /// # Errors
    /// If the daemon can't be started.
    pub fn daemon_with_agent(
        &self,
        order: usize,
        notices: UnboundedReceiver<Notice>,
    ) -> Result<RunningDaemon> {
        self.start_daemon(order, &[], Some(notices))
    }

    fn start_daemon(
        &self,
        order: usize,
        changes: &[(&str, String)],
        notices: Option<UnboundedReceiver<Notice>>,
    ) -> Result<RunningDaemon> {
        let mut variables = HashMap::from([
            ("GRADWIRE_JOB".into(), self.job.to_string()),
            ("GRADWIRE_SECRET".into(), self.secret.to_hex()),
            ("GRADWIRE_COORDINATOR".into(), self.coordinator_address.to_string()),
            ("GRADWIRE_HOST".into(), format!("node-{order}")),
            ("GRADWIRE_ADDRESS".into(), "127.0.0.1".into()),
            ("GRADWIRE_SLOTS".into(), self.plan.slots[order].to_string()),
            ("GRADWIRE_ORDER".into(), order.to_string()),
            ("GRADWIRE_SOCKET".into(), self.socket(order)),
        ]);
        variables.extend(changes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
        let config = DaemonConfig::from_env(&variables, &self.plan.settings(order)?)?;
        let stop = CancellationToken::new();
        let cancel = stop.clone();
        let mut daemon = self.runtime.block_on(Daemon::bind(config))?;
        if let Some(notices) = notices {
            daemon = daemon.with_agent(notices);
        }
        let data_address = daemon.data_address();
        let task = self.runtime.spawn(async move { Ok(daemon.run(cancel, |_| ()).await?) });
        Ok(RunningDaemon { task, stop, data_address })
    }

    /// The job's id.
    pub fn job(&self) -> &JobId {
        &self.job
    }

    /// The job's secret.
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The number of ranks.
    pub fn size(&self) -> u32 {
        self.plan.slots.iter().sum()
    }

    /// The socket on which a node's daemon listens for workers.
    pub fn socket(&self, order: usize) -> String {
        format!("@gradwire-{}-{order}", self.job)
    }

    /// The node and the local rank of a rank.
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn place(&self, rank: u32) -> (usize, u32) {
        let mut first = 0;
        for (order, slots) in self.plan.slots.iter().enumerate() {
            if rank - first < *slots {
                return (order, rank - first);
            }
            first += slots;
        }
        panic!("rank {rank} does not exist");
    }

    /// The builder of a rank's session.
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn builder(&self, rank: u32) -> SessionBuilder {
        let (order, local_rank) = self.place(rank);
        let settings = self.plan.settings(order).expect("the daemon was started with them");
        let (job, secret) = (self.job.clone(), self.secret.clone());
        Session::builder(job, secret, self.socket(order), local_rank)
            .arena_segment_bytes(settings.worker.arena_segment_bytes as usize)
            .max_object_bytes(settings.worker.max_object_bytes as usize)
            .start_timeout(PATIENCE)
    }

    /// Runs `rank` on a thread for each rank and returns the results in rank order. Each session
    /// leaves the job when its thread ends.
    ///
    /// # Errors
    /// If a rank can't attach, panics (with the panic's text), or does not end.
    pub fn ranks<T: Send + 'static>(
        &self,
        rank: impl Fn(&Session) -> T + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        self.start_ranks(0..self.size(), rank).join()
    }

    /// Like [`Cluster::ranks`], but for some of the ranks, and without waiting for them.
    pub fn start_ranks<T: Send + 'static>(
        &self,
        which: impl IntoIterator<Item = u32>,
        rank: impl Fn(&Session) -> T + Send + Sync + 'static,
    ) -> Ranks<T> {
        let program = Arc::new(rank);
        let (sender, results) = mpsc::channel();
        let (arrived, arrivals) = mpsc::channel();
        let mut expected = Vec::new();
        for rank in which {
            expected.push(rank);
            let (builder, program) = (self.builder(rank), program.clone());
            let (sender, arrived) = (sender.clone(), arrived.clone());
            thread::spawn(move || {
                let life = || -> Result<T> {
                    let session = builder.attach()?;
                    let _ = arrived.send(());
                    let result = program(&session);
                    let _ = session.shutdown();
                    Ok(result)
                };
                let result = panic::catch_unwind(AssertUnwindSafe(life));
                // The receiver is gone if the test has given up.
                let _ = sender.send((rank, result.unwrap_or_else(|panic| Err(panicked(&*panic)))));
            });
        }
        Ranks { expected, arrivals, results }
    }

    /// Kills the coordinator: its tasks stop and its sockets close.
    pub fn kill_coordinator(&mut self) {
        if let Some(coordinator) = self.coordinator.take() {
            coordinator.runtime.shutdown_background();
        }
    }

    /// Blocks the coordinator for a while. Its sockets stay open.
    pub fn freeze_coordinator(&self, time: Duration) {
        if let Some(coordinator) = &self.coordinator {
            coordinator.runtime.spawn(async move { thread::sleep(time) });
        }
    }

    /// Waits for the end of a daemon.
    ///
    /// # Errors
    /// If it doesn't end in time, or has panicked.
    pub fn ended(&self, daemon: RunningDaemon) -> Result<Ending> {
        let within = async { tokio::time::timeout(PATIENCE, daemon.task).await };
        self.runtime.block_on(within).context("a daemon did not end")??
    }

    /// Waits for the end of the job, and returns how each daemon ended.
    ///
    /// # Errors
    /// If the job does not end in time, or a part of it panicked.
    pub fn finish(mut self) -> Result<Vec<Ending>> {
        let daemons = std::mem::take(&mut self.daemons);
        let endings: Result<Vec<Ending>> =
            daemons.into_iter().map(|daemon| self.ended(daemon)).collect();
        if let Some(Coordinator { runtime, task }) = self.coordinator.take() {
            let within = async { tokio::time::timeout(PATIENCE, task).await };
            let ended = runtime.block_on(within).context("the coordinator did not end");
            runtime.shutdown_background();
            ended???;
        }
        let panics = PANICS.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(panics.is_empty(), "threads of Gradwire panicked: {panics:?}");
        endings
    }
}

/// Runs a whole job whose ranks all leave in good order. Returns their results in rank order.
///
/// # Panics
/// If any part of the job fails.
pub fn run_job<T: Send + 'static>(
    plan: &Plan,
    rank: impl Fn(&Session) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let cluster = Cluster::start(plan).expect("a job");
    let results = cluster.ranks(rank).unwrap_or_else(|error| panic!("{error}"));
    let endings = cluster.finish().unwrap_or_else(|error| panic!("{error}"));
    assert!(endings.iter().all(|ending| *ending == Ending::Finished), "{endings:?}");
    results
}

fn runtime_of(threads: usize, name: &str) -> Result<Runtime> {
    Ok(Builder::new_multi_thread()
        .worker_threads(threads)
        .thread_name(name)
        .enable_all()
        .build()?)
}

/// Running ranks.
#[derive(Debug)]
pub struct Ranks<T> {
    expected: Vec<u32>,
    arrivals: Receiver<()>,
    results: Receiver<(u32, Result<T>)>,
}

impl<T> Ranks<T> {
    /// Waits until all of these ranks are attached.
    ///
    /// # Panics
    /// If a rank does not attach within [`PATIENCE`].
    #[must_use]
    pub fn attached(self) -> Self {
        for rank in &self.expected {
            let arrived = self.arrivals.recv_timeout(PATIENCE);
            assert!(arrived.is_ok(), "rank {rank} or another one did not attach");
        }
        self
    }

    /// Waits for all of these ranks and returns their results in rank order.
    ///
    /// # Errors
    /// If ranks couldn't attach, panicked or did not end: the errors of all of them.
    pub fn join(self) -> Result<Vec<T>> {
        self.join_within(PATIENCE)
    }

    /// Like [`Ranks::join`], with a time limit for long-running ranks.
    ///
    /// # Errors
    /// As for [`Ranks::join`].
    pub fn join_within(self, time: Duration) -> Result<Vec<T>> {
        let deadline = Instant::now() + time;
        let mut results = BTreeMap::new();
        let mut errors = Vec::new();
        while results.len() + errors.len() < self.expected.len() {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.results.recv_timeout(left) {
                Ok((rank, Ok(result))) => _ = results.insert(rank, result),
                Ok((rank, Err(error))) => errors.push(format!("rank {rank}: {error:#}")),
                Err(_) => {
                    let ended = results.len() + errors.len();
                    let all = self.expected.len();
                    errors.push(format!("only {ended} of {all} ranks ended in {time:?}"));
                    break;
                }
            }
        }
        if !errors.is_empty() {
            bail!("{}", errors.join("\n"));
        }
        Ok(results.into_values().collect())
    }
}

fn panicked(panic: &(dyn std::any::Any + Send)) -> anyhow::Error {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    anyhow!("it panicked: {}", text.unwrap_or("no text"))
}
