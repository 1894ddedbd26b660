//! Accepts all connections on a thread of its own (`gw-inspect`), and serves viewers there. So
//! neither strangers nor viewers take time from the negotiation thread, which only makes snapshots
//! for them.
//!
//! A node begins its connection with [`NODE_PREFACE`]. Such a connection goes to the negotiation
//! thread, so messages from nodes wake no other thread. All other connections stay here. A node
//! that omits the preface is also served here: its messages take one more step.
//!
//! The number of connections is limited (BOUND): a stranger must not use up the descriptors that
//! the daemon of this host needs. A connection gets a place only once it has begun to speak HTTP/2:
//! from then on its server notices when it goes silent.

use std::{io, sync::Arc, time::Duration};

use gradwire_proto::NODE_PREFACE;
use gradwire_telemetry::reactor;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::{
    connection::Connection,
    grpc::{self, NodeConnections},
    inspection::Inspection,
    session::SessionAcceptor,
};

/// How long a connection may take to send its first bytes (WAIT).
const FIRST_BYTES: Duration = Duration::from_secs(10);

/// The most connections that have not sent anything (BOUND). Others wait in the listen queue.
const MAX_SILENT: usize = 256;

/// The most connections that wait for a thread to take them (BOUND).
const WAITING: usize = 64;

/// The places for node connections in addition to one per node (BOUND). So a few strangers do not
/// keep nodes out.
const MORE_NODES: usize = 64;

/// The places for viewers and single requests, in addition to one per node (BOUND): nodes without
/// the preface are served here.
const VIEWERS: usize = 128;

/// The first bytes of an HTTP/2 client.
const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How often this checks for the rest of a preface.
const LOOK: Duration = Duration::from_millis(20);

/// How long open requests may take to end when the thread is stopped.
const STOP: Duration = Duration::from_millis(200);

/// Where connections go, and the places that are free there.
#[derive(Debug, Clone)]
struct Ways {
    to_nodes: mpsc::Sender<(std::net::TcpStream, OwnedSemaphorePermit)>,
    for_nodes: Arc<Semaphore>,
    to_viewers: mpsc::Sender<io::Result<Connection>>,
    for_viewers: Arc<Semaphore>,
}

/// Starts the thread for a job with `nodes` nodes. It ends with `stop`. Returns the connections of
/// nodes, and a channel for the error if the thread ends by itself.
///
/// # Errors
/// The system can't create the thread or a descriptor.
pub(crate) fn start(
    listener: TcpListener,
    nodes: u32,
    acceptor: SessionAcceptor,
    inspection: Arc<Inspection>,
    stop: CancellationToken,
) -> io::Result<(NodeConnections, oneshot::Receiver<String>)> {
    let listener = listener.into_std()?;
    let (to_nodes, of_nodes) = mpsc::channel(WAITING);
    let (to_viewers, of_viewers) = mpsc::channel(WAITING);
    let places = |more: usize| Arc::new(Semaphore::new(nodes as usize + more));
    let (for_nodes, for_viewers) = (places(MORE_NODES), places(VIEWERS));
    let ways = Ways { to_nodes, for_nodes, to_viewers, for_viewers };
    let (failed, ended) = oneshot::channel();
    let run = move || async move {
        let serve = async {
            let listener = TcpListener::from_std(listener).map_err(|error| error.to_string())?;
            let viewers = ReceiverStream::new(of_viewers);
            let stopped = stop.clone().cancelled_owned();
            let late = async {
                stop.cancelled().await;
                sleep(STOP).await;
            };
            tokio::select! {
                served = grpc::serve_viewers(acceptor, inspection.clone(), viewers, stopped) => {
                    served.map_err(|error| error.to_string())
                }
                () = accept(listener, &ways) => Ok(()),
                () = inspection.serve() => Ok(()),
                () = late => Ok(()),
            }
        };
        if let Err(error) = serve.await {
            // The receiver may be gone.
            let _ = failed.send(error);
        }
    };
    reactor::start("gw-inspect", run)?;
    Ok((of_nodes, ended))
}

/// Accepts connections forever.
async fn accept(listener: TcpListener, ways: &Ways) {
    let silent = Arc::new(Semaphore::new(MAX_SILENT));
    loop {
        // The semaphore is never closed.
        let permit = silent.clone().acquire_owned().await.ok();
        match listener.accept().await {
            Ok((stream, _)) => {
                tokio::spawn(route(stream, permit, ways.clone()));
            }
            Err(error) => {
                // The connection was closed again, or there are no descriptors left.
                tracing::debug!(%error, "can't accept a connection");
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Routes a connection by its first bytes (TRUST).
async fn route(mut stream: TcpStream, _silent: Option<OwnedSemaphorePermit>, ways: Ways) {
    let routed = async {
        stream.set_nodelay(true)?;
        let mut first = [0; 1];
        if stream.peek(&mut first).await? == 0 {
            return Ok(());
        }
        let is_node = first[0] == NODE_PREFACE[0];
        if is_node {
            let mut preface = [0; NODE_PREFACE.len()];
            stream.read_exact(&mut preface).await?;
            if preface != *NODE_PREFACE {
                return Ok(());
            }
        }
        if !speaks_http2(&stream).await? {
            return Ok(());
        }
        if is_node {
            // The semaphore is never closed.
            if let Ok(place) = ways.for_nodes.acquire_owned().await {
                let _ = ways.to_nodes.send((stream.into_std()?, place)).await;
            }
        } else if let Ok(place) = ways.for_viewers.try_acquire_owned() {
            let _ = ways.to_viewers.send(Ok(Connection::new(stream, place))).await;
        }
        io::Result::Ok(())
    };
    if let Ok(Err(error)) = timeout(FIRST_BYTES, routed).await {
        tracing::debug!(%error, "a connection ended before its first message");
    }
}

/// Waits for the preface of HTTP/2 without consuming it. Returns false if something else arrives.
async fn speaks_http2(stream: &TcpStream) -> io::Result<bool> {
    let mut begin = [0; HTTP2_PREFACE.len()];
    loop {
        let length = stream.peek(&mut begin).await?;
        if length == 0 || !HTTP2_PREFACE.starts_with(&begin[..length]) {
            return Ok(false);
        }
        if length == begin.len() {
            return Ok(true);
        }
        // Peeked bytes keep the socket readable, so readiness does not tell when more arrive.
        sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use tokio::io::AsyncWriteExt as _;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    /// The connections that were routed to nodes and to viewers.
    type Came = (
        mpsc::Receiver<(std::net::TcpStream, OwnedSemaphorePermit)>,
        mpsc::Receiver<io::Result<Connection>>,
    );

    fn ways(places: usize) -> (Ways, Came) {
        let ((to_nodes, nodes), (to_viewers, viewers)) = (mpsc::channel(9), mpsc::channel(9));
        let places = || Arc::new(Semaphore::new(places));
        let (for_nodes, for_viewers) = (places(), places());
        (Ways { to_nodes, for_nodes, to_viewers, for_viewers }, (nodes, viewers))
    }

    /// Opens a connection, sends these bytes and routes it.
    async fn routed(listener: &TcpListener, begin: &[u8], ways: &Ways) -> TcpStream {
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(begin).await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        route(stream, None, ways.clone()).await;
        client
    }

    /// Whether it was closed without an answer, cleanly or not. Tokio's clock is paused.
    fn is_closed(client: TcpStream) -> bool {
        let mut client = client.into_std().unwrap();
        client.set_nonblocking(false).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        let read = client.read(&mut [0; 1]);
        read.map_or_else(|error| error.kind() == io::ErrorKind::ConnectionReset, |read| read == 0)
    }

    /// WAIT: a connection that does not complete its preface is closed.
    #[tokio::test(start_paused = true)]
    async fn an_incomplete_preface_gets_no_place() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ways, (mut nodes, mut viewers)) = ways(1);
        let node = [&NODE_PREFACE[..], HTTP2_PREFACE].concat();
        for begin in [
            &HTTP2_PREFACE[..1],
            &HTTP2_PREFACE[..23],
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"NODE something else",
            &node[..NODE_PREFACE.len()],
            &node[..node.len() - 1],
        ] {
            let client = routed(&listener, begin, &ways).await;
            assert!(is_closed(client), "{begin:?}");
            assert!(nodes.try_recv().is_err() && viewers.try_recv().is_err(), "{begin:?}");
        }
        let _client = routed(&listener, HTTP2_PREFACE, &ways).await;
        assert!(viewers.try_recv().unwrap().is_ok());
        let _client = routed(&listener, &node, &ways).await;
        assert!(nodes.try_recv().is_ok());
    }

    /// BOUND: a place is free again once its connection has ended.
    #[tokio::test(start_paused = true)]
    async fn places_are_limited() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ways, (mut nodes, mut viewers)) = ways(1);
        let node = [&NODE_PREFACE[..], HTTP2_PREFACE].concat();
        for _ in 0..3 {
            let _first = routed(&listener, HTTP2_PREFACE, &ways).await;
            let _node = routed(&listener, &node, &ways).await;
            assert!(is_closed(routed(&listener, HTTP2_PREFACE, &ways).await));
            assert!(is_closed(routed(&listener, &node, &ways).await));
            drop((viewers.try_recv().unwrap(), nodes.try_recv().unwrap()));
            assert!(viewers.try_recv().is_err() && nodes.try_recv().is_err());
        }
    }
}
