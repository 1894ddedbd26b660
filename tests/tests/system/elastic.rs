//! Training that outlives its daemons and ranks: real daemons, whose epochs the test starts and
//! ends as the launcher would, and ranks that are threads with real sessions.
//!
//! Each rank trains a model of whole numbers. So its weights follow exactly from the processes that
//! took part in each step, in any order of additions. After every step all ranks report them, and
//! the test replays the memberships.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant, SystemTime},
};

use gradwire_reference::Dice;
use gradwire_services::launch::Notice;
use gradwire_tests::{
    cluster::PATIENCE,
    epochs::{DaemonProcess, ElasticJob},
};
use gradwire_worker::{
    AllreduceOptions, BroadcastOptions, GradwireError, ProcessSet, ReduceOp, Rejoined, Session,
    Tensor,
};
use rustix::process::Signal;

/// The elements of the model: several pieces, so that a loss interrupts operations midway.
const ELEMENTS: usize = 1 << 16;
const PIECES: [(&str, &str); 2] =
    [("GRADWIRE_NEGOTIATION__PIECE_BYTES", "64KiB"), ("GRADWIRE_DATA__CHUNK_BYTES", "64KiB")];

/// A training step that a rank has kept.
#[derive(Debug)]
struct Step {
    worker: u32,
    number: u64,
    /// The workers that took part, by rank.
    members: Vec<u32>,
    /// The weights, which are all the same.
    weight: f32,
}

/// The part of a worker in a step.
fn gradient(worker: u32, step: u64) -> f32 {
    (u64::from(worker + 1) * (step % 5 + 1)) as f32
}

/// How a rank ends.
#[derive(Debug, Default)]
struct Orders {
    /// It is lost: its session ends without `shutdown`.
    lost: AtomicBool,
    /// All ranks leave, once they agree on it.
    stop: AtomicBool,
}

/// A training process.
struct Trainer {
    worker: u32,
    session: Session,
    orders: Arc<Orders>,
    reports: Sender<Step>,
    weights: Tensor<f32>,
    sum: Tensor<f32>,
    step: u64,
    /// The workers of this epoch, by rank.
    members: Vec<u32>,
    /// Whether the vote that is in flight decides about the step.
    asks: bool,
    /// The process set of the first epoch's ranks 0 and 1.
    pair: Option<ProcessSet>,
}

/// What follows a step.
enum Next {
    Step,
    Epoch,
    Stop,
}

impl Trainer {
    /// Trains until it receives the order to end.
    fn run(mut self) {
        if self.session.epoch() > 1 {
            // The others have been there before.
            self.receive_state().unwrap_or_else(|error| self.until_next_epoch(error));
        }
        while !self.orders.lost.load(Relaxed) {
            match self.one_step() {
                Ok(Next::Step) => {}
                Ok(Next::Epoch) => self.join_next_epoch(),
                Ok(Next::Stop) => return self.session.shutdown().unwrap(),
                Err(error) => self.until_next_epoch(error),
            }
        }
    }

    fn one_step(&mut self) -> Result<Next, GradwireError> {
        let session = self.session.clone();
        if self.members.is_empty() {
            let own = session.tensor(&[self.worker], &[1])?;
            self.members = session.allgather(&own, Default::default())?.tensor.to_vec();
        }
        self.sum.fill(gradient(self.worker, self.step));
        let options = AllreduceOptions::named("gradient").op(ReduceOp::Sum);
        session.allreduce(&mut self.sum, options)?;
        self.use_pair()?;
        self.asks = true;
        let keeps = session.vote(true)?;
        self.asks = false;
        assert!(keeps, "all ranks have voted for it");
        self.keep();
        // No rank decides this alone.
        let wants = self.orders.stop.load(Relaxed) || session.pending_change().is_some();
        if session.vote(!wants)? {
            return Ok(Next::Step);
        }
        let stops = session.vote(self.orders.stop.load(Relaxed))?;
        Ok(if stops { Next::Stop } else { Next::Epoch })
    }

    /// Adds up ranks in the process set, while it exists.
    fn use_pair(&mut self) -> Result<(), GradwireError> {
        let Some(pair) = self.pair.clone().filter(|pair| pair.position().is_some()) else {
            return Ok(());
        };
        let mut own = [self.session.rank()];
        let options = AllreduceOptions::named("pair").op(ReduceOp::Sum).process_set(&pair);
        match self.session.allreduce_slice(&mut own, options) {
            Ok(()) => assert_eq!(own[0], pair.ranks().iter().sum::<u32>()),
            Err(GradwireError::Invalid(gone)) => {
                assert!(gone.contains("does not exist any more: worker "), "{gone}");
                self.pair = None;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Keeps a step, as all ranks do.
    fn keep(&mut self) {
        self.weights.iter_mut().zip(self.sum.iter()).for_each(|(weight, sum)| *weight += sum);
        let weight = self.weights[0];
        assert!(self.weights.iter().all(|other| *other == weight), "worker {}", self.worker);
        let Self { worker, step, members, .. } = self;
        let report = Step { worker: *worker, number: *step, members: members.clone(), weight };
        // The test may have ended.
        let _ = self.reports.send(report);
        self.step += 1;
    }

    /// Goes on after an error, if that is possible.
    fn until_next_epoch(&mut self, error: GradwireError) {
        assert!(error.is_recoverable(), "worker {}: {error}", self.worker);
        self.join_next_epoch();
    }

    fn join_next_epoch(&mut self) {
        let rejoined = rejoin(&self.session);
        let Rejoined { newcomers, vote, .. } =
            rejoined.unwrap_or_else(|error| panic!("worker {}: {error}", self.worker));
        if std::mem::take(&mut self.asks) && vote == Some(true) {
            self.keep();
        }
        self.members.clear();
        if newcomers {
            self.receive_state().unwrap_or_else(|error| self.until_next_epoch(error));
        }
    }

    /// Gives all ranks the state of the first one.
    fn receive_state(&mut self) -> Result<(), GradwireError> {
        let from = |name: &str| BroadcastOptions::from_rank(0).name(name);
        let mut step = [self.step];
        self.session.broadcast_slice(&mut step, from("step"))?;
        self.session.broadcast(&mut self.weights, from("weights"))?;
        self.step = step[0];
        Ok(())
    }
}

/// Calls `rejoin`.
fn rejoin(session: &Session) -> Result<Rejoined, GradwireError> {
    // SAFETY: only the thread that rejoins uses tensors.
    #[expect(unsafe_code, reason = "the call moves tensors")]
    unsafe {
        session.rejoin()
    }
}

/// A rank in a thread.
struct Rank {
    thread: JoinHandle<()>,
    orders: Arc<Orders>,
}

/// The launcher's part.
struct Job {
    job: ElasticJob,
    seed: u64,
    epoch: u64,
    daemons: Vec<DaemonProcess>,
    /// The workers of each host.
    hosts: Vec<Vec<u32>>,
    ranks: BTreeMap<u32, Rank>,
    next_worker: u32,
    reports: Receiver<Step>,
    sender: Sender<Step>,
    steps: Vec<Step>,
}

impl Job {
    fn new(seed: u64, hosts: &[usize]) -> Self {
        let (sender, reports) = mpsc::channel();
        let mut job = Self {
            job: ElasticJob::new(),
            seed,
            epoch: 0,
            daemons: Vec::new(),
            hosts: vec![Vec::new(); hosts.len()],
            ranks: BTreeMap::new(),
            next_worker: 0,
            reports,
            sender,
            steps: Vec::new(),
        };
        let pieces = PIECES.map(|(name, value)| (name, value.to_owned()));
        job.job.variables.extend(pieces);
        for (host, ranks) in hosts.iter().enumerate() {
            (0..*ranks).for_each(|_| job.add(host));
        }
        job.start();
        job
    }

    /// Starts a process on a host. It waits for an epoch that includes it.
    fn add(&mut self, host: usize) {
        let (id, secret) = self.job.identity();
        let worker = self.next_worker;
        let builder = Session::builder(id.clone(), secret.clone(), self.job.socket(host), 0)
            .elastic(worker)
            .elastic_timeout(PATIENCE)
            .arena_segment_bytes(1 << 20);
        let orders = Arc::<Orders>::default();
        let (own, reports) = (orders.clone(), self.sender.clone());
        let train = move || {
            let session = builder.attach().unwrap();
            let first = session.epoch() == 1;
            let pair = first.then(|| session.add_process_set(&[0, 1]).unwrap());
            let weights = session.zeros(&[ELEMENTS]).unwrap();
            let sum = session.zeros(&[ELEMENTS]).unwrap();
            let (step, members, asks) = (0, Vec::new(), false);
            let orders = own;
            Trainer { worker, session, orders, reports, weights, sum, step, members, asks, pair }
                .run();
        };
        let thread = thread::Builder::new().name(format!("worker {worker}")).spawn(train).unwrap();
        self.ranks.insert(worker, Rank { thread, orders });
        self.hosts[host].push(worker);
        self.next_worker += 1;
    }

    /// Starts the daemons of the next epoch.
    fn start(&mut self) {
        self.epoch += 1;
        let hosts: Vec<&[u32]> = self.hosts.iter().map(Vec::as_slice).collect();
        self.daemons = self.job.start(self.epoch, &hosts).unwrap();
    }

    /// Waits until the ranks have kept some more steps.
    fn wait_for_steps(&mut self, reports: usize) {
        for _ in 0..reports {
            let step = self.reports.recv_timeout(PATIENCE);
            self.steps.push(step.unwrap_or_else(|_| panic!("seed {}: no step", self.seed)));
        }
    }

    /// A rank is lost.
    fn lose(&mut self, host: usize, at: usize) {
        let worker = self.hosts[host].remove(at);
        let Rank { thread, orders } = self.ranks.remove(&worker).unwrap();
        orders.lost.store(true, Relaxed);
        self.join(worker, thread);
    }

    /// All ranks leave the epoch.
    fn change(&mut self) {
        for daemon in &mut self.daemons {
            daemon.notify(&Notice::Changed { added: true, removed: false }).unwrap();
        }
    }

    /// Waits for the end of the epoch.
    fn end(&mut self) {
        for daemon in &mut self.daemons {
            daemon.ended().unwrap_or_else(|error| panic!("seed {}: {error}", self.seed));
        }
    }

    fn join(&self, worker: u32, thread: JoinHandle<()>) {
        let begin = Instant::now();
        while !thread.is_finished() {
            let waited = begin.elapsed();
            assert!(waited < PATIENCE, "seed {}: worker {worker} does not end", self.seed);
            thread::sleep(Duration::from_millis(2));
        }
        let ended = thread.join();
        assert!(ended.is_ok(), "seed {}: worker {worker} has failed", self.seed);
    }

    /// Ends the training, and checks all of its steps.
    fn finish(mut self) {
        for rank in self.ranks.values() {
            rank.orders.stop.store(true, Relaxed);
        }
        for (worker, rank) in std::mem::take(&mut self.ranks) {
            self.join(worker, rank.thread);
        }
        self.end();
        self.steps.extend(self.reports.try_iter());
        let seed = self.seed;
        let mut by_number: BTreeMap<u64, Vec<&Step>> = BTreeMap::new();
        for step in &self.steps {
            by_number.entry(step.number).or_default().push(step);
        }
        let mut weight = 0.0;
        for (expected, (number, reports)) in by_number.iter().enumerate() {
            assert_eq!(expected as u64, *number, "seed {seed}: no step is left out");
            let members = &reports[0].members;
            let sum: f32 = members.iter().map(|worker| gradient(*worker, *number)).sum();
            weight += sum;
            for report in reports {
                assert_eq!((&report.members, report.weight), (members, weight), "seed {seed}");
            }
            let kept: BTreeSet<u32> = reports.iter().map(|report| report.worker).collect();
            let alive = |worker: &&u32| self.hosts.iter().flatten().any(|other| other == *worker);
            let missing: Vec<_> =
                members.iter().filter(alive).filter(|w| !kept.contains(w)).collect();
            assert!(missing.is_empty(), "seed {seed}, step {number}: {missing:?} did not keep it");
        }
    }
}

#[test]
fn ranks_survive_each_daemon_and_each_rank() {
    let mut job = Job::new(0, &[2, 1]);
    // The daemon with the coordinator, the other one, and both.
    for killed in [&[0][..], &[1], &[0, 1]] {
        job.wait_for_steps(9);
        for daemon in killed {
            job.daemons[*daemon].signal(Signal::KILL).unwrap();
        }
        job.end();
        job.start();
    }
    job.wait_for_steps(9);
    job.lose(0, 1);
    job.end();
    job.add(0);
    job.start();
    job.wait_for_steps(9);
    job.add(1);
    job.change();
    job.end();
    job.start();
    job.wait_for_steps(9);
    job.finish();
}

#[test]
fn random_losses_and_newcomers_keep_ranks_equal() {
    let seed = std::env::var("SEED").ok().map_or_else(
        || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64,
        |seed| seed.parse().unwrap(),
    );
    println!("SEED={seed}");
    let mut dice = Dice::of(&[seed]);
    let mut job = Job::new(seed, &[2, 2]);
    for _ in 0..5 {
        let reports = dice.below(12) as usize;
        job.wait_for_steps(reports);
        thread::sleep(Duration::from_millis(dice.below(30)));
        let host = dice.below(2) as usize;
        match dice.below(4) {
            0 if job.hosts[host].len() > 1 => {
                let at = dice.below(job.hosts[host].len() as u64) as usize;
                job.lose(host, at);
            }
            1 if reports > 0 => job.change(),
            _ => job.daemons[host].signal(Signal::KILL).unwrap(),
        }
        job.end();
        if dice.below(2) == 0 {
            job.add(dice.below(2) as usize);
        }
        job.start();
    }
    job.finish();
}
