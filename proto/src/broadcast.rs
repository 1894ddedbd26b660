//! A message of the coordinator that goes to many nodes. All of them share it, and it is encoded
//! once: with 256 nodes, a quarter of the coordinator's time went into copies and encodings of what
//! is the same for all.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut, Bytes};
use prost::Message;
use tonic::{
    Status,
    codec::{Codec, EncodeBuf, Encoder},
};
use tonic_prost::{ProstCodec, ProstDecoder};

use crate::pb;

/// The service `gradwire.v1.Coordinator` with such messages. On the wire it is the same as
/// [`pb::coordinator_server`].
#[expect(clippy::default_constructed_unit_structs, reason = "generated for any codec")]
mod generated {
    tonic::include_proto!("gradwire.v1.Coordinator");
}
pub use generated::coordinator_server as server;

/// A message and, once a node needs it, its encoding.
#[derive(Debug)]
pub struct Broadcast {
    message: pb::CoordinatorMessage,
    encoded: OnceLock<Bytes>,
}

impl Broadcast {
    /// A message that any number of nodes may share.
    pub fn new(message: pb::CoordinatorMessage) -> Arc<Self> {
        Arc::new(Self { message, encoded: OnceLock::new() })
    }

    /// The message, for a node that needs no encoding. It is copied unless this is the last node.
    pub fn into_message(self: Arc<Self>) -> pb::CoordinatorMessage {
        match Arc::try_unwrap(self) {
            Ok(own) => own.message,
            Err(shared) => shared.message.clone(),
        }
    }

    /// How many bytes its encoding has.
    pub fn encoded_len(&self) -> usize {
        self.encoded.get().map_or_else(|| self.message.encoded_len(), Bytes::len)
    }
}

/// Encodes [`Broadcast`]s, and decodes what nodes answer.
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
