//! A message of the coordinator to many nodes, which share one copy and one encoding. With 256
//! nodes, a quarter of the coordinator's time went into copying and encoding the same message for
//! each.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut, Bytes};
use gradwire_proto::pb;
use prost::Message;
use tonic::{
    Status,
    codec::{Codec, EncodeBuf, Encoder},
};
use tonic_prost::{ProstCodec, ProstDecoder};

/// The service `gradwire.v1.Coordinator` with such messages. It has the same wire format as
/// [`coordinator_server`](crate::coordinator_server).
#[expect(clippy::default_constructed_unit_structs, reason = "generated for any codec")]
mod generated {
    include!("../generated/gradwire.v1.Coordinator.rs");
}
pub use generated::coordinator_server as server;

/// A message and its encoding, which is made when a node needs it.
#[derive(Debug)]
pub struct Broadcast {
    message: pb::CoordinatorMessage,
    encoded: OnceLock<Bytes>,
}

impl Broadcast {
    /// A message that several nodes share.
    pub fn new(message: pb::CoordinatorMessage) -> Arc<Self> {
        Arc::new(Self { message, encoded: OnceLock::new() })
    }

    /// The message, for a node that needs no encoding. Copied unless this is the last reference.
    pub fn into_message(self: Arc<Self>) -> pb::CoordinatorMessage {
        match Arc::try_unwrap(self) {
            Ok(own) => own.message,
            Err(shared) => shared.message.clone(),
        }
    }

    /// The length of its encoding in bytes.
    pub fn encoded_len(&self) -> usize {
        self.encoded.get().map_or_else(|| self.message.encoded_len(), Bytes::len)
    }
}

/// Encodes [`Broadcast`]s, and decodes the messages of nodes.
#[derive(Debug, Default)]
pub struct BroadcastCodec;

impl Codec for BroadcastCodec {
    type Encode = Arc<Broadcast>;
    type Decode = pb::NodeMessage;
    type Encoder = BroadcastEncoder;
    type Decoder = ProstDecoder<pb::NodeMessage>;

    fn encoder(&mut self) -> BroadcastEncoder {
        BroadcastEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<pb::CoordinatorMessage, _>::default().decoder()
    }
}

/// The encoder of [`BroadcastCodec`].
#[derive(Debug)]
pub struct BroadcastEncoder;

impl Encoder for BroadcastEncoder {
    type Item = Arc<Broadcast>;
    type Error = Status;

    fn encode(&mut self, item: Arc<Broadcast>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        let encoded = item.encoded.get_or_init(|| item.message.encode_to_vec().into());
        buffer.put_slice(encoded);
        Ok(())
    }
}
