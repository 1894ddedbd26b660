//! What the ranks of `gradwire probe` measure, beyond the coordinator's probe of links.
//!
//! - A call takes time besides moving its bytes: ranks submit, nodes announce, and data threads and
//!   ranks wake up. A call of a few bytes takes little else. It has a name, like the tensors of a
//!   training step: the coordinator knows it after the first call.
//! - A line may pass bursts at a higher rate after idling, for example with a token bucket. So a
//!   long call after a pause takes less than its part of a longer call. The difference between the
//!   two shows the rate of the line, which the coordinator's short transfers do not.
//! - The same holds for links between racks, while as many pairs as possible use them.

use std::{
    thread,
    time::{Duration, Instant},
};

use gradwire_collectives::Topology;
use gradwire_launcher::error::CommandError;
use gradwire_worker::{AllgatherOptions, AllreduceOptions, BroadcastOptions, ProcessSet, Session};

/// Measured short calls, after as many warm-up calls: [`CALLS`], or fewer within the time limit.
const CALLS: usize = 100;
const SOME_CALLS: usize = 5;
const CALLS_TIME: f64 = 0.3;

/// Repetitions of each size.
const OFTEN: usize = 5;

/// How long a line idles before a call.
const REST: Duration = Duration::from_millis(60);

/// The bytes of calls: a call that shows the time besides moving bytes, one that fits into most
/// bursts, one that is longer than most bursts, and one whose additional bytes show the line's rate
/// without a burst.
const SIZES: [usize; 4] = [64, 64 << 10, 2 << 20, 6 << 20];

/// The bytes of a call that moves nearly nothing.
pub(crate) const FEW_BYTES: usize = SIZES[0];

/// If every call of a size takes more seconds than this, longer ones would take too long. If one
/// takes more than [`LONG`], the others would, too.
const SLOW: [f64; 4] = [0.02, 0.02, 0.5, LONG];
const LONG: f64 = 2.0;

/// Savings below this part of the line's time are noise.
const NOISE: f64 = 0.05;

/// The least time of a byte or call.
const MOMENT: f64 = 1e-12;

/// The most pairs that are measured at once between two racks. For larger racks the result of the
/// coordinator's probe counts.
const MAX_PAIRS: usize = 32;

/// The ranks' measurements, in seconds.
#[derive(Debug, Clone, PartialEq, Default)]
pub(crate) struct Calls {
    /// An allreduce of [`FEW_BYTES`] by all ranks, in sequence.
    pub(crate) call: f64,
    /// Between two ranks of a rack.
    near: Option<Sizes>,
    /// Between two racks, with as many pairs as the smaller rack has nodes.
    across: Option<Sizes>,
}

/// Seconds of an allreduce of each size between two ranks, after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Sizes([f64; 4]);

/// A burst that a line passes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Burst {
    /// Its bytes.
    pub(crate) bytes: f64,
    /// Its bytes per second.
    pub(crate) rate: f64,
}

/// The pairs that exchange data at the same time.
#[derive(Debug, Clone, PartialEq, Default)]
struct Pairs {
    /// Two ranks of a rack, or of different racks if no rack has two.
    near: Option<[u32; 2]>,
    /// Pairs of the first two racks, if one has several ranks.
    across: Vec<[u32; 2]>,
}

impl Pairs {
    /// The pairs of ranks with these racks.
    fn of(racks: &[u32]) -> Self {
        if racks.len() < 2 {
            return Self::default();
        }
        let members = Topology::from_racks(racks.to_vec()).members();
        let Some(several) = members.iter().find(|ranks| ranks.len() > 1) else {
            // Each is alone in its rack, so its line is the rack's uplink.
            return Self { near: Some([0, 1]), across: Vec::new() };
        };
        let across: Vec<[u32; 2]> = match &members[..] {
            [here, there, ..] => {
                here.iter().zip(there).map(|(a, b)| [*a.min(b), *a.max(b)]).collect()
            }
            _ => Vec::new(),
        };
        let across = if across.len() > MAX_PAIRS { Vec::new() } else { across };
        Self { near: Some([several[0], several[1]]), across }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

/// Measures; all ranks take part. `racks` is the rack of each rank, known on rank 0.
///
/// # Errors
/// [`CommandError`] if the session fails.
pub(crate) fn measure(session: &Session, racks: &[u32]) -> Result<Calls, CommandError> {
    let pairs = Pairs::of(&as_rank_0_says(session, racks)?);
    // All ranks learn the slowest time, and so make the same number of calls.
    let first = gathered(session, &[typical(session, SOME_CALLS)?])?;
    let slowest = first.into_iter().fold(MOMENT, f64::max);
    let calls = ((CALLS_TIME / slowest) as usize / 2).clamp(SOME_CALLS, CALLS);
    let call = typical(session, calls)?;
    let Some(near) = pairs.near else { return Ok(Calls { call, ..Calls::default() }) };
    let of_pair = |pair: &[u32; 2]| session.add_process_set(pair).map_err(CommandError::failed);
    let near = [of_pair(&near)?];
    let across: Result<Vec<ProcessSet>, _> = pairs.across.iter().map(of_pair).collect();
    Ok(Calls { call, near: sizes(session, &near)?, across: sizes(session, &across?)? })
}

/// The racks of the ranks, broadcast by rank 0.
fn as_rank_0_says(session: &Session, racks: &[u32]) -> Result<Vec<u32>, CommandError> {
    let failed = CommandError::failed;
    let known = |rank: usize| racks.get(rank).copied().unwrap_or(0) as i32;
    let known: Vec<i32> = (0..session.size() as usize).map(known).collect();
    let mut tensor = session.tensor(&known, &[known.len()]).map_err(failed)?;
    session.broadcast(&mut tensor, BroadcastOptions::from_rank(0)).map_err(failed)?;
    Ok(tensor.as_slice().iter().map(|rack| *rack as u32).collect())
}

/// The measurements of all ranks, concatenated.
fn gathered(session: &Session, own: &[f64]) -> Result<Vec<f64>, CommandError> {
    let own = session.tensor(own, &[own.len()]).map_err(CommandError::failed)?;
    let all = session.allgather(&own, AllgatherOptions::default()).map_err(CommandError::failed)?;
    Ok(all.tensor.as_slice().to_vec())
}

/// The median seconds of a short call over all ranks, of `calls` calls after as many warm-up calls.
fn typical(session: &Session, calls: usize) -> Result<f64, CommandError> {
    let failed = CommandError::failed;
    let mut tensor = session.zeros::<f64>(&[FEW_BYTES / 8]).map_err(failed)?;
    let mut times = Vec::new();
    for _ in 0..2 * calls {
        let start = Instant::now();
        session.allreduce(&mut tensor, AllreduceOptions::named("probe.call")).map_err(failed)?;
        times.push(start.elapsed().as_secs_f64());
    }
    Ok(median(times.split_off(calls)))
}

/// Measures all sizes between pairs, all pairs at the same time. None if there are no pairs, or if
/// they are too slow.
fn sizes(session: &Session, pairs: &[ProcessSet]) -> Result<Option<Sizes>, CommandError> {
    let mut found = [0.0; 4];
    if pairs.is_empty() {
        return Ok(None);
    }
    for (at, bytes) in SIZES.into_iter().enumerate() {
        // Other processes only add time, so the minimum counts.
        found[at] = f64::INFINITY;
        for _ in 0..OFTEN {
            let all = gathered(session, &[after_a_rest(session, pairs, bytes)?])?;
            // The first to begin waits for the other.
            let of_pair = |pair: &ProcessSet| {
                let both = pair.ranks().into_iter().map(|rank| all[rank as usize]);
                both.fold(f64::INFINITY, f64::min)
            };
            // The slowest pair shares the line with all.
            found[at] = pairs.iter().map(of_pair).fold(0.0, f64::max).min(found[at]);
            // All ranks have the same value, and decide alike.
            if found[at] > LONG {
                return Ok(None);
            }
        }
        if found[at] > SLOW[at] {
            return Ok(None);
        }
    }
    Ok(Some(Sizes(found)))
}

/// Reduces `bytes` in each pair, after a pause. Returns the seconds; 0 on ranks outside all pairs.
fn after_a_rest(
    session: &Session,
    pairs: &[ProcessSet],
    bytes: usize,
) -> Result<f64, CommandError> {
    let failed = CommandError::failed;
    let own = pairs.iter().find(|pair| pair.includes(session.rank()));
    // Its memory is already mapped. Compression leaves f64 unchanged.
    let mut tensor = session.tensor(&vec![1.0f64; bytes / 8], &[bytes / 8]).map_err(failed)?;
    session.barrier().map_err(failed)?;
    let Some(pair) = own else { return Ok(0.0) };
    thread::sleep(REST);
    let start = Instant::now();
    let options = AllreduceOptions::named("probe.pair").process_set(pair);
    session.allreduce(&mut tensor, options).map_err(failed)?;
    Ok(start.elapsed().as_secs_f64())
}

impl Sizes {
    /// Seconds per byte without a burst.
    fn per_byte(&self) -> f64 {
        let [_, _, long, longest] = self.0;
        ((longest - long) / (SIZES[3] - SIZES[2]) as f64).max(MOMENT)
    }

    /// The burst of a line; none if it is not clear.
    fn burst(&self) -> Option<Burst> {
        let [empty, short, long, _] = self.0;
        let [_, small, large, _] = SIZES.map(|bytes| bytes as f64);
        let per_byte = self.per_byte();
        let bytes = large - (long - empty).max(0.0) / per_byte;
        if per_byte <= MOMENT || bytes < NOISE * large {
            return None;
        }
        // Even if it seems to take no time, a burst is not infinitely fast.
        let fast = small / (short - empty).max(small * per_byte / 100.0);
        Some(Burst { bytes: bytes.min(large), rate: fast.max(2.0 / per_byte) })
    }

    /// The rate of a line without a burst, in bytes per second, if known.
    fn line(&self) -> Option<f64> {
        (self.per_byte() > MOMENT).then(|| 1.0 / self.per_byte())
    }
}

impl Calls {
    /// The burst of a line. None if it is not clear.
    pub(crate) fn burst(&self) -> Option<Burst> {
        self.near.and_then(|near| near.burst())
    }

    /// The rate of a line without a burst, in bytes per second, if known.
    pub(crate) fn line(&self) -> Option<f64> {
        self.near.and_then(|near| near.line())
    }

    /// The share of each node of the smaller rack in the link to other racks, in bytes per second,
    /// if known.
    pub(crate) fn uplink(&self) -> Option<f64> {
        self.across.and_then(|across| across.line())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const EMPTY: f64 = 300e-6;

    /// Calls on a line with a token bucket.
    fn sizes(rate: f64, burst: f64) -> Sizes {
        let seconds = |bytes: usize| {
            let at_once = (bytes as f64).min(burst);
            EMPTY + at_once / 2e9 + (bytes as f64 - at_once) / rate
        };
        Sizes(SIZES.map(seconds))
    }

    /// The same, between two nodes of a rack and between racks of such nodes.
    pub(crate) fn calls(line: (f64, f64), across: f64) -> Calls {
        let near = Some(sizes(line.0, line.1));
        Calls { call: 3e-4, near, across: Some(sizes(across, 0.0)) }
    }

    #[test]
    fn a_burst_is_found_again() {
        for (rate, burst) in [(25e6, 262_144.0), (125e6, 262_144.0), (125e6, 1e6), (25e6, 2e6)] {
            let calls = Calls { near: Some(sizes(rate, burst)), ..Calls::default() };
            let found = calls.burst().unwrap();
            // A burst takes some time, too.
            assert!((found.bytes / burst - 1.0).abs() < 0.1, "{rate} {burst}: {found:?}");
            assert!((found.rate / 2e9 - 1.0).abs() < 0.3, "{rate} {burst}: {found:?}");
            let line = calls.line().unwrap();
            assert!((line / rate - 1.0).abs() < 0.01, "{rate} {burst}: {line}");
        }
    }

    #[test]
    fn a_line_without_one_has_none() {
        for rate in [25e6, 125e6, 3e9] {
            let one = sizes(rate, 0.0);
            assert_eq!(one.burst(), None);
            // Noise.
            let [empty, short, long, longest] = one.0;
            assert_eq!(Sizes([empty, short, long, 1.02 * longest]).burst(), None);
            let wrong = Sizes([empty, short, long, 0.1 * longest]);
            assert_eq!((wrong.burst(), wrong.line()), (None, None));
        }
        assert_eq!(Calls::default().burst(), None);
    }

    #[test]
    fn a_burst_without_time_has_a_finite_rate() {
        let found = Sizes([1e-3, 1e-3, 1e-3, 5e-3]).burst().unwrap();
        assert!(found.bytes > 0.0 && found.rate.is_finite(), "{found:?}");
    }

    #[test]
    fn pairs_are_within_a_rack_and_between_two() {
        let of = |racks: &[u32]| {
            let Pairs { near, across } = Pairs::of(racks);
            (near, across)
        };
        assert_eq!(of(&[]), (None, vec![]));
        assert_eq!(of(&[0]), (None, vec![]));
        assert_eq!(of(&[0, 0, 0]), (Some([0, 1]), vec![]));
        assert_eq!(of(&[0, 1, 2]), (Some([0, 1]), vec![]));
        assert_eq!(of(&[0, 0, 1, 1]), (Some([0, 1]), vec![[0, 2], [1, 3]]));
        assert_eq!(of(&[1, 0, 0, 1, 0]), (Some([1, 2]), vec![[0, 1], [2, 3]]));
        assert_eq!(of(&[3, 0, 0]), (Some([1, 2]), vec![[0, 1]]));
        let large: Vec<u32> = (0..2 * MAX_PAIRS as u32 + 2).map(|rank| rank % 2).collect();
        assert_eq!(of(&large), (Some([0, 2]), vec![]));
    }

    #[test]
    fn a_node_has_its_share_of_the_uplink() {
        let calls = Calls { across: Some(sizes(25e6, 262_144.0)), ..Calls::default() };
        let share = calls.uplink().unwrap();
        assert!((share / 25e6 - 1.0).abs() < 0.01, "{share}");
        assert_eq!(Calls::default().uplink(), None);
    }
}
