//! The timing loop of all measurements.
//!
//! Calls are made back to back, as in nccl-tests, without barriers unless requested.
//!
//! For a check, the tensors of a call are filled before it and read after it, both untimed. Ranks
//! take different times for that, and the next call's time must not contain the difference. So
//! after a check all ranks meet at an untimed barrier, which they leave like a call. They also meet
//! before the check: otherwise, if ranks share cores, the first rank to check would keep the others
//! from noticing the end of the call.
//!
//! The time of an iteration is that of the slowest rank, computed after the loop.

use gradwire_worker::{AllreduceOptions, GradwireError, ReduceOp, Session};
use rustix::time::{ClockId, clock_gettime};

use gradwire_launcher::error::CommandError;

/// The number of iterations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounds {
    /// Warm-up iterations.
    pub warmup: u32,
    /// Measured iterations.
    pub iters: u32,
    /// The interval, in iterations, at which the result is checked; the first is always checked.
    pub check: u32,
    /// Whether there is a barrier before each iteration.
    pub barrier: bool,
}

/// The times of a step, in nanoseconds of the machine's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Its beginning.
    pub start: i64,
    /// When the last operation was submitted; for a single blocking call, the beginning.
    pub submitted: i64,
    /// Its end.
    pub end: i64,
}

/// The repeated part of a measurement.
pub trait Step {
    /// Fills the tensors.
    fn fill(&mut self);

    /// Does the timed work.
    ///
    /// # Errors
    /// The error of the session.
    fn run(&mut self) -> Result<Span, GradwireError>;

    /// Checks the result of `run` after `fill`.
    ///
    /// # Errors
    /// A description of the wrong result.
    fn check(&self) -> Result<(), String>;
}

/// Nanoseconds of a clock that all processes of the machine share.
pub fn now() -> i64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Runs the loop on this rank.
///
/// # Errors
/// [`CommandError`] if the session fails or a result is wrong.
pub fn repeat(
    session: &Session,
    rounds: &Rounds,
    step: &mut dyn Step,
) -> Result<Vec<Span>, CommandError> {
    step.fill();
    for _ in 0..rounds.warmup {
        step.run().map_err(CommandError::failed)?;
    }
    let mut spans = Vec::new();
    let mut interrupted = false;
    for i in 0..rounds.iters {
        let checked = i.is_multiple_of(rounds.check.max(1));
        if checked {
            step.fill();
        }
        if checked || interrupted || rounds.barrier {
            session.barrier().map_err(CommandError::failed)?;
        }
        spans.push(step.run().map_err(CommandError::failed)?);
        if checked {
            session.barrier().map_err(CommandError::failed)?;
            step.check().map_err(|wrong| {
                CommandError::failed(format!(
                    "the result is wrong on rank {}, iteration {i}: {wrong}",
                    session.rank()
                ))
            })?;
        }
        interrupted = checked;
    }
    Ok(spans)
}

/// The maximum of each time over all ranks.
///
/// # Errors
/// [`CommandError`] if the session fails.
pub fn slowest(session: &Session, times: &[f64]) -> Result<Vec<f64>, CommandError> {
    let mut times = times.to_vec();
    let options = AllreduceOptions::named("bench.times").op(ReduceOp::Max);
    session.allreduce_slice(&mut times, options).map_err(CommandError::failed)?;
    Ok(times)
}

/// The seconds between two times.
pub fn seconds(from: i64, to: i64) -> f64 {
    to.saturating_sub(from).max(0) as f64 / 1e9
}

/// Checks that no rank left a barrier before all ranks of its node had reached it. Clocks of
/// different nodes can't be compared, so each node is checked separately.
///
/// # Errors
/// [`CommandError`] if a rank left a barrier too early, or the session fails.
pub fn check_barriers(session: &Session, spans: &[Span]) -> Result<(), CommandError> {
    let nodes = session.nodes();
    let rank = session.rank();
    let own = nodes.iter().position(|n| (n.first_rank..n.first_rank + n.slots).contains(&rank));
    let own = own.unwrap_or_default();
    let width = spans.len();
    let over_all = |name: &str, op, empty, of: fn(&Span) -> i64| {
        let mut table = vec![empty; nodes.len() * width];
        for (cell, span) in table[own * width..].iter_mut().zip(spans) {
            *cell = of(span);
        }
        let options = AllreduceOptions::named(name).op(op);
        session.allreduce_slice(&mut table, options).map_err(CommandError::failed)?;
        Ok::<_, CommandError>(table)
    };
    let last_in = over_all("bench.in", ReduceOp::Max, i64::MIN, |span| span.start)?;
    let first_out = over_all("bench.out", ReduceOp::Min, i64::MAX, |span| span.end)?;
    match last_in.iter().zip(&first_out).position(|(last_in, first_out)| first_out < last_in) {
        None => Ok(()),
        Some(cell) => Err(CommandError::failed(format!(
            "a rank left barrier {} on host {} {} ns before another one arrived",
            cell % width,
            nodes.get(cell / width).map_or("", |node| node.host.as_str()),
            last_in[cell] - first_out[cell],
        ))),
    }
}
