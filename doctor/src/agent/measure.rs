//! Measures the path to another agent, which answers: latency, a large message, and the rate of
//! both directions at once.

use std::{
    io,
    net::SocketAddr,
    time::{Duration, Instant},
};

use gradwire_proto::Secret;
use nix::sys::socket::{getsockopt, sockopt::IpMtu};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

use super::connect::{Kind, dial};
use crate::{
    facts::Measured,
    limits::{
        ARRIVING, LARGE, LARGE_WAIT, LATENCY, MAX_SENT, MAX_STREAMS, PING, PINGS, SENDING, WARM_UP,
    },
};

/// How many bytes are sent or received with one call.
const CHUNK: usize = 256 << 10;

/// The first byte of a message: the message has one byte, or [`LARGE`] bytes.
const SMALL_MESSAGE: u8 = 1;
const LARGE_MESSAGE: u8 = 2;

/// The dialling side. Returns the connections for the measurement of the rate, which take turns
/// among the peer's addresses; none if large messages are lost.
///
/// # Errors
/// Why nothing could be measured.
pub async fn measure(
    addresses: &[SocketAddr],
    secret: &Secret,
    own: u32,
    streams: u32,
    limit: Duration,
) -> Result<(Measured, Vec<TcpStream>), String> {
    let first = *addresses.first().ok_or("no address is given")?;
    let connect = |address, kind| dial(address, secret, own, kind, limit);
    let mut stream = connect(first, Kind::Ping).await?;
    let round_trip = latency(&mut stream).await.map_err(|error| error.to_string())?;
    let lost_large = match timeout(LARGE_WAIT, exchange_large(&mut stream)).await {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("it did not come back within {} ms", LARGE_WAIT.as_millis())),
    };
    let path_mtu = getsockopt(&stream, IpMtu).ok().and_then(|bytes| u32::try_from(bytes).ok());
    let mut bulk = Vec::new();
    if lost_large.is_none() {
        // As in a job, each interface has the same number of connections.
        let (streams, all) = (streams as usize, addresses.len());
        let even = streams.next_multiple_of(all).min(MAX_STREAMS as usize / all * all);
        for address in addresses.iter().cycle().take(even) {
            bulk.push(connect(*address, Kind::Bulk).await?);
        }
    }
    let round_trip_us = u64::try_from(round_trip.as_micros()).unwrap_or(u64::MAX);
    Ok((Measured { round_trip_us, path_mtu, lost_large }, bulk))
}

/// The median of many round trips: a few slow ones don't matter.
async fn latency(stream: &mut TcpStream) -> io::Result<Duration> {
    let mut trips = Vec::new();
    let began = Instant::now();
    while trips.len() < WARM_UP + PINGS && (trips.len() <= WARM_UP || began.elapsed() < LATENCY) {
        let sent = Instant::now();
        let mut answer = [0];
        let trip = async {
            stream.write_all(&[SMALL_MESSAGE]).await?;
            stream.read_exact(&mut answer).await
        };
        timeout(PING, trip)
            .await
            .map_err(|_| io::Error::other(format!("no answer within {} ms", PING.as_millis())))??;
        trips.push(sent.elapsed());
    }
    let counted = &mut trips[WARM_UP..];
    counted.sort_unstable();
    Ok(counted[counted.len() / 2])
}

async fn exchange_large(stream: &mut TcpStream) -> io::Result<()> {
    let mut message = vec![0; LARGE];
    message[0] = LARGE_MESSAGE;
    stream.write_all(&message).await?;
    stream.read_exact(&mut message).await?;
    Ok(())
}

/// Answers small and large messages until the other side closes.
///
/// # Errors
/// When the connection ends.
pub async fn answer(stream: &mut TcpStream) -> io::Result<()> {
    let mut message = vec![0; LARGE];
    loop {
        stream.read_exact(&mut message[..1]).await?;
        let length = if message[0] == LARGE_MESSAGE { LARGE } else { 1 };
        stream.read_exact(&mut message[1..length]).await?;
        stream.write_all(&message[..length]).await?;
    }
}

/// Sends as fast as possible for a fixed time, and receives what the other side sends in the same
/// way. Returns the bytes that arrived and how long that took, in microseconds.
pub async fn carry(stream: TcpStream, streams: u32) -> (u64, u64) {
    let (from, to) = stream.into_split();
    let most = MAX_SENT / u64::from(streams.max(1));
    let limit = SENDING + ARRIVING;
    let (received, _) = tokio::join!(receive(from, limit), timeout(limit, send(to, most)));
    received
}

async fn send(mut to: OwnedWriteHalf, most: u64) -> io::Result<()> {
    let chunk = vec![0; CHUNK];
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < SENDING && sent < most {
        to.write_all(&chunk).await?;
        sent += CHUNK as u64;
    }
    to.shutdown().await
}

/// Counts from the end of the first read, without its bytes: when they began to arrive is unknown.
async fn receive(mut from: OwnedReadHalf, limit: Duration) -> (u64, u64) {
    let deadline = Instant::now() + limit;
    let mut chunk = vec![0; CHUNK];
    let (mut bytes, mut first, mut last) = (0, None, Instant::now());
    while let Ok(Ok(read)) = tokio::time::timeout_at(deadline.into(), from.read(&mut chunk)).await {
        if read == 0 {
            break;
        }
        last = Instant::now();
        match first {
            None => first = Some(last),
            Some(_) => bytes += read as u64,
        }
    }
    let took = first.map_or(Duration::ZERO, |first| last - first);
    (bytes, u64::try_from(took.as_micros()).unwrap_or(u64::MAX))
}
