//! The simulated machine: time, the queue of what happens, processes, hosts and the network.
//!
//! Messages between two processes arrive in their order, after a delay. A partition delays them
//! until it ends. A message to a frozen process waits until it goes on. The end of a process closes
//! its connections, unless its host vanishes: then others notice only its silence.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    time::Duration,
};

use gradwire_launcher::launch::{hosts, job::events::Event as Launched};
use gradwire_proto::{JobId, Secret};
use gradwire_services::launch::{ProcessEnd, Role};
use rand_xoshiro::{
    SplitMix64,
    rand_core::{Rng as _, SeedableRng as _},
};

use crate::{
    agents::AgentIn,
    check::Check,
    daemon::{DaemonIn, Key},
    faults::Fault,
    plants::Plant,
    worker::WorkerIn,
};

pub(crate) type Time = Duration;

/// The number of a process, which is never given to another one.
pub(crate) type Pid = usize;

pub(crate) fn ms(ms: u64) -> Time {
    Time::from_millis(ms)
}

/// All chance of a run.
#[derive(Debug)]
pub(crate) struct Dice(SplitMix64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0.next_u64() % end.max(1)
    }

    /// True once in `of` throws.
    pub(crate) fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        from.get(self.below(from.len() as u64) as usize).copied()
    }

    /// A time between two limits in milliseconds.
    pub(crate) fn time(&mut self, from: u64, to: u64) -> Time {
        Time::from_micros(1000 * from + self.below(1000 * (to - from).max(1)))
    }
}

/// What happens.
#[derive(Debug)]
pub(crate) enum What {
    Launcher(Box<Launched>),
    LauncherTick(Time),
    Agent(usize, AgentIn),
    Daemon(Pid, DaemonIn),
    Worker(Pid, WorkerIn),
    /// Bytes of a data connection arrive at the system of their receiver, and then at the receiver.
    Data {
        conn: u64,
        to: Pid,
        bytes: Vec<u8>,
        has_arrived: bool,
    },
    Fault(Fault),
}

struct Due {
    at: Time,
    number: u64,
    what: What,
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Due {}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Due {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        Reverse((self.at, self.number)).cmp(&Reverse((other.at, other.number)))
    }
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) host: usize,
    pub(crate) agent: usize,
    pub(crate) role: Role,
    /// The epoch of a daemon; 0 for a worker.
    pub(crate) epoch: u64,
    pub(crate) is_alive: bool,
    pub(crate) frozen: Option<(Time, Time)>,
}

#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) name: String,
    pub(crate) slots: u32,
    pub(crate) is_up: bool,
    /// The daemons that accept data connections, and nodes of the coordinator, at its address.
    pub(crate) data: Option<Pid>,
    pub(crate) grpc: Option<Pid>,
}

impl Host {
    /// As the launcher knows it.
    pub(crate) fn listed(&self) -> hosts::Host {
        let (name, slots) = (self.name.clone(), self.slots);
        hosts::Host::new(name, slots)
    }
}

/// A data connection between two daemons.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) ends: [Pid; 2],
    pub(crate) is_broken: bool,
    /// Per sender: the position of its first byte, and how many bytes the other system has.
    pub(crate) base: [u64; 2],
    pub(crate) there: [u64; 2],
}

impl Conn {
    pub(crate) fn side(&self, pid: Pid) -> usize {
        usize::from(self.ends[1] == pid)
    }
}

/// The tensor of an operation in flight, which a worker shares with its daemon.
#[derive(Debug)]
pub(crate) struct Buffer {
    pub(crate) data: Vec<u64>,
    pub(crate) input: Vec<u64>,
    /// The elements that complete pieces have written.
    pub(crate) written: Vec<bool>,
}

pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) dice: Dice,
    pub(crate) plant: Option<Plant>,
    pub(crate) check: Check,
    pub(crate) job: JobId,
    pub(crate) secret: Secret,
    pub(crate) processes: Vec<Process>,
    pub(crate) hosts: Vec<Host>,
    /// The longest delay of a message between two hosts, in milliseconds.
    pub(crate) latency: u64,
    pub(crate) conns: BTreeMap<u64, Conn>,
    /// The streams between daemons and their coordinators that are not broken, with their ends.
    pub(crate) streams: BTreeMap<u64, [Pid; 2]>,
    next_stream: u64,
    /// What each daemon shares with its workers. A worker that has left may have other memory by
    /// then.
    pub(crate) memory: BTreeMap<(Pid, Pid, Key), Buffer>,
    /// The agents that the launcher can't reach any more.
    pub(crate) cut: BTreeSet<usize>,
    /// The connected pairs of processes.
    sockets: BTreeSet<(Pid, Pid)>,
    /// Until when two hosts can't reach each other.
    partitions: BTreeMap<(usize, usize), Time>,
    /// When the last message between two ends arrives.
    last: BTreeMap<(End, End), Time>,
    queue: BinaryHeap<Due>,
    happened: u64,
    /// The log of a run that is replayed.
    pub(crate) log: Option<Vec<String>>,
}

/// One end of a stream of messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum End {
    Launcher,
    Agent(usize),
    Process(Pid),
}

impl World {
    pub(crate) fn new(seed: u64, plant: Option<Plant>, job: JobId, secret: Secret) -> Self {
        Self {
            now: Time::ZERO,
            dice: Dice::new(seed),
            plant,
            check: Check::default(),
            job,
            secret,
            processes: Vec::new(),
            hosts: Vec::new(),
            latency: 4,
            conns: BTreeMap::new(),
            streams: BTreeMap::new(),
            next_stream: 0,
            memory: BTreeMap::new(),
            cut: BTreeSet::new(),
            sockets: BTreeSet::new(),
            partitions: BTreeMap::new(),
            last: BTreeMap::new(),
            queue: BinaryHeap::new(),
            happened: 0,
            log: None,
        }
    }

    pub(crate) fn has(&self, plant: Plant) -> bool {
        self.plant == Some(plant)
    }

    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        let now = self.now.as_secs_f64();
        if let Some(log) = &mut self.log {
            log.push(format!("{now:9.4} {}", text()));
        }
    }

    pub(crate) fn at(&mut self, at: Time, what: What) {
        self.happened += 1;
        self.queue.push(Due { at, number: self.happened, what });
    }

    pub(crate) fn after(&mut self, delay: Time, what: What) {
        self.at(self.now + delay, what);
    }

    /// What happens next.
    pub(crate) fn next(&mut self) -> Option<What> {
        let due = self.queue.pop()?;
        self.now = due.at;
        Some(due.what)
    }

    /// The host of an end; the launcher is on none of them.
    fn host_of(&self, end: End) -> Option<usize> {
        match end {
            End::Process(pid) => Some(self.processes[pid].host),
            End::Launcher | End::Agent(_) => None,
        }
    }

    /// When a message that is sent now arrives.
    pub(crate) fn arrival(&mut self, from: End, to: End) -> Time {
        let mut at = match (self.host_of(from), self.host_of(to)) {
            (Some(one), Some(other)) if one == other => self.now + self.dice.time(0, 1),
            (Some(one), Some(other)) => {
                let until = self.partitions.get(&(one.min(other), one.max(other)));
                let free = until.copied().unwrap_or_default().max(self.now);
                free + self.dice.time(0, self.latency)
            }
            _ => self.now + self.dice.time(0, 6),
        };
        let last = self.last.entry((from, to)).or_default();
        at = at.max(*last + Time::from_nanos(1));
        *last = at;
        at
    }

    pub(crate) fn partition(&mut self, one: usize, other: usize, time: Time) {
        self.partitions.insert((one.min(other), one.max(other)), self.now + time);
    }

    pub(crate) fn tell_launcher(&mut self, agent: usize, event: Launched) {
        if !self.cut.contains(&agent) {
            let at = self.arrival(End::Agent(agent), End::Launcher);
            self.at(at, What::Launcher(Box::new(event)));
        }
    }

    pub(crate) fn tell_daemon(&mut self, from: Pid, to: Pid, message: DaemonIn) {
        let at = self.arrival(End::Process(from), End::Process(to));
        self.at(at, What::Daemon(to, message));
    }

    pub(crate) fn tell_worker(&mut self, from: Pid, to: Pid, message: WorkerIn) {
        let at = self.arrival(End::Process(from), End::Process(to));
        self.at(at, What::Worker(to, message));
    }

    pub(crate) fn is_alive(&self, pid: Pid) -> bool {
        self.processes[pid].is_alive
    }

    /// Until when a process is frozen, if it is.
    pub(crate) fn frozen_until(&self, pid: Pid) -> Option<Time> {
        self.processes[pid].frozen.map(|(_, until)| until).filter(|until| *until > self.now)
    }

    pub(crate) fn freeze(&mut self, pid: Pid, time: Time) {
        if !self.is_alive(pid) || self.frozen_until(pid).is_some() {
            return;
        }
        self.note(|| format!("process {pid} is frozen for {time:?}"));
        let until = self.now + time;
        self.processes[pid].frozen = Some((self.now, until));
        // Before everything that waits for it.
        self.at(
            until,
            match self.processes[pid].role {
                Role::Daemon => What::Daemon(pid, DaemonIn::Thawed(time)),
                Role::Rank(_) => What::Worker(pid, WorkerIn::Thawed),
            },
        );
    }

    /// Connects two processes: each learns of the other's end.
    pub(crate) fn connect(&mut self, one: Pid, other: Pid) {
        self.sockets.insert((one.min(other), one.max(other)));
    }

    /// Closes a connection from one side.
    pub(crate) fn close(&mut self, from: Pid, to: Pid) {
        if self.sockets.remove(&(from.min(to), from.max(to))) {
            let at = self.arrival(End::Process(from), End::Process(to));
            self.at(at, closed(self.processes[to].role, to, from));
        }
    }

    /// Opens a stream between a daemon and its coordinator.
    pub(crate) fn open_stream(&mut self, one: Pid, other: Pid) -> u64 {
        self.next_stream += 1;
        self.streams.insert(self.next_stream, [one, other]);
        self.next_stream
    }

    /// Closes a stream from one side.
    pub(crate) fn close_stream(&mut self, stream: u64, from: Pid, to: Pid) {
        if self.streams.remove(&stream).is_some() {
            let at = self.arrival(End::Process(from), End::Process(to));
            self.at(at, What::Daemon(to, DaemonIn::StreamBroke(stream)));
        }
    }

    /// What is on the way on a stream is lost; these of its ends notice it.
    pub(crate) fn break_stream(&mut self, stream: u64, notice: [bool; 2]) {
        let Some(ends) = self.streams.remove(&stream) else { return };
        self.note(|| format!("stream {stream} breaks"));
        for (pid, _) in ends.into_iter().zip(notice).filter(|(_, notices)| *notices) {
            let delay = self.dice.time(0, 3);
            self.after(delay, What::Daemon(pid, DaemonIn::StreamBroke(stream)));
        }
    }

    /// A process ends. Its agent notices it, and so does everyone with a connection.
    pub(crate) fn end(&mut self, pid: Pid, end: ProcessEnd, is_silent: bool) {
        if !std::mem::replace(&mut self.processes[pid].is_alive, false) {
            return;
        }
        self.note(|| format!("process {pid} {end}"));
        let host = self.processes[pid].host;
        if self.hosts[host].data == Some(pid) {
            self.hosts[host].data = None;
        }
        if self.hosts[host].grpc == Some(pid) {
            self.hosts[host].grpc = None;
        }
        let own: Vec<_> =
            self.sockets.iter().copied().filter(|(a, b)| *a == pid || *b == pid).collect();
        for (one, other) in own {
            let peer = if one == pid { other } else { one };
            if is_silent {
                self.sockets.remove(&(one, other));
            } else {
                self.close(pid, peer);
            }
        }
        let conns: Vec<u64> = self.conns_of(pid);
        for conn in conns {
            if is_silent {
                self.conns.get_mut(&conn).into_iter().for_each(|conn| conn.is_broken = true);
            } else {
                self.break_conn(conn);
            }
        }
        if !is_silent {
            let agent = self.processes[pid].agent;
            let delay = self.dice.time(0, 10);
            self.after(delay, What::Agent(agent, AgentIn::Ended(pid, end)));
        }
    }

    pub(crate) fn conns_of(&self, pid: Pid) -> Vec<u64> {
        let own = self.conns.iter().filter(|(_, conn)| !conn.is_broken && conn.ends.contains(&pid));
        own.map(|(number, _)| *number).collect()
    }

    /// What is on the way on a data connection is lost; both ends notice it.
    pub(crate) fn break_conn(&mut self, conn: u64) {
        let Some(broken) = self.conns.get_mut(&conn) else { return };
        if std::mem::replace(&mut broken.is_broken, true) {
            return;
        }
        for pid in broken.ends {
            let delay = self.dice.time(0, 3);
            self.after(delay, What::Daemon(pid, DaemonIn::Reset(conn)));
        }
    }

    /// Writes to a data connection.
    pub(crate) fn write(&mut self, from: Pid, conn: u64, bytes: Vec<u8>) {
        let Some(ends) = self.conns.get(&conn).map(|conn| conn.ends) else { return };
        let to = if ends[0] == from { ends[1] } else { ends[0] };
        let at = self.arrival(End::Process(from), End::Process(to));
        self.at(at, What::Data { conn, to, bytes, has_arrived: false });
    }
}

fn closed(role: Role, to: Pid, from: Pid) -> What {
    match role {
        Role::Daemon => What::Daemon(to, DaemonIn::Closed(from)),
        Role::Rank(_) => What::Worker(to, WorkerIn::Closed(from)),
    }
}
