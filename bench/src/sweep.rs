//! Measures one collective on tensors of increasing size.

use gradwire_launcher::error::CommandError;
use gradwire_proto::DType;
use gradwire_worker::{GradwireError, Session};

use super::{
    args::{Data, Sweep},
    baseline::{self, Setup},
    flow::Flow,
    measure::{Rounds, Span, Step, check_barriers, now, repeat, seconds, slowest},
    operation::{Memory, Operation, Place, Tensors},
    report::{Report, Row},
    value::{OWNERS, Pattern, Wrong},
};

/// Measures a series of sizes.
///
/// # Errors
/// [`CommandError`] if the session fails, a result is wrong, or the report can't be written.
pub fn run(
    session: &Session,
    operation: Operation,
    sweep: &Sweep,
    report: &mut Report,
) -> Result<(), CommandError> {
    let (mut last, granule) = (0, operation.granule(session.size()));
    for bytes in sweep.sizes()? {
        let elements =
            usize::try_from(bytes).map_err(CommandError::usage)? / sweep.data.dtype.size();
        let elements = (elements / granule).max(1) * granule;
        // Several sizes may be too small to give each rank a share.
        if elements > last {
            let data = &sweep.data;
            report.row(size(session, operation, data, elements)?)?;
        }
        last = elements;
    }
    Ok(())
}

/// Measures barriers, which have no size.
///
/// # Errors
/// As for [`run`].
pub fn barriers(
    session: &Session,
    rounds: Rounds,
    report: &mut Report,
) -> Result<(), CommandError> {
    let operation = Operation::Barrier;
    let mut call = Call::new(session, operation, Memory::Ordinary, DType::U8, 0)?;
    let spans = repeat(session, &rounds, &mut call)?;
    check_barriers(session, &spans)?;
    let times: Vec<_> = spans.iter().map(|span| seconds(span.start, span.end)).collect();
    report.row(Row::new(operation, session.size(), 0, 0, slowest(session, &times)?))
}

fn size(
    session: &Session,
    operation: Operation,
    data: &Data,
    elements: usize,
) -> Result<Row, CommandError> {
    let bytes = (elements * data.dtype.size()) as u64;
    let common = &data.common;
    let check = data.check_every(bytes);
    let rounds =
        Rounds { warmup: common.warmup, iters: common.iters, check, barrier: common.barrier };
    let mut call = Call::new(session, operation, data.memory, data.dtype, elements)?;
    let spans = repeat(session, &rounds, &mut call)?;
    // Frees memory for the baseline.
    drop(call);
    let times: Vec<_> = spans.iter().map(|span| seconds(span.start, span.end)).collect();
    let row = Row::new(operation, session.size(), bytes, elements, slowest(session, &times)?);
    let setup = Setup::of(session, operation, data);
    let baseline = baseline::seconds(session, &setup, elements)?;
    Ok(row.with_baseline(baseline))
}

/// A blocking call, which is repeated.
#[derive(Debug)]
pub struct Call<'a> {
    session: &'a Session,
    operation: Operation,
    /// The tensor's name, different for each size.
    name: String,
    elements: usize,
    tensors: Tensors,
    before: Pattern,
    /// The flows of the result.
    after: Vec<Flow>,
    /// The right reduction, or the contribution of each rank.
    sources: Vec<Pattern>,
}

impl<'a> Call<'a> {
    /// A call on tensors of `elements` elements.
    ///
    /// # Errors
    /// [`CommandError`] if there is not enough memory.
    pub fn new(
        session: &'a Session,
        operation: Operation,
        memory: Memory,
        dtype: DType,
        elements: usize,
    ) -> Result<Self, CommandError> {
        let (rank, ranks) = (session.rank(), session.size());
        let (before, sources) = match operation.reduction() {
            Some(op) => {
                let mut right = Pattern::reduction(dtype, op, ranks, 0);
                if operation == Operation::Allreduce(op) {
                    right = right.compressed(op, session, elements);
                }
                (Pattern::contribution(dtype, op, rank, ranks, 0), vec![right])
            }
            None => {
                let own = |rank| Pattern::own(dtype, rank);
                (own(rank), (0..ranks.min(OWNERS)).map(own).collect::<Vec<_>>())
            }
        };
        let mine = |flow: &Flow| flow.to.is_none_or(|to| to == rank);
        let input = operation.input(rank, ranks, elements);
        let input = Place::zeros(session, memory, dtype, input).map_err(CommandError::failed)?;
        Ok(Self {
            session,
            operation,
            name: format!("bench.{elements}"),
            elements,
            tensors: Tensors { dtype, input, output: None },
            before,
            after: operation.flows(ranks, elements).filter(mine).collect(),
            sources,
        })
    }
}

impl Step for Call<'_> {
    fn fill(&mut self) {
        self.before.fill(self.tensors.input.bytes_mut());
    }

    fn run(&mut self) -> Result<Span, GradwireError> {
        let start = now();
        self.operation.call(self.session, &self.name, self.elements, &mut self.tensors)?;
        Ok(Span { start, submitted: start, end: now() })
    }

    fn check(&self) -> Result<(), String> {
        if self.after.is_empty() {
            return Ok(());
        }
        let (result, dtype) = (self.tensors.result(), self.tensors.dtype);
        let (length, size) = (result.len() / dtype.size(), dtype.size());
        let expected =
            self.operation.output(self.session.rank(), self.session.size(), self.elements);
        if length != expected {
            return Err(format!("it has {length} elements, expected {expected}"));
        }
        for flow in &self.after {
            let source = &self.sources[flow.from.map_or(0, |rank| rank % OWNERS) as usize];
            let part = &result[flow.target * size..][..flow.count * size];
            source.check(part, flow.source).map_err(|Wrong { element, got, expected }| {
                format!(
                    "element {} of {length} {dtype} is {got}, expected {expected}",
                    flow.target + element
                )
            })?;
        }
        Ok(())
    }
}
