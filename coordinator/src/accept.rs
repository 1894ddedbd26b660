//! Accepts all connections, on a thread of its own (`gw-inspect`), and serves those who look at the
//! job there. So neither strangers nor viewers take time of the thread that negotiates: of them it
//! only makes snapshots.
//!
//! A node begins its connection with [`NODE_PREFACE`]. Such a connection goes to the thread of the
//! negotiation, so a message of a node wakes no other thread on its way. All other connections stay
//! here. A node that leaves the preface out is served here, too: its messages take one more step.

use std::{io, sync::Arc, thread, time::Duration};

use gradwire_proto::NODE_PREFACE;
use tokio::{
    io::AsyncReadExt,
    net::{TcpListener, TcpStream},
    runtime,
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::{sleep, timeout},
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

use crate::{
    grpc::{self, NodeConnections},
    inspection::Inspection,
    session::SessionAcceptor,
};

/// How long a connection may take for its first bytes (WAIT).
const FIRST_BYTES: Duration = Duration::from_secs(10);

/// The most connections from which nothing has come (BOUND). Others wait in the queue of the
/// system.
const MAX_SILENT: usize = 256;

/// The most connections that wait for a thread to take them (BOUND).
const WAITING: usize = 64;

/// How long open requests may take to end when the thread is stopped.
const STOP: Duration = Duration::from_millis(200);

/// Starts the thread. It ends with `stop`. Returns the connections of nodes, and a channel that
/// gets the error with which it ends, if it does so by itself.
///
/// # Errors
/// The system refuses the thread or a descriptor.
pub(crate) fn start(
    listener: TcpListener,
    acceptor: SessionAcceptor,
    inspection: Arc<Inspection>,
    stop: CancellationToken,
) -> io::Result<(NodeConnections, oneshot::Receiver<String>)> {
    let listener = listener.into_std()?;
    let runtime = runtime::Builder::new_current_thread().enable_all().build()?;
    let (to_nodes, nodes) = mpsc::channel(WAITING);
    let (failed, ended) = oneshot::channel();
    let run = move || {
        let serve = async {
            let listener = TcpListener::from_std(listener).map_err(|error| error.to_string())?;
            let (to_viewers, viewers) = mpsc::channel(WAITING);
            let viewers = ReceiverStream::new(viewers);
            let stopped = stop.clone().cancelled_owned();
            let late = async {
                stop.cancelled().await;
                sleep(STOP).await;
            };
            tokio::select! {
                served = grpc::serve_viewers(acceptor, inspection.clone(), viewers, stopped) => {
                    served.map_err(|error| error.to_string())
                }
                () = accept(listener, &to_nodes, &to_viewers) => Ok(()),
                () = inspection.serve() => Ok(()),
                () = late => Ok(()),
            }
        };
        if let Err(error) = runtime.block_on(serve) {
            // Whoever waits for it may have gone.
            let _ = failed.send(error);
        }
        runtime.shutdown_background();
    };
    thread::Builder::new().name("gw-inspect".to_owned()).spawn(run)?;
    Ok((nodes, ended))
}

/// Accepts without end.
async fn accept(
    listener: TcpListener,
    to_nodes: &mpsc::Sender<std::net::TcpStream>,
    to_viewers: &mpsc::Sender<io::Result<TcpStream>>,
) {
    let silent = Arc::new(Semaphore::new(MAX_SILENT));
    loop {
        // The semaphore is never closed.
        let permit = silent.clone().acquire_owned().await.ok();
        match listener.accept().await {
            Ok((stream, _)) => {
                let (to_nodes, to_viewers) = (to_nodes.clone(), to_viewers.clone());
                tokio::spawn(route(stream, permit, to_nodes, to_viewers));
            }
            Err(error) => {
                // One connection has gone already, or there is no descriptor left.
                tracing::debug!(%error, "a connection can't be accepted");
                sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// Gives a connection to who serves it, once its first bytes say who that is (TRUST).
async fn route(
    mut stream: TcpStream,
    _silent: Option<OwnedSemaphorePermit>,
    to_nodes: mpsc::Sender<std::net::TcpStream>,
    to_viewers: mpsc::Sender<io::Result<TcpStream>>,
) {
    let routed = async {
        stream.set_nodelay(true)?;
        let mut first = [0; 1];
        if stream.peek(&mut first).await? == 0 {
            return Ok(());
        }
        if first[0] != NODE_PREFACE[0] {
            let _ = to_viewers.send(Ok(stream)).await;
            return Ok(());
        }
        let mut preface = [0; NODE_PREFACE.len()];
        stream.read_exact(&mut preface).await?;
        if preface == *NODE_PREFACE {
            let _ = to_nodes.send(stream.into_std()?).await;
        }
        io::Result::Ok(())
    };
    if let Ok(Err(error)) = timeout(FIRST_BYTES, routed).await {
        tracing::debug!(%error, "a connection ended before it said anything");
    }
}
