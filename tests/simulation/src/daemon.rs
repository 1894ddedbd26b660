//! A daemon: joins its epoch, attaches workers, gathers their tensors, and carries out operations.
//! If it is the first of the epoch, it hosts the coordinator ([`crate::coordinator`]).

mod tensors;

use std::{collections::BTreeMap, sync::Arc};

use gradwire_coordinator::model::command::World as Formed;
use gradwire_launcher::launch::job::events::Event as Launched;
use gradwire_proto::{Failure, FailureKind, NodeId, ProcessSetId, Rank, Request, TensorId};
use gradwire_services::launch::{Notice, ProcessEnd, Role, ServiceReport, to_line};

pub(crate) use self::tensors::{Key, Tensor};
use crate::{
    agents::address,
    coordinator::{Coordinator, FromNode, ToNode},
    lines::Line,
    pieces::Piece,
    plants::Plant,
    streams::Uplink,
    worker::WorkerIn,
    world::{Pid, Time, What, World, ms},
};

pub(crate) const BEAT: Time = Time::from_millis(500);
/// How long ranks may take to attach.
const ATTACH: Time = Time::from_secs(30);

#[derive(Debug)]
pub(crate) enum DaemonIn {
    Begin,
    Thawed(Time),
    Notice(Notice),
    Terminate,
    /// The time of heartbeats.
    Beat,
    /// Its last messages are out.
    Exit(i32),
    /// The coordinator that it hosts has a deadline.
    EngineTick(Time),
    /// From a node to the coordinator that it hosts, and the other way.
    Node {
        stream: u64,
        from: Pid,
        message: FromNode,
    },
    Ordered {
        stream: u64,
        message: ToNode,
    },
    /// A stream has broken.
    StreamBroke(u64),
    /// It is time for another stream, which has this number, or for the answer on it.
    Return(u32),
    /// It tries to reach its coordinator.
    Dial,
    /// A connection has ended.
    Closed(Pid),
    Attach {
        worker: u32,
        pid: Pid,
    },
    Submit {
        pid: Pid,
        key: Key,
        request: Request,
    },
    Detach(Pid),
    /// A data connection: asked for, granted with what the acceptor has read, broken.
    Hello {
        conn: u64,
        from: Pid,
        bytes: Vec<u8>,
    },
    Granted {
        conn: u64,
        read: Option<u64>,
    },
    Reset(u64),
    Bytes {
        conn: u64,
        bytes: Vec<u8>,
    },
    /// An attempt to make a data connection has taken too long.
    Redial {
        peer: u32,
        attempt: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Free,
    /// It waits for the world.
    Claimed(Pid),
    Attached(Pid),
    Left,
}

#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) pid: Pid,
    agent: usize,
    pub(crate) host: usize,
    pub(crate) epoch: u64,
    pub(crate) order: u32,
    /// The workers of this node by local rank.
    pub(crate) workers: Vec<u32>,
    slots: Vec<Slot>,
    ended: BTreeMap<u32, ProcessEnd>,
    pub(crate) coordinator: Option<Coordinator>,
    pub(crate) up: Uplink,
    /// Until when its coordinator waits for nodes that have not received their last message.
    exits_until: Option<Time>,
    formed: Option<(Arc<Formed>, Time)>,
    pub(crate) node: NodeId,
    wanted: (bool, bool),
    pub(crate) sets: BTreeMap<ProcessSetId, Vec<Rank>>,
    pub(crate) tensors: BTreeMap<Key, Tensor>,
    names: BTreeMap<TensorId, Key>,
    pub(crate) pieces: BTreeMap<u64, Piece>,
    /// Pieces that have ended: only with a planted fault.
    pub(crate) gone: BTreeMap<u64, Piece>,
    pub(crate) lines: BTreeMap<u32, Line>,
    /// What has arrived for pieces that have not started here.
    pub(crate) early: BTreeMap<(u64, u32, u32), Vec<u8>>,
    has_reported: bool,
    pub(crate) is_over: bool,
}

impl Daemon {
    pub(crate) fn new(
        world: &mut World,
        pid: Pid,
        agent: usize,
        environment: &BTreeMap<String, String>,
    ) -> Self {
        let text = |name: &str| environment[name].as_str();
        let number = |name: &str| text(name).parse::<u64>().expect("a number");
        let listed = text("GRADWIRE_WORKERS").split(',').map(|id| id.parse().expect("an id"));
        let workers: Vec<u32> = listed.collect();
        let host = world.processes[pid].host;
        let epoch = number("GRADWIRE_EPOCH");
        let small = |name: &str| u32::try_from(number(name)).expect("a small number");
        let at = text("GRADWIRE_COORDINATOR");
        let (coordinator, coordinator_host) = if at == "here" {
            world.check.coordinator(epoch, pid);
            let size = (small("GRADWIRE_NODES"), small("GRADWIRE_RANKS"));
            (Some(Coordinator::new(world, pid, epoch, size)), host)
        } else {
            let ip = at.split(':').next().expect("an address");
            let last: usize = ip.rsplit('.').next().and_then(|n| n.parse().ok()).expect("10.0.0.x");
            (None, last - 1)
        };
        let up = Uplink::new(world, coordinator_host, coordinator.is_some());
        Self {
            pid,
            agent,
            host,
            epoch,
            order: small("GRADWIRE_ORDER"),
            slots: vec![Slot::Free; workers.len()],
            workers,
            ended: BTreeMap::new(),
            coordinator,
            up,
            exits_until: None,
            formed: None,
            node: NodeId(0),
            wanted: (false, false),
            sets: BTreeMap::new(),
            tensors: BTreeMap::new(),
            names: BTreeMap::new(),
            pieces: BTreeMap::new(),
            gone: BTreeMap::new(),
            lines: BTreeMap::new(),
            early: BTreeMap::new(),
            has_reported: false,
            is_over: false,
        }
    }

    pub(crate) fn formed(&self) -> Option<&Arc<Formed>> {
        self.formed.as_ref().map(|(formed, _)| formed)
    }

    pub(crate) fn happens(&mut self, world: &mut World, event: DaemonIn) {
        // The coordinator lives on for others until the process ends.
        match event {
            DaemonIn::Exit(code) => {
                let is_owed = self.coordinator.as_ref().is_some_and(Coordinator::is_owed);
                if is_owed && self.exits_until.is_some_and(|until| world.now < until) {
                    world.after(ms(20), What::Daemon(self.pid, DaemonIn::Exit(code)));
                } else {
                    world.end(self.pid, ProcessEnd::Code(code), false);
                }
            }
            DaemonIn::Node { stream, .. } | DaemonIn::Ordered { stream, .. }
                if !world.streams.contains_key(&stream) => {}
            DaemonIn::Node { stream, from, message } => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.received(world, stream, from, message);
                }
            }
            DaemonIn::StreamBroke(stream) => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.broke(world, stream);
                }
                if !self.is_over {
                    self.stream_broke(world, stream);
                }
            }
            DaemonIn::Notice(Notice::DaemonEnded { node, why }) => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.node_ended(world, NodeId(node), why);
                }
                if node == 0 && !self.is_over {
                    self.coordinator_ended(world);
                }
            }
            DaemonIn::EngineTick(at) => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.tick(world, at);
                }
            }
            DaemonIn::Closed(pid) if world.processes[pid].role == Role::Daemon => {
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.closed(world, pid);
                }
                if !self.is_over {
                    self.coordinator_closed(world, pid);
                }
            }
            DaemonIn::Terminate if !self.is_over => {
                let kind = FailureKind::NodeLost;
                self.report(world, Failure::new(kind, "gradwired was asked to end"));
                if self.formed.is_none() {
                    self.exits(world, 1);
                }
            }
            _ if self.is_over => {}
            event => self.lives(world, event),
        }
    }

    fn lives(&mut self, world: &mut World, event: DaemonIn) {
        match event {
            DaemonIn::Begin => self.begin(world),
            DaemonIn::Thawed(time) => {
                self.up.restart(world.now);
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.suspended(world, time);
                }
            }
            DaemonIn::Notice(notice) => self.noticed(world, notice),
            DaemonIn::Beat => self.beat(world),
            DaemonIn::Dial => self.dial_coordinator(world),
            DaemonIn::Return(attempt) => self.returns(world, attempt),
            DaemonIn::Ordered { stream, message } => self.hears(world, stream, message),
            DaemonIn::Closed(pid) => {
                let attached = self.slots.iter().position(
                    |slot| matches!(slot, Slot::Attached(one) | Slot::Claimed(one) if *one == pid),
                );
                if let Some(local) = attached {
                    let was_attached = self.slots[local] == Slot::Attached(pid);
                    self.slots[local] = Slot::Left;
                    if was_attached {
                        self.worker_lost(world, local, "its connection ended");
                    } else if self.ended.contains_key(&self.workers[local]) {
                        self.worker_lost(world, local, "it ended before it had joined");
                    } else {
                        self.slots[local] = Slot::Free;
                    }
                }
            }
            DaemonIn::Attach { worker, pid } => self.attach(world, worker, pid),
            DaemonIn::Submit { pid, key, request } => self.submit(world, pid, key, request),
            DaemonIn::Detach(pid) => {
                let Some(local) = self.slots.iter().position(|s| *s == Slot::Attached(pid)) else {
                    return;
                };
                self.slots[local] = Slot::Left;
                let rank = self.rank(local);
                self.tell_coordinator(world, FromNode::Left(rank, false));
                world.tell_worker(self.pid, pid, WorkerIn::Detached);
            }
            DaemonIn::Hello { conn, from, bytes } => self.hello(world, conn, from, &bytes),
            DaemonIn::Granted { conn, read } => self.granted(world, conn, read),
            DaemonIn::Reset(conn) => self.reset(world, conn),
            DaemonIn::Bytes { conn, bytes } => self.bytes(world, conn, &bytes),
            DaemonIn::Redial { peer, attempt } => self.redial(world, peer, attempt),
            _ => {}
        }
    }

    fn begin(&mut self, world: &mut World) {
        world.hosts[self.host].data = Some(self.pid);
        let ip = address(self.host);
        let grpc = self.coordinator.is_some().then(|| (ip, 7000).into());
        if grpc.is_some() {
            world.hosts[self.host].grpc = Some(self.pid);
        }
        let data = Some((ip, 5000).into());
        self.says(world, &ServiceReport::Serving { metrics: (ip, 8000).into(), data, grpc });
        self.dial_coordinator(world);
        world.after(BEAT, What::Daemon(self.pid, DaemonIn::Beat));
    }

    fn says(&self, world: &mut World, report: &ServiceReport) {
        let line = to_line(report);
        world.tell_launcher(
            self.agent,
            Launched::Said { node: self.agent, role: Role::Daemon, line },
        );
    }

    fn beat(&mut self, world: &mut World) {
        world.after(BEAT, What::Daemon(self.pid, DaemonIn::Beat));
        if let Some(coordinator) = &mut self.coordinator {
            coordinator.beat(world);
        }
        self.tell_count(world);
        self.check_stream(world);
        if self.is_over {
            return;
        }
        if let Some((_, since)) = self.formed
            && world.now > since + ATTACH
            && let Some(local) = self.slots.iter().position(|slot| *slot == Slot::Free)
        {
            let failure = Failure::new(FailureKind::Timeout, "it has not attached in time");
            self.report(world, failure.rank(self.rank(local)));
        }
        self.check_lines(world);
    }

    fn rank(&self, local: usize) -> Rank {
        let first = self.formed().map_or(0, |formed| formed.nodes[self.node.index()].first_rank.0);
        Rank(first + u32::try_from(local).expect("few slots"))
    }

    fn worker_lost(&mut self, world: &mut World, local: usize, what: &str) {
        let host = world.hosts[self.host].name.clone();
        let failure = Failure::new(FailureKind::WorkerLost, what).rank(self.rank(local)).host(host);
        self.report(world, failure);
    }

    /// Tells the coordinator of a failure, which then tells everyone.
    pub(crate) fn report(&mut self, world: &mut World, failure: Failure) {
        if self.formed.is_some() {
            if !std::mem::replace(&mut self.has_reported, true) {
                world.note(|| format!("daemon {} reports {}", self.pid, failure.what));
                self.tell_coordinator(world, FromNode::Failed(failure));
            }
        } else {
            self.fails(world, failure);
        }
    }

    /// The epoch has failed here, without the coordinator.
    pub(crate) fn fails(&mut self, world: &mut World, failure: Failure) {
        self.over(world, &failure, false);
    }

    /// The epoch has failed: all workers learn the cause (TELL), and the daemon ends.
    fn over(&mut self, world: &mut World, failure: &Failure, is_common: bool) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        if world.has(Plant::Silence) {
            return;
        }
        let what = "the stream to the coordinator ended";
        let own = Failure::new(FailureKind::CoordinatorLost, what);
        let tells_own = world.has(Plant::OwnCause) && self.order > 0;
        let failure = if tells_own { &own } else { failure };
        world.note(|| format!("daemon {} is over: {failure}", self.pid));
        self.says(world, &ServiceReport::Failed { failure: failure.clone() });
        for slot in &self.slots {
            if let Slot::Attached(pid) = slot {
                let message = WorkerIn::Aborted { failure: failure.clone(), is_common };
                world.tell_worker(self.pid, *pid, message);
            }
        }
        self.exits(world, 1);
    }

    fn exits(&mut self, world: &mut World, code: i32) {
        self.is_over = true;
        self.exits_until = Some(world.now + ms(1000));
        let delay = world.dice.time(20, 200);
        world.after(delay, What::Daemon(self.pid, DaemonIn::Exit(code)));
    }

    fn noticed(&mut self, world: &mut World, notice: Notice) {
        match notice {
            Notice::Ended { rank, end } => {
                self.ended.insert(rank.0, end);
                let local = self.workers.iter().position(|worker| *worker == rank.0);
                let Some(local) = local.filter(|local| self.slots[*local] == Slot::Free) else {
                    return;
                };
                if self.formed.is_some() {
                    self.slots[local] = Slot::Left;
                    if end.is_well() {
                        self.tell_coordinator(world, FromNode::Left(self.rank(local), true));
                    } else {
                        self.worker_lost(world, local, "it ended before it had joined");
                    }
                }
            }
            // The ranks of the simulation end at the first SIGTERM.
            Notice::Ending { .. } => {}
            Notice::Changed { added, removed } => {
                self.wanted = (self.wanted.0 || added, self.wanted.1 || removed);
                for slot in &self.slots {
                    if let Slot::Attached(pid) = slot {
                        world.tell_worker(self.pid, *pid, WorkerIn::Changed);
                    }
                }
            }
            Notice::Stopping { why, .. } => {
                self.report(world, Failure::new(FailureKind::Cancelled, why));
            }
            Notice::Started { .. } | Notice::Wrote { .. } | Notice::DaemonEnded { .. } => {}
        }
    }

    fn attach(&mut self, world: &mut World, worker: u32, pid: Pid) {
        let mut local = self.workers.iter().position(|known| *known == worker);
        if world.has(Plant::Stranger) {
            local = local.or_else(|| self.slots.iter().position(|slot| *slot == Slot::Free));
        }
        match local {
            Some(local) if self.slots[local] == Slot::Free => {
                self.slots[local] = Slot::Claimed(pid);
                self.attach_claimed(world, local);
            }
            _ => world.tell_worker(self.pid, pid, WorkerIn::Later),
        }
    }

    fn attach_claimed(&mut self, world: &mut World, local: usize) {
        let (Slot::Claimed(pid), Some(formed)) = (self.slots[local], self.formed()) else { return };
        let size = formed.nodes.iter().map(|node| node.slots).sum();
        let (rank, epoch) = (self.rank(local).0, self.epoch);
        self.slots[local] = Slot::Attached(pid);
        let worker = world.processes[pid].role;
        world.check.attached(epoch, rank, worker);
        world.tell_worker(self.pid, pid, WorkerIn::Attached { rank, size, epoch });
        if self.wanted.0 || self.wanted.1 {
            world.tell_worker(self.pid, pid, WorkerIn::Changed);
        }
    }

    pub(crate) fn ordered(&mut self, world: &mut World, order: ToNode) {
        match order {
            ToNode::Beat(_) | ToNode::Resumed(_) | ToNode::Refused(_) => {}
            ToNode::Welcome(node, formed) => {
                self.node = node;
                let size: u32 = formed.nodes.iter().map(|node| node.slots).sum();
                self.sets.insert(ProcessSetId::GLOBAL, (0..size).map(Rank).collect());
                self.formed = Some((formed, world.now));
                (0..self.slots.len()).for_each(|local| self.attach_claimed(world, local));
                self.dial_peers(world);
                let gone: Vec<_> = self.ended.iter().map(|(id, end)| (*id, *end)).collect();
                for (id, end) in gone {
                    self.noticed(world, Notice::Ended { rank: Rank(id), end });
                }
            }
            ToNode::Abort(failure) => {
                self.tell_count(world);
                self.over(world, &failure, true);
            }
            ToNode::Shutdown => {
                self.tell_count(world);
                self.exits(world, 0);
            }
            ToNode::Execute(execute) => self.execute(world, *execute),
        }
    }
}
