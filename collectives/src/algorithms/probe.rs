//! Schedules that measure links. Their data is meaningless; only the time counts.
//!
//! The daemon runs them on its ordinary lanes, as pieces without tensors. So they use the same
//! connections, threads and chunks as the pieces of a job.

use std::{fmt, str::FromStr};

use super::{Algorithm, Kind, generate, parts::build::Builder};
use crate::{
    layout,
    schedule::{Action, Block, Schedule},
    topology::Topology,
};

/// The bytes of a message that measures latency.
const SMALL: u64 = 64;

/// What the participants of a probe do. Messages of the first two have 64 bytes. The last two
/// measure memory instead of links, and need no schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// The first of two participants sends this many messages, and waits for the answer to each.
    RoundTrips(u32),
    /// The first of two participants sends this many messages without waiting.
    Messages(u32),
    /// Two participants send this many bytes to each other at the same time.
    Exchange(u64),
    /// All participants send this many bytes each to the first one at the same time.
    Gather(u64),
    /// The only participant adds this many bytes of f32 to others.
    Reduce(u64),
    /// The only participant copies this many bytes.
    Copy(u64),
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoundTrips(count) => write!(f, "round-trips({count})"),
            Self::Messages(count) => write!(f, "messages({count})"),
            Self::Exchange(bytes) => write!(f, "exchange({bytes})"),
            Self::Gather(bytes) => write!(f, "gather({bytes})"),
            Self::Reduce(bytes) => write!(f, "reduce({bytes})"),
            Self::Copy(bytes) => write!(f, "copy({bytes})"),
        }
    }
}

/// A text that is not a pattern.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown probe {0:?}")]
pub struct UnknownPattern(String);

impl FromStr for Pattern {
    type Err = UnknownPattern;

    fn from_str(text: &str) -> Result<Self, UnknownPattern> {
        let unknown = || UnknownPattern(text.chars().take(64).collect());
        let (name, number) =
            text.strip_suffix(')').and_then(|text| text.split_once('(')).ok_or_else(unknown)?;
        let bytes: u64 = number.parse().map_err(|_| unknown())?;
        let count = || u32::try_from(bytes).map_err(|_| unknown());
        match name {
            "round-trips" => Ok(Self::RoundTrips(count()?)),
            "messages" => Ok(Self::Messages(count()?)),
            "exchange" => Ok(Self::Exchange(bytes)),
            "gather" => Ok(Self::Gather(bytes)),
            "reduce" => Ok(Self::Reduce(bytes)),
            "copy" => Ok(Self::Copy(bytes)),
            _ => Err(unknown()),
        }
    }
}

impl Pattern {
    /// The most messages of a probe (BOUND).
    pub const MAX_MESSAGES: u32 = 1024;

    /// The most bytes that a participant of a probe holds (BOUND).
    pub const MAX_BYTES: u64 = 64 << 20;

    /// Whether this number of participants can run it within the bounds (TRUST).
    pub fn fits(self, participants: u32) -> bool {
        match self {
            Self::RoundTrips(count) | Self::Messages(count) => {
                participants == 2 && (1..=Self::MAX_MESSAGES).contains(&count)
            }
            Self::Exchange(bytes) => participants == 2 && fits(bytes, 2),
            Self::Gather(bytes) => participants >= 2 && fits(bytes, participants),
            Self::Reduce(bytes) | Self::Copy(bytes) => {
                participants == 1 && fits(bytes, 3) && bytes.is_multiple_of(SMALL)
            }
        }
    }

    /// The schedule of participant `me`, over elements of one byte. Its blocks are those that this
    /// participant holds.
    ///
    /// # Panics
    /// If `me` is not one of the participants, or if they can't run it ([`Self::fits`]).
    pub fn schedule(self, participants: u32, me: u32) -> Schedule {
        assert!(me < participants && self.fits(participants), "{self:?} of {participants}");
        let flat = Topology::flat(participants);
        let direct = |kind, bytes: u64| {
            let all = bytes * u64::from(participants);
            layout::compacted(generate(kind, Algorithm::Direct, &flat, me, all))
        };
        match self {
            Self::RoundTrips(count) => round_trips(count, me),
            Self::Messages(count) => messages(count, me),
            Self::Exchange(bytes) => direct(Kind::Allgather, bytes),
            Self::Gather(bytes) => direct(Kind::Gather { root: 0 }, bytes),
            Self::Reduce(_) | Self::Copy(_) => Schedule::empty(participants, me),
        }
    }
}

fn fits(bytes: u64, participants: u32) -> bool {
    bytes >= SMALL && bytes <= Pattern::MAX_BYTES / u64::from(participants)
}

/// The same block there and back: each receives what it sends next.
fn round_trips(count: u32, me: u32) -> Schedule {
    let mut builder = Builder::new(1);
    let peer = 1 - me;
    for trip in 0..count {
        let (first, second) = if me == 0 {
            (Action::send(peer), Action::copy(peer))
        } else {
            (Action::copy(peer), Action::send(peer))
        };
        builder.add(2 * trip, first, 0);
        builder.add(2 * trip + 1, second, 0);
    }
    builder.finish(2, me, vec![Block { offset: 0, count: SMALL }])
}

fn messages(count: u32, me: u32) -> Schedule {
    let mut builder = Builder::new(count as usize);
    let action = if me == 0 { Action::send(1) } else { Action::copy(0) };
    (0..count).for_each(|message| builder.add(message, action, message));
    let block = |message| Block { offset: u64::from(message) * SMALL, count: SMALL };
    builder.finish(2, me, (0..count).map(block).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(schedule: &Schedule) -> u64 {
        let sends = schedule.steps.iter().filter(|step| step.action.sends_to().is_some());
        sends.map(|step| schedule.elements(step)).sum()
    }

    fn received(schedule: &Schedule) -> u64 {
        let receives = schedule.steps.iter().filter(|step| step.action.receives_from().is_some());
        receives.map(|step| schedule.elements(step)).sum()
    }

    #[test]
    fn each_moves_what_it_says() {
        for (pattern, participants, both) in [
            (Pattern::RoundTrips(5), 2, [(320, 320), (320, 320)]),
            (Pattern::Messages(5), 2, [(320, 0), (0, 320)]),
            (Pattern::Exchange(4096), 2, [(4096, 4096), (4096, 4096)]),
            (Pattern::Gather(4096), 5, [(0, 4 * 4096), (4096, 0)]),
        ] {
            for (me, expected) in (0..).zip(both) {
                let schedule = pattern.schedule(participants, me);
                assert_eq!((sent(&schedule), received(&schedule)), expected, "{pattern:?} {me}");
            }
        }
    }

    /// A message is answered only after it has arrived.
    #[test]
    fn round_trips_wait_for_each_other() {
        for me in 0..2 {
            let schedule = Pattern::RoundTrips(3).schedule(2, me);
            assert_eq!(schedule.steps.len(), 6);
            for (index, step) in (0..).zip(schedule.steps.iter()).skip(1) {
                assert_eq!(step.after, [index - 1], "{schedule:?}");
            }
        }
    }

    #[test]
    fn large_and_invalid_patterns_do_not_fit() {
        for (pattern, participants) in [
            (Pattern::RoundTrips(0), 2),
            (Pattern::RoundTrips(1), 3),
            (Pattern::Messages(1025), 2),
            (Pattern::Exchange(0), 2),
            (Pattern::Exchange(u64::MAX), 2),
            (Pattern::Gather(4096), 1),
            (Pattern::Gather((64 << 20) / 3), 4),
            (Pattern::Reduce(4096), 2),
            (Pattern::Copy(100), 1),
        ] {
            assert!(!pattern.fits(participants), "{pattern:?} {participants}");
        }
    }

    #[test]
    fn printed_patterns_can_be_read_again() {
        for pattern in [
            Pattern::RoundTrips(7),
            Pattern::Messages(1),
            Pattern::Exchange(1 << 40),
            Pattern::Gather(64),
            Pattern::Reduce(128),
            Pattern::Copy(0),
        ] {
            assert_eq!(pattern.to_string().parse(), Ok(pattern));
        }
        for text in ["", "exchange", "exchange(", "exchange()", "exchange(-1)", "copy(1", "x(1)"] {
            assert!(text.parse::<Pattern>().is_err(), "{text}");
        }
        assert!("round-trips(4294967296)".parse::<Pattern>().is_err());
    }
}
