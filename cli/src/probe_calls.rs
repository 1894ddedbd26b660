//! What `gradwire probe` measures as a rank: what the coordinator's probe of links leaves out.
//!
//! - A call takes time besides its operations: ranks submit, nodes announce, and ranks wake up
//!   again. A barrier moves no data, so it takes just that.
//! - A line may let some bytes through at any rate after it had nothing to do, such as one that is
//!   shaped with a token bucket. So a long message after a pause comes earlier than those that
//!   follow it, and these show what the line can do, as the short transfers of the coordinator's
//!   probe do not.

use std::{
    thread,
    time::{Duration, Instant},
};

use gradwire_launcher::error::CommandError;
use gradwire_worker::{AllgatherOptions, ReceiveOptions, SendOptions, Session, Tensor};

/// Barriers that are measured, after as many that are not.
const BARRIERS: usize = 32;

/// How often each message is sent.
const OFTEN: usize = 5;

/// How long a line rests before a message.
const REST: Duration = Duration::from_millis(60);

/// The bytes of a message that says how long one takes besides its bytes, of one that most bursts
/// let through, and of one that is longer than most bursts.
const SIZES: [usize; 3] = [64, 64 << 10, 2 << 20];

/// So many of the longest follow each other to show what a line can do without a rest.
const ROW: usize = 3;

/// If one of the first two sizes takes more seconds, long ones would take too long.
const SLOW: f64 = 0.02;

/// What saves less than this part of the time that the line needs is noise.
const NOISE: f64 = 0.05;

/// No message takes less than this.
const MOMENT: f64 = 1e-6;

/// Medians in seconds.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Calls {
    /// Of a barrier.
    pub(crate) barrier: f64,
    /// Of the first two ranks, between them, both ways at once.
    messages: Vec<Messages>,
}

/// Messages of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Messages {
    /// Of each size, after a pause.
    alone: [f64; 3],
    /// Several of the last size, after a pause.
    row: f64,
}

/// What a line lets through at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Burst {
    /// How many bytes.
    pub(crate) bytes: f64,
    /// At how many bytes per second.
    pub(crate) rate: f64,
    /// At how many bytes per second the line goes on.
    pub(crate) line: f64,
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Measures; all ranks take part.
///
/// # Errors
/// [`CommandError`] if the session fails.
pub(crate) fn measure(session: &Session) -> Result<Calls, CommandError> {
    let mut barriers = Vec::new();
    for _ in 0..2 * BARRIERS {
        let start = Instant::now();
        session.barrier().map_err(CommandError::failed)?;
        barriers.push(start.elapsed().as_secs_f64());
    }
    let mut own = Vec::new();
    for (bytes, row) in SIZES.into_iter().map(|bytes| (bytes, 1)).chain([(SIZES[2], ROW)]) {
        // All ranks know how long the short ones took, and decide alike.
        let is_long = bytes == SIZES[2];
        let is_slow = is_long && gathered(session, &own[..2])?.iter().any(|time| *time > SLOW);
        let often = if is_slow { 0 } else { OFTEN };
        let times: Result<Vec<f64>, _> =
            (0..often).map(|_| exchange(session, bytes, row)).collect();
        own.push(median(times?));
    }
    let all = gathered(session, &own)?;
    let of_rank = |times: &[f64]| match *times {
        [empty, short, long, row] => Messages { alone: [empty, short, long], row },
        _ => Messages::default(),
    };
    let messages = all.chunks(SIZES.len() + 1).take(2).map(of_rank).collect();
    Ok(Calls { barrier: median(barriers.split_off(BARRIERS)), messages })
}

/// What all ranks have measured, one after the other.
fn gathered(session: &Session, own: &[f64]) -> Result<Vec<f64>, CommandError> {
    let own = session.tensor(own, &[own.len()]).map_err(CommandError::failed)?;
    let all = session.allgather(&own, AllgatherOptions::default()).map_err(CommandError::failed)?;
    Ok(all.tensor.as_slice().to_vec())
}

/// The first two ranks exchange so many messages, after a pause. More ranks would wait for credit
/// and not for their lines. Returns how long that takes; 0 on other ranks, or if there is only one.
fn exchange(session: &Session, bytes: usize, row: usize) -> Result<f64, CommandError> {
    let failed = CommandError::failed;
    let peer = session.rank() ^ 1;
    let tensor = || session.zeros::<u8>(&[bytes]);
    let tensors: Result<Vec<Tensor<u8>>, _> = (0..2 * row).map(|_| tensor()).collect();
    let mut tensors = tensors.map_err(failed)?.into_iter();
    session.barrier().map_err(failed)?;
    if peer >= session.size() || peer > 1 {
        return Ok(0.0);
    }
    thread::sleep(REST);
    let start = Instant::now();
    let mut handles = Vec::new();
    for (tag, tensor) in (0..).zip(tensors.by_ref().take(row)) {
        let options = ReceiveOptions::from_rank(peer).tag(tag);
        handles.push(session.receive_into_async(tensor, options).map_err(failed)?);
    }
    for (tag, tensor) in (0..).zip(tensors) {
        let options = SendOptions::to_rank(peer).tag(tag);
        handles.push(session.send_async(tensor, options).map_err(failed)?);
    }
    for handle in handles {
        handle.wait().map_err(failed)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

impl Messages {
    /// What a line lets through at once; none if that is not clear.
    fn burst(&self) -> Option<Burst> {
        let [empty, short, long] = self.alone;
        let [_, small, large] = SIZES.map(|bytes| bytes as f64);
        // What one of them takes where the line has not rested.
        let each = (self.row - long) / (ROW - 1) as f64;
        let line = large / each.max(MOMENT);
        let bytes = (each - (long - empty).max(0.0)) * line;
        if long <= 0.0 || each <= MOMENT || bytes < NOISE * large {
            return None;
        }
        // What takes no time at all is not infinitely fast.
        let fast = small / (short - empty).max(small / line / 100.0);
        Some(Burst { bytes: bytes.min(large), rate: fast.max(2.0 * line), line })
    }
}

impl Calls {
    /// What a line lets through at once, by the means of both ranks: who begins later measures as
    /// much too short as the other one too long. None if that is not clear.
    pub(crate) fn burst(&self) -> Option<Burst> {
        let count = self.messages.len().max(1) as f64;
        let mean = |of: fn(&Messages) -> f64| self.messages.iter().map(of).sum::<f64>() / count;
        let alone = [mean(|one| one.alone[0]), mean(|one| one.alone[1]), mean(|one| one.alone[2])];
        Messages { alone, row: mean(|one| one.row) }.burst()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages on a line with a token bucket.
    fn messages(rate: f64, burst: f64) -> Messages {
        let (empty, fast) = (300e-6, 2e9);
        let seconds = |bytes: usize| {
            let at_once = (bytes as f64).min(burst);
            empty + at_once / fast + (bytes as f64 - at_once) / rate
        };
        Messages { alone: SIZES.map(seconds), row: seconds(ROW * SIZES[2]) }
    }

    #[test]
    fn a_burst_is_found_again() {
        for (rate, burst) in [(25e6, 262_144.0), (125e6, 262_144.0), (125e6, 1e6), (25e6, 2e6)] {
            let found = messages(rate, burst).burst().unwrap();
            // What comes at once takes some time, too.
            assert!((found.bytes / burst - 1.0).abs() < 0.1, "{rate} {burst}: {found:?}");
            assert!((found.rate / 2e9 - 1.0).abs() < 0.3, "{rate} {burst}: {found:?}");
            assert!((found.line / rate - 1.0).abs() < 0.01, "{rate} {burst}: {found:?}");
        }
    }

    #[test]
    fn a_line_without_one_has_none() {
        for rate in [25e6, 125e6, 3e9] {
            let one = messages(rate, 0.0);
            assert_eq!(one.burst(), None);
            // Noise.
            assert_eq!(Messages { row: 1.02 * one.row, ..one }.burst(), None);
            assert_eq!(Messages { row: 0.1 * one.row, ..one }.burst(), None);
        }
        assert_eq!(Messages::default().burst(), None);
    }

    #[test]
    fn who_begins_later_does_not_matter() {
        let one = messages(125e6, 3e5);
        let shifted = |by: f64| {
            let alone = [one.alone[0] + by / 2.0, one.alone[1] - by, one.alone[2] + by];
            Messages { alone, row: one.row + by }
        };
        let messages = vec![shifted(4e-4), shifted(-4e-4)];
        let found = Calls { barrier: 1e-3, messages }.burst().unwrap();
        assert!((found.bytes / 3e5 - 1.0).abs() < 0.1, "{found:?}");
        assert_eq!(Calls::default().burst(), None);
    }

    #[test]
    fn no_time_is_no_infinite_rate() {
        let found = Messages { alone: [1e-3; 3], row: 5e-3 }.burst().unwrap();
        assert!(found.bytes > 0.0 && found.rate.is_finite(), "{found:?}");
    }
}
