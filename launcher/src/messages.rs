//! Reads the messages of [`gradwire_proto::launch`], line by line.

use gradwire_proto::launch::{self, NotAMessage};
use serde::de::DeserializeOwned;
use tokio::io::AsyncRead;
use tokio_stream::StreamExt;
use tokio_util::codec::{FramedRead, LinesCodec};

/// The longest message, in bytes (BOUND): an environment fits, a runaway does not.
pub const MAX_MESSAGE: usize = 8 << 20;

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The connection broke, or a message is too long.
    #[error("{0}")]
    Broken(#[from] tokio_util::codec::LinesCodecError),
    /// A line is no message.
    #[error(transparent)]
    Strange(#[from] NotAMessage),
}

/// The messages of the other side.
#[derive(Debug)]
pub struct Reader<R>(FramedRead<R, LinesCodec>);

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        Self(FramedRead::new(input, LinesCodec::new_with_max_length(MAX_MESSAGE)))
    }

    /// The next message, or `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// [`MessageError`] for what is no message (TRUST).
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<Result<T, MessageError>> {
        Some(match self.0.next().await? {
            Ok(line) => launch::from_line(&line).map_err(Into::into),
            Err(error) => Err(error.into()),
        })
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::launch::{Report, to_line};

    use super::*;

    #[tokio::test]
    async fn messages_are_read_until_the_end() {
        let line = format!("{}Welcome to n1!\n", to_line(&Report::Stopped));
        let mut reader = Reader::new(line.as_bytes());
        assert_eq!(reader.next::<Report>().await.unwrap().unwrap(), Report::Stopped);
        let strange = reader.next::<Report>().await.unwrap().unwrap_err().to_string();
        assert!(strange.starts_with("'Welcome to n1!' is not a message of gradwire"), "{strange}");
        assert!(reader.next::<Report>().await.is_none());
    }
}
