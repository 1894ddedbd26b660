//! Connections that are neither many nor idle (BOUND, WAIT). A client that opens connections and
//! says nothing, or asks and never reads, must not use up the descriptors of the service. One that
//! reads what it is sent may stay: somebody watches.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// The most connections at a time. Others wait in the queue of the system.
const CONNECTIONS: usize = 64;

/// How long a connection may exist without taking a byte of an answer. A scraper that comes again
/// makes another one.
const PATIENCE: Duration = Duration::from_secs(30);

/// Accepts a limited number of connections.
pub(crate) struct Guard {
    listener: TcpListener,
    free: Arc<Semaphore>,
    patience: Duration,
}

impl Guard {
    pub(crate) fn new(listener: TcpListener) -> Self {
        Self { listener, free: Arc::new(Semaphore::new(CONNECTIONS)), patience: PATIENCE }
    }
}

impl Listener for Guard {
    type Io = Guarded;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Guarded, SocketAddr) {
        // The semaphore is never closed.
        let permit = self.free.clone().acquire_owned().await.ok();
        // The listener of axum waits where the system has no descriptor left.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let end = Box::pin(sleep(self.patience));
        (Guarded { stream, end, patience: self.patience, _permit: permit }, address)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that ends if it takes nothing for too long.
pub(crate) struct Guarded {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    patience: Duration,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Guarded {
    /// Its stream, as long as there is time.
    fn poll(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for Guarded {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(self.poll(context)?.poll_write(context, bytes))?;
        let end = Instant::now() + self.patience;
        self.end.as_mut().reset(end);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(ready!(Pin::new(&mut self.stream).poll_shutdown(context)))
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, routing::get};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        time::timeout,
    };

    use super::*;

    const LONG: Duration = Duration::from_secs(60);

    /// Clients that say nothing have to go, and then others are served.
    #[tokio::test]
    async fn silent_clients_make_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let guard = Guard { patience: Duration::from_millis(200), ..Guard::new(listener) };
        let router = Router::new().route("/", get(|| std::future::ready("here")));
        let server = tokio::spawn(async move { axum::serve(guard, router).await });
        let mut silent = Vec::new();
        for _ in 0..2 * CONNECTIONS {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        timeout(LONG, client.read_to_string(&mut answer)).await.unwrap().unwrap();
        assert!(answer.ends_with("here"), "{answer}");
        for mut client in silent {
            // Closed without an answer, orderly or not.
            let read = timeout(LONG, client.read(&mut [0; 64])).await.unwrap();
            assert_eq!(read.unwrap_or(0), 0);
        }
        server.abort();
    }
}
