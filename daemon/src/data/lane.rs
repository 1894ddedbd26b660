//! A lane: one data thread with its own connections to each peer.
//!
//! It blocks only in `poll`, and only when no piece can make progress. It receives orders through
//! its inbox, and sends events to [`LaneEvents`].

use std::{
    io,
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use gradwire_kernels::Store;
use gradwire_proto::{Failure, FailureKind, NodeId, Sequence, beat::Suspension};
use gradwire_trace::Track;
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;

use super::{
    arrivals::LinkError,
    in_memory,
    lateness::{Activity, Lateness, NOTICES_PER_LIMIT, Wait},
    link::{Broken, Desk, Ended, Link, LinkConfig, Returned},
    meter::{Doing, Meter},
    order::{Connected, Disconnected, LaneConfig, LaneEvents, Order},
    piece::Piece,
    running::{Ordered, Pieces, Running},
    unconfirmed::Unconfirmed,
};
use crate::{
    metrics::{self, Share},
    transport::{
        frame::Totals,
        handshake::MAX_STREAMS,
        paths::DataSocket,
        stream::{StreamError, Turn},
    },
};

/// The other threads' end of a lane. Dropping it does not end the lane; [`Order::Stop`] does.
#[derive(Debug)]
pub(crate) struct Lane {
    inbox: Sender<Order>,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Lane {
    pub(crate) fn start(config: LaneConfig, events: Arc<dyn LaneEvents>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        let (inbox, orders) = channel();
        let name = format!("gw-lane-{}", config.index);
        let runner = Runner {
            links: config.hosts.iter().map(|_| None).collect(),
            unconfirmed: Unconfirmed::new(config.hosts.len(), config.recovery.is_some()),
            meter: Meter::new(config.index, config.tracer.recorder(Track::Lane(config.index))),
            in_flight: Share::of_pieces(),
            memory: Share::of_memory("staging"),
            config,
            poll,
            orders,
            pieces: Pieces::new(),
            ordered: Ordered::default(),
            spare: Vec::new(),
            next_check: Instant::now(),
            next_look: Instant::now(),
            suspension: Suspension::new(Instant::now()),
            events,
        };
        let thread = std::thread::Builder::new().name(name).spawn(move || runner.run())?;
        Ok(Self { inbox, waker, thread: Mutex::new(Some(thread)) })
    }

    /// Gives the lane an order. A lane that has ended drops it, and has reported why it ended.
    pub(crate) fn send(&self, order: Order) {
        if self.inbox.send(order).is_ok() {
            // A failed wake-up (if the kernel has no memory) costs at most the lane's timeout in
            // `poll`.
            let _ = self.waker.wake();
        }
    }

    /// Orders the thread to stop. Returns true once it has stopped and accesses no memory any more.
    /// Until then call it again.
    pub(crate) fn try_stop(&self) -> bool {
        self.send(Order::Stop);
        let mut thread = self.thread.lock();
        if thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return false;
        }
        if thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a data thread panicked while it reported a failure");
        }
        true
    }
}

/// How often to check whether the systems of peers answer.
const LOOK: Duration = Duration::from_secs(1);

const WAKE: Token = Token(usize::MAX);
/// While bytes move, the sockets are polled only once in this many turns. Polling is a system call,
/// and sockets that were ready usually still are.
const POLL_EVERY: u32 = 4;
const IDLE_CHECK: Duration = Duration::from_millis(250);

/// The delay of a check after a limit, so that the limit has certainly passed.
const TICK: Duration = Duration::from_millis(1);

/// How much longer the acceptor waits for a broken connection than the dialler, which may notice
/// the break later and knows why the connection can't be made again.
const SPARE: Duration = Duration::from_millis(1500);

const MAX_NAMES: usize = 3;

fn token(peer: NodeId, number: u32) -> Token {
    debug_assert!(number < MAX_STREAMS);
    Token(peer.0 as usize * MAX_STREAMS as usize + number as usize)
}

fn place(token: Token) -> (usize, u32) {
    (token.0 / MAX_STREAMS as usize, (token.0 % MAX_STREAMS as usize) as u32)
}

struct Runner {
    config: LaneConfig,
    poll: Poll,
    orders: Receiver<Order>,
    links: Vec<Option<Link>>,
    unconfirmed: Unconfirmed,
    pieces: Pieces,
    ordered: Ordered,
    /// Staging buffers for reuse: the steady state allocates nothing and faults no page.
    spare: Vec<Vec<u8>>,
    /// The shares of the pieces and of these buffers in the metrics.
    in_flight: Share,
    memory: Share,
    meter: Meter,
    /// When to check next whether a piece is late, and to send notices to peers.
    next_check: Instant,
    /// When to check next whether the systems of peers answer.
    next_look: Instant,
    suspension: Suspension,
    events: Arc<dyn LaneEvents>,
}

impl Runner {
    fn run(mut self) {
        let events = self.events.clone();
        // After a panic only the inbox is used.
        let served = catch_unwind(AssertUnwindSafe(|| self.serve()));
        let result = served.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            let what = format!("a data thread of gradwired has panicked: {}", text.unwrap_or("…"));
            let failure = Failure::new(FailureKind::Internal, what);
            Err(failure
                .host(self.host(self.config.me))
                .hint("its log says where; please report it"))
        });
        if let Err(failure) = result {
            events.failed(failure);
            // The job is about to end: just wait for the order to stop.
            while !matches!(self.orders.recv(), Ok(Order::Stop) | Err(_)) {}
        }
    }

    fn host(&self, node: NodeId) -> &str {
        &self.config.hosts[node.0 as usize]
    }

    fn serve(&mut self) -> Result<(), Failure> {
        let mut ready = Events::with_capacity(256);
        let mut turns: u32 = 0;
        loop {
            while let Ok(order) = self.orders.try_recv() {
                match order {
                    Order::Start(piece) => self.start(piece),
                    Order::Measure { sequence, pattern } => {
                        self.ordered.start(sequence);
                        self.events.measured(sequence, in_memory::measure(pattern));
                        self.meter.spent(Doing::Reduce);
                    }
                    // `finish_complete` finds the pieces.
                    Order::Allocated => {}
                    Order::Connected(connected) => self.connect(connected)?,
                    Order::Moved(node, addresses) => self.moved(node, &addresses),
                    #[cfg(test)]
                    Order::Panic => panic!("it was asked to"),
                    Order::Stop => return Ok(()),
                }
            }
            let moved = self.turn()?;
            turns = if moved { turns.wrapping_add(1) } else { 0 };
            if moved && !turns.is_multiple_of(POLL_EVERY) {
                continue;
            }
            let next_check = self.next_check.saturating_duration_since(Instant::now());
            let timeout = if moved { Duration::ZERO } else { IDLE_CHECK.min(next_check) };
            match self.poll.poll(&mut ready, Some(timeout)) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let what = format!("a data thread can't wait for its sockets: {error}");
                    return Err(Failure::new(FailureKind::Internal, what));
                }
            }
            for event in &ready {
                if event.token() == WAKE {
                    continue;
                }
                let (index, number) = place(event.token());
                if let Some(stream) = self.links[index].as_mut().and_then(|l| l.stream(number)) {
                    stream.notice(event);
                }
            }
            self.check_lateness()?;
        }
    }

    /// Moves everything that can move by one chunk. Returns false when nothing could.
    fn turn(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        let Self { config, pieces, meter, unconfirmed, .. } = self;
        for piece in pieces.values_mut() {
            if piece.reduce_some(config.chunk, &config.pool, meter, unconfirmed) {
                moved = true;
                break;
            }
        }
        // Each node begins with the node after it. If all began with the first node, the queue of
        // its line would overflow, and then that of the second node.
        let (me, nodes) = (self.config.me.index(), self.links.len());
        for index in (1..nodes).map(|after| (me + after) % nodes) {
            let Some(link) = &mut self.links[index] else { continue };
            let Self { pieces, ordered, meter, unconfirmed, .. } = self;
            let mut desk = Desk { pieces, ordered, meter, unconfirmed };
            let sent = link.send(&mut desk);
            match link.receive(&mut desk) {
                Ok(received) => moved |= sent == Turn::Moved || received == Turn::Moved,
                Err(broken) => {
                    self.lost(index, &broken)?;
                    moved = true;
                }
            }
        }
        for running in self.pieces.values_mut().filter(|_| moved) {
            if running.begins() {
                self.events.begun(&running.piece);
            }
        }
        moved |= self.finish_complete();
        Ok(moved)
    }

    fn start(&mut self, piece: Piece) {
        let sequence = piece.sequence;
        self.ordered.start(sequence);
        self.meter.starts(sequence, piece.ordered);
        if piece.nodes.len() <= 1 {
            self.events.begun(&piece);
            let store = self.store(&piece);
            let (read, written) = piece.touched();
            let LaneConfig { pool, chunk, .. } = &self.config;
            let part = |part| piece.run_alone(part, store);
            pool.run(piece.end(), read + written, *chunk, &part);
            self.meter.spent_on(Doing::Reduce, sequence, piece.bytes, None);
            self.events.finished(&piece, None);
            return;
        }
        let staging = self.spare.pop().unwrap_or_default();
        let before = staging.capacity();
        let running = Running::new(piece, staging);
        self.memory.add(running.staging_bytes() - before);
        self.in_flight.add(1);
        for (step, peer) in running.piece.plan.senders() {
            let node = running.piece.nodes[peer as usize];
            Self::link(&mut self.links, &self.config, node).enqueue(sequence, step);
        }
        self.pieces.insert(sequence, running);
    }

    fn store(&self, piece: &Piece) -> Store {
        let whole = piece.tensors.iter().map(|(tensor, _)| tensor.bytes()).max().unwrap_or(0);
        if whole >= self.config.streaming_bytes { Store::Streaming } else { Store::Cached }
    }

    fn link<'a>(links: &'a mut [Option<Link>], config: &LaneConfig, peer: NodeId) -> &'a mut Link {
        let nodes = config.hosts.len() as u32;
        let LaneConfig { epoch, chunk, recovery, .. } = *config;
        let link_config = LinkConfig { epoch, chunk, nodes, recovery };
        links[peer.0 as usize].get_or_insert_with(|| Link::new(peer, link_config))
    }

    fn connect(&mut self, connected: Connected) -> Result<(), Failure> {
        let Connected { peer, number, stream, window, attempt, theirs } = connected;
        let stream = self.watch(peer, number, stream)?;
        let link = Self::link(&mut self.links, &self.config, peer);
        let taken = link.connect(number, attempt, (stream, window), theirs, &mut self.unconfirmed);
        match taken {
            Ok(true) => self.tell_returned(peer),
            Ok(false) => {
                let peer = self.host(peer);
                tracing::debug!(peer, attempt, "a data connection came after a later one");
            }
            Err(error) => return Err(self.link_failed(peer, &error)),
        }
        Ok(())
    }

    /// Breaks the connections from and to earlier addresses of a node.
    fn moved(&mut self, node: NodeId, addresses: &[IpAddr]) {
        for link in self.links.iter_mut().flatten() {
            if node == self.config.me {
                link.keep(|socket| {
                    socket.local_addr().is_ok_and(|at| addresses.contains(&at.ip()))
                });
            } else if node == link.peer() {
                link.keep(|socket| socket.peer_addr().is_ok_and(|at| addresses.contains(&at.ip())));
            }
        }
    }

    /// Reports connections that have replaced broken ones.
    fn tell_returned(&mut self, peer: NodeId) {
        let Some(link) = &mut self.links[peer.index()] else { return };
        for Returned { number, cause, after } in link.take_returned() {
            metrics::recovered_connection();
            let (peer, lane) = (self.host(peer), self.config.index);
            tracing::warn!(peer, lane, number, ?after, cause, "a data connection was made again");
        }
    }

    fn watch(
        &self,
        peer: NodeId,
        number: u32,
        stream: std::net::TcpStream,
    ) -> Result<Arc<DataSocket>, Failure> {
        let mut stream = mio::net::TcpStream::from_std(stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.poll.registry().register(&mut stream, token(peer, number), interest);
        registered.map_err(|error| {
            let what = format!("a data thread can't watch a connection: {error}");
            Failure::new(FailureKind::Resource, what)
        })?;
        Ok(self.config.paths.watch(peer, stream))
    }

    fn finish_complete(&mut self) -> bool {
        let complete: Vec<Sequence> = self
            .pieces
            .iter()
            .filter(|(_, piece)| piece.progress.is_complete() && piece.piece.is_allocated())
            .map(|(sequence, _)| *sequence)
            .collect();
        for sequence in &complete {
            let Some(running) = self.pieces.remove(sequence) else { continue };
            self.in_flight.remove(1);
            let since = self.meter.spent(Doing::Idle);
            running.keep_before_end(&mut self.unconfirmed);
            running.publish(self.store(&running.piece), &self.config.pool, self.config.chunk);
            let (piece, staging) = running.into_parts();
            self.spare.push(staging);
            if piece.is_probe() {
                self.events.measured(piece.sequence, piece.ordered.elapsed());
            } else {
                self.events.finished(&piece, Some(since));
            }
            self.meter.spent_on(Doing::Publish, piece.sequence, piece.bytes, None);
        }
        if !complete.is_empty() {
            self.count_moved();
        }
        !complete.is_empty()
    }

    fn count_moved(&mut self) {
        for link in self.links.iter_mut().flatten() {
            let Totals { written, read } = link.take_moved(&self.unconfirmed);
            self.events.moved(link.peer(), written, read);
        }
    }

    fn names(&self, of: impl Fn(&Running) -> bool) -> String {
        let names: Vec<String> = self
            .pieces
            .values()
            .filter(|p| of(p) && !p.piece.is_probe())
            .take(MAX_NAMES)
            .map(|p| p.piece.names())
            .collect();
        names.join(", ")
    }

    /// Whether an operation needs this peer. Probes don't count: nobody waits for them.
    fn concerns(&self, peer: NodeId) -> bool {
        let is_there = |piece: &Piece| !piece.is_probe() && piece.nodes.contains(&peer);
        self.pieces.values().any(|running| is_there(&running.piece))
    }

    /// A connection was lost. Another one may replace it: the acceptor compares the counts of both
    /// ends. If no piece needs the connection, the peer is assumed to have closed it regularly.
    fn lost(&mut self, index: usize, broken: &Broken) -> Result<(), Failure> {
        let Broken { number, error } = broken;
        let (peer, lane, number) = (NodeId(index as u32), self.config.index, *number);
        let is_needed = self.concerns(peer);
        let is_closed = matches!(error, LinkError::Stream(StreamError::Closed));
        let Some(link) = &mut self.links[index] else { return Ok(()) };
        if !error.is_end() {
            return Err(self.link_failed(peer, error));
        }
        let ended = link.disconnect(broken, Instant::now(), &mut self.unconfirmed);
        let Ended { totals, is_between, is_replaced } =
            ended.map_err(|error| self.link_failed(peer, &error))?;
        if is_replaced {
            self.tell_returned(peer);
            return Ok(());
        }
        let is_closed = if self.config.recovery.is_some() {
            is_closed && !is_needed
        } else if is_closed && is_needed || !is_between && !is_closed {
            return Err(self.link_failed(peer, error));
        } else if !is_between {
            return Ok(());
        } else {
            is_closed
        };
        tracing::debug!(peer = self.host(peer), lane, number, %error, "a data connection ended");
        let ended = Disconnected { peer, lane, number, totals, is_closed, is_needed };
        self.events.disconnected(ended);
        Ok(())
    }

    fn link_failed(&self, peer: NodeId, error: &LinkError) -> Failure {
        let kind = match error {
            LinkError::Lost { .. } | LinkError::NotReturned { .. } => FailureKind::ConnectionLost,
            error if error.is_end() => FailureKind::ConnectionLost,
            _ => FailureKind::Protocol,
        };
        let what = format!("the data connection with this host failed: {error}");
        let names = self.names(|running| running.piece.nodes.contains(&peer));
        Failure::new(kind, what).host(self.host(peer)).tensor(names)
    }

    /// Checks whether a piece is late (WAIT), and notifies peers of the pieces that wait here: a
    /// few times within the limit, and when a limit ends.
    fn check_lateness(&mut self) -> Result<(), Failure> {
        let now = self.meter.spent(Doing::Idle);
        self.check_answers(now);
        if now < self.next_check {
            return Ok(());
        }
        let limit = self.config.limit;
        self.next_check = now + limit / NOTICES_PER_LIMIT;
        self.count_moved();
        let was_suspended = self.suspension.check(now, limit).is_some();
        self.check_missing(now, was_suspended)?;
        for link in self.links.iter_mut().flatten() {
            link.look(now, was_suspended, &mut self.unconfirmed);
        }
        if was_suspended {
            self.pieces.values_mut().for_each(|running| running.mark_progress(now));
        }
        let me = self.config.me;
        let mut notices: Vec<Option<Lateness>> = self.links.iter().map(|_| None).collect();
        // A complete piece waits for a rank of this node, which has its own deadline. The
        // coordinator waits for a probe for a limited time.
        let unfinished =
            |running: &&Running| !running.progress.is_complete() && !running.piece.is_probe();
        for running in self.pieces.values().filter(unfinished) {
            let waits = self.waits(running);
            let lateness = Lateness::of(me, running.last_progress, &waits, limit, now);
            if lateness.is_late(limit, now) {
                return Err(self.late(&lateness, &waits));
            }
            self.next_check = self.next_check.min(lateness.since + limit + TICK);
            for &peer in &running.piece.plan.peers {
                let peer = running.piece.nodes[peer as usize];
                let moved = running.last_progress;
                let lateness = Lateness::as_reported_to(peer, me, moved, &waits, limit, now);
                let notice = &mut notices[peer.0 as usize];
                // A notice reports the latest progress of any piece with this peer.
                if notice.is_none_or(|notice| notice.since < lateness.since) {
                    *notice = Some(lateness);
                }
            }
        }
        for link in self.links.iter_mut().flatten() {
            let peer = link.peer();
            if let Some(lateness) = notices[peer.0 as usize] {
                link.give_notice(lateness.notice(now), &mut self.unconfirmed);
            }
        }
        Ok(())
    }

    /// Gives up connections that a piece needs and on which the peer's system does not answer,
    /// before the piece is late. They are made again if that is possible.
    fn check_answers(&mut self, now: Instant) {
        let Some(recovery) = self.config.recovery else { return };
        if now < self.next_look {
            return;
        }
        let limit = recovery.min(self.config.limit) / 2;
        self.next_look = now + LOOK.min(limit / 2);
        for index in 0..self.links.len() {
            let is_needed = self.concerns(NodeId(index as u32));
            if let Some(link) = self.links[index].as_mut().filter(|_| is_needed) {
                link.check_answers(limit);
            }
        }
    }

    /// Checks whether connections that broke have been missing for too long.
    fn check_missing(&mut self, now: Instant, was_suspended: bool) -> Result<(), Failure> {
        for peer in (0..self.links.len() as u32).map(NodeId) {
            let is_needed = !was_suspended && self.concerns(peer);
            let Some(link) = &mut self.links[peer.index()] else { continue };
            let checked = link.check_missing(now, SPARE, is_needed);
            checked.map_err(|error| self.link_failed(peer, &error))?;
        }
        Ok(())
    }

    fn waits(&self, running: &Running) -> Vec<Wait> {
        let wait = |peer: NodeId| {
            let link = self.links[peer.0 as usize].as_ref();
            let activity = link.map_or(Activity::new(running.last_progress), Link::activity);
            Wait { peer, activity }
        };
        running.waits_for(self.config.chunk).into_iter().map(wait).collect()
    }

    /// The failure of a late piece, which names the root of the wait (WAIT).
    fn late(&self, lateness: &Lateness, waits: &[Wait]) -> Failure {
        let root = self.host(lateness.root);
        let is_direct = waits.iter().any(|wait| wait.peer == lateness.root);
        let link = self.links[lateness.root.0 as usize].as_ref();
        let why = if !is_direct {
            let hosts: Vec<&str> = waits.iter().map(|wait| self.host(wait.peer)).collect();
            format!("{} waits for {root}", hosts.join(", "))
        } else if link.is_none_or(|link| !link.is_connected()) {
            format!("no connection with {root}")
        } else {
            format!("nothing gets through between {root} and {}", self.host(self.config.me))
        };
        let what = format!("no data has moved for {} ms: {why}", self.config.limit.as_millis());
        let names = self.names(|running| running.last_progress <= lateness.since);
        Failure::new(FailureKind::ConnectionLost, what)
            .host(root)
            .tensor(names)
            .hint("check that host and the network in between; job.timeout_ms sets the limit")
    }
}
