//! The coordinator of an epoch: the real [`Engine`], and the streams of its nodes.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_collectives::Rules;
use gradwire_coordinator::{
    engine::Engine,
    model::{
        Command, ConnectionId, EngineConfig, Event,
        command::{Execute, World as Formed},
        event::Announcement,
    },
};
use gradwire_proto::{Epoch, Failure, NodeId, Rank, Sequence, TensorId, pb};
use gradwire_settings::Settings;

use crate::{
    daemon::DaemonIn,
    world::{Pid, Time, What, World},
};

/// From a node to the coordinator.
#[derive(Debug)]
pub(crate) enum FromNode {
    Join(Box<pb::Join>),
    Ready(Announcement),
    Done(u64),
    Failed(Failure),
    Left(Rank, bool),
    Forgotten(Vec<TensorId>),
    Beat,
}

/// From the coordinator to a node.
#[derive(Debug, Clone)]
pub(crate) enum ToNode {
    Welcome(NodeId, Arc<Formed>),
    Refused(String),
    Execute(Box<Execute>),
    Abort(Failure),
    Shutdown,
    Beat,
}

#[derive(Debug)]
pub(crate) struct Coordinator {
    pid: Pid,
    epoch: u64,
    engine: Engine,
    born: Time,
    /// The streams, by the processes at their other ends.
    streams: BTreeMap<Pid, ConnectionId>,
    next: u64,
    last_sequence: Option<u64>,
    /// When the next tick comes.
    armed: Option<Time>,
}

impl Coordinator {
    pub(crate) fn new(world: &mut World, pid: Pid, epoch: u64, size: (u32, u32)) -> Self {
        let (nodes, ranks) = size;
        let settings = Settings::default();
        let mut config =
            EngineConfig::new(world.job.clone(), nodes, 0, &settings).expect("valid settings");
        config.epoch = Epoch(epoch);
        config.elastic = true;
        config.ranks = Some(ranks);
        config.probe = false;
        config.may_explore = false;
        config.rules = Rules::parse("ring").expect("a rule");
        config.piece_bytes = [512, 1024, 4096][world.dice.below(3) as usize];
        config.credit_pieces = 1 + world.dice.below(4) as u32;
        let engine = Engine::new(config);
        let (born, streams) = (world.now, BTreeMap::new());
        Self { pid, epoch, engine, born, streams, next: 0, last_sequence: None, armed: None }
    }

    pub(crate) fn received(&mut self, world: &mut World, from: Pid, message: FromNode) {
        if let FromNode::Join(join) = message {
            let connection = ConnectionId(self.next);
            self.next += 1;
            self.streams.insert(from, connection);
            self.step(world, Event::Joined { connection, join: *join, proven: true });
            return;
        }
        let Some(&connection) = self.streams.get(&from) else { return };
        let event = match message {
            FromNode::Join(_) | FromNode::Beat => Event::MessageReceived { connection },
            FromNode::Ready(one) => Event::Ready { connection, announcements: vec![one] },
            FromNode::Done(number) => Event::Done { connection, sequences: vec![Sequence(number)] },
            FromNode::Failed(failure) => Event::Failed { connection, failure },
            FromNode::Left(rank, absent) => Event::Left { connection, ranks: vec![rank], absent },
            FromNode::Forgotten(ids) => Event::Forgotten { connection, ids },
        };
        self.step(world, event);
    }

    /// The stream of a node has ended.
    pub(crate) fn closed(&mut self, world: &mut World, pid: Pid) {
        if let Some(connection) = self.streams.remove(&pid) {
            let why = "its stream ended".to_owned();
            self.step(world, Event::Lost { connection, why });
        }
    }

    pub(crate) fn suspended(&mut self, world: &mut World, time: Time) {
        self.step(world, Event::Suspended { time });
    }

    pub(crate) fn beat(&self, world: &mut World) {
        for to in self.streams.keys().copied().collect::<Vec<_>>() {
            self.send(world, to, ToNode::Beat);
        }
    }

    pub(crate) fn tick(&mut self, world: &mut World, at: Time) {
        if self.armed == Some(at) {
            self.armed = None;
        }
        if self.engine.next_deadline().is_some_and(|deadline| self.born + deadline <= world.now) {
            self.step(world, Event::Tick);
        } else {
            self.arm(world);
        }
    }

    /// Asks for a tick at the next deadline, unless one comes earlier.
    fn arm(&mut self, world: &mut World) {
        let Some(deadline) = self.engine.next_deadline() else { return };
        let at = (self.born + deadline).max(world.now);
        if self.armed.is_none_or(|armed| armed > at) {
            self.armed = Some(at);
            world.at(at, What::Daemon(self.pid, DaemonIn::EngineTick(at)));
        }
    }

    fn send(&self, world: &mut World, to: Pid, message: ToNode) {
        world.tell_daemon(self.pid, to, DaemonIn::Ordered(self.pid, message));
    }

    fn send_all(&self, world: &mut World, message: &ToNode) {
        for to in self.streams.keys().copied().collect::<Vec<_>>() {
            self.send(world, to, message.clone());
        }
    }

    fn step(&mut self, world: &mut World, event: Event) {
        let now = world.now - self.born;
        let is_beat = matches!(event, Event::MessageReceived { .. });
        let mut commands = self.engine.step(event, now).commands;
        if !is_beat {
            commands.extend(self.engine.step(Event::Drained, now).commands);
        }
        for command in commands {
            self.carry_out(world, command);
        }
        self.arm(world);
    }

    fn of(&self, connection: ConnectionId) -> Option<Pid> {
        self.streams.iter().find(|(_, one)| **one == connection).map(|(pid, _)| *pid)
    }

    fn carry_out(&mut self, world: &mut World, command: Command) {
        match command {
            Command::Welcome { connection, node, world: formed } => {
                if let Some(to) = self.of(connection) {
                    self.send(world, to, ToNode::Welcome(node, formed));
                }
            }
            Command::Refuse { connection, text, .. } => {
                if let Some(to) = self.of(connection) {
                    self.send(world, to, ToNode::Refused(text));
                    self.streams.remove(&to);
                }
            }
            Command::Execute(execute) => {
                for operation in &execute.operations {
                    let number = operation.sequence.0;
                    world.check.ordered(self.epoch, self.last_sequence, number);
                    self.last_sequence = Some(number);
                }
                self.send_all(world, &ToNode::Execute(Box::new(execute)));
            }
            Command::Abort(failure) => {
                world.check.common_cause(self.epoch, &failure);
                self.send_all(world, &ToNode::Abort(failure));
            }
            Command::Shutdown => self.send_all(world, &ToNode::Shutdown),
            Command::Report { .. } | Command::Stalled { .. } | Command::Finish(_) => {}
        }
    }
}
