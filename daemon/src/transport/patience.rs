//! How long making a data connection to a peer may take. Pure.
//!
//! The setting `data.connect_timeout_ms` is meant for a line with short round trips. The first
//! answer of the peer shows how long a round trip takes, and from then on the limits follow it.

use std::time::{Duration, Instant};

/// How long a handshake may take before another connection is tried; the limit then doubles each
/// time. The kernel waits longer before each retransmission of a lost packet.
const FIRST_HANDSHAKE: Duration = Duration::from_secs(1);

/// Twice the round trips of a handshake (`handshake`), because the other side may get its orders
/// later.
const HANDSHAKE_TRIPS: u32 = 4;

/// The additional round trips for all attempts: two of them, each with the connection itself.
const TRIPS: u32 = 2 * (1 + HANDSHAKE_TRIPS);

/// The longest round trip that is believed (BOUND): a peer could delay its first answer on purpose.
const LONGEST_TRIP: Duration = Duration::from_secs(5);

/// The limits of a node that dials.
#[derive(Debug, Clone)]
pub(crate) struct Patience {
    began: Instant,
    timeout: Duration,
    handshake: Duration,
    /// The shortest one that was measured: a lost packet makes one longer.
    round_trip: Option<Duration>,
}

impl Patience {
    /// Begins now; `timeout` is the limit without a round trip.
    pub(crate) fn new(began: Instant, timeout: Duration) -> Self {
        Self { began, timeout, handshake: FIRST_HANDSHAKE, round_trip: None }
    }

    /// The peer's kernel has answered.
    pub(crate) fn measured(&mut self, round_trip: Duration) {
        let shortest = self.round_trip.map_or(round_trip, |known| known.min(round_trip));
        self.round_trip = Some(shortest.min(LONGEST_TRIP));
    }

    /// How long a handshake that begins now may take.
    pub(crate) fn handshake(&self) -> Duration {
        self.handshake.max(HANDSHAKE_TRIPS * self.round_trip.unwrap_or_default())
    }

    /// A handshake has taken too long: the next one may take longer.
    pub(crate) fn was_silent(&mut self) {
        self.handshake = 2 * self.handshake();
    }

    /// When to give up.
    pub(crate) fn deadline(&self) -> Instant {
        self.began + self.timeout + TRIPS * self.round_trip.unwrap_or_default()
    }

    /// The time until the deadline, for the report.
    pub(crate) fn limit(&self) -> Duration {
        self.deadline() - self.began
    }
}

/// How long the accepting node waits for a handshake. Its kernel has measured the round trip.
pub(crate) fn to_accept(timeout: Duration, round_trip: Duration) -> Duration {
    timeout + HANDSHAKE_TRIPS * round_trip.min(LONGEST_TRIP)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn limits_follow_the_round_trip() {
        let began = Instant::now();
        let mut patience = Patience::new(began, 3 * SECOND);
        assert_eq!((patience.handshake(), patience.limit()), (SECOND, 3 * SECOND));
        patience.measured(Duration::from_millis(1));
        assert_eq!(patience.handshake(), SECOND, "a short one changes little");
        assert_eq!(patience.limit(), Duration::from_millis(3010));
        // A line with 500 ms each way.
        let mut patience = Patience::new(began, 3 * SECOND);
        patience.measured(2 * SECOND);
        patience.measured(SECOND);
        patience.measured(3 * SECOND);
        assert_eq!((patience.handshake(), patience.limit()), (4 * SECOND, 13 * SECOND));
        patience.was_silent();
        assert_eq!(patience.handshake(), 8 * SECOND);
    }

    #[test]
    fn a_peer_can_delay_only_for_a_while() {
        let began = Instant::now();
        let mut patience = Patience::new(began, SECOND);
        patience.measured(Duration::from_secs(3600));
        assert_eq!(patience.deadline(), began + 51 * SECOND, "BOUND");
        assert_eq!(to_accept(SECOND, Duration::from_secs(3600)), 21 * SECOND, "BOUND");
        assert_eq!(to_accept(3 * SECOND, SECOND), 7 * SECOND);
    }
}
