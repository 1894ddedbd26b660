//! One collective on a tensor of one size after the other.

use gradwire_worker::{GradwireError, Session};

use super::{
    args::{Data, Memory, Sweep},
    limit,
    measure::{Rounds, Span, Step, check_barriers, now, repeat, seconds, slowest},
    operation::{Operation, Place},
    rank::Bound,
    report::{Report, Row},
    value::{Pattern, Value, Wrong, with_type},
};
use crate::error::CliError;

/// Measures a series of sizes.
///
/// # Errors
/// [`CliError`] if the session fails, a result is wrong, or the report can't be written.
pub fn run(
    session: &Session,
    operation: Operation,
    sweep: &Sweep,
    report: &mut Report,
) -> Result<(), CliError> {
    for bytes in sweep.sizes()? {
        let row = with_type!(sweep.data.dtype, size(session, operation, &sweep.data, bytes))?;
        report.row(row)?;
    }
    Ok(())
}

/// Measures barriers, which have no size.
///
/// # Errors
/// As [`run`].
pub fn barriers(session: &Session, rounds: Rounds, report: &mut Report) -> Result<(), CliError> {
    let operation = Operation::Barrier;
    let mut call = Call::<u8>::new(session, operation, Memory::Ordinary, 0)?;
    let spans = repeat(session, &rounds, &mut call)?;
    check_barriers(session, &spans)?;
    let times: Vec<_> = spans.iter().map(|span| seconds(span.start, span.end)).collect();
    report.row(Row::new(operation, session.size(), 0, 0, slowest(session, &times)?))
}

fn size<T: Value>(
    session: &Session,
    operation: Operation,
    data: &Data,
    bytes: u64,
) -> Result<Row, CliError> {
    let elements = usize::try_from(bytes).map_err(CliError::usage)? / size_of::<T>();
    let common = &data.common;
    let check = data.check_every(bytes);
    let rounds =
        Rounds { warmup: common.warmup, iters: common.iters, check, barrier: common.barrier };
    let mut call = Call::<T>::new(session, operation, data.memory, elements)?;
    let spans = repeat(session, &rounds, &mut call)?;
    // The limit needs the room.
    drop(call);
    let times: Vec<_> = spans.iter().map(|span| seconds(span.start, span.end)).collect();
    let row = Row::new(operation, session.size(), bytes, elements, slowest(session, &times)?);
    let bound = Bound::of(session, operation, data);
    let limit = limit::seconds(session, &bound, bytes)?;
    Ok(row.limited(limit))
}

/// One blocking call.
struct Call<'a, T: Value> {
    session: &'a Session,
    operation: Operation,
    /// By which ranks know which tensors belong together; another size is another tensor.
    name: String,
    place: Place<T>,
    before: Pattern<T>,
    after: Pattern<T>,
}

impl<'a, T: Value> Call<'a, T> {
    fn new(
        session: &'a Session,
        operation: Operation,
        memory: Memory,
        elements: usize,
    ) -> Result<Self, CliError> {
        let (rank, ranks) = (session.rank(), session.size());
        Ok(Self {
            session,
            operation,
            name: format!("bench.{elements}"),
            place: Place::zeros(session, memory, elements).map_err(CliError::failed)?,
            before: operation.before(rank, ranks, 0),
            after: operation.after(rank, ranks, 0),
        })
    }
}

impl<T: Value> Step for Call<'_, T> {
    fn fill(&mut self) {
        self.before.fill(self.place.as_mut_slice());
    }

    fn run(&mut self) -> Result<Span, GradwireError> {
        let start = now();
        self.operation.call(self.session, &self.name, &mut self.place)?;
        Ok(Span { start, submitted: start, end: now() })
    }

    fn check(&self) -> Result<(), String> {
        let tensor = self.place.as_slice();
        self.after.check(tensor).map_err(|Wrong { element, got, expected }| {
            format!(
                "element {element} of {} {} is {got}, expected {expected}",
                tensor.len(),
                T::DTYPE
            )
        })
    }
}
