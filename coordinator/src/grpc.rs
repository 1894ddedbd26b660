//! The gRPC services: `gradwire.v1.Coordinator` for nodes, on the negotiation thread;
//! `gradwire.v1.Inspect` for viewers, health and reflection for tools, on a thread of their own
//! (`accept`).

use std::{io, sync::Arc, time::Duration};

use gradwire_proto::{MAX_CONTROL_MESSAGE, pb};
use gradwire_services::{
    FILE_DESCRIPTOR_SET,
    broadcast::server::{Coordinator, CoordinatorServer},
    inspect_server::{Inspect, InspectServer},
};
use tokio::{
    net::TcpStream,
    sync::{OwnedSemaphorePermit, mpsc},
};
use tokio_stream::{Stream, StreamExt, adapters::Map, wrappers::ReceiverStream};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Error, Server},
};

use crate::{
    connection::Connection,
    inbox::OVER,
    inspection::Inspection,
    session::{SessionAcceptor, SessionStream},
};

/// The most streams of one connection: a session, and status requests.
const MAX_STREAMS: u32 = 16;

/// How often a silent connection is probed, and how long it may take to answer. Nodes of the
/// world also have heartbeats, which are faster.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The flow-control window of a connection, in bytes.
const WINDOW: u32 = 2 << 20;

/// Connections of nodes that another thread has accepted, with their places.
pub(crate) type NodeConnections = mpsc::Receiver<(std::net::TcpStream, OwnedSemaphorePermit)>;

/// A server with the limits for every connection.
fn server() -> Server {
    Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .concurrency_limit_per_connection(MAX_STREAMS as usize)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
}

fn coordinator(acceptor: SessionAcceptor) -> CoordinatorServer<SessionAcceptor> {
    CoordinatorServer::new(acceptor)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE)
}

/// Serves the connections of nodes until `stop`.
pub(crate) async fn serve_nodes(
    acceptor: SessionAcceptor,
    connections: NodeConnections,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let incoming = ReceiverStream::new(connections)
        .map(|(stream, place)| TcpStream::from_std(stream).map(|s| Connection::new(s, place)));
    let router = server().add_service(coordinator(acceptor));
    router.serve_with_incoming_shutdown(incoming, stop).await
}

/// Serves all other connections until `stop`.
pub(crate) async fn serve_viewers(
    acceptor: SessionAcceptor,
    inspection: Arc<Inspection>,
    connections: impl Stream<Item = io::Result<Connection>>,
    stop: impl Future<Output = ()>,
) -> Result<(), Error> {
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<CoordinatorServer<SessionAcceptor>>().await;
    let inspect = InspectServer::from_arc(inspection);
    let mut router =
        server().add_service(coordinator(acceptor)).add_service(inspect).add_service(health);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    match reflection {
        Ok(reflection) => router = router.add_service(reflection),
        Err(error) => tracing::warn!(%error, "no reflection: invalid descriptors"),
    }
    router.serve_with_incoming_shutdown(connections, stop).await
}

/// Turns a shared snapshot into an owned message.
type Copied = fn(Result<Arc<pb::StatusResponse>, Status>) -> Result<pb::StatusResponse, Status>;

#[tonic::async_trait]
impl Inspect for Inspection {
    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusResponse>, Status> {
        let seen = self.look().await.ok_or_else(|| Status::unavailable(OVER))?;
        Ok(Response::new(Arc::unwrap_or_clone(seen)))
    }

    type WatchStream = Map<ReceiverStream<Result<Arc<pb::StatusResponse>, Status>>, Copied>;

    async fn watch(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let copied: Copied = |seen| seen.map(Arc::unwrap_or_clone);
        Ok(Response::new(ReceiverStream::new(Self::watch(self)?).map(copied)))
    }

    async fn challenge(
        &self,
        _: Request<pb::ChallengeRequest>,
    ) -> Result<Response<pb::ViewerChallenge>, Status> {
        Ok(Response::new(self.permits.challenge()))
    }

    async fn explain(
        &self,
        request: Request<pb::ExplainRequest>,
    ) -> Result<Response<pb::Explanation>, Status> {
        let pb::ExplainRequest { stacks, nonce, proof, save } = request.get_ref();
        if !self.permits.admits(nonce, proof) {
            return Err(Status::unauthenticated("the viewer does not know the job's secret"));
        }
        let explained = self.explain(*stacks, *save).await;
        let explained = explained.ok_or_else(|| Status::unavailable(OVER))?;
        Ok(Response::new(explained))
    }

    type TraceStream = ReceiverStream<Result<pb::TracePart, Status>>;

    async fn trace(
        &self,
        _: Request<pb::TraceRequest>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        Ok(Response::new(ReceiverStream::new(Self::trace(self).await?)))
    }
}

#[tonic::async_trait]
impl Coordinator for SessionAcceptor {
    type SessionStream = SessionStream;

    async fn session(
        &self,
        request: Request<Streaming<pb::NodeMessage>>,
    ) -> Result<Response<SessionStream>, Status> {
        self.accept_remote(request.into_inner()).map(Response::new)
    }
}
