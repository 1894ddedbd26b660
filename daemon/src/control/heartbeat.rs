//! Heartbeats to and from the coordinator: on the stream, and as datagrams, which get through
//! immediately when an outage ends.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    sync::{Arc, Weak},
    thread::{self, sleep},
    time::{Duration, Instant},
};

use gradwire_proto::{
    Ending, Failure, FailureKind,
    beat::{BEAT_BYTES, BEATS_PER_INTERVAL, Beat, Limits, Side, Silence, Suspension},
};

use super::{liveness::Liveness, node::Node, recording, report::Reporter};
use crate::model::{
    job::{JobIdentity, Outgoing},
    world::World,
};

const FORMING_POLL: Duration = Duration::from_millis(100);

/// The minimum wait for datagrams, so that those which have arrived are read.
const MIN_WAIT: Duration = Duration::from_millis(1);

/// How many datagrams are read after each one that is sent (BOUND): any host can send some.
const MAX_DATAGRAMS: usize = 256;

/// Sends heartbeats and listens for the coordinator's on a separate thread (`gw-heartbeat`): a busy
/// control thread must not look dead, and a stopped coordinator closes no connection. `is_local`:
/// the coordinator is in this process, so no datagrams are needed.
pub(crate) fn start(node: &Arc<Node>, is_local: bool) -> io::Result<()> {
    let report = node.report_panic("the heartbeat thread");
    let (liveness, node) = (node.liveness.clone(), Arc::downgrade(node));
    let run = move || {
        let _report = report;
        beat(&node, &liveness, is_local);
    };
    thread::Builder::new().name("gw-heartbeat".into()).spawn(run)?;
    Ok(())
}

/// Sends and receives heartbeats until the node is gone.
fn beat(node: &Weak<Node>, liveness: &Liveness, is_local: bool) {
    let mut datagrams: Option<io::Result<Datagrams>> = None;
    let mut reporter = Reporter::default();
    let mut next = Instant::now();
    let mut suspension = Suspension::new(next);
    while let Some(there) = node.upgrade() {
        let Some(world) = there.job.world() else {
            drop(there);
            sleep(FORMING_POLL);
            continue;
        };
        let now = Instant::now();
        if now >= next {
            let report = reporter.next(&there, now).map(Box::new);
            there.job.send(Outgoing::Heartbeat(report));
            recording::clock(&there);
            next = Instant::now() + world.heartbeat_interval;
        }
        if suspension.check(Instant::now(), world.heartbeat_timeout).is_some() {
            liveness.restart();
        }
        check_silence(&there, liveness, &world, is_local);
        if let Some(Ok(datagrams)) = &mut datagrams {
            datagrams.follow(&there);
        }
        if !is_local && datagrams.is_none() {
            let opened = Datagrams::open(&there, &world);
            if let Err(error) = &opened {
                let what = "no heartbeats by UDP: the job survives only shorter outages";
                tracing::warn!(%error, "{what}");
            }
            datagrams = Some(opened);
        }
        drop(there);
        let pause = world.heartbeat_interval / BEATS_PER_INTERVAL;
        match &mut datagrams {
            Some(Ok(datagrams)) => datagrams.beat(liveness, &world, pause),
            _ => sleep(pause),
        }
    }
}

/// The failure for a coordinator that has been silent for too long, on the stream and in datagrams.
pub(super) fn silent(coordinator: SocketAddr, time: Duration) -> Failure {
    let seconds = time.as_secs_f64();
    let what = format!("the coordinator at {coordinator} has been silent for {seconds:.1} s");
    let hint = "it is stopped, or the network to the first host is down";
    Failure::new(FailureKind::CoordinatorLost, what).hint(hint)
}

/// Ends the job if the coordinator has been silent for too long. If another stream may follow, this
/// one may have broken without a sign of that, and the node opens the next one.
fn check_silence(node: &Node, liveness: &Liveness, world: &World, is_local: bool) {
    let limits = Limits::new(world.heartbeat_interval, world.heartbeat_timeout);
    let coordinator = node.config.coordinator;
    let may_return = node.config.recovery.is_some() && !is_local;
    // This node tells its new address when it joins again.
    let has_moved = || node.running.get().is_some_and(|running| running.mesh.has_moved());
    if may_return && has_moved() {
        return liveness.distrust();
    }
    let failure = match liveness.silence(&limits) {
        None => return,
        Some(_) if may_return => return liveness.distrust(),
        Some(Silence::All(time)) => silent(coordinator, time),
        Some(Silence::Stream(time)) => Failure::new(
            FailureKind::CoordinatorLost,
            format!(
                "nothing has arrived on the stream from the coordinator at {coordinator} for {:.1} \
                 s, although it is alive",
                time.as_secs_f64()
            ),
        )
        .hint(
            "something on the path, perhaps a firewall, holds up TCP traffic to or from that port",
        ),
    };
    // If this failure reaches the coordinator, it names the host that does not hear it (TELL).
    node.job.end(Ending::Failed(failure.host(node.config.host.clone())));
}

/// The first address of this node.
fn own_address(node: &Node) -> Option<IpAddr> {
    Some(node.running.get()?.mesh.own_addresses().first().ip())
}

#[derive(Debug)]
struct Datagrams {
    socket: UdpSocket,
    /// The address of this host.
    from: IpAddr,
    identity: JobIdentity,
    sent: u64,
    /// The first datagram without an answer; answers to earlier ones are too old.
    unanswered: u64,
}

impl Datagrams {
    fn open(node: &Node, world: &World) -> io::Result<Self> {
        let from = own_address(node).unwrap_or_else(|| world.me().addresses.first().ip());
        let socket = Self::socket(node, from)?;
        let identity = node.config.identity.clone();
        Ok(Self { socket, from, identity, sent: 0, unanswered: 0 })
    }

    fn socket(node: &Node, from: IpAddr) -> io::Result<UdpSocket> {
        let coordinator = node.config.coordinator;
        // The data may have a network of the other family. Then the system chooses the address.
        let from = match coordinator.ip() {
            IpAddr::V4(_) if from.is_ipv6() => IpAddr::from(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) if from.is_ipv4() => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            _ => from,
        };
        let socket = UdpSocket::bind((from, 0))?;
        socket.connect(coordinator)?;
        Ok(socket)
    }

    /// Sends from the address that this host has got instead of another one.
    fn follow(&mut self, node: &Node) {
        let Some(own) = own_address(node).filter(|own| *own != self.from) else { return };
        if let Ok(socket) = Self::socket(node, own) {
            (self.socket, self.from) = (socket, own);
        }
    }

    /// Sends one datagram, and reads answers for `pause`.
    fn beat(&mut self, liveness: &Liveness, world: &World, pause: Duration) {
        let until = Instant::now() + pause;
        let JobIdentity { job, secret } = &self.identity;
        let (node, epoch) = (world.node, world.epoch);
        let beat = Beat { side: Side::Node, node, epoch, count: self.sent };
        // A datagram that can't be sent is as good as lost.
        let _ = self.socket.send(&beat.encode(job, secret));
        self.sent += 1;
        // One byte more: a longer datagram is not a heartbeat.
        let mut bytes = [0; BEAT_BYTES + 1];
        for _ in 0..MAX_DATAGRAMS {
            // Datagrams that have arrived are read even if they are late: this thread may have been
            // stopped.
            let left = until.saturating_duration_since(Instant::now()).max(MIN_WAIT);
            if self.socket.set_read_timeout(Some(left)).is_err() {
                break;
            }
            match self.socket.recv(&mut bytes) {
                Ok(length) => {
                    let bytes = &bytes[..length];
                    let answer = Beat::decode(bytes, Side::Coordinator, epoch, job, secret);
                    let is_new = |beat: &Beat| {
                        beat.node == node && (self.unanswered..self.sent).contains(&beat.count)
                    };
                    if let Some(answer) = answer.filter(is_new) {
                        self.unanswered = answer.count + 1;
                        liveness.datagram_received();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Nothing has arrived in time, or the port is closed.
                Err(_) => break,
            }
        }
        sleep(until.saturating_duration_since(Instant::now()));
    }
}
