//! A message of the coordinator to many nodes, which share one copy and one encoding. With 256
//! nodes, a quarter of the coordinator's time went into copying and encoding the same message for
//! each.

use gradwire_proto::pb;
use tonic::codec::Codec;
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::shared::{Shared, SharedEncoder};

/// The service `gradwire.v1.Coordinator` with such messages. It has the same wire format as
/// [`coordinator_server`](crate::coordinator_server).
#[expect(clippy::default_constructed_unit_structs, reason = "generated for any codec")]
mod generated {
    include!("../generated/gradwire.v1.Coordinator.rs");
}
pub use generated::coordinator_server as server;

/// A message that several nodes share.
pub type Broadcast = Shared<pb::CoordinatorMessage>;

/// Encodes [`Broadcast`]s, and decodes the messages of nodes.
#[derive(Debug, Default)]
pub struct BroadcastCodec;

impl Codec for BroadcastCodec {
    type Encode = std::sync::Arc<Broadcast>;
    type Decode = pb::NodeMessage;
    type Encoder = SharedEncoder<pb::CoordinatorMessage>;
    type Decoder = ProstDecoder<pb::NodeMessage>;

    fn encoder(&mut self) -> Self::Encoder {
        SharedEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<pb::CoordinatorMessage, _>::default().decoder()
    }
}
