//! A message that several streams send or keep: they share one copy and one encoding.

use std::sync::{Arc, OnceLock};

use bytes::{BufMut, Bytes};
use prost::Message;
use tonic::{
    Status,
    codec::{EncodeBuf, Encoder},
};

/// A message and its encoding, which is made when it is needed.
#[derive(Debug)]
pub struct Shared<M> {
    message: M,
    encoded: OnceLock<Bytes>,
}

impl<M: Message + Clone> Shared<M> {
    /// A message to be shared.
    pub fn new(message: M) -> Arc<Self> {
        Arc::new(Self { message, encoded: OnceLock::new() })
    }

    /// The message, for a receiver that needs no encoding. Copied unless this is the last
    /// reference.
    pub fn into_message(self: Arc<Self>) -> M {
        match Arc::try_unwrap(self) {
            Ok(own) => own.message,
            Err(shared) => shared.message.clone(),
        }
    }

    /// The length of its encoding in bytes.
    pub fn encoded_len(&self) -> usize {
        self.encoded.get().map_or_else(|| self.message.encoded_len(), Bytes::len)
    }

    /// Encodes it, and keeps the encoding for the streams. Returns its length in bytes.
    pub fn encode(&self) -> usize {
        self.encoded().len()
    }

    /// Its encoding.
    fn encoded(&self) -> &Bytes {
        self.encoded.get_or_init(|| self.message.encode_to_vec().into())
    }
}

/// Encodes [`Shared`] messages.
#[derive(Debug)]
pub struct SharedEncoder<M>(std::marker::PhantomData<fn(M)>);

impl<M> Default for SharedEncoder<M> {
    fn default() -> Self {
        Self(std::marker::PhantomData)
    }
}

impl<M: Message + Clone> Encoder for SharedEncoder<M> {
    type Item = Arc<Shared<M>>;
    type Error = Status;

    fn encode(&mut self, item: Arc<Shared<M>>, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(item.encoded());
        Ok(())
    }
}
