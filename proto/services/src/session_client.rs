//! Opens the stream of a node, whose messages are [`Shared`]: the node keeps them until they have
//! arrived. It has the same wire format as [`coordinator_client`](crate::coordinator_client).

use std::sync::Arc;

use gradwire_proto::{MAX_CONTROL_MESSAGE, pb};
use tonic::{
    Request, Status, Streaming,
    client::Grpc,
    codec::Codec,
    codegen::{http::uri::PathAndQuery, tokio_stream::Stream},
    transport::Channel,
};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::shared::{Shared, SharedEncoder};

const PATH: &str = "/gradwire.v1.Coordinator/Session";

/// A message of a node.
pub type FromNode = Shared<pb::NodeMessage>;

#[derive(Debug)]
struct NodeCodec;

impl Codec for NodeCodec {
    type Encode = Arc<FromNode>;
    type Decode = pb::CoordinatorMessage;
    type Encoder = SharedEncoder<pb::NodeMessage>;
    type Decoder = ProstDecoder<pb::CoordinatorMessage>;

    fn encoder(&mut self) -> Self::Encoder {
        SharedEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<pb::NodeMessage, _>::default().decoder()
    }
}

/// Opens a stream with a node's `messages`. Returns those of the coordinator.
///
/// # Errors
/// The status with which the coordinator refuses, or that the connection is broken.
pub async fn open(
    channel: Channel,
    messages: impl Stream<Item = Arc<FromNode>> + Send + 'static,
) -> Result<Streaming<pb::CoordinatorMessage>, Status> {
    let mut grpc = Grpc::new(channel)
        .max_decoding_message_size(MAX_CONTROL_MESSAGE)
        .max_encoding_message_size(MAX_CONTROL_MESSAGE);
    grpc.ready().await.map_err(|error| Status::unavailable(format!("not ready: {error}")))?;
    let path = PathAndQuery::from_static(PATH);
    Ok(grpc.streaming(Request::new(messages), path, NodeCodec).await?.into_inner())
}
