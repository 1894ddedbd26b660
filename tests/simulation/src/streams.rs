//! The stream of a daemon to its coordinator, with the real count of messages and the real record
//! of those that may not have arrived ([`Sent`], [`Received`]). With these, another stream
//! continues after a break.

use std::mem::take;

use gradwire_proto::{
    Failure, FailureKind, PROTOCOL, VERSION,
    beat::{LastReceived, Limits},
    numbered::{Received, Sent},
    pb,
};

use crate::{
    agents::address,
    coordinator::{FromNode, ToNode},
    daemon::{BEAT, Daemon, DaemonIn},
    lines::RETURN,
    plants::Plant,
    world::{Pid, Time, What, World, ms},
};

const SILENCE: Time = Time::from_secs(3);

/// How long the coordinator may take to continue on a stream.
const ANSWER: Time = Time::from_secs(1);

/// The end of a stream, and of those that follow it, at a daemon.
#[derive(Debug)]
pub(crate) struct Uplink {
    /// The host of the coordinator, and its process once it is connected.
    host: usize,
    coordinator: Option<Pid>,
    stream: Option<u64>,
    /// Whether numbered messages may be sent.
    is_open: bool,
    sent: Sent<FromNode>,
    received: Received,
    attempt: u32,
    last: LastReceived,
    began: Time,
    /// When the last stream broke that was of use, until a message arrives again.
    broke: Option<Time>,
    /// Whether the coordinator's process is known to have ended.
    has_ended: bool,
}

impl Uplink {
    /// A daemon that has not connected to the coordinator on a host.
    pub(crate) fn new(world: &World, host: usize, is_here: bool) -> Self {
        Self {
            host,
            coordinator: None,
            stream: None,
            is_open: false,
            sent: Sent::new(!is_here),
            received: Received::default(),
            attempt: 0,
            last: LastReceived::at(world.now),
            began: world.now,
            broke: None,
            has_ended: false,
        }
    }

    /// Ignores all silence up to now.
    pub(crate) fn restart(&mut self, now: Time) {
        self.last = LastReceived::at(now);
    }
}

impl Daemon {
    fn coordinator_lost(&mut self, world: &mut World, what: &str) {
        self.fails(world, Failure::new(FailureKind::CoordinatorLost, what));
    }

    /// The process of the coordinator at its address.
    fn found(&self, world: &World) -> Option<Pid> {
        world.hosts[self.up.host].grpc.filter(|pid| world.is_alive(*pid))
    }

    pub(crate) fn dial_coordinator(&mut self, world: &mut World) {
        if self.up.stream.is_some() || self.up.attempt > 0 {
            return;
        }
        match self.found(world) {
            Some(there) => {
                self.up.last = LastReceived::at(world.now);
                self.joins(world, there);
                self.up.is_open = true;
                self.flush(world);
            }
            None if world.now > self.up.began + ms(10_000) => {
                self.coordinator_lost(world, "the coordinator does not answer");
            }
            None => world.after(ms(100), What::Daemon(self.pid, DaemonIn::Dial)),
        }
    }

    /// Opens a stream and joins on it.
    fn joins(&mut self, world: &mut World, there: Pid) {
        if there != self.pid {
            world.connect(self.pid, there);
        }
        let stream = world.open_stream(self.pid, there);
        (self.up.stream, self.up.coordinator) = (Some(stream), Some(there));
        let mut received = self.up.received.tell();
        if world.has(Plant::ReplayedMessage) {
            received = received.saturating_sub(1);
        }
        let join = pb::Join {
            protocol: PROTOCOL,
            version: VERSION.into(),
            job: world.job.to_string(),
            host: world.hosts[self.host].name.clone(),
            data_address: format!("{}:5000", address(self.host)),
            slots: u32::try_from(self.workers.len()).expect("few slots"),
            order: self.order,
            epoch: self.epoch,
            attempt: self.up.attempt,
            received,
            ..pb::Join::default()
        };
        let (from, message) = (self.pid, FromNode::Join(Box::new(join)));
        world.tell_daemon(from, there, DaemonIn::Node { stream, from, message });
    }

    pub(crate) fn tell_coordinator(&mut self, world: &mut World, message: FromNode) {
        self.up.sent.push(message, 1);
        self.flush(world);
    }

    fn flush(&mut self, world: &mut World) {
        let (Some(stream), Some(to), true) = (self.up.stream, self.up.coordinator, self.up.is_open)
        else {
            return;
        };
        while let Some(message) = self.up.sent.next_to_send() {
            let from = self.pid;
            world.tell_daemon(from, to, DaemonIn::Node { stream, from, message });
        }
    }

    /// Tells the coordinator how many of its messages have arrived.
    pub(crate) fn tell_count(&mut self, world: &mut World) {
        let count = self.up.received.tell();
        self.tell_coordinator(world, FromNode::Beat(count));
    }

    /// Opens another stream if this one is silent. Gives up if none has continued in time.
    pub(crate) fn check_stream(&mut self, world: &mut World) {
        if self.up.is_open && self.up.last.silence(&Limits::new(BEAT, SILENCE), world.now).is_some()
        {
            if self.coordinator.is_some() {
                return self.coordinator_lost(world, "the coordinator is silent");
            }
            let since = self.up.last.last();
            self.stream_lost(world, since);
        } else if self.up.broke.is_some_and(|broke| world.now > broke + RETURN) {
            self.coordinator_lost(world, "the stream to the coordinator is lost");
        }
    }

    /// A stream has broken.
    pub(crate) fn stream_broke(&mut self, world: &mut World, stream: u64) {
        if self.up.stream == Some(stream) {
            self.stream_lost(world, world.now);
        }
    }

    /// The process at the other end has ended.
    pub(crate) fn coordinator_closed(&mut self, world: &mut World, pid: Pid) {
        if self.up.coordinator == Some(pid) && self.up.stream.is_some() {
            self.stream_lost(world, world.now);
        }
    }

    /// The launcher says that the process of the coordinator has ended.
    pub(crate) fn coordinator_ended(&mut self, world: &mut World) {
        self.up.has_ended = true;
        if self.up.stream.is_none() || !self.up.is_open {
            self.coordinator_lost(world, "the process of the coordinator has ended");
        }
    }

    /// The stream is of no use since a time, so another one follows.
    fn stream_lost(&mut self, world: &mut World, since: Time) {
        if let (Some(stream), Some(to)) = (take(&mut self.up.stream), self.up.coordinator) {
            world.close_stream(stream, self.pid, to);
        }
        self.up.is_open = false;
        self.up.broke.get_or_insert(since);
        self.up.attempt += 1;
        if self.up.has_ended {
            return self.coordinator_lost(world, "the process of the coordinator has ended");
        }
        let (attempt, delay) = (self.up.attempt, world.dice.time(0, 60));
        world.after(delay, What::Daemon(self.pid, DaemonIn::Return(attempt)));
    }

    /// It is time to open another stream, or the coordinator has not continued on it.
    pub(crate) fn returns(&mut self, world: &mut World, attempt: u32) {
        if attempt != self.up.attempt || self.up.is_open {
            return;
        }
        if self.up.stream.is_some() {
            return self.stream_lost(world, world.now);
        }
        let again = match self.found(world) {
            Some(there) => {
                self.joins(world, there);
                ANSWER
            }
            None => ms(50),
        };
        world.after(again, What::Daemon(self.pid, DaemonIn::Return(attempt)));
    }

    /// A message of the coordinator has arrived.
    pub(crate) fn hears(&mut self, world: &mut World, stream: u64, message: ToNode) {
        if self.up.stream != Some(stream) {
            return;
        }
        self.up.last = LastReceived::at(world.now);
        match message {
            ToNode::Resumed(received) => {
                if let Err(impossible) = self.up.sent.resume(received) {
                    let failure = Failure::new(FailureKind::Protocol, impossible.to_string());
                    return self.fails(world, failure);
                }
                world.note(|| format!("daemon {} continues on stream {stream}", self.pid));
                self.up.is_open = true;
                self.flush(world);
            }
            // It had joined, so the coordinator that it knew is gone.
            ToNode::Refused(why) if self.up.attempt > 0 => self.coordinator_lost(world, &why),
            ToNode::Refused(why) => self.fails(world, Failure::new(FailureKind::Invalid, why)),
            message => {
                self.up.broke = None;
                if self.up.received.note() {
                    self.tell_count(world);
                }
                if let ToNode::Beat(received) = message
                    && let Err(error) = self.up.sent.confirm(received)
                    && error.received > error.confirmed
                {
                    let failure = Failure::new(FailureKind::Protocol, error.to_string());
                    return self.fails(world, failure);
                }
                self.ordered(world, message);
            }
        }
    }
}
