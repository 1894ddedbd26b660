//! The services on the wire: `gradwire.v1.Coordinator` for nodes, `gradwire.v1.Inspect` for
//! people, health and reflection for tools.

use std::{sync::Arc, time::Duration};

use gradwire_proto::{
    FILE_DESCRIPTOR_SET, MAX_CONTROL_MESSAGE,
    pb::{
        self,
        coordinator_server::{Coordinator, CoordinatorServer},
        inspect_server::{Inspect, InspectServer},
    },
};
use tokio::net::TcpListener;
use tokio_stream::{StreamExt, adapters::Map, wrappers::ReceiverStream};
use tonic::{
    Request, Response, Status, Streaming,
    transport::{Server, server::TcpIncoming},
};

use crate::{
    inbox::OVER,
    inspection::Inspection,
    session::{SessionAcceptor, SessionStream},
};

/// The most streams of one connection: a session, and status requests.
const MAX_STREAMS: u32 = 16;

/// How often a silent connection is probed, and how long it may take to answer. Nodes of the
/// world have heartbeats, which are faster.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// The most bytes that may be under way on one connection.
const WINDOW: u32 = 2 << 20;

/// Serves until `stop`.
pub(crate) async fn serve(
    acceptor: SessionAcceptor,
    inspection: Arc<Inspection>,
    listener: TcpListener,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let inspect = InspectServer::new(Shown(inspection.clone()));
    let coordinator = CoordinatorServer::new(acceptor)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE);
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_serving::<CoordinatorServer<SessionAcceptor>>().await;
    let mut server = Server::builder()
        .max_concurrent_streams(MAX_STREAMS)
        .concurrency_limit_per_connection(MAX_STREAMS as usize)
        .initial_stream_window_size(WINDOW)
        .initial_connection_window_size(WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE));
    let mut router = server.add_service(coordinator).add_service(inspect).add_service(health);
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1();
    match reflection {
        Ok(reflection) => router = router.add_service(reflection),
        Err(error) => tracing::warn!(%error, "no reflection: the descriptors are unreadable"),
    }
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    tokio::select! {
        served = router.serve_with_incoming_shutdown(incoming, stop) => served,
        () = inspection.serve() => unreachable!("it has no end"),
    }
}

/// The service for people.
#[derive(Debug)]
struct Shown(Arc<Inspection>);

/// A snapshot as a message of its own.
type Copied = fn(Result<Arc<pb::StatusResponse>, Status>) -> Result<pb::StatusResponse, Status>;

#[tonic::async_trait]
impl Inspect for Shown {
    async fn status(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<pb::StatusResponse>, Status> {
        self.0.look().await.map(Response::new).ok_or_else(|| Status::unavailable(OVER))
    }

    type WatchStream = Map<ReceiverStream<Result<Arc<pb::StatusResponse>, Status>>, Copied>;

    async fn watch(
        &self,
        _: Request<pb::StatusRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let copied: Copied = |seen| seen.map(Arc::unwrap_or_clone);
        Ok(Response::new(ReceiverStream::new(self.0.watch()?).map(copied)))
    }

    type TraceStream = ReceiverStream<Result<pb::TracePart, Status>>;

    async fn trace(
        &self,
        _: Request<pb::TraceRequest>,
    ) -> Result<Response<Self::TraceStream>, Status> {
        Ok(Response::new(ReceiverStream::new(self.0.trace()?)))
    }
}

#[tonic::async_trait]
impl Coordinator for SessionAcceptor {
    type SessionStream = SessionStream;

    async fn session(
        &self,
        request: Request<Streaming<pb::NodeMessage>>,
    ) -> Result<Response<SessionStream>, Status> {
        self.accept(request.into_inner()).map(Response::new)
    }
}
