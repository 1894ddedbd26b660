//! The timing loop, the same for everything.
//!
//! Calls are made back to back, as nccl-tests makes them; no barrier comes between them unless one
//! is asked for. Where a call's result is checked, its tensors are filled before and read after
//! it, both untimed. Ranks don't take equally long for that, and the next call's time must not
//! hold the difference, so after an interruption all ranks meet at an untimed barrier, which leaves
//! them as the end of a call would. They meet before it, too: where ranks share cores, the first
//! one to check would keep the others from noticing that the call has ended.
//!
//! The time of an iteration is that of the slowest rank. It is found after the loop, not in it.

use gradwire_worker::{AllreduceOptions, GradwireError, ReduceOp, Session};
use rustix::time::{ClockId, clock_gettime};

use gradwire_launcher::error::CommandError;

/// How often something is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rounds {
    /// Before it counts.
    pub warmup: u32,
    /// While it counts.
    pub iters: u32,
    /// Every so many iterations, from the first on, the result is checked.
    pub check: u32,
    /// A barrier before each iteration.
    pub barrier: bool,
}

/// When a step ran, in nanoseconds of the machine's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// It began.
    pub start: i64,
    /// The last operation was submitted; for a single blocking call this is the beginning.
    pub submitted: i64,
    /// It had ended.
    pub end: i64,
}

/// What is repeated.
pub trait Step {
    /// Gives tensors their contents.
    fn fill(&mut self);

    /// Does what is timed.
    ///
    /// # Errors
    /// What the session says.
    fn run(&mut self) -> Result<Span, GradwireError>;

    /// Checks the result of `run` after `fill`.
    ///
    /// # Errors
    /// What is wrong.
    fn check(&self) -> Result<(), String>;
}

/// Nanoseconds of a clock that all processes of a machine share.
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

/// The slowest rank's value of each.
///
/// # Errors
/// [`CommandError`] if the session fails.
pub fn slowest(session: &Session, times: &[f64]) -> Result<Vec<f64>, CommandError> {
    let mut times = times.to_vec();
    let options = AllreduceOptions::named("bench.times").op(ReduceOp::Max);
    session.allreduce_slice(&mut times, options).map_err(CommandError::failed)?;
    Ok(times)
}

/// Seconds between two times.
pub fn seconds(from: i64, to: i64) -> f64 {
    to.saturating_sub(from).max(0) as f64 / 1e9
}

/// Whether barriers were barriers: nobody on a node left one before everybody on the node had
/// come. Clocks of different nodes say nothing about each other, so each node has its own row.
///
/// # Errors
/// [`CommandError`] if one was left too early, or the session fails.
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
            "barrier {} on host {} was left by one rank {} ns before another had come",
            cell % width,
            nodes.get(cell / width).map_or("", |node| node.host.as_str()),
            last_in[cell] - first_out[cell],
        ))),
    }
}
