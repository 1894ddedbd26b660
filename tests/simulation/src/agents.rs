//! The launcher with its real decisions ([`Job`]), and the agents of the hosts, which carry them
//! out.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    time::Duration,
};

use gradwire_launcher::launch::{
    job::{
        Job,
        events::{Command, Event, Limits},
    },
    plan::Plan,
    report::JobReport,
};
use gradwire_proto::Rank;
use gradwire_services::launch::{Notice, Order, ProcessEnd, Role, Start};

use crate::{
    daemon::{Daemon, DaemonIn},
    plants::Plant,
    worker::{Worker, WorkerIn},
    world::{End, Pid, Process, What, World, ms},
};

const LIMITS: Limits = Limits {
    start: Duration::from_secs(30),
    grace: Duration::from_secs(3),
    gather: Duration::from_millis(300),
    report: Duration::from_secs(1),
    silence: Duration::from_secs(10),
};

/// What happens to an agent.
#[derive(Debug)]
pub(crate) enum AgentIn {
    /// It starts on its host.
    Begin,
    Order(Box<Order>),
    /// A process of its host has ended.
    Ended(Pid, ProcessEnd),
    /// The time for the processes to end by themselves is over.
    GraceOver,
    /// It has noticed that the launcher is gone.
    Orphaned,
}

#[derive(Debug)]
pub(crate) struct Agent {
    number: usize,
    pub(crate) host: usize,
    running: BTreeMap<Role, Pid>,
    is_stopping: bool,
    pub(crate) has_ended: bool,
}

impl Agent {
    fn new(number: usize, host: usize) -> Self {
        let running = BTreeMap::new();
        Self { number, host, running, is_stopping: false, has_ended: false }
    }

    fn report(&self, world: &mut World, event: Event) {
        world.tell_launcher(self.number, event);
    }

    /// The daemon of the host, while it lives.
    fn daemon(&self) -> Option<Pid> {
        self.running.get(&Role::Daemon).copied()
    }

    fn notify(&self, world: &mut World, notice: Notice) {
        if let Some(daemon) = self.daemon() {
            let at = world.arrival(End::Agent(self.number), End::Process(daemon));
            world.at(at, What::Daemon(daemon, DaemonIn::Notice(notice)));
        }
    }

    fn start(&mut self, world: &mut World, start: &Start, actors: &mut Actors) {
        let variable = |name: &str| start.environment.get(name).map(String::as_str);
        let epoch = variable("GRADWIRE_EPOCH").and_then(|text| text.parse().ok()).unwrap_or(0);
        let (host, agent, role) = (self.host, self.number, start.role);
        if role == Role::Daemon {
            let earlier = world.processes.iter().any(|process| {
                process.is_alive && process.agent == agent && process.role == Role::Daemon
            });
            world.check.started_daemon(epoch, earlier);
        }
        let pid = world.processes.len();
        world.processes.push(Process { host, agent, role, epoch, is_alive: true, frozen: None });
        self.running.insert(role, pid);
        world.note(|| format!("{role} of host {host} starts as process {pid}, epoch {epoch}"));
        let begins = world.now + world.dice.time(5, 60);
        match role {
            Role::Daemon => {
                let daemon = Daemon::new(world, pid, self.number, &start.environment);
                actors.daemons.insert(pid, daemon);
                for (role, pid) in self.running.clone() {
                    if let Role::Rank(worker) = role {
                        let pid = u32::try_from(pid).expect("a small number");
                        self.notify(world, Notice::Started { rank: Rank(worker), pid });
                    }
                }
                world.at(begins, What::Daemon(pid, DaemonIn::Begin));
            }
            Role::Rank(worker) => {
                actors.workers.insert(pid, Worker::new(pid, self.number, worker));
                let started = u32::try_from(pid).expect("a small number");
                self.notify(world, Notice::Started { rank: Rank(worker), pid: started });
                world.at(begins, What::Worker(pid, WorkerIn::Begin));
            }
        }
        let pid = u32::try_from(pid).expect("a small number");
        self.report(world, Event::Started { node: self.number, role, pid, at: world.now });
    }

    fn happens(&mut self, world: &mut World, event: AgentIn, actors: &mut Actors) {
        match event {
            AgentIn::Begin => {
                let address = address(self.host);
                self.report(world, Event::Ready { node: self.number, address, port: 4000 });
            }
            AgentIn::Order(order) => self.ordered(world, *order, actors),
            AgentIn::Ended(pid, end) => self.ended(world, pid, end),
            AgentIn::GraceOver => self.kill_all(world),
            AgentIn::Orphaned => {
                self.is_stopping = true;
                self.kill_all(world);
                self.stopped(world);
            }
        }
    }

    fn ordered(&mut self, world: &mut World, order: Order, actors: &mut Actors) {
        match order {
            Order::Start(_) if self.is_stopping => {}
            Order::Start(start) => self.start(world, &start, actors),
            Order::End { role } => self.terminate(world, role),
            Order::Kill { role } => {
                let Some(&pid) = self.running.get(&role) else { return };
                if role == Role::Daemon && world.has(Plant::NoFence) {
                    self.ended(world, pid, ProcessEnd::Signal(9));
                    return;
                }
                world.end(pid, ProcessEnd::Signal(9), false);
            }
            Order::Notify { notice } => self.notify(world, notice),
            Order::Stop { grace_ms, why } => {
                self.notify(world, Notice::Stopping { why, alone: false });
                self.is_stopping = true;
                for role in self.running.keys().copied().collect::<Vec<_>>() {
                    self.terminate(world, role);
                }
                let number = self.number;
                world.after(ms(grace_ms), What::Agent(number, AgentIn::GraceOver));
                self.stopped(world);
            }
            Order::Begin(_) | Order::Clock | Order::Shown { .. } | Order::Signal { .. } => {}
        }
    }

    /// Sends SIGTERM. A frozen process does not see it.
    fn terminate(&self, world: &mut World, role: Role) {
        let Some(&pid) = self.running.get(&role) else { return };
        let at = world.arrival(End::Agent(self.number), End::Process(pid));
        match role {
            Role::Daemon => world.at(at, What::Daemon(pid, DaemonIn::Terminate)),
            Role::Rank(_) => world.at(at, What::Worker(pid, WorkerIn::Terminate)),
        }
    }

    fn kill_all(&self, world: &mut World) {
        for &pid in self.running.values() {
            world.end(pid, ProcessEnd::Signal(9), false);
        }
    }

    fn ended(&mut self, world: &mut World, pid: Pid, end: ProcessEnd) {
        let role = world.processes[pid].role;
        if self.running.get(&role) != Some(&pid) {
            return;
        }
        self.running.remove(&role);
        if let Role::Rank(worker) = role {
            self.notify(world, Notice::Ended { rank: Rank(worker), end });
        }
        let (node, at, tail) = (self.number, world.now, Vec::new());
        let pid = u32::try_from(pid).expect("a small number");
        self.report(world, Event::Exited { node, role, pid, end, at, tail });
        if self.is_stopping {
            self.stopped(world);
        }
    }

    fn stopped(&mut self, world: &mut World) {
        if self.running.is_empty() && !std::mem::replace(&mut self.has_ended, true) {
            self.report(world, Event::Stopped { node: self.number });
        }
    }
}

/// The address of a host.
pub(crate) fn address(host: usize) -> IpAddr {
    IpAddr::from([10, 0, 0, 1 + u8::try_from(host).expect("few hosts")])
}

/// All processes that do something, and their agents.
#[derive(Debug, Default)]
pub(crate) struct Actors {
    pub(crate) agents: Vec<Agent>,
    pub(crate) daemons: BTreeMap<Pid, Daemon>,
    pub(crate) workers: BTreeMap<Pid, Worker>,
}

impl Actors {
    pub(crate) fn agent(&mut self, world: &mut World, agent: usize, event: AgentIn) {
        // It is taken out while it starts others.
        let host = self.agents[agent].host;
        if self.agents[agent].has_ended || !world.hosts[host].is_up {
            return;
        }
        let mut one = std::mem::replace(&mut self.agents[agent], Agent::new(agent, host));
        one.happens(world, event, self);
        self.agents[agent] = one;
    }
}

/// The launcher.
#[derive(Debug)]
pub(crate) struct Launcher {
    job: Job,
    pub(crate) report: Option<JobReport>,
    pub(crate) said: Vec<String>,
    lost: BTreeSet<usize>,
    pub(crate) epoch: u64,
}

impl Launcher {
    /// A launcher that reaches the hosts of the plan.
    pub(crate) fn new(world: &mut World, plan: Plan, actors: &mut Actors) -> Self {
        for node in &plan.nodes {
            let host = host_named(world, &node.host).expect("a host of the job");
            actors.agents.push(Agent::new(node.agent, host));
            let delay = world.dice.time(1, 50);
            world.after(delay, What::Agent(node.agent, AgentIn::Begin));
        }
        let job = Job::new(plan, LIMITS);
        Self { job, report: None, said: Vec::new(), lost: BTreeSet::new(), epoch: 0 }
    }

    pub(crate) fn happens(&mut self, world: &mut World, event: Event, actors: &mut Actors) {
        if self.report.is_some() {
            return;
        }
        if let Event::Lost { node, .. } = &event
            && !self.lost.insert(*node)
        {
            return;
        }
        world.note(|| format!("launcher: {event:?}"));
        for command in self.job.step(event, world.now) {
            self.carry_out(world, command, actors);
        }
        if let Some(at) = self.job.deadline() {
            let is_forgotten = world.has(Plant::LostWakeup) && self.epoch > 1;
            if !is_forgotten {
                let at = at.max(world.now);
                world.at(at, What::LauncherTick(at));
            }
        }
        self.report = self.job.report();
    }

    /// The deadline, if it is still the same.
    pub(crate) fn tick(&mut self, world: &mut World, at: Duration, actors: &mut Actors) {
        if self.job.deadline().is_some_and(|deadline| deadline <= at) {
            self.happens(world, Event::Tick, actors);
        }
    }

    fn carry_out(&mut self, world: &mut World, command: Command, actors: &mut Actors) {
        match command {
            Command::Order { node, order } => {
                let order = self.planted(world, order);
                if world.cut.contains(&node) {
                    return;
                }
                let at = world.arrival(End::Launcher, End::Agent(node));
                world.at(at, What::Agent(node, AgentIn::Order(Box::new(order))));
            }
            Command::Reach { agent, host } => {
                let at = host_named(world, &host).expect("a host of the job");
                assert_eq!(agent, actors.agents.len(), "agents are numbered in order");
                actors.agents.push(Agent::new(agent, at));
                let delay = world.dice.time(20, 300);
                if world.hosts[at].is_up {
                    world.after(delay, What::Agent(agent, AgentIn::Begin));
                } else if world.dice.one_in(2) {
                    let what = format!("host {host} can't be reached");
                    let event = Event::Refused { node: agent, what, hint: String::new() };
                    world.after(delay, What::Launcher(Box::new(event)));
                }
            }
            Command::Say(text) => {
                world.note(|| format!("launcher says: {text}"));
                self.said.push(text);
            }
            Command::Serving { .. } => world.check.served(self.epoch),
            Command::Note(_) | Command::Answer(_) | Command::Suspend => {}
        }
    }

    /// An order as it is given, with the faults that are planted here.
    fn planted(&mut self, world: &mut World, mut order: Order) -> Order {
        let Order::Start(start) = &mut order else { return order };
        if start.role != Role::Daemon {
            return order;
        }
        let environment = &mut start.environment;
        let epoch = environment["GRADWIRE_EPOCH"].parse().expect("a number");
        self.epoch = epoch;
        let workers = environment["GRADWIRE_WORKERS"].clone();
        world.check.listed(epoch, &environment["GRADWIRE_ORDER"], &workers);
        if world.has(Plant::RankOrder) && epoch > 1 {
            let reversed: Vec<&str> = workers.rsplit(',').collect();
            environment.insert("GRADWIRE_WORKERS".to_owned(), reversed.join(","));
        }
        if world.has(Plant::TwoCoordinators) && epoch > 1 {
            environment.insert("GRADWIRE_COORDINATOR".to_owned(), "here".to_owned());
            environment.entry("GRADWIRE_NODES".to_owned()).or_insert_with(|| "1".to_owned());
            environment.entry("GRADWIRE_RANKS".to_owned()).or_insert_with(|| "1".to_owned());
        }
        order
    }
}

fn host_named(world: &World, name: &str) -> Option<usize> {
    world.hosts.iter().position(|host| host.name == name)
}
