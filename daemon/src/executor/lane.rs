//! A lane: one data thread with its own connections to each peer.
//!
//! It never blocks but in `poll`, and there only when no piece can go on. What it is told comes
//! through its inbox; what it finds out goes to the [`LaneEvents`].

use std::{
    io,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use gradwire_collectives::kernels::Store;
use gradwire_proto::{Failure, FailureKind, NodeId, Sequence};
use mio::{Events, Interest, Poll, Token, Waker};

use super::piece::{Piece, Running};
use crate::transport::{
    link::{Link, LinkConfig, LinkError, MOST_STREAMS, Ordered, Pieces, Turn},
    stream::Stream,
    window::Window,
};

/// What a lane tells the rest of the daemon.
pub(crate) trait LaneEvents: Send + Sync + 'static {
    /// The piece has been published on this node.
    fn finished(&self, piece: &Piece);
    /// The lane can't go on.
    fn failed(&self, failure: Failure);
    /// Bytes went to and came from a peer since the last call.
    fn moved(&self, peer: NodeId, sent: u64, received: u64);
}

/// What a lane is told.
#[derive(Debug)]
pub(crate) enum Order {
    Start(Piece),
    /// Ranks have made room for their results: pieces that waited for it can be published.
    RoomMade,
    /// A connection with a peer stands: which of those that this lane has with it, and its buffers,
    /// if they are to fit the path.
    Connected {
        peer: NodeId,
        number: u32,
        stream: std::net::TcpStream,
        window: Option<Window>,
    },
    /// Drop everything and end.
    Stop,
}

/// A lane's settings.
#[derive(Debug, Clone)]
pub(crate) struct LaneConfig {
    pub(crate) index: u32,
    /// Hosts of all nodes, for texts.
    pub(crate) hosts: Arc<[String]>,
    pub(crate) epoch: u32,
    /// Bytes that are reduced, sent and received at once.
    pub(crate) chunk: u64,
    /// How long a piece may stand still.
    pub(crate) patience: Duration,
    /// Results at least this large bypass the cache on their way to the ranks.
    pub(crate) streaming_bytes: u64,
}

/// The other threads' end of a lane. Dropping it does not end the lane; [`Order::Stop`] does.
#[derive(Debug)]
pub(crate) struct Lane {
    inbox: Sender<Order>,
    waker: Waker,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Lane {
    /// Starts the thread.
    pub(crate) fn start(config: LaneConfig, events: Arc<dyn LaneEvents>) -> io::Result<Self> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        let (inbox, orders) = channel();
        let name = format!("gw-lane-{}", config.index);
        let runner = Runner {
            links: config.hosts.iter().map(|_| None).collect(),
            config,
            poll,
            orders,
            pieces: Pieces::new(),
            ordered: Ordered::default(),
            spare: Vec::new(),
            events,
        };
        let thread = std::thread::Builder::new().name(name).spawn(move || runner.run())?;
        Ok(Self { inbox, waker, thread: Mutex::new(Some(thread)) })
    }

    /// Tells the lane something. A lane that has ended has said why; what it is told is dropped.
    pub(crate) fn tell(&self, order: Order) {
        if self.inbox.send(order).is_ok() {
            // A failed wake-up (no memory in the kernel) costs the lane its idle time-out at most.
            let _ = self.waker.wake();
        }
    }

    /// Stops the thread and waits for its end: after that it touches no memory any more.
    pub(crate) fn stop(&self) {
        self.tell(Order::Stop);
        let thread = self.thread.lock().expect("no panic while it is held").take();
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            tracing::error!("a data thread has panicked");
        }
    }
}

const WAKE: Token = Token(usize::MAX);
/// While bytes move, after so many turns it is looked whether other sockets have become ready: it is a
/// system call, and those that were ready mostly still are.
const LOOK_EVERY: u32 = 4;
const IDLE_CHECK: Duration = Duration::from_millis(250);

/// What the events of a connection are known by.
fn token(peer: NodeId, number: u32) -> Token {
    debug_assert!(number < MOST_STREAMS);
    Token(peer.0 as usize * MOST_STREAMS as usize + number as usize)
}

/// The peer and the number of the connection.
fn place(token: Token) -> (usize, u32) {
    (token.0 / MOST_STREAMS as usize, (token.0 % MOST_STREAMS as usize) as u32)
}

struct Runner {
    config: LaneConfig,
    poll: Poll,
    orders: Receiver<Order>,
    links: Vec<Option<Link>>,
    pieces: Pieces,
    ordered: Ordered,
    /// Staging buffers for reuse: the steady state allocates nothing and faults no page.
    spare: Vec<Vec<u8>>,
    events: Arc<dyn LaneEvents>,
}

impl Runner {
    fn run(mut self) {
        let events = self.events.clone();
        if let Err(failure) = self.serve() {
            events.failed(failure);
            // Until it is stopped nothing more is done: the job is about to end.
            while !matches!(self.orders.recv(), Ok(Order::Stop) | Err(_)) {}
        }
    }

    fn serve(&mut self) -> Result<(), Failure> {
        let mut ready = Events::with_capacity(256);
        let mut turns: u32 = 0;
        loop {
            while let Ok(order) = self.orders.try_recv() {
                match order {
                    Order::Start(piece) => self.start(piece),
                    // It is looked for with everything else that is complete.
                    Order::RoomMade => {}
                    Order::Connected { peer, number, stream, window } => {
                        let stream = self.watch(peer, number, stream)?;
                        let link = Self::link(&mut self.links, &self.config, peer);
                        link.connect(number, Stream::new(stream, window));
                    }
                    Order::Stop => return Ok(()),
                }
            }
            let moved = self.turn()?;
            turns = if moved { turns.wrapping_add(1) } else { 0 };
            if moved && !turns.is_multiple_of(LOOK_EVERY) {
                continue;
            }
            let timeout = if moved { Duration::ZERO } else { IDLE_CHECK };
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
            if !moved {
                self.check_patience()?;
            }
        }
    }

    /// Everything that can go on goes on by one chunk. False when nothing could.
    fn turn(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        for piece in self.pieces.values_mut() {
            if piece.reduce_some(self.config.chunk) {
                moved = true;
                break;
            }
        }
        for index in 0..self.links.len() {
            let Some(link) = &mut self.links[index] else { continue };
            let result = link
                .send(&mut self.pieces)
                .and_then(|sent| Ok((sent, link.receive(&mut self.pieces, &self.ordered)?)));
            match result {
                Ok((sent, received)) => moved |= sent == Turn::Moved || received == Turn::Moved,
                Err(error) => self.lost(index, &error)?,
            }
        }
        moved |= self.finish_complete();
        Ok(moved)
    }

    fn start(&mut self, piece: Piece) {
        let sequence = piece.sequence;
        self.ordered.start(sequence);
        if piece.nodes.len() <= 1 {
            let store = self.store(&piece);
            piece.run_alone(self.config.chunk, store);
            self.events.finished(&piece);
            return;
        }
        let staging = self.spare.pop().unwrap_or_default();
        let running = Running::new(piece, staging);
        for (step, peer) in running.piece.plan.senders() {
            let node = running.piece.nodes[peer as usize];
            Self::link(&mut self.links, &self.config, node).enqueue(sequence, step);
        }
        self.pieces.insert(sequence, running);
    }

    fn store(&self, piece: &Piece) -> Store {
        let whole = piece.segments.iter().map(|s| s.tensor.bytes()).max().unwrap_or(0);
        if whole >= self.config.streaming_bytes { Store::Streaming } else { Store::Cached }
    }

    fn link<'a>(links: &'a mut [Option<Link>], config: &LaneConfig, peer: NodeId) -> &'a mut Link {
        let link_config = LinkConfig { epoch: config.epoch, chunk: config.chunk };
        links[peer.0 as usize].get_or_insert_with(|| Link::new(peer, link_config))
    }

    fn watch(
        &self,
        peer: NodeId,
        number: u32,
        stream: std::net::TcpStream,
    ) -> Result<mio::net::TcpStream, Failure> {
        let mut stream = mio::net::TcpStream::from_std(stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        let registered = self.poll.registry().register(&mut stream, token(peer, number), interest);
        registered.map_err(|error| {
            let what = format!("a data thread can't watch a connection: {error}");
            Failure::new(FailureKind::Resource, what)
        })?;
        Ok(stream)
    }

    fn finish_complete(&mut self) -> bool {
        let complete: Vec<Sequence> = self
            .pieces
            .iter()
            .filter(|(_, piece)| piece.progress.is_complete() && piece.piece.has_room())
            .map(|(sequence, _)| *sequence)
            .collect();
        for sequence in &complete {
            let Some(running) = self.pieces.remove(sequence) else { continue };
            running.publish(self.store(&running.piece));
            let (piece, staging) = running.into_parts();
            self.spare.push(staging);
            self.events.finished(&piece);
        }
        if !complete.is_empty() {
            for link in self.links.iter_mut().flatten() {
                let (sent, received) = link.take_moved();
                self.events.moved(link.peer(), sent, received);
            }
        }
        !complete.is_empty()
    }

    fn names(&self, of: impl Fn(&Running) -> bool) -> String {
        let names: Vec<String> =
            self.pieces.values().filter(|p| of(p)).take(3).map(|p| p.piece.names()).collect();
        names.join(", ")
    }

    /// A connection is lost. While no piece needs it that is the orderly end of a peer.
    fn lost(&mut self, index: usize, error: &LinkError) -> Result<(), Failure> {
        let peer = NodeId(index as u32);
        let concerned = |p: &Running| p.piece.nodes.contains(&peer);
        let names = self.names(concerned);
        self.links[index] = None;
        if names.is_empty() && matches!(error, LinkError::Closed | LinkError::Io(_)) {
            tracing::debug!(peer = %self.config.hosts[index], %error, "data connection ended");
            return Ok(());
        }
        let kind = match error {
            LinkError::Closed | LinkError::Io(_) => FailureKind::ConnectionLost,
            _ => FailureKind::Protocol,
        };
        let what = format!("the data connection with this host failed: {error}");
        Err(Failure::new(kind, what).host(self.config.hosts[index].clone()).tensor(names))
    }

    /// A piece that stands still for too long is a failure of those it waits for (WAIT).
    fn check_patience(&self) -> Result<(), Failure> {
        let now = Instant::now();
        // One that is complete waits for a rank of this node, which has a deadline of its own.
        let late = |p: &Running| {
            !p.progress.is_complete() && now.duration_since(p.last_progress) > self.config.patience
        };
        let Some(piece) = self.pieces.values().find(|p| late(p)) else { return Ok(()) };
        let waiting = piece.waiting_for();
        let hosts: Vec<&str> =
            waiting.iter().map(|node| self.config.hosts[node.0 as usize].as_str()).collect();
        let unconnected = waiting.iter().all(|node| {
            self.links[node.0 as usize].as_ref().is_none_or(|link| !link.is_connected())
        });
        let why = if unconnected { "no connection with" } else { "nothing has come from" };
        let what = format!(
            "no data has moved for {} ms: {why} {}",
            self.config.patience.as_millis(),
            hosts.join(", ")
        );
        let host = hosts.first().copied().unwrap_or_default();
        Err(Failure::new(FailureKind::ConnectionLost, what)
            .host(host)
            .tensor(self.names(late))
            .hint("look at that host and at the network between; job.timeout_ms sets the limit"))
    }
}
