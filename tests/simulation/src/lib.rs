//! A simulation of elastic jobs. The real state machines decide: the launcher's `Job` with its
//! membership, the coordinator's `Engine`, the formation and the votes of workers, and the record
//! of what a connection has sent. Around them, everything is simulated: processes, agents, a
//! network with delays, broken connections and partitions, crashes, freezes, hosts that vanish,
//! return, join and leave, all at random times from a seed. Predicates (`check`) hold at any
//! time, and every job ends.
//!
//! The tests run many seeds. A failing run prints its seed, and this runs it again, with the log of
//! its events:
//!
//! ```text
//! GRADWIRE_SIMULATION_SEED=17 cargo test -p gradwire-elastic-simulation seed -- --nocapture
//! ```
//!
//! `GRADWIRE_SIMULATION_PLANT=VoteSplit` also switches on a planted fault ([`Plant`]), and
//! `GRADWIRE_SIMULATION_SEEDS=100000` runs more seeds.
//!
//! - `world`: time, chance, processes, the network
//! - `agents`, `coordinator`, `daemon`, `worker`: the processes, and what they decide with
//! - `streams`: the streams between daemons and their coordinator
//! - `pieces`, `lines`: operations on the data plane, and its connections
//! - `faults`: what goes wrong
//! - `check`, `plants`: the predicates, and faults that they must find

#![forbid(unsafe_code)]

mod agents;
mod check;
mod coordinator;
mod daemon;
mod faults;
mod lines;
mod pieces;
mod plants;
mod streams;
mod worker;
mod world;

use std::sync::LazyLock;

use agents::{Actors, Launcher};
use daemon::DaemonIn;
use gradwire_launcher::launch::{elastic::Elastic, plan::Plan};
use gradwire_proto::JobId;
use gradwire_services::launch::Text;
use gradwire_settings::{Layers, Settings};
pub use plants::Plant;
use world::{Host, What, World, ms};

/// A job without hosts and rules.
static PLAN: LazyLock<Plan> = LazyLock::new(|| {
    let settings = Settings::load(&Layers::default()).expect("the defaults");
    let nodes = Plan::nodes(&[], Some(1)).expect("one rank");
    Plan::new(nodes, "train", Vec::<Text>::new(), &settings).expect("a plan")
});

/// How a run ended.
#[derive(Debug)]
pub struct Run {
    /// The label of the predicate that does not hold, and what happened.
    pub found: Option<(&'static str, String)>,
    /// What has happened, if it was to be logged.
    pub log: Vec<String>,
    /// `well`, or the launcher's exit code and last lines.
    pub end: String,
    /// How many events there were.
    pub events: u64,
    /// The last epoch.
    pub epochs: u64,
}

/// Runs the job of a seed, perhaps with a planted fault.
pub fn run(seed: u64, plant: Option<Plant>, is_logged: bool) -> Run {
    Simulation::new(seed, plant, is_logged).run()
}

struct Simulation {
    world: World,
    launcher: Launcher,
    actors: Actors,
    has_faults: bool,
    /// Whether all faults are breaks of connections.
    only_break: bool,
}

impl Simulation {
    fn new(seed: u64, plant: Option<Plant>, is_logged: bool) -> Self {
        let job = JobId::new(PLAN.job.as_str()).expect("the id of a job");
        let mut world = World::new(seed, plant, job, PLAN.secret.clone());
        world.log = is_logged.then(Vec::new);
        world.latency = world.dice.pick(&[2, 4, 30, 80]).unwrap_or(4);
        let count = 1 + world.dice.below(4);
        for at in 0..count {
            let (data, grpc, slots) = (None, None, 1 + world.dice.below(3) as u32);
            world.hosts.push(Host { name: format!("h{at}"), slots, is_up: true, data, grpc });
        }
        let hosts: Vec<_> = world.hosts.iter().map(Host::listed).collect();
        let slots: u32 = hosts.iter().map(|host| host.slots).sum();
        let np = (1 + world.dice.below(u64::from(slots)) as u32).max(2.min(slots));
        let mut plan = PLAN.clone();
        plan.nodes = Plan::nodes(&hosts, Some(np)).expect("enough slots");
        plan.elastic = Some(Elastic {
            hosts,
            min: 1 + world.dice.below(u64::from(np.min(3))) as u32,
            max: np + world.dice.below(u64::from(slots - np) + 1) as u32,
            spares: world.dice.below(2) as u32,
            timeout: ms(20_000),
            reset_limit: world.dice.one_in(20).then_some(3),
            restarts: u32::MAX,
            cooldown: (ms(200), ms(2000)),
            reach: ms(5000),
        });
        let faults = faults::plan(&mut world.dice);
        let has_faults = !faults.is_empty();
        let only_break = faults::only_break(&faults);
        for (at, fault) in faults {
            world.at(at, What::Fault(fault));
        }
        world.note(|| format!("hosts {:?}, rules {:?}", plan.nodes, plan.elastic));
        let mut actors = Actors::default();
        let launcher = Launcher::new(&mut world, plan, &mut actors);
        Self { world, launcher, actors, has_faults, only_break }
    }

    fn run(mut self) -> Run {
        let mut events = 0;
        while self.world.check.found.is_none() && self.launcher.report.is_none() {
            let Some(what) = self.world.next() else { break };
            events += 1;
            if self.world.now > faults::BOUND {
                break;
            }
            self.happens(what);
        }
        self.at_the_end(events)
    }

    fn at_the_end(mut self, events: u64) -> Run {
        let end = match &self.launcher.report {
            Some(report) if report.code == 0 => "well".to_owned(),
            Some(report) => format!("{}: {}", report.code, report.lines.join(" / ")),
            None => "not at all".to_owned(),
        };
        let check = &mut self.world.check;
        match &self.launcher.report {
            None => check.fault("WAIT", "the job does not end".to_owned()),
            Some(report) if report.code == 0 && check.finished == 0 => {
                check.fault("TELL", "no rank has finished, but the job succeeds".to_owned());
            }
            Some(report) if report.code != 0 && report.lines.is_empty() => {
                check.fault("TELL", "the job fails and says nothing".to_owned());
            }
            Some(report) if report.code != 0 && !self.has_faults => {
                check.fault("WAIT", format!("a job without faults fails: {end}"));
            }
            Some(_) if self.only_break && check.failures > 0 => {
                check.fault("RETURN", "connections broke, and ranks heard of it".to_owned());
            }
            Some(_) => {}
        }
        let epochs = self.launcher.epoch;
        let (found, log) = (self.world.check.found, self.world.log.unwrap_or_default());
        Run { found, log, end, events, epochs }
    }

    fn happens(&mut self, what: What) {
        let Self { world, launcher, actors, .. } = self;
        match what {
            What::Launcher(event) => launcher.happens(world, *event, actors),
            What::LauncherTick(at) => launcher.tick(world, at, actors),
            What::Agent(agent, event) => actors.agent(world, agent, event),
            What::Fault(fault) => world.goes_wrong(fault),
            What::Daemon(pid, event) => {
                if !world.is_alive(pid) {
                    actors.daemons.remove(&pid);
                } else if let Some(until) = world.frozen_until(pid) {
                    world.at(until, What::Daemon(pid, event));
                } else if let Some(daemon) = actors.daemons.get_mut(&pid) {
                    daemon.happens(world, event);
                }
            }
            What::Worker(pid, event) => {
                if !world.is_alive(pid) {
                    actors.workers.remove(&pid);
                } else if let Some(until) = world.frozen_until(pid) {
                    world.at(until, What::Worker(pid, event));
                } else if let Some(worker) = actors.workers.get_mut(&pid) {
                    worker.happens(world, event);
                }
            }
            What::Data { conn, to, bytes, has_arrived } => {
                if !has_arrived {
                    let Some(one) = world.conns.get_mut(&conn).filter(|one| !one.is_broken) else {
                        return;
                    };
                    let sender = 1 - one.side(to);
                    one.there[sender] += bytes.len() as u64;
                }
                if let Some(until) = world.frozen_until(to) {
                    world.at(until, What::Data { conn, to, bytes, has_arrived: true });
                } else if let Some(daemon) = actors.daemons.get_mut(&to)
                    && world.is_alive(to)
                {
                    daemon.happens(world, DaemonIn::Bytes { conn, bytes });
                }
            }
        }
    }
}
