//! The gradients of a network, in the order of a backward pass: last layer first, each submitted as
//! soon as it is computed. Front layers are the most urgent, because the next forward pass needs
//! them first (ByteScheduler, Peng et al., SOSP 2019). Then the pass waits for all of them.

use std::{thread, time::Duration};

use gradwire_launcher::error::CommandError;
use gradwire_proto::DType;
use gradwire_worker::{
    AllreduceOptions, Buffer, GradwireError, Handle, ReduceOp, Session, optimizer,
};

use super::{
    args::Data,
    baseline::{self, Setup},
    measure::{Rounds, Span, Step, now, repeat, seconds, slowest},
    operation::{Operation, Place},
    report::{Model, Report, Row},
    shapes::{self, Gradient},
    value::{Pattern, Wrong},
};

/// Measures steps of a network.
///
/// # Errors
/// [`CommandError`] if the session fails, a result is wrong, or the report can't be written.
pub fn run(
    session: &Session,
    op: ReduceOp,
    data: &Data,
    (network, compute_ms): (&str, f64),
    report: &mut Report,
) -> Result<(), CommandError> {
    let gradients = shapes::load("--shapes", network)?;
    let row = steps(session, op, data, &gradients, compute_ms)?;
    report.row(row)
}

fn steps(
    session: &Session,
    op: ReduceOp,
    data: &Data,
    gradients: &[Gradient],
    compute_ms: f64,
) -> Result<Row, CommandError> {
    let mut pass = Pass::new(session, op, data, gradients, compute_ms)?;
    let elements: usize = pass.tensors.iter().map(|tensor| tensor.elements).sum();
    let bytes = (elements * data.dtype.size()) as u64;
    let common = &data.common;
    let check = data.check_every(bytes);
    let rounds =
        Rounds { warmup: common.warmup, iters: common.iters, check, barrier: common.barrier };
    let spans = repeat(session, &rounds, &mut pass)?;
    drop(pass);
    let times: Vec<_> = spans.iter().map(|span| seconds(span.start, span.end)).collect();
    let exposed: Vec<_> = spans.iter().map(|span| seconds(span.submitted, span.end)).collect();
    let (times, exposed) = (slowest(session, &times)?, slowest(session, &exposed)?);
    let operation = Operation::Allreduce(op);
    let setup = Setup::of(session, operation, data);
    let baseline = baseline::seconds(session, &setup, elements)?;
    // Communication may overlap with computing, but a step takes at least as long as either.
    let baseline = baseline.map(|baseline| baseline.max(compute_ms / 1e3));
    let model = Model::new(gradients.len(), compute_ms, &exposed);
    Ok(Row::new(operation, session.size(), bytes, elements, times)
        .with_baseline(baseline)
        .model(model))
}

/// One gradient of this rank.
struct Member {
    name: String,
    priority: i32,
    elements: usize,
    /// `None` while it is in flight.
    place: Option<Place>,
    before: Pattern,
    after: Pattern,
}

/// One backward pass.
struct Pass<'a> {
    session: &'a Session,
    op: ReduceOp,
    dtype: DType,
    compute: Duration,
    /// In the order of submission.
    tensors: Vec<Member>,
}

impl<'a> Pass<'a> {
    fn new(
        session: &'a Session,
        op: ReduceOp,
        &Data { memory, dtype, .. }: &Data,
        gradients: &[Gradient],
        compute_ms: f64,
    ) -> Result<Self, CommandError> {
        let (rank, ranks) = (session.rank(), session.size());
        let names = gradients.iter().map(|gradient| gradient.name.as_str());
        let planned = optimizer::plan("bench.", names).map_err(CommandError::usage)?;
        let member = |(i, (gradient, planned)): (usize, (&Gradient, optimizer::Planned))| {
            let elements = usize::try_from(gradient.elements()).map_err(CommandError::usage)?;
            let place = Place::zeros(session, memory, dtype, elements);
            let place = place.map_err(CommandError::failed)?;
            Ok(Member {
                name: planned.name.as_str().to_owned(),
                priority: planned.priority,
                elements,
                place: Some(place),
                before: Pattern::contribution(dtype, op, rank, ranks, i),
                after: Pattern::reduction(dtype, op, ranks, i).compressed(op, session, elements),
            })
        };
        let all = gradients.iter().zip(planned).enumerate().rev();
        let tensors = all.map(member).collect::<Result<_, CommandError>>()?;
        let compute = Duration::try_from_secs_f64(compute_ms / 1e3).map_err(CommandError::usage)?;
        Ok(Self { session, op, dtype, compute, tensors })
    }
}

/// A gradient in flight. One in ordinary memory is sent as a copy.
enum Sent {
    Own(Handle<Buffer>),
    Copy(Vec<u8>, Handle<Buffer>),
}

impl Sent {
    fn submit(
        session: &Session,
        dtype: DType,
        place: Place,
        options: AllreduceOptions,
    ) -> Result<Self, GradwireError> {
        Ok(match place {
            Place::Arena(buffer) => Self::Own(session.allreduce_async(buffer, options)?),
            Place::Ordinary(bytes) => {
                let copy = session.buffer_from(dtype, &bytes)?;
                Self::Copy(bytes, session.allreduce_async(copy, options)?)
            }
        })
    }

    fn wait(self) -> Result<Place, GradwireError> {
        Ok(match self {
            Self::Own(handle) => Place::Arena(handle.wait()?),
            Self::Copy(mut bytes, handle) => {
                bytes.copy_from_slice(handle.wait()?.bytes());
                Place::Ordinary(bytes)
            }
        })
    }
}

impl Step for Pass<'_> {
    fn fill(&mut self) {
        for Member { place, before, .. } in &mut self.tensors {
            if let Some(place) = place {
                before.fill(place.bytes_mut());
            }
        }
    }

    fn run(&mut self) -> Result<Span, GradwireError> {
        let start = now();
        let count = self.tensors.len().max(1) as f64;
        let mut sent = Vec::with_capacity(self.tensors.len());
        for (i, member) in self.tensors.iter_mut().enumerate() {
            // Relative to the start, because sleeping takes longer than requested.
            let due = self.compute.mul_f64((i + 1) as f64 / count);
            let passed = Duration::from_secs_f64(seconds(start, now()));
            if let Some(left) = due.checked_sub(passed).filter(|left| !left.is_zero()) {
                thread::sleep(left);
            }
            let options =
                AllreduceOptions::named(&member.name).op(self.op).priority(member.priority);
            // Every pass ends with all tensors back in place, or with an error and no further pass.
            if let Some(place) = member.place.take() {
                sent.push((i, Sent::submit(self.session, self.dtype, place, options)?));
            }
        }
        let submitted = now();
        for (i, sent) in sent {
            self.tensors[i].place = Some(sent.wait()?);
        }
        Ok(Span { start, submitted, end: now() })
    }

    fn check(&self) -> Result<(), String> {
        for Member { name, place, after, .. } in &self.tensors {
            let tensor = place.as_ref().map(Place::bytes).unwrap_or_default();
            after.check(tensor, 0).map_err(|Wrong { element, got, expected }| {
                format!("element {element} of '{name}' is {got}, expected {expected}")
            })?;
        }
        Ok(())
    }
}
