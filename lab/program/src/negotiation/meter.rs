//! Measures the traffic with the coordinator: encoded messages, and all bytes of their sockets.

use std::{
    io::{self, IoSlice},
    net::SocketAddr,
    ops::AddAssign,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use gradwire_proto::NODE_PREFACE;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf},
    net::TcpStream,
};
use tonic::transport::{Channel, Endpoint, Uri};

/// The time limit of a connection (WAIT).
const CONNECT: Duration = Duration::from_secs(5);

/// The traffic in one direction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// The number of messages, without heartbeats, because steps do not cause those.
    pub messages: f64,
    /// The encoded bytes of these messages.
    pub bytes: f64,
    /// All bytes of the sockets above TCP, with the frames of gRPC and HTTP/2, and with heartbeats.
    pub wire_bytes: f64,
}

impl Traffic {
    /// Counts a message.
    pub fn count(&mut self, message: &impl prost::Message) {
        self.messages += 1.0;
        self.bytes += message.encoded_len() as f64;
    }

    /// Divides each figure by `parts`.
    #[must_use]
    pub fn per(self, parts: f64) -> Self {
        let Self { messages, bytes, wire_bytes } = self;
        let per = |all: f64| all / parts.max(1.0);
        Self { messages: per(messages), bytes: per(bytes), wire_bytes: per(wire_bytes) }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.wire_bytes += other.wire_bytes;
    }
}

/// Counts the bytes of a socket.
#[derive(Debug, Default)]
pub struct Wire {
    sent: AtomicU64,
    received: AtomicU64,
}

impl Wire {
    /// The bytes sent and received since the beginning.
    pub fn bytes(&self) -> [u64; 2] {
        [self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed)]
    }
}

/// Connects as a daemon does, and counts the bytes of the socket.
///
/// # Errors
/// The error of gRPC.
pub async fn connect(
    address: SocketAddr,
    wire: &Arc<Wire>,
) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(Duration::from_secs(5))
        .keep_alive_timeout(Duration::from_secs(5));
    let wire = Arc::clone(wire);
    let connector = tower::service_fn(move |_: Uri| {
        let wire = Arc::clone(&wire);
        async move {
            let mut stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            stream.write_all(NODE_PREFACE).await?;
            Ok::<_, io::Error>(TokioIo::new(Metered { stream, wire }))
        }
    });
    endpoint.connect_with_connector(connector).await
}

/// A socket that counts its bytes.
#[derive(Debug)]
struct Metered {
    stream: TcpStream,
    wire: Arc<Wire>,
}

impl Metered {
    fn sent(&self, result: io::Result<usize>) -> Poll<io::Result<usize>> {
        if let Ok(bytes) = result {
            self.wire.sent.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        Poll::Ready(result)
    }
}

impl AsyncRead for Metered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let bytes = buffer.filled().len() - before;
        self.wire.received.fetch_add(bytes as u64, Ordering::Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Metered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write(context, bytes));
        self.sent(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write_vectored(context, slices));
        self.sent(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpListener,
    };

    use super::*;

    #[tokio::test]
    async fn every_byte_is_counted_in_its_direction() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let echo = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = [0; 1000];
            stream.read_exact(&mut bytes).await.unwrap();
            stream.write_all(&bytes[..300]).await.unwrap();
        });
        let wire = Arc::new(Wire::default());
        let stream = TcpStream::connect(address).await.unwrap();
        let mut metered = Metered { stream, wire: Arc::clone(&wire) };
        metered.write_all(&[7; 1000]).await.unwrap();
        let mut bytes = Vec::new();
        metered.read_to_end(&mut bytes).await.unwrap();
        echo.await.unwrap();
        assert_eq!((wire.bytes(), bytes.len()), ([1000, 300], 300));
    }
}
