//! Limits the number and the idle time of connections (BOUND, WAIT). A client that opens
//! connections and sends nothing, or asks and never reads, must not use up the descriptors of the
//! service, nor keep others waiting. A client that reads its answers may stay.

use std::{
    io::{self, ErrorKind},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::serve::Listener;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep, timeout_at},
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// The most connections at a time. Others wait in the queue of the system.
const CONNECTIONS: usize = 64;

/// A connection is closed if the client reads nothing for this time. A scraper can reconnect.
const IDLE_LIMIT: Duration = Duration::from_secs(30);

/// After this time without reading, a connection can be closed to make room for another.
const IDLE: Duration = Duration::from_secs(1);

/// Accepts a limited number of connections. If there are too many, the longest idle one is closed.
pub(crate) struct Guard {
    listener: TcpListener,
    free: Arc<Semaphore>,
    open: Vec<Weak<Shared>>,
    idle_limit: Duration,
}

/// What the guard knows about a connection.
struct Shared {
    /// When its client last read something; at first, when it was accepted.
    used: Mutex<Instant>,
    /// Closes it, to make room for another one.
    evict: CancellationToken,
}

impl Guard {
    pub(crate) fn new(listener: TcpListener) -> Self {
        let free = Arc::new(Semaphore::new(CONNECTIONS));
        Self { listener, free, open: Vec::new(), idle_limit: IDLE_LIMIT }
    }

    /// Waits until there is room for one more connection, and closes idle ones to make room. The
    /// semaphore is never closed.
    async fn room(&mut self) -> Option<OwnedSemaphorePermit> {
        let mut earliest = Instant::now();
        loop {
            self.open.retain(|shared| shared.strong_count() > 0);
            let others = self.open.iter().filter_map(Weak::upgrade);
            let oldest = others.min_by_key(|shared| *shared.used.lock());
            let idle_at = oldest.as_ref().map_or(earliest, |oldest| *oldest.used.lock() + IDLE);
            let due = idle_at.max(earliest);
            if let Ok(permit) = timeout_at(due, self.free.clone().acquire_owned()).await {
                return permit.ok();
            }
            // Its client may have read something meanwhile.
            if let Some(oldest) = oldest.filter(|oldest| oldest.used.lock().elapsed() >= IDLE) {
                *oldest.used.lock() = Instant::now();
                oldest.evict.cancel();
                // Evicts only one for each new connection, by giving it time to close.
                earliest = Instant::now() + IDLE;
            }
        }
    }
}

impl Listener for Guard {
    type Io = Guarded;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Guarded, SocketAddr) {
        // axum's listener waits if the system has no descriptor left.
        let (stream, address) = Listener::accept(&mut self.listener).await;
        let permit = self.room().await;
        let shared =
            Arc::new(Shared { used: Mutex::new(Instant::now()), evict: CancellationToken::new() });
        self.open.push(Arc::downgrade(&shared));
        let end = Box::pin(sleep(self.idle_limit));
        let evicted = Box::pin(shared.evict.clone().cancelled_owned());
        (
            Guarded { stream, end, evicted, shared, idle_limit: self.idle_limit, _permit: permit },
            address,
        )
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that is closed if its client reads nothing for too long.
pub(crate) struct Guarded {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    evicted: Pin<Box<WaitForCancellationFutureOwned>>,
    shared: Arc<Shared>,
    idle_limit: Duration,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Guarded {
    /// The stream; an error once the connection is idle for too long or evicted.
    fn poll(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        let is_over = self.end.as_mut().poll(context).is_ready();
        match is_over || self.evicted.as_mut().poll(context).is_ready() {
            true => Err(ErrorKind::TimedOut.into()),
            false => Ok(Pin::new(&mut self.stream)),
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
        let now = Instant::now();
        let end = now + self.idle_limit;
        self.end.as_mut().reset(end);
        *self.shared.used.lock() = now;
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

    #[tokio::test]
    async fn silent_clients_make_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let guard = Guard { idle_limit: Duration::from_millis(200), ..Guard::new(listener) };
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
            // Closed without an answer, cleanly or not.
            let read = timeout(LONG, client.read(&mut [0; 64])).await.unwrap();
            assert_eq!(read.unwrap_or(0), 0);
        }
        server.abort();
    }

    /// A new client is served at once although all connections are in use by silent clients whose
    /// limit is not over. A client that reads its answers stays.
    #[tokio::test]
    async fn the_longest_idle_connection_makes_room() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let guard = Guard { idle_limit: 10 * LONG, ..Guard::new(listener) };
        let router = Router::new().route("/", get(|| std::future::ready("here")));
        let server = tokio::spawn(async move { axum::serve(guard, router).await });
        let mut regular = TcpStream::connect(address).await.unwrap();
        let mut ask = async || {
            regular.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            let mut answer = Vec::new();
            while !answer.ends_with(b"here") {
                assert!(timeout(LONG, regular.read_buf(&mut answer)).await.unwrap().unwrap() > 0);
            }
        };
        ask().await;
        let mut idle = Vec::new();
        for _ in 1..CONNECTIONS {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        for _ in 0..3 {
            // The others are idle for longer than the regular client.
            ask().await;
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.0\r\n\r\n").await.unwrap();
            let mut answer = String::new();
            timeout(LONG, client.read_to_string(&mut answer)).await.unwrap().unwrap();
            assert!(answer.ends_with("here"), "{answer}");
        }
        ask().await;
        // Only one was evicted: each new client had disconnected before the next one.
        let gone = idle.iter().filter(|client| client.try_read(&mut [0; 1]).is_ok()).count();
        assert_eq!(gone, 1);
        server.abort();
    }
}
