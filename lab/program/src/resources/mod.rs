//! `gradwire bench resources`: the resources that a job uses.
//!
//! An idle job should use none, and a long job should not grow. So a job that repeatedly reduces
//! one tensor measures itself. Its ranks first sleep, then work. Its processes are sampled before
//! and after, and at some steps in between. In a final part, `perf` counts system calls, if it is
//! installed and allowed. This part is separate because counting has a cost, too.
//!
//! - [`args`]: the options
//! - [`watch`]: samples the processes of a node, by one of its ranks
//! - [`calls`]: counts system calls
//! - [`figures`]: turns measurements into a report (pure)

pub mod args;
pub mod calls;
pub mod figures;
pub mod watch;

use std::{thread, time::Duration};

use gradwire_bench::{
    measure::Step as _, operation::Operation, rank::Changed, sweep::Call, table::Table,
};
use gradwire_launcher::error::CommandError;
use gradwire_proto::{DType, ReduceOp};
use gradwire_worker::{AllgatherOptions, Session};

use self::{
    args::Resources,
    figures::{Head, Seen, rows},
    watch::Watch,
};

/// After this many steps, a job has allocated everything that it needs.
const SETTLED: u32 = 100;

/// Runs the job and measures its resources.
///
/// # Errors
/// [`CommandError`] if the session fails, a result is wrong, or the report can't be written.
pub fn run(session: &Session, options: &Resources, settings: Changed) -> Result<(), CommandError> {
    let writes = session.rank() == 0;
    let head = Head::new(session, options, settings);
    let lines = head.lines();
    let (columns, json) = (figures::columns(), options.common.json.as_deref());
    let mut table = Table::begin(head, lines, columns, json, writes)?;
    let all = session
        .allgather_object(&watched(session, options)?, AllgatherOptions::named("bench.seen"))
        .map_err(CommandError::failed)?;
    for row in rows(&all.concat(), options) {
        table.row(row)?;
    }
    table.finish()
}

/// The step numbers after which memory is sampled.
fn sample_steps(steps: u32) -> Vec<u32> {
    let powers = (0..).map_while(|power| SETTLED.checked_mul(10_u32.checked_pow(power)?));
    let mut steps_of_samples: Vec<_> = powers.take_while(|step| *step < steps).collect();
    steps_of_samples.push(steps);
    steps_of_samples
}

/// The measurements of this rank and, on the first rank of a node, of the services there.
fn watched(session: &Session, options: &Resources) -> Result<Vec<Seen>, CommandError> {
    let elements = usize::try_from(options.bytes / 4).map_err(CommandError::usage)?.max(1);
    let operation = Operation::Allreduce(ReduceOp::Sum);
    let mut call = Call::new(session, operation, options.memory, DType::F32, elements)?;
    let mut step = |checked: bool| {
        if checked {
            call.fill();
        }
        if checked || options.common.barrier {
            session.barrier().map_err(CommandError::failed)?;
        }
        call.run().map_err(CommandError::failed)?;
        if checked {
            call.check().map_err(|wrong| {
                let rank = session.rank();
                CommandError::failed(format!("the result is wrong on rank {rank}: {wrong}"))
            })?;
        }
        Ok::<_, CommandError>(())
    };
    for i in 0..options.common.warmup.max(1) {
        step(i == 0)?;
    }

    let mut watch = Watch::of(session)?;
    session.barrier().map_err(CommandError::failed)?;
    // Lets the threads that the barrier woke fall asleep again.
    thread::sleep(Duration::from_millis(200));
    watch.idle_begins()?;
    thread::sleep(Duration::from_secs_f64(options.idle));
    watch.idle_ends()?;

    let mut done = 0;
    for until in sample_steps(options.steps) {
        // Ranks sample after the same step, but not at the same time. A late rank only adds a wait.
        for i in done..until {
            step(i + 1 == options.steps)?;
        }
        done = until;
        watch.sample(until)?;
    }
    if options.calls > 0 {
        watch.calls_begin();
        session.barrier().map_err(CommandError::failed)?;
        for _ in 0..options.calls {
            step(false)?;
        }
        watch.calls_end();
        // No rank leaves or reports while another one still counts calls.
        session.barrier().map_err(CommandError::failed)?;
    }
    Ok(watch.seen())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_sampled_early_and_late() {
        assert_eq!(sample_steps(10_000), [100, 1000, 10_000]);
        assert_eq!(sample_steps(2500), [100, 1000, 2500]);
        assert_eq!((sample_steps(100), sample_steps(1)), (vec![100], vec![1]));
        assert_eq!(sample_steps(u32::MAX).last(), Some(&u32::MAX));
    }
}
