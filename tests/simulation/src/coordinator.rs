//! The coordinator of an epoch: the real [`Engine`], and the streams of its nodes.

use std::{collections::BTreeMap, sync::Arc};

use gradwire_collectives::Rules;
use gradwire_coordinator::{
    engine::Engine,
    model::{
        Command, ConnectionId, EngineConfig, Event,
        command::{Execute, World as Formed},
        event::{Announcement, Noticed},
    },
};
use gradwire_proto::{
    Epoch, Failure, NodeId, Rank, Sequence, TensorId,
    numbered::{ImpossibleCount, Received, Sent},
    pb,
};
use gradwire_settings::Settings;

use crate::{
    daemon::DaemonIn,
    plants::Plant,
    world::{Pid, Time, What, World},
};

/// From a node to the coordinator.
#[derive(Debug, Clone)]
pub(crate) enum FromNode {
    Join(Box<pb::Join>),
    Ready(Announcement),
    Done(u64),
    Failed(Failure),
    Left(Rank, bool),
    Forgotten(Vec<TensorId>),
    /// With how many messages have arrived.
    Beat(u64),
}

/// From the coordinator to a node.
#[derive(Debug, Clone)]
pub(crate) enum ToNode {
    Welcome(NodeId, Arc<Formed>),
    /// It continues, after how many messages of the node.
    Resumed(u64),
    Refused(String),
    Execute(Box<Execute>),
    Abort(Failure),
    Shutdown,
    /// With how many messages have arrived.
    Beat(u64),
}

/// The end of a stream at the coordinator.
#[derive(Debug)]
struct Session {
    node: Pid,
    sent: Sent<ToNode>,
    received: Received,
    is_away: bool,
}

#[derive(Debug)]
pub(crate) struct Coordinator {
    pid: Pid,
    epoch: u64,
    engine: Engine,
    born: Time,
    /// The streams of the nodes, by their numbers.
    sessions: BTreeMap<u64, Session>,
    /// Whether all nodes have been sent their last message.
    is_over: bool,
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
        let (born, sessions) = (world.now, BTreeMap::new());
        let (last_sequence, armed, is_over) = (None, None, false);
        Self { pid, epoch, engine, born, sessions, is_over, last_sequence, armed }
    }

    pub(crate) fn received(
        &mut self,
        world: &mut World,
        stream: u64,
        node: Pid,
        message: FromNode,
    ) {
        let connection = ConnectionId(stream);
        if let FromNode::Join(join) = message {
            let (sent, received) = (Sent::new(node != self.pid), Received::default());
            self.sessions.insert(stream, Session { node, sent, received, is_away: false });
            self.step(world, Event::Joined { connection, join: *join, proven: true });
            return;
        }
        let Some(session) = self.sessions.get_mut(&stream) else { return };
        if session.received.note() && session.sent.remembers() {
            self.beat_to(world, stream);
        }
        let event = match message {
            FromNode::Beat(received) => {
                self.step(world, Event::MessageReceived { connection });
                return self.confirm(world, stream, received);
            }
            FromNode::Join(_) => return,
            FromNode::Ready(one) => Event::Ready { connection, announcements: vec![one] },
            FromNode::Done(number) => Event::Done { connection, sequences: vec![Sequence(number)] },
            FromNode::Failed(failure) => {
                Event::Failed { connection, failure, noticed: Noticed::UNKNOWN }
            }
            FromNode::Left(rank, absent) => Event::Left { connection, ranks: vec![rank], absent },
            FromNode::Forgotten(ids) => Event::Forgotten { connection, ids },
        };
        self.step(world, event);
    }

    /// A node has received this many messages.
    fn confirm(&mut self, world: &mut World, stream: u64, received: u64) {
        let Some(session) = self.sessions.get_mut(&stream) else { return };
        if session.sent.remembers()
            && let Err(error) = session.sent.confirm(received)
            && error.received > error.confirmed
        {
            self.nonsense(world, stream, error);
        }
    }

    fn nonsense(&mut self, world: &mut World, stream: u64, error: ImpossibleCount) {
        let (connection, what) = (ConnectionId(stream), error.to_string());
        self.step(world, Event::Nonsense { connection, what });
    }

    /// Whether a node has not received its last message.
    pub(crate) fn is_owed(&self) -> bool {
        let is_owed = |one: &Session| one.sent.remembers() && one.sent.kept() > 0;
        self.is_over && self.sessions.values().any(is_owed)
    }

    fn loses(&mut self, world: &mut World, stream: u64, why: String, may_return: bool) {
        let connection = ConnectionId(stream);
        self.sessions.get_mut(&stream).into_iter().for_each(|session| session.is_away = true);
        self.step(world, Event::Lost { connection, why, may_return });
        if !may_return || !self.engine.awaits(connection) {
            self.sessions.remove(&stream);
        }
    }

    /// A stream has broken.
    pub(crate) fn broke(&mut self, world: &mut World, stream: u64) {
        if self.sessions.contains_key(&stream) {
            self.loses(world, stream, "its stream broke".to_owned(), true);
        }
    }

    /// The process of a node has closed its streams.
    pub(crate) fn closed(&mut self, world: &mut World, pid: Pid) {
        let own = self.sessions.iter().filter(|(_, session)| session.node == pid);
        for stream in own.map(|(stream, _)| *stream).collect::<Vec<_>>() {
            self.broke(world, stream);
        }
    }

    /// The launcher says that the process of a node has ended.
    pub(crate) fn node_ended(&mut self, world: &mut World, node: NodeId, why: String) {
        if let Some(connection) = self.engine.connection(node) {
            self.loses(world, connection.0, why, false);
        }
    }

    /// Continues with a node that has `received` N messages.
    fn resume(&mut self, world: &mut World, stream: u64, earlier: Option<u64>, received: u64) {
        let earlier = earlier.and_then(|earlier| self.sessions.remove(&earlier));
        let Some(session) = self.sessions.get_mut(&stream) else { return };
        let (again, node) = (earlier.is_some(), session.node);
        if let Some(earlier) = earlier {
            (session.sent, session.received) = (earlier.sent, earlier.received);
        }
        let message = ToNode::Resumed(session.received.count());
        world.tell_daemon(self.pid, node, DaemonIn::Ordered { stream, message });
        let resumed = match again {
            true => session.sent.resume(received).map(drop),
            false => session.sent.confirm(received),
        };
        if world.has(Plant::DroppedMessage) {
            while session.sent.next_to_send().is_some() {}
        }
        match resumed {
            Ok(()) => self.flush(world, stream),
            Err(error) => self.nonsense(world, stream, error),
        }
    }

    pub(crate) fn suspended(&mut self, world: &mut World, time: Time) {
        self.step(world, Event::Suspended { time });
    }

    pub(crate) fn beat(&mut self, world: &mut World) {
        for stream in self.streams() {
            self.beat_to(world, stream);
        }
    }

    fn beat_to(&mut self, world: &mut World, stream: u64) {
        let count = self.sessions.get_mut(&stream).map_or(0, |session| session.received.tell());
        self.send(world, stream, ToNode::Beat(count));
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

    fn streams(&self) -> Vec<u64> {
        self.sessions.keys().copied().collect()
    }

    fn send(&mut self, world: &mut World, stream: u64, message: ToNode) {
        let Some(session) = self.sessions.get_mut(&stream) else { return };
        session.sent.push(message, 1);
        self.flush(world, stream);
    }

    fn flush(&mut self, world: &mut World, stream: u64) {
        let own = self.sessions.get_mut(&stream);
        let Some(session) = own.filter(|session| !session.is_away) else { return };
        while let Some(message) = session.sent.next_to_send() {
            world.tell_daemon(self.pid, session.node, DaemonIn::Ordered { stream, message });
        }
    }

    fn send_all(&mut self, world: &mut World, message: &ToNode) {
        for stream in self.streams() {
            self.send(world, stream, message.clone());
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

    fn carry_out(&mut self, world: &mut World, command: Command) {
        match command {
            Command::Welcome { connection, node, world: formed } => {
                self.send(world, connection.0, ToNode::Welcome(node, formed));
            }
            Command::Refuse { connection, text, .. } => {
                let stream = connection.0;
                if let Some(session) = self.sessions.remove(&stream) {
                    let message = ToNode::Refused(text);
                    let refused = DaemonIn::Ordered { stream, message };
                    world.tell_daemon(self.pid, session.node, refused);
                }
            }
            Command::Resume { connection, earlier, received } => {
                self.resume(world, connection.0, earlier.map(|one| one.0), received);
            }
            Command::Execute(execute) => {
                for operation in &execute.operations {
                    let number = operation.sequence.0;
                    world.check.ordered(self.epoch, self.last_sequence, number);
                    self.last_sequence = Some(number);
                }
                self.send_all(world, &ToNode::Execute(execute));
            }
            Command::Abort(failure) => {
                world.check.common_cause(self.epoch, &failure);
                self.is_over = true;
                self.send_all(world, &ToNode::Abort(failure));
            }
            Command::Shutdown => {
                self.is_over = true;
                self.send_all(world, &ToNode::Shutdown);
            }
            Command::Report { .. }
            | Command::Stalled { .. }
            | Command::Moved { .. }
            | Command::Finish(_) => {}
        }
    }
}
