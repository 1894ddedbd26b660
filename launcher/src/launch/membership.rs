//! Which workers of an elastic job form the next epoch, and which processes to start. Pure.
//!
//! A host has *slots*, each with room for one worker. A *newcomer* waits until an epoch includes
//! it; a *survivor* was in one. The end of a worker by its own fault quarantines its slot, and the
//! loss of an agent its host: nothing starts there for a time that doubles with each fault in a
//! row. A worker *leaves* if it is asked to, or if its host or slot is taken off the list; that is
//! not a fault.

use std::{collections::BTreeMap, time::Duration};

use super::{
    elastic::Elastic,
    hosts::Host,
    plan::{Node, count},
};

/// A newcomer that is ready waits at most this long for others that were started with it.
const TOGETHER: Duration = Duration::from_secs(10);

/// A change that waits for the next epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Change {
    /// Newcomers are ready: as many as an epoch has room for, or all that have been started.
    pub added: bool,
    /// Members are to leave.
    pub removed: bool,
}

impl Change {
    /// Whether there is something to change.
    pub fn is_some(self) -> bool {
        self != Self::default()
    }
}

/// A process to start, for which a host may have to be reached first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Reach a host, with this number for its agent.
    Reach {
        /// The number.
        agent: usize,
        /// The host.
        host: Host,
    },
    /// Start a worker.
    Start {
        /// The agent of its host.
        agent: usize,
        /// Its id.
        worker: u32,
    },
}

/// What to end because it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Surplus {
    /// Everything on the host of this agent.
    Host(usize),
    /// One worker.
    Worker {
        /// The agent of its host.
        agent: usize,
        /// Its id.
        worker: u32,
    },
}

/// The agent of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Agent {
    None,
    /// It is being started: since this time, or, with `None`, as a part of the job's start.
    Called(usize, Option<Duration>),
    Here(usize),
}

/// The first and the longest time for which a host that others don't reach is left out.
const LEFT_OUT: (Duration, Duration) = (Duration::from_secs(300), Duration::from_secs(3600));

/// Faults in a row, and when their quarantine ends.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    number: u32,
    until: Duration,
}

impl Faults {
    /// Adds a fault, and returns the time of quarantine.
    fn add(&mut self, rules: &Elastic, lived: Duration, now: Duration) -> Duration {
        // After a long time without a fault, a new row begins.
        self.number = if lived > rules.cooldown.1 { 1 } else { self.number.saturating_add(1) };
        let time = rules.quarantine(self.number);
        self.until = self.until.max(now + time);
        time
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    worker: Option<u32>,
    faults: Faults,
}

#[derive(Debug)]
struct Place {
    host: Host,
    /// Whether the user's list or script names the host now.
    listed: bool,
    /// The user has taken it off for good.
    is_drained: bool,
    agent: Agent,
    /// When the agent answered.
    since: Duration,
    faults: Faults,
    /// How often it was left out because the daemons of other hosts did not reach it.
    left_out: u32,
    /// At least as many as `host.slots`; workers in later ones leave.
    slots: Vec<Slot>,
}

impl Place {
    fn new(host: Host) -> Self {
        let slots = vec![Slot::default(); host.slots as usize];
        let (agent, since, faults) = (Agent::None, Duration::ZERO, Faults::default());
        Self { host, listed: true, is_drained: false, agent, since, faults, left_out: 0, slots }
    }

    fn is_server(&self) -> bool {
        self.host.slots == 0 && self.slots.is_empty()
    }

    /// Whether a worker may stay in this slot.
    fn has_room(&self, slot: usize) -> bool {
        self.listed && slot < self.host.slots as usize
    }

    /// The slots that have no worker, and whether each may have one now.
    fn free(&self, now: Duration) -> impl Iterator<Item = (usize, bool)> {
        let open = self.listed && self.faults.until <= now;
        let slots = self.slots.iter().take(self.host.slots as usize).enumerate();
        slots
            .filter(|(_, slot)| slot.worker.is_none())
            .map(move |(at, slot)| (at, open && slot.faults.until <= now))
    }
}

#[derive(Debug)]
struct Worker {
    place: usize,
    slot: usize,
    agent: usize,
    born: Duration,
    /// It has said that it waits for the next epoch.
    ready: bool,
    /// It was asked to leave.
    leaves: bool,
    /// Its rank in the last epoch that ran; `None` for a newcomer.
    rank: Option<u32>,
}

/// The hosts, slots and workers of an elastic job.
#[derive(Debug)]
pub struct Membership {
    rules: Elastic,
    places: Vec<Place>,
    workers: BTreeMap<u32, Worker>,
    next_worker: u32,
}

impl Membership {
    /// The membership of a job whose first epoch consists of these nodes.
    pub fn new(rules: Elastic, nodes: &[Node]) -> Self {
        let places = rules.hosts.iter().cloned().map(Place::new).collect();
        let mut new = Self { rules, places, workers: BTreeMap::new(), next_worker: 0 };
        for node in nodes {
            let Some(at) = new.places.iter().position(|place| place.host.name == node.host) else {
                continue;
            };
            // The start of the job has a limit of its own.
            new.places[at].agent = Agent::Called(node.agent, None);
            for (slot, worker) in node.workers.iter().enumerate() {
                new.add(at, slot, node.agent, *worker, Duration::ZERO);
            }
        }
        new.formed(nodes);
        new
    }

    fn add(&mut self, place: usize, slot: usize, agent: usize, worker: u32, now: Duration) {
        self.places[place].slots[slot].worker = Some(worker);
        self.next_worker = self.next_worker.max(worker + 1);
        let (ready, leaves, rank) = (false, false, None);
        let new = Worker { place, slot, agent, born: now, ready, leaves, rank };
        self.workers.insert(worker, new);
    }

    /// The rules of this job.
    pub fn rules(&self) -> &Elastic {
        &self.rules
    }

    /// Whether a worker runs, and was in an epoch.
    pub fn is_survivor(&self, worker: u32) -> bool {
        self.workers.get(&worker).is_some_and(|worker| worker.rank.is_some())
    }

    /// How many workers that were in an epoch run and do not leave.
    pub fn survivors(&self) -> u32 {
        let survivors = self.workers.values().filter(|it| it.rank.is_some() && !self.leaves(it));
        u32::try_from(survivors.count()).unwrap_or(u32::MAX)
    }

    /// Whether a worker runs and its host is in the job.
    pub fn has(&self, worker: u32) -> bool {
        self.workers.contains_key(&worker)
    }

    /// Whether all workers that were in an epoch and do not leave have said that they wait for the
    /// next one.
    pub fn all_wait(&self) -> bool {
        let mut survivors =
            self.workers.values().filter(|it| it.rank.is_some() && !self.leaves(it));
        self.survivors() > 0 && survivors.all(|it| it.ready)
    }

    /// Whether a worker that runs is to leave.
    pub fn is_leaving(&self, worker: u32) -> bool {
        self.workers.get(&worker).is_some_and(|worker| self.leaves(worker))
    }

    fn leaves(&self, worker: &Worker) -> bool {
        worker.leaves || !self.places[worker.place].has_room(worker.slot)
    }

    /// A worker was asked to leave. Its slot is not in quarantine afterwards.
    pub fn leave(&mut self, worker: u32) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.leaves = true;
        }
    }

    /// A worker has said that it waits for an epoch.
    pub fn waits(&mut self, worker: u32) {
        if let Some(worker) = self.workers.get_mut(&worker) {
            worker.ready = true;
        }
    }

    /// Whether a worker has said that it waits for an epoch.
    pub fn is_waiting(&self, worker: u32) -> bool {
        self.workers.get(&worker).is_some_and(|worker| worker.ready)
    }

    /// A worker has ended. Returns the time for which its slot is quarantined, if it is at fault.
    pub fn ended(&mut self, worker: u32, is_fault: bool, now: Duration) -> Option<Duration> {
        let is_leaving = self.is_leaving(worker);
        let worker = self.workers.remove(&worker)?;
        let slot = &mut self.places[worker.place].slots[worker.slot];
        slot.worker = None;
        let lived = now.saturating_sub(worker.born);
        (is_fault && !is_leaving).then(|| slot.faults.add(&self.rules, lived, now))
    }

    fn place_of(&mut self, agent: usize) -> Option<&mut Place> {
        self.places.iter_mut().find(|place| match place.agent {
            Agent::Called(number, _) | Agent::Here(number) => number == agent,
            Agent::None => false,
        })
    }

    /// An agent has answered. Returns whether it is still wanted.
    pub fn answered(&mut self, agent: usize, now: Duration) -> bool {
        let Some(place) = self.place_of(agent) else { return false };
        (place.agent, place.since) = (Agent::Here(agent), now);
        true
    }

    /// An agent has ended, and with it all workers of its host. Returns the time for which the host
    /// is quarantined, if it was still wanted.
    pub fn agent_ended(&mut self, agent: usize, now: Duration) -> Option<Duration> {
        let here: Vec<_> = self.workers.iter().filter(|(_, it)| it.agent == agent).collect();
        let here: Vec<u32> = here.into_iter().map(|(worker, _)| *worker).collect();
        for worker in here {
            self.ended(worker, false, now);
        }
        let rules = self.rules.clone();
        let place = self.place_of(agent)?;
        place.agent = Agent::None;
        let lived = now.saturating_sub(place.since);
        place.listed.then(|| place.faults.add(&rules, lived, now))
    }

    /// Leaves out a host that the daemons of others don't reach, for five minutes the first time:
    /// another attempt costs an epoch.
    pub fn leave_out(&mut self, agent: usize, now: Duration) -> Option<Duration> {
        let place = self.place_of(agent)?;
        place.left_out += 1;
        let time = LEFT_OUT.0.saturating_mul(1 << (place.left_out - 1).min(8)).min(LEFT_OUT.1);
        place.faults.until = now + time;
        Some(time)
    }

    /// Whether the host of an agent was left out before.
    pub fn was_left_out(&self, agent: usize) -> bool {
        let is_it = |place: &&Place| matches!(place.agent, Agent::Here(at) if at == agent);
        self.places.iter().find(is_it).is_some_and(|place| place.left_out > 0)
    }

    /// Agents that have not answered in time. They are given up.
    pub fn silent(&mut self, now: Duration) -> Vec<(usize, String)> {
        let limit = self.rules.reach;
        let calls = self.places.iter().filter_map(|place| match place.agent {
            Agent::Called(agent, Some(since)) if now >= since + limit => {
                Some((agent, place.host.name.clone()))
            }
            _ => None,
        });
        let silent: Vec<_> = calls.collect();
        for (agent, _) in &silent {
            self.agent_ended(*agent, now);
        }
        silent
    }

    /// Newcomers, with their agents, that have not said within the time limit that they wait. They
    /// hang before they join, and occupy slots.
    pub fn overdue(&self, now: Duration) -> Vec<(usize, u32)> {
        let limit = self.rules.timeout;
        let is_late = |it: &Worker| it.rank.is_none() && !it.ready && now >= it.born + limit;
        let late = self.workers.iter().filter(|(_, it)| is_late(it));
        late.map(|(id, it)| (it.agent, *id)).collect()
    }

    /// Takes a new list of hosts. A host keeps its place and its quarantine.
    pub fn list(&mut self, hosts: &[Host]) {
        for place in &mut self.places {
            let is_named = hosts.iter().any(|it| it.name == place.host.name);
            place.listed = place.is_server() || is_named && !place.is_drained;
        }
        for host in hosts {
            match self.places.iter_mut().find(|place| place.host.name == host.name) {
                Some(place) => {
                    let slots = place.slots.len().max(host.slots as usize);
                    place.slots.resize(slots, Slot::default());
                    place.host.slots = host.slots;
                }
                None => self.places.push(Place::new(host.clone())),
            }
        }
    }

    /// Takes a host off the list for good.
    ///
    /// # Errors
    /// A text, if the job does not have the host, or no other one with slots.
    pub fn drain(&mut self, host: &str) -> Result<(), String> {
        let has_slots = |place: &&Place| place.listed && place.host.slots > 0;
        let names: Vec<_> =
            self.places.iter().filter(has_slots).map(|place| place.host.name.clone()).collect();
        if !names.iter().any(|name| name == host) {
            return Err(format!(
                "the job has no host '{host}'; its hosts are {}",
                names.join(", ")
            ));
        }
        if names.len() == 1 {
            return Err(format!("host {host} is the only host of the job; add another one first"));
        }
        for place in self.places.iter_mut().filter(|place| place.host.name == host) {
            (place.listed, place.is_drained) = (false, true);
        }
        Ok(())
    }

    /// What to start now, so that the job gets as many workers as it may have, and its spares.
    /// `next_agent` is the number of the next agent.
    pub fn fill(&mut self, mut next_agent: usize, now: Duration) -> Vec<Request> {
        let mut requests = Vec::new();
        let mut missing = self.missing();
        // First the hosts that need not be reached.
        let mut order: Vec<usize> = (0..self.places.len()).collect();
        order.sort_by_key(|at| match self.places[*at].agent {
            Agent::Here(_) => 0,
            Agent::Called(..) => 1,
            Agent::None => 2,
        });
        for at in order {
            let place = &self.places[at];
            let free: Vec<usize> =
                place.free(now).filter(|(_, may)| *may).map(|(slot, _)| slot).collect();
            let lost_server = place.is_server() && place.listed && place.faults.until <= now;
            match place.agent {
                Agent::Here(agent) => {
                    for slot in free.into_iter().take(missing) {
                        let worker = self.next_worker;
                        self.add(at, slot, agent, worker, now);
                        requests.push(Request::Start { agent, worker });
                        missing -= 1;
                    }
                }
                Agent::Called(..) => missing -= free.len().min(missing),
                Agent::None if free.len().min(missing) > 0 || lost_server => {
                    missing -= free.len().min(missing);
                    let host = place.host.clone();
                    self.places[at].agent = Agent::Called(next_agent, Some(now));
                    requests.push(Request::Reach { agent: next_agent, host });
                    next_agent += 1;
                }
                Agent::None => {}
            }
        }
        requests
    }

    /// How many workers and spares are missing, without those that leave.
    fn missing(&self) -> usize {
        let wanted = self.rules.max.saturating_add(self.rules.spares) as usize;
        wanted.saturating_sub(self.workers.values().filter(|it| !self.leaves(it)).count())
    }

    /// When [`Self::fill`], [`Self::silent`], [`Self::overdue`] or [`Self::pending`] may have
    /// another result.
    pub fn wakeup(&self, now: Duration) -> Option<Duration> {
        let starting = self.workers.values().filter(|it| !it.ready && it.rank.is_none());
        let starting =
            starting.flat_map(|it| [TOGETHER, self.rules.timeout].map(|at| it.born + at));
        let is_missing = self.missing() > 0;
        let places = self.places.iter().filter(|place| place.listed);
        let free = places.flat_map(|place| {
            let called = match place.agent {
                Agent::Called(_, since) => since.map(|since| since + self.rules.reach),
                _ => None,
            };
            let slots = place.slots.iter().filter(move |slot| is_missing && slot.worker.is_none());
            let slots = slots.map(|slot| slot.faults.until.max(place.faults.until));
            slots.chain(place.is_server().then_some(place.faults.until)).chain(called)
        });
        starting.chain(free).filter(|at| *at > now).min()
    }

    /// What the next epoch would change if it were formed now. Newcomers that start together join
    /// together: each change costs the job an epoch, and `--reset-limit` counts it.
    pub fn pending(&self, now: Duration) -> Change {
        let (members, newcomers): (Vec<&Worker>, Vec<&Worker>) =
            self.workers.values().partition(|it| it.rank.is_some());
        let removed = members.iter().any(|it| self.leaves(it));
        let newcomers = newcomers.into_iter().filter(|it| !self.leaves(it));
        let (ready, starting): (Vec<_>, Vec<_>) = newcomers.partition(|it| it.ready);
        let room = self.rules.max.saturating_sub(self.survivors()) as usize;
        let awaits = starting.iter().any(|it| now < it.born + TOGETHER);
        let added = room > 0 && !ready.is_empty() && (!awaits || ready.len() >= room);
        Change { added, removed }
    }

    /// The nodes of the next epoch: all survivors that do not leave, then newcomers that are ready.
    /// A newcomer that still starts would keep the others waiting.
    ///
    /// Nodes are in the order of their survivors' lowest ranks, and those without survivors follow,
    /// so that rank 0 has the state of the job. Survivors of a node keep their order, newcomers
    /// follow by id. Servers come last.
    pub fn next(&self) -> Vec<Node> {
        let here = |it: &Worker| self.places[it.place].agent == Agent::Here(it.agent);
        let mut chosen: Vec<(u32, &Worker)> =
            self.workers.iter().map(|(id, it)| (*id, it)).collect();
        let is_ready = |it: &Worker| it.rank.is_some() || it.ready;
        chosen.retain(|(_, it)| here(it) && !self.leaves(it) && is_ready(it));
        // Ids grow, so newcomers are in order.
        chosen.sort_by_key(|(id, it)| (it.rank.is_none(), it.rank.unwrap_or(*id)));
        chosen.truncate(self.rules.max as usize);
        let mut nodes: Vec<(u32, usize, Vec<u32>)> = Vec::new();
        for (id, it) in chosen {
            match nodes.iter_mut().find(|(_, place, _)| *place == it.place) {
                Some((_, _, workers)) => workers.push(id),
                None => nodes.push((it.rank.unwrap_or(u32::MAX), it.place, vec![id])),
            }
        }
        nodes.sort_by_key(|(rank, place, _)| (*rank, *place));
        let servers = self.places.iter().enumerate();
        let servers = servers.filter(|(_, it)| it.is_server() && it.listed);
        nodes.extend(servers.map(|(place, _)| (u32::MAX, place, Vec::new())));
        let mut first_rank = 0;
        let nodes = nodes.into_iter().filter_map(|(_, place, workers)| {
            let Place { host, agent: Agent::Here(agent), .. } = &self.places[place] else {
                return None;
            };
            let Host { name: host, rack, line_mbit, interface, .. } = host.clone();
            let survivors = workers.iter().filter(|worker| self.is_survivor(**worker)).count();
            let survivors = u32::try_from(survivors).unwrap_or(u32::MAX);
            let agent = *agent;
            let node =
                Node { host, agent, first_rank, workers, survivors, rack, line_mbit, interface };
            first_rank += node.ranks();
            Some(node)
        });
        nodes.collect()
    }

    /// An epoch of these nodes runs.
    pub fn formed(&mut self, nodes: &[Node]) {
        for node in nodes {
            for (worker, rank) in node.workers.iter().zip(node.first_rank..) {
                if let Some(worker) = self.workers.get_mut(worker) {
                    (worker.rank, worker.ready) = (Some(rank), false);
                }
            }
        }
    }

    /// What leaves, when no epoch runs any more. Each agent is named once. Its workers are
    /// not members any more, however long they take to end.
    pub fn take_surplus(&mut self) -> Vec<Surplus> {
        let hosts = self.places.iter_mut().filter_map(|place| match place.agent {
            Agent::Called(agent, _) | Agent::Here(agent) if !place.listed => {
                place.agent = Agent::None;
                Some(Surplus::Host(agent))
            }
            _ => None,
        });
        let mut surplus: Vec<_> = hosts.collect();
        for (worker, it) in &mut self.workers {
            let place = &self.places[it.place];
            if !it.leaves && place.has_room(it.slot) {
                continue;
            }
            it.rank = None;
            if place.listed {
                surplus.push(Surplus::Worker { agent: it.agent, worker: *worker });
            }
        }
        surplus
    }

    /// What a job with too few ranks waits for (WAIT).
    pub fn awaited(&self, now: Duration) -> String {
        let is_new = |it: &&Worker| it.rank.is_none() && !self.leaves(it);
        let starting = self.workers.values().filter(is_new).count();
        let places = || self.places.iter().filter(|place| place.listed);
        let called = places().find(|place| matches!(place.agent, Agent::Called(..)));
        let free = places().flat_map(|place| {
            let slots = place.free(now);
            slots.map(|(at, _)| place.slots[at].faults.until.max(place.faults.until))
        });
        match (starting, called, free.min()) {
            (1.., _, _) => format!("{} to start", count(starting, "worker")),
            (_, Some(place), _) => format!("an answer of host {}", place.host.name),
            (_, _, Some(until)) => {
                let seconds = until.saturating_sub(now).as_secs_f64();
                format!("a slot in quarantine, which is free in {seconds:.0} s")
            }
            _ => "a host with a free slot".to_owned(),
        }
    }
}

#[cfg(test)]
mod tests;
