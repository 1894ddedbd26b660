//! The agent of one host: `gradwire doctor-agent`. It answers the launcher on its standard output,
//! and other agents on the ports that a job would use. It decides nothing.
//!
//! It ends when its standard input ends (the launcher died or ssh lost the connection), on a
//! signal, and after [`LIFE`]. The programs that it runs die with it.
//!
//! - [`connect`]: connections between agents
//! - [`datagram`]: checks whether datagrams arrive
//! - [`measure`]: measurements over connections
//! - [`programs`]: facts from other programs on this host
//! - [`read`]: the facts of this host

pub mod connect;
pub mod datagram;
pub mod measure;
pub mod programs;
pub mod read;

use std::{
    collections::HashMap,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use gradwire_launcher::{agent::host::reached_address, messages::Reader, signals::Endings};
use gradwire_net::interfaces::{self, Interface, data_addresses};
use gradwire_proto::Secret;
use gradwire_services::launch::to_line;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    sync::{Semaphore, mpsc},
    time::sleep,
};
use tokio_util::task::TaskTracker;

use self::connect::Kind;
use crate::{
    facts::{HostFacts, Offer, Purpose, Wanted},
    limits::{CONNECT, LIFE, MAX_ACCEPTED, MAX_OFFERS, ROUND},
    messages::{Order, Peer, Report},
};

/// How many reports may wait for the launcher (BOUND); when the queue is full, senders wait.
const REPORTS: usize = 1024;

/// Serves one launcher over `input` and `output`.
///
/// # Errors
/// Why it ended before the launcher wanted it to.
pub async fn run<R, W>(input: R, output: W) -> Result<(), String>
where
    R: AsyncRead + Unpin,
    W: AsyncWrite + Unpin + Send + 'static,
{
    let (reports, queue) = mpsc::channel(REPORTS);
    let writer = tokio::spawn(pass_on(queue, output));
    let mut endings = Endings::listen().map_err(|error| error.to_string())?;
    let ended = tokio::select! {
        ended = Agent { reports, state: None }.serve(Reader::new(input)) => ended,
        _ = endings.next() => Ok(()),
        () = sleep(LIFE) => Err(format!("the check did not end within {} s", LIFE.as_secs())),
    };
    writer.abort();
    ended
}

async fn pass_on(mut queue: mpsc::Receiver<Report>, mut output: impl AsyncWrite + Unpin) {
    while let Some(report) = queue.recv().await {
        // The end of the launcher is noticed at the other pipe.
        let _ = output.write_all(to_line(&report).as_bytes()).await;
        let _ = output.flush().await;
    }
}

/// What the agent knows once it listens.
#[derive(Debug, Clone)]
struct Listening {
    host: u32,
    secret: Arc<Secret>,
    streams: u32,
}

#[derive(Debug)]
struct Agent {
    reports: mpsc::Sender<Report>,
    state: Option<Listening>,
}

impl Agent {
    async fn serve(mut self, mut orders: Reader<impl AsyncRead + Unpin>) -> Result<(), String> {
        while let Some(order) = orders.next::<Order>().await {
            let order = order.map_err(|error| {
                let version = gradwire_proto::VERSION;
                format!("gradwire {version} can't understand the launcher: {error}")
            })?;
            self.obey(order).await?;
        }
        Ok(())
    }

    async fn obey(&mut self, order: Order) -> Result<(), String> {
        let report = match (order, self.state.clone()) {
            (Order::Begin { .. }, _) => Report::Hello {
                version: gradwire_proto::VERSION.to_owned(),
                address: reached_address(),
            },
            (Order::Clock, _) => Report::Clock { unix_us: unix_us() },
            (Order::Listen { host, address, secret, wanted }, None) => {
                let secret = Secret::from_hex(&secret).map_err(|error| error.to_string())?;
                let state = Listening { host, secret: Arc::new(secret), streams: wanted.streams };
                self.state = Some(state.clone());
                let data = match data_listen(&wanted, address) {
                    Ok(all) => self.listen_on(all, address, &state).await,
                    Err(why) => Err(why),
                };
                let offers = match wanted.offers {
                    true => self.offer(&state, address).await,
                    false => Vec::new(),
                };
                let coordinator = match wanted.coordinator_listen {
                    _ if host != 0 => None,
                    Some(at) => Some(self.listen(at, address, &state).await),
                    None => Some(self.listen(SocketAddr::new(address, 0), address, &state).await),
                };
                let heartbeats = match &coordinator {
                    Some(Ok(at)) => Some(self.listen_for_datagrams(*at, &state).await),
                    _ => None,
                };
                let reports = self.reports.clone();
                tokio::spawn(async move {
                    let first = data.as_ref().ok().and_then(|all| all.first());
                    let of_data = first.map_or(address, SocketAddr::ip);
                    let known = read::all(of_data, &wanted).await;
                    let facts = HostFacts { data, offers, coordinator, heartbeats, ..known };
                    reports.send(Report::Facts { facts: Box::new(facts) }).await
                });
                return Ok(());
            }
            (Order::Dial { peers, limit_ms }, Some(state)) => {
                for peer in peers {
                    tokio::spawn(reach(peer, state.clone(), limit_ms, self.reports.clone()));
                }
                return Ok(());
            }
            (Order::Measure { peer, others, streams, limit_ms }, Some(state)) => {
                let reports = self.reports.clone();
                tokio::spawn(measure(peer, others, streams, state, limit_ms, reports));
                return Ok(());
            }
            (Order::Listen { .. }, Some(_)) => return Err("received Listen twice".to_owned()),
            (Order::Dial { .. } | Order::Measure { .. }, None) => {
                return Err("Listen must come first".to_owned());
            }
        };
        let _ = self.reports.send(report).await;
        Ok(())
    }

    /// Listens, and returns the address for others: they reach a listener on all addresses at the
    /// host's own address.
    async fn listen(
        &self,
        at: SocketAddr,
        own: IpAddr,
        state: &Listening,
    ) -> Result<SocketAddr, String> {
        let failed = |error| format!("can't listen on {at}: {error}");
        let listener = TcpListener::bind(at).await.map_err(failed)?;
        let mut address = listener.local_addr().map_err(failed)?;
        if address.ip().is_unspecified() {
            address.set_ip(own);
        }
        tokio::spawn(accept_all(listener, state.clone(), self.reports.clone()));
        Ok(address)
    }

    /// Listens on all of these addresses.
    async fn listen_on(
        &self,
        all: Vec<SocketAddr>,
        own: IpAddr,
        state: &Listening,
    ) -> Result<Vec<SocketAddr>, String> {
        let mut listening = Vec::new();
        for at in all {
            listening.push(self.listen(at, own, state).await?);
        }
        Ok(listening)
    }

    /// Listens on every interface that other hosts can use; `own` is the address by which they know
    /// this one. An interface that goes away meanwhile is not offered.
    async fn offer(&self, state: &Listening, own: IpAddr) -> Vec<Offer> {
        let mut offers = Vec::new();
        let mut all = interfaces::usable();
        all.truncate(MAX_OFFERS);
        for Interface { name, address } in all {
            let listening = self.listen(SocketAddr::new(address, 0), address, state).await;
            let Ok(at) = listening else { continue };
            let mbit = read::rate(&name);
            offers.push(Offer { address: at, interface: selecting(&name, address, own), mbit });
        }
        offers
    }

    /// Answers datagrams on the port of the coordinator.
    async fn listen_for_datagrams(
        &self,
        at: SocketAddr,
        state: &Listening,
    ) -> Result<SocketAddr, String> {
        let failed = |error| format!("can't listen on {at} for UDP: {error}");
        let socket = UdpSocket::bind(at).await.map_err(failed)?;
        tokio::spawn(datagram::answer(socket, state.secret.clone()));
        Ok(at)
    }
}

/// A value of `data.interface` that selects an address: the name of its interface, or, if the name
/// would select another address of the interface, a network with only this address.
fn selecting(name: &str, address: IpAddr, own: IpAddr) -> String {
    let chosen = data_addresses(name, &HashMap::new(), own);
    if chosen.is_ok_and(|chosen| chosen.addresses == [address]) {
        return name.to_owned();
    }
    format!("{address}/{}", if address.is_ipv4() { 32 } else { 128 })
}

/// Where a daemon on this host would listen for data.
fn data_listen(wanted: &Wanted, address: IpAddr) -> Result<Vec<SocketAddr>, String> {
    if let Some(listen) = wanted.data_listen {
        return Ok(vec![listen]);
    }
    let (given, variables) = (&wanted.data_interface, &wanted.interface_variables);
    match data_addresses(given, variables, address) {
        Ok(found) => Ok(found.addresses.into_iter().map(|own| SocketAddr::new(own, 0)).collect()),
        Err(error) => Err(format!("data.interface={given}: {error}")),
    }
}

async fn accept_all(listener: TcpListener, state: Listening, reports: mpsc::Sender<Report>) {
    let (tasks, free) = (TaskTracker::new(), Arc::new(Semaphore::new(MAX_ACCEPTED)));
    loop {
        // BOUND: further connections wait in the system's queue.
        let Ok(place) = free.clone().acquire_owned().await else { return };
        let Ok((mut stream, _)) = listener.accept().await else {
            // The descriptors may be used up. Other connections may end meanwhile.
            sleep(Duration::from_millis(10)).await;
            continue;
        };
        let (state, reports) = (state.clone(), reports.clone());
        tasks.spawn(async move {
            let _place = place;
            let Some((host, kind)) = connect::accept(&mut stream, &state.secret, CONNECT).await
            else {
                return;
            };
            match kind {
                Kind::Reach => {}
                Kind::Ping => {
                    // It ends when the other side closes, or no longer matters.
                    let _ = tokio::time::timeout(ROUND, measure::answer(&mut stream)).await;
                }
                Kind::Bulk => {
                    let (bytes, us) = measure::carry(stream, state.streams).await;
                    let _ = reports.send(Report::Received { host, bytes, us }).await;
                }
            }
        });
    }
}

async fn reach(peer: Peer, state: Listening, limit_ms: u64, reports: mpsc::Sender<Report>) {
    let limit = Duration::from_millis(limit_ms);
    let (at, secret) = (peer.address, &*state.secret);
    let failed = match peer.purpose {
        Purpose::Heartbeats => datagram::ask(at, secret, limit).await.err(),
        Purpose::Data | Purpose::Offer | Purpose::Coordinator => {
            connect::dial(at, secret, state.host, Kind::Reach, limit).await.err()
        }
    };
    let _ = reports.send(Report::Dialled { peer, failed }).await;
}

async fn measure(
    peer: Peer,
    others: Vec<SocketAddr>,
    streams: u32,
    state: Listening,
    limit_ms: u64,
    reports: mpsc::Sender<Report>,
) {
    let limit = Duration::from_millis(limit_ms);
    let host = peer.host;
    let addresses = [vec![peer.address], others].concat();
    let made = measure::measure(&addresses, &state.secret, state.host, streams, limit).await;
    let (result, bulk) = match made {
        Ok((measured, bulk)) => (Ok(measured), bulk),
        Err(why) => (Err(why), Vec::new()),
    };
    let streams = u32::try_from(bulk.len()).unwrap_or(0);
    let carried: Vec<_> =
        bulk.into_iter().map(|stream| tokio::spawn(measure::carry(stream, streams))).collect();
    let _ = reports.send(Report::Measured { host, result, streams }).await;
    for task in carried {
        if let Ok((bytes, us)) = task.await {
            let _ = reports.send(Report::Received { host, bytes, us }).await;
        }
    }
}

/// Microseconds since 1970.
pub fn unix_us() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX)
}
