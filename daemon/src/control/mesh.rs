//! Makes the connections between nodes. When a schedule first needs a peer, the node with the
//! smaller number dials, `streams` times per lane, and the other one accepts. If both nodes use
//! several interfaces together, each lane has connections on all of them. The dialler alone
//! chooses the number of connections: a frame says where it belongs. `connections` decides when a
//! broken connection is dialled again.
//!
//! Dialling, accepting and the handshakes run on the control thread. A connection that has passed
//! its handshake goes to its lane, which owns the socket from then on.
//!
//! - `moving`: hosts that get other addresses

mod moving;

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use gradwire_proto::{Failure, FailureKind, NodeId};
use gradwire_telemetry::Rate;
use parking_lot::Mutex;
use socket2::{Domain, SockRef, Socket, TcpKeepalive, Type};
use tokio::{
    net::{TcpListener, TcpSocket, TcpStream},
    runtime::Handle,
    task::JoinSet,
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};

use crate::{
    config::DaemonConfig,
    data::{
        lane::Lane,
        order::{Connected, Disconnected, Order},
    },
    metrics::{self, Rejection},
    model::{
        job::{Job, ReportPanic},
        world::World,
    },
    ops::Connector,
    transport::{
        connections::{Connections, Demand},
        frame::Totals,
        handshake::{
            self, Admission, Attempt, ConnectionId, HandshakeError, Identity, MAX_STREAMS,
        },
        patience::{self, Patience},
        places::Places,
        window::Window,
    },
};

/// The smallest limit of connections that are in their handshake at a time (BOUND). One more than
/// the limit replaces the oldest, so silent connections keep nobody out.
const MIN_HANDSHAKES: usize = 64;

/// The largest such limit, for any number of peers.
const MAX_HANDSHAKES: usize = 4096;

/// How long the peer's kernel may take to answer before a second attempt begins beside the first
/// one, as in RFC 8305 §5; the delay then doubles each time. The kernel retransmits a lost first
/// packet only after a second.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// The longest interval between retransmissions: the shortest one that the system accepts.
const RETRANSMISSION: Duration = Duration::from_secs(1);

/// The longest time for which [`probes`] tests a connection that may be made again: once a second.
const SOON: Duration = Duration::from_secs(60);

/// How often the system probes a silent connection, and after how many unanswered probes it ends
/// the connection: after the limit of the lane. An earlier end would break transfers in the other
/// direction after an outage that the job survives. If the peer has lost the connection, it rejects
/// the first probe that arrives.
fn probes(limit: Duration) -> (Duration, u32) {
    let interval = (limit / 60).max(Duration::from_secs(1));
    (interval, limit.div_duration_f64(interval).ceil() as u32 + 1)
}

/// Limits the log lines about connections that failed, by reason.
static REFUSALS: Rate = Rate::new();
static SILENT: Rate = Rate::new();

/// Connections to all peers that are needed.
#[derive(Debug)]
pub(crate) struct Mesh {
    config: DaemonConfig,
    identity: Identity,
    world: Arc<World>,
    places: Places,
    lanes: Arc<[Lane]>,
    job: Job,
    runtime: Handle,
    cancel: CancellationToken,
    /// The first size of socket buffers in bytes, if the size adapts to the path.
    initial: Option<usize>,
    dialled: Mutex<Connections>,
    /// The connections that peers have dialled, with the latest attempt.
    accepted: Mutex<HashMap<ConnectionId, u32>>,
}

impl Mesh {
    pub(crate) fn new(
        config: DaemonConfig,
        identity: Identity,
        world: Arc<World>,
        lanes: Arc<[Lane]>,
        job: Job,
        cancel: CancellationToken,
    ) -> Arc<Self> {
        let initial = Window::initial(identity.lanes * config.streams);
        let addresses = world.nodes.iter().map(|node| node.addresses.clone());
        let fits = config.socket_buffer_bytes == 0 && grants_buffers(initial);
        Arc::new(Self {
            initial: fits.then_some(initial),
            places: Places::new(world.node, addresses.collect()),
            config,
            identity,
            world,
            lanes,
            job,
            runtime: Handle::current(),
            cancel,
            dialled: Mutex::default(),
            accepted: Mutex::default(),
        })
    }

    /// A connection broke.
    pub(crate) fn disconnected(self: &Arc<Self>, connection: Disconnected) {
        let Disconnected { peer, lane, number, totals, is_closed, is_needed } = connection;
        if peer <= self.identity.node {
            return;
        }
        let id = ConnectionId { peer, number: number * self.identity.lanes + lane };
        // Without recovery, another connection is only an attempt.
        let is_needed = is_needed && self.config.recovery.is_some();
        if self.dialled.lock().lost(id, totals, is_closed, is_needed) {
            self.start(id, totals);
        }
    }

    /// How many connections each lane has with a peer: the same number on each interface that both
    /// nodes use.
    fn streams(&self, peer: NodeId) -> u32 {
        let [own, theirs] = [self.world.node, peer].map(|node| &self.world.nodes[node.0 as usize]);
        let pairs = own.addresses.pairs(&theirs.addresses) as u32;
        let even = self.config.streams.next_multiple_of(pairs);
        if even > MAX_STREAMS { MAX_STREAMS / pairs * pairs } else { even }
    }

    fn start(self: &Arc<Self>, id: ConnectionId, totals: Totals) {
        let mesh = self.clone();
        let (job, host) = (self.job.clone(), self.world.me().host.clone());
        let report = ReportPanic { job, who: "a dialler", host };
        self.runtime.spawn(async move {
            let _report = report;
            let cancel = mesh.cancel.clone();
            cancel.run_until_cancelled(mesh.reach(id, totals)).await;
        });
    }

    async fn reach(&self, id: ConnectionId, totals: Totals) {
        let node = &self.world.nodes[id.peer.0 as usize];
        let returns = self.config.recovery.filter(|_| self.dialled.lock().was_up(id));
        let limit = returns.unwrap_or(self.config.connect_timeout);
        match self.dial(id, totals, limit).await {
            Ok((stream, attempt, round_trip)) => {
                self.dialled.lock().connected(id);
                self.hand_over(id, attempt, None, stream, round_trip);
            }
            Err(why) if self.dialled.lock().failed(id, totals) => {
                let again = match returns {
                    Some(limit) => format!(" again within {} ms", limit.as_millis()),
                    None => String::new(),
                };
                let (from, to) = self.ends(id);
                let host = &self.world.me().host;
                let is_named = *host == from.to_string();
                let at = if is_named { String::new() } else { format!(" ({from})") };
                let what = format!(
                    "its data plane at {to} can't be reached{again} from {host}{at}: {why}"
                );
                let hint = if to.is_ipv4() == from.is_ipv4() {
                    "is the address right, and does a firewall let it through?"
                } else {
                    "one is an IPv4 and the other an IPv6 address: name all hosts by one kind"
                };
                let failure = Failure::new(FailureKind::ConnectionLost, what)
                    .host(node.host.clone())
                    .hint(hint);
                self.job.report(failure);
            }
            Err(why) => {
                let peer = &node.host;
                tracing::debug!(%peer, why, "a data connection can't be made again now");
            }
        }
    }

    /// The addresses of a connection's ends.
    fn ends(&self, id: ConnectionId) -> (IpAddr, SocketAddr) {
        let (_, number) = id.place(self.identity.lanes);
        self.places.pair(id.peer, number)
    }

    /// Dials until the limit: a peer may start a moment later, and a connection may be reset. An
    /// end may get another address meanwhile.
    async fn dial(
        &self,
        id: ConnectionId,
        totals: Totals,
        limit: Duration,
    ) -> Result<(TcpStream, u32, Duration), String> {
        let mut patience = Patience::new(Instant::now().into_std(), limit);
        let mut changes = self.places.changes();
        loop {
            changes.mark_unchanged();
            let ends = self.ends(id);
            // The peer accepts the attempt with the largest number, so attempts must not overlap.
            let number = self.dialled.lock().attempt(id);
            let no_answer = |patience: &Patience| format!("no answer in {:?}", patience.limit());
            let opened = tokio::select! {
                opened = timeout_at(patience.deadline().into(), self.open(ends)) => opened,
                Ok(()) = changes.changed() => continue,
            };
            let (mut stream, round_trip) = match opened {
                Err(_) => return Err(no_answer(&patience)),
                Ok(Err(error)) => {
                    let why = error.to_string();
                    again(&patience).await.then_some(()).ok_or(why)?;
                    continue;
                }
                Ok(Ok(opened)) => opened,
            };
            patience.measured(round_trip);
            self.set_receive_buffer(&stream, round_trip);
            let attempt = Attempt { number, totals };
            let shake = handshake::dial(&mut stream, &self.identity, id, attempt);
            let limit = patience.handshake();
            let until = patience.deadline().min((Instant::now() + limit).into_std());
            let why = match timeout_at(until.into(), shake).await {
                Ok(Ok(())) => return Ok((stream, number, round_trip)),
                Ok(Err(error)) => error.to_string(),
                Err(_) => {
                    patience.was_silent();
                    format!("no answer to the handshake in {limit:?}")
                }
            };
            again(&patience).await.then_some(()).ok_or(why)?;
        }
    }

    /// The first connection that the peer's kernel answers, with its round trip. Several attempts
    /// may be in flight: on a lossy line, one of them must get through in time.
    async fn open(&self, ends: (IpAddr, SocketAddr)) -> io::Result<(TcpStream, Duration)> {
        // Dials from this node's own address, which the peer knows: the host may have several nodes
        // or networks.
        let (from, to) = (SocketAddr::new(ends.0, 0), ends.1);
        let mut attempts = JoinSet::new();
        let mut delay = ATTEMPT_DELAY;
        loop {
            attempts.spawn(connect(from, to, self.config.congestion_control.clone()));
            tokio::select! {
                Some(first) = attempts.join_next() => return first?,
                () = sleep(delay) => delay *= 2,
            }
        }
    }

    /// Accepts until cancelled.
    pub(crate) async fn serve(self: Arc<Self>, listener: TcpListener) {
        // Accepted connections inherit this. `prepare` reports an error.
        let is_loopback = listener.local_addr().is_ok_and(|own| own.ip().is_loopback());
        let chosen = &self.config.congestion_control;
        let _ = choose_congestion_control(&SockRef::from(&listener), chosen, is_loopback);
        let mut handshakes = VecDeque::new();
        // All peers with smaller numbers may dial at once, each with as many connections as it
        // chooses.
        let smaller = (0..self.identity.node.0).map(NodeId);
        let dialled: u32 = smaller.map(|peer| self.identity.lanes * self.streams(peer)).sum();
        let most = (dialled as usize).clamp(MIN_HANDSHAKES, MAX_HANDSHAKES);
        let accept = async {
            loop {
                match listener.accept().await {
                    Ok((stream, from)) => {
                        handshakes
                            .retain(|handshake: &AbortOnDropHandle<()>| !handshake.is_finished());
                        if handshakes.len() >= most {
                            handshakes.pop_front();
                            metrics::rejected_connection(Rejection::TooMany);
                        }
                        let mesh = self.clone();
                        let receive = async move { mesh.receive(stream, from).await };
                        handshakes.push_back(AbortOnDropHandle::new(tokio::spawn(receive)));
                    }
                    Err(error) => {
                        // Probably out of descriptors: existing connections continue, and this may
                        // be temporary.
                        let hint = crate::model::hint::resource_hint(&error);
                        tracing::warn!("a data connection could not be accepted: {error}{hint}");
                        sleep(Duration::from_millis(100)).await;
                    }
                }
            }
        };
        self.cancel.run_until_cancelled(accept).await;
    }

    async fn receive(&self, mut stream: TcpStream, from: SocketAddr) {
        let began = Instant::now();
        let admit = |id: ConnectionId, attempt: Attempt, stream: &TcpStream| {
            // One round trip, plus the dialler's own time. A slow dialler gets larger buffers than
            // it needs, within the system's limits (BOUND).
            self.set_receive_buffer(stream, began.elapsed());
            match self.accepted.lock().entry(id) {
                Entry::Occupied(latest) if *latest.get() >= attempt.number => false,
                entry => {
                    entry.insert_entry(attempt.number);
                    true
                }
            }
        };
        let round_trip = gradwire_net::path(&stream).map_or(Duration::ZERO, |path| path.round_trip);
        let limit = patience::to_accept(self.config.connect_timeout, round_trip);
        let shake = handshake::accept(&mut stream, &self.identity, admit);
        match timeout(limit, shake).await {
            Ok(Ok((id, attempt))) => {
                let theirs = Some(attempt.totals);
                self.hand_over(id, attempt.number, theirs, stream, began.elapsed());
            }
            Ok(Err(error)) => {
                metrics::rejected_connection(rejection(&error));
                if let Some(left_out) = REFUSALS.admits() {
                    tracing::warn!(%from, %error, left_out, "a data connection was refused");
                }
            }
            Err(_) => {
                metrics::rejected_connection(Rejection::Silent);
                if let Some(left_out) = SILENT.admits() {
                    let what = "a data connection was silent during its handshake";
                    tracing::warn!(%from, left_out, "{what}");
                }
            }
        }
    }

    fn hand_over(
        &self,
        id: ConnectionId,
        attempt: u32,
        theirs: Option<Totals>,
        stream: TcpStream,
        round_trip: Duration,
    ) {
        let prepared = match self.prepare(&stream) {
            // It has broken since its handshake. The lane reads what has arrived on it, which the
            // peer does not send again.
            Err(_) if stream.peer_addr().is_err() => Ok(()),
            prepared => prepared,
        };
        match prepared.and_then(|()| stream.into_std()) {
            Ok(stream) => {
                let (lane, number) = id.place(self.identity.lanes);
                let window = |size| Window::new(size, round_trip, Instant::now().into_std());
                let window = self.initial.map(window);
                let peer = id.peer;
                let connected = Connected { peer, number, stream, window, attempt, theirs };
                self.lanes[lane as usize].send(Order::Connected(connected));
            }
            Err(error) => {
                let what = format!("a data connection can't be set up: {error}");
                self.job.report(Failure::new(FailureKind::Resource, what));
            }
        }
    }

    /// Sets the receive buffer of a connection before the peer may send: with the first full
    /// segment, the system fixes the largest window that it will announce. A failure only costs
    /// speed.
    fn set_receive_buffer(&self, stream: &TcpStream, round_trip: Duration) {
        let connections = self.identity.lanes * self.config.streams;
        let size = match self.initial {
            Some(_) => Window::receive_buffer(connections, round_trip),
            None => self.config.socket_buffer_bytes,
        };
        if size > 0 {
            let _ = SockRef::from(stream).set_recv_buffer_size(size);
        }
    }

    fn prepare(&self, stream: &TcpStream) -> io::Result<()> {
        let socket = SockRef::from(stream);
        socket.set_tcp_nodelay(true)?;
        // After an outage the connection must continue before the timeout. Only the lane decides
        // when a connection that it waits for is dead: a TCP user timeout would also end a
        // connection with a live peer that does not read. The probes of a connection that may be
        // made again show soon that packets are dropped.
        if let Err(error) = gradwire_net::limit_retransmission_interval(stream, RETRANSMISSION) {
            tracing::debug!(%error, "the system chooses the retransmission interval");
        }
        let limit = self.config.progress_timeout;
        let limit = if self.config.recovery.is_some() { limit.min(SOON) } else { limit };
        let (interval, probes) = probes(limit);
        let keepalive = TcpKeepalive::new().with_time(interval).with_interval(interval);
        socket.set_tcp_keepalive(&keepalive.with_retries(probes))?;
        let is_loopback = stream.peer_addr()?.ip().is_loopback();
        choose_congestion_control(&socket, &self.config.congestion_control, is_loopback)?;
        let size = self.initial.unwrap_or(self.config.socket_buffer_bytes);
        if size > 0 {
            socket.set_send_buffer_size(size)?;
        }
        Ok(())
    }
}

impl Connector for Arc<Mesh> {
    fn connect(&self, peer: NodeId, demand: Demand) {
        if peer <= self.identity.node {
            return;
        }
        let count = self.identity.lanes * self.streams(peer);
        for (id, totals) in self.dialled.lock().need(peer, count, demand) {
            self.start(id, totals);
        }
    }
}

/// The reason why a handshake failed, for the metrics.
fn rejection(error: &HandshakeError) -> Rejection {
    match error {
        HandshakeError::Io(_) => Rejection::Broken,
        HandshakeError::NotGradwire => Rejection::NotGradwire,
        HandshakeError::WrongPeer(_) => Rejection::WrongJob,
        HandshakeError::Secret | HandshakeError::Refused(Admission::Secret) => Rejection::Secret,
        HandshakeError::Refused(_) => Rejection::Superseded,
    }
}

/// Waits a moment before another attempt. Returns whether there is time for it.
async fn again(patience: &Patience) -> bool {
    let is_time = Instant::now().into_std() + Duration::from_millis(100) < patience.deadline();
    if is_time {
        sleep(Duration::from_millis(50)).await;
    }
    is_time
}

/// Makes one connection. Only the kernels take part, so the time is the minimal round trip.
async fn connect(
    from: SocketAddr,
    to: SocketAddr,
    congestion_control: String,
) -> io::Result<(TcpStream, Duration)> {
    let socket = if to.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind(from)?;
    // `prepare` reports an error.
    let is_loopback = to.ip().is_loopback();
    let _ = choose_congestion_control(&SockRef::from(&socket), &congestion_control, is_loopback);
    let began = Instant::now();
    let stream = socket.connect(to).await?;
    Ok((stream, began.elapsed()))
}

/// Sets the congestion control of a socket to `chosen`; if that is empty, keeps the system's,
/// except bbr, and uses reno on loopback. Must be called before the socket connects, so that bbr
/// never starts: the pacing that it turns on would stay, and slow a fast line down.
///
/// # Errors
/// If the system does not have the chosen one, or does not allow it.
fn choose_congestion_control(
    socket: &SockRef<'_>,
    chosen: &str,
    is_loopback: bool,
) -> io::Result<()> {
    if !chosen.is_empty() {
        return socket.set_tcp_congestion(chosen.as_bytes()).map_err(|error| {
            let text = format!("data.congestion_control={chosen:?} is not available: {error}");
            io::Error::new(error.kind(), text)
        });
    }
    let instead: &[&str] = if is_loopback {
        // A paced sender (bbr) leaves loopback idle half of the time.
        &["reno"]
    } else if socket.tcp_congestion()?.starts_with(b"bbr") {
        // Each bbr connection assumes that it has the line alone, and ignores loss: several nodes
        // that send to one keep overflowing the queue.
        &["cubic", "reno"]
    } else {
        &[]
    };
    // Every kernel has reno. If none is allowed, nothing changes.
    let _ = instead.iter().any(|name| socket.set_tcp_congestion(name.as_bytes()).is_ok());
    Ok(())
}

/// Whether the system grants socket buffers of our first size. This tries it on a separate socket,
/// because setting a size disables automatic sizing, which is better if less is granted
/// (`net.core.wmem_max` and `rmem_max`).
fn grants_buffers(initial: usize) -> bool {
    let granted = || {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_send_buffer_size(initial)?;
        socket.set_recv_buffer_size(initial)?;
        Ok::<_, io::Error>(socket.send_buffer_size()?.min(socket.recv_buffer_size()?))
    };
    match granted() {
        // The system reports twice the requested size.
        Ok(granted) if granted >= 2 * initial => true,
        other => {
            tracing::debug!(granted = ?other, "the system chooses the sockets' buffers");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keepalive_outlasts_the_limit() {
        for limit in [0.1, 4.0, 5.0, 59.5, 61.0, 3600.0].map(Duration::from_secs_f64) {
            let (interval, probes) = probes(limit);
            assert!(interval * probes > limit, "{limit:?}: {probes} probes, every {interval:?}");
            // Linux's limit.
            assert!(probes <= 127, "{limit:?}: {probes}");
        }
    }
}
