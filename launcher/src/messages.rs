//! Reads the messages of [`gradwire_services::launch`], line by line.

use gradwire_services::launch::{self, NotAMessage};
use serde::de::DeserializeOwned;
use tokio::io::AsyncRead;
use tokio_stream::StreamExt;
use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead};

/// The longest message, in bytes (BOUND): an environment fits, runaway output does not.
pub const MAX_MESSAGE: usize = 8 << 20;

/// Why a message could not be read.
#[derive(Debug, thiserror::Error)]
pub enum MessageError {
    /// The connection broke, or a message is too long.
    #[error("{0}")]
    Broken(#[from] AnyDelimiterCodecError),
    /// A line is not a message.
    #[error(transparent)]
    Strange(#[from] NotAMessage),
}

/// The messages of the other side. A login may print a greeting before the first one, in any
/// encoding and without a newline.
#[derive(Debug)]
pub struct Reader<R> {
    lines: FramedRead<R, AnyDelimiterCodec>,
    has_begun: bool,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    /// Reads from `input`.
    pub fn new(input: R) -> Self {
        let end = b"\n".to_vec();
        let lines = AnyDelimiterCodec::new_with_max_length(end.clone(), end, MAX_MESSAGE);
        Self { lines: FramedRead::new(input, lines), has_begun: false }
    }

    /// The next message, or `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// [`MessageError`] for anything that is not a message (TRUST).
    pub async fn next<T: DeserializeOwned>(&mut self) -> Option<Result<T, MessageError>> {
        let line = match self.lines.next().await? {
            Ok(line) => line,
            Err(error) => return Some(Err(error.into())),
        };
        let text = String::from_utf8_lossy(&line);
        let message = match (launch::from_line(&text), text.find("{\"")) {
            (Err(strange), Some(at)) if !self.has_begun => {
                launch::from_line(&text[at..]).map_err(|_| strange)
            }
            (message, _) => message,
        };
        self.has_begun |= message.is_ok();
        Some(message.map_err(Into::into))
    }
}

#[cfg(test)]
mod tests {
    use gradwire_services::launch::{Report, to_line};

    use super::*;

    #[tokio::test]
    async fn messages_are_read_until_the_end() {
        let line = format!("{}Welcome to n1!\n", to_line(&Report::Stopped));
        let mut reader = Reader::new(line.as_bytes());
        assert_eq!(reader.next::<Report>().await.unwrap().unwrap(), Report::Stopped);
        let strange = reader.next::<Report>().await.unwrap().unwrap_err().to_string();
        assert!(strange.starts_with("'Welcome to n1!' is not a Gradwire message"), "{strange}");
        assert!(reader.next::<Report>().await.is_none());
    }

    #[tokio::test]
    async fn a_greeting_hides_no_message() {
        let stopped = to_line(&Report::Stopped);
        let greetings: [&[u8]; 3] = [b"Gr\xfc\xdfe\r\n", b"\x1b]0;n1\x07", b"Gr\xfc\xdfe {}: "];
        for greeting in greetings {
            let open = [greeting, stopped.as_bytes(), greeting, stopped.as_bytes()].concat();
            let mut reader = Reader::new(&open[..]);
            let mut next = reader.next::<Report>().await.unwrap();
            if greeting.ends_with(b"\n") {
                assert!(next.is_err(), "{next:?}");
                next = reader.next::<Report>().await.unwrap();
            }
            assert_eq!(next.unwrap(), Report::Stopped);
            // Only the first message may follow a greeting.
            let strange = reader.next::<Report>().await.unwrap().unwrap_err().to_string();
            assert!(strange.contains("is not a Gradwire message"), "{strange}");
        }
    }
}
