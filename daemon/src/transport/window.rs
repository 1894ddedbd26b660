//! The sizes of a connection's buffers. Pure.
//!
//! The system's automatic buffers grow until the queue of the line overflows. Then the sender
//! retransmits, and data that waits in memory has left the cache when it is read. The sender's
//! buffer bounds the bytes in flight. So it is small at first and grows only as far as the path
//! needs it: to twice the bytes in flight at the measured rate, as long as that increases the rate.
//! If the path is the limit, the product of rate and round trip is constant, and so is the buffer.
//!
//! The receiver's buffer must be chosen before the first byte arrives, when only the round trip is
//! known. It is large enough for any sender.

use std::time::{Duration, Instant};

/// The first size of the buffers of all connections with a peer together, in bytes: enough for 10
/// Gbit/s with a round trip of a millisecond. A quarter of this slowed such a line down. Twice as
/// much lost packets at the queue of the line, and so did the automatic buffers.
const INITIAL_TOTAL: usize = 2 << 20;

/// The minimum first size of a buffer, in bytes: a smaller one costs system calls, and gains
/// nothing.
const MIN_INITIAL: usize = 256 << 10;

/// The fastest line for a receiver's buffer, in bytes per second: 25 Gbit/s. The system grants
/// twice the requested size, which is enough for 40 Gbit/s.
const MAX_RATE: f64 = 25e9 / 8.0;
/// The limit of a receiver's buffer, in bytes: more than a system grants, but a valid request. A
/// peer that delays the handshake can make its round trip as long as it likes (TRUST).
const MAX_SIZE: f64 = (1 << 30) as f64;

/// A rate is measured over this many buffers, because the first one is filled immediately.
const SAMPLE: u64 = 8;

#[derive(Debug, Clone)]
pub(crate) struct Window {
    round_trip: Duration,
    size: u64,
    /// Set when the system has not granted more.
    at_most: bool,
    moved: u64,
    since: Instant,
}

impl Window {
    /// The first size of each buffer, in bytes, for `connections` connections with a peer.
    pub(crate) fn initial(connections: u32) -> usize {
        (INITIAL_TOTAL / connections.max(1) as usize).max(MIN_INITIAL)
    }

    /// The size of a receive buffer, in bytes, for `connections` connections with a peer and this
    /// round trip. The system may grant less.
    pub(crate) fn receive_buffer(connections: u32, round_trip: Duration) -> usize {
        let under_way = MAX_RATE * round_trip.as_secs_f64() / f64::from(connections.max(1));
        Self::initial(connections).max(under_way.min(MAX_SIZE) as usize)
    }

    /// A buffer of `size` bytes on a path with this round trip.
    pub(crate) fn new(size: usize, round_trip: Duration, now: Instant) -> Self {
        Self { round_trip, size: size as u64, at_most: false, moved: 0, since: now }
    }

    /// Bytes have moved. Returns the size to which the buffer should grow, if it should.
    pub(crate) fn moved(&mut self, bytes: usize, now: Instant) -> Option<usize> {
        self.moved += bytes as u64;
        if self.at_most || self.moved < SAMPLE * self.size {
            return None;
        }
        let elapsed = now.saturating_duration_since(self.since).max(Duration::from_micros(1));
        let rate = self.moved as f64 / elapsed.as_secs_f64();
        self.moved = 0;
        self.since = now;
        let wanted = 2.0 * rate * self.round_trip.as_secs_f64();
        // At most doubled: the effect on the rate is only known once the buffer is used.
        let wanted = wanted.min(2.0 * self.size as f64) as u64;
        (wanted > self.size + self.size / 4).then(|| {
            self.size = wanted;
            wanted as usize
        })
    }

    /// The system has not granted a request, so no more are made.
    pub(crate) fn settle(&mut self) {
        self.at_most = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 1 << 20;

    /// The final window on a line of `rate` bytes per second.
    fn settled(rate: f64, round_trip: Duration) -> u64 {
        let mut now = Instant::now();
        let mut window = Window::new(SIZE, round_trip, now);
        for _ in 0..10_000 {
            let rate = rate.min(window.size as f64 / round_trip.as_secs_f64());
            now += Duration::from_secs_f64(65_536.0 / rate);
            window.moved(65_536, now);
        }
        window.size
    }

    #[test]
    fn a_short_path_keeps_the_first_size() {
        assert_eq!(settled(1.25e9, Duration::from_micros(100)), SIZE as u64);
        assert_eq!(settled(125e6, Duration::from_millis(2)), SIZE as u64);
    }

    #[test]
    fn a_long_path_gets_twice_the_bytes_in_flight() {
        let product = 1.25e9 * 0.02;
        let size = settled(1.25e9, Duration::from_millis(20)) as f64;
        assert!(size >= 1.5 * product && size <= 2.1 * product, "{size}");
    }

    #[test]
    fn a_receive_buffer_does_not_limit_the_rate() {
        // A peer that delays the handshake gets no more than the limit.
        assert_eq!(Window::receive_buffer(1, Duration::from_secs(3)), 1 << 30);
        assert_eq!(Window::receive_buffer(2, Duration::from_micros(100)), SIZE);
        let far = Duration::from_millis(10);
        for connections in [1, 2, 8] {
            let receive_buffer =
                Window::receive_buffer(connections, far) as u64 * u64::from(connections);
            assert!(receive_buffer >= settled(1.25e9, far), "{connections}: {receive_buffer}");
        }
    }

    #[test]
    fn a_refused_size_is_not_requested_again() {
        let mut now = Instant::now();
        let mut window = Window::new(SIZE, Duration::from_secs(1), now);
        let mut asked = 0;
        for _ in 0..1000 {
            now += Duration::from_micros(100);
            if window.moved(1 << 20, now).is_some() {
                asked += 1;
                window.settle();
            }
        }
        assert_eq!(asked, 1);
    }

    #[test]
    fn an_idle_connection_does_not_grow() {
        let mut now = Instant::now();
        let mut window = Window::new(SIZE, Duration::from_millis(1), now);
        for _ in 0..100 {
            now += Duration::from_secs(1);
            assert_eq!(window.moved(1 << 20, now), None);
        }
    }
}
