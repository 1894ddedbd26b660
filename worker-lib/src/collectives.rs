//! The collectives: blocking or with a handle, in a process set, with a name and a priority.
//!
//! All ranks must use the same name, element type, reduction, factors, root and shape. The first
//! dimension may differ if the collective accepts different numbers of rows. An operation without a
//! name is named by its number (`allreduce.#3`). The names agree if all ranks make their unnamed
//! calls in the same order.
//!
//! A call that is invalid by itself is refused, and nothing is started. If the requests of several
//! ranks don't fit together, the operation fails on all ranks, and the failure names the ranks that
//! differ (TELL).
//!
//! The asynchronous forms take ownership of their tensors, and the handles return them: as the
//! result if it is in place, otherwise together with the result.

mod groups;
mod messages;
mod moves;
pub(crate) mod reductions;
mod slices;

use std::{sync::Arc, thread};

use gradwire_proto::{DType, Expected, Part, ProcessSetId, Request, Shape, TensorName};
use gradwire_shm::control::{Origin, Submission};

use crate::{
    call_site::CallSite,
    epoch::Membership,
    error::{GradwireError, Result},
    handle::{Handle, NotStarted, Start},
    inspection::Inspection,
    memory::{Buffer, FromBuffer, Keep, Memory, Output, Payload},
    naming::{Numbered, PAIRS, Way},
    options::Common,
    process_set::Members,
    session::Session,
    shared::{Done, Shared},
    sizes,
    task::Unwinding,
};

/// The rows of all ranks, concatenated along the first dimension.
#[derive(Debug)]
pub struct Gathered<P> {
    /// All rows, in rank order.
    pub tensor: P,
    /// The number of rows from each member of the process set, in rank order. Members that have
    /// joined have no entry.
    pub rows: Vec<usize>,
}

/// An operation before its name and its places in memory are known.
pub(crate) struct Call {
    /// The epoch in which the call began.
    membership: Arc<Membership>,
    pub(crate) set: Arc<Members>,
    /// `None`: the operation is named by its number.
    pub(crate) name: Option<String>,
    /// The kind under which it is counted if it has no name.
    pub(crate) kind: &'static str,
    /// The ends and the tag of a message, from which its name is made.
    pub(crate) way: Option<Way>,
    pub(crate) priority: i32,
    pub(crate) origin: Origin,
    pub(crate) request: Request,
    site: CallSite,
}

/// Where an operation's results go.
pub(crate) enum Target<'a> {
    /// To its inputs, in place.
    InPlace,
    /// To a given tensor, unless its size turns out to be wrong.
    Given(&'a Memory),
    /// To new memory.
    New,
}

/// An operation that was started, and the expected places of its results.
pub(crate) struct Started {
    /// The epoch in which it was started.
    pub(crate) membership: Arc<Membership>,
    ticket: u64,
    name: TensorName,
    set: ProcessSetId,
    /// For each tensor the buffer of its result, if it is in new memory.
    outputs: Vec<Option<Buffer>>,
    expected: Vec<Expected>,
}

/// The results of an operation that has succeeded.
pub(crate) struct Finished {
    /// The number in the completion.
    pub(crate) aux: u64,
    /// For each tensor its result, if it is in new memory.
    pub(crate) outputs: Vec<Option<Output>>,
}

impl Started {
    /// Whether a rank is this one.
    fn is_rank(&self, rank: u32) -> bool {
        self.membership.world.rank == rank
    }

    /// The results of the operation, which is done.
    fn finish(self, done: Done) -> Finished {
        let Done { aux, moved } = done;
        let outputs = match moved {
            Some(outputs) => outputs.into_iter().map(Some).collect(),
            None => {
                let rows = self.expected.into_iter().map(|expected| expected.rows);
                let outputs = self.outputs.into_iter().zip(rows);
                outputs.map(|(buffer, rows)| Some(Output { buffer: buffer?, rows })).collect()
            }
        };
        Finished { aux, outputs }
    }
}

impl Finished {
    fn all(self) -> Result<Vec<Output>> {
        let outputs = self.outputs.into_iter().collect();
        // A rank that gets a result knows its shape from its own request.
        let lost = || GradwireError::Protocol("a result has no place".into());
        Option::<Vec<Output>>::ok_or_else(outputs, lost)
    }

    /// The only result.
    pub(crate) fn one<P: FromBuffer>(self) -> Result<P> {
        self.gathered().map(|gathered| gathered.tensor)
    }

    /// One result for each tensor.
    pub(crate) fn many<P: FromBuffer>(self) -> Result<Vec<P>> {
        Ok(self.all()?.into_iter().map(|output| P::from_buffer(output.buffer)).collect())
    }

    /// The only result, with its rows.
    pub(crate) fn gathered<P: FromBuffer>(self) -> Result<Gathered<P>> {
        let lost = || GradwireError::Protocol("an operation has no result".into());
        self.gathered_many()?.pop().ok_or_else(lost)
    }

    /// One result for each tensor, with its rows.
    pub(crate) fn gathered_many<P: FromBuffer>(self) -> Result<Vec<Gathered<P>>> {
        let gathered = |Output { buffer, rows }| Gathered {
            tensor: P::from_buffer(buffer),
            rows: sizes::of_wire(&rows).to_vec(),
        };
        Ok(self.all()?.into_iter().map(gathered).collect())
    }
}

/// The first tensor of a group, and the others.
fn parts<'a>(tensors: impl IntoIterator<Item = &'a Memory>) -> Result<(Part, Vec<Part>)> {
    let part = |memory: &Memory| Part { dtype: memory.dtype(), shape: memory.shape().clone() };
    let mut parts = tensors.into_iter().map(part);
    let first = parts.next().ok_or_else(|| {
        GradwireError::Invalid("a group of no tensors: use at least one".to_owned())
    })?;
    Ok((first, parts.collect()))
}

fn buffers<P: Payload>(tensors: &[P]) -> Vec<&Memory> {
    tensors.iter().map(Payload::memory).collect()
}

/// Turns a single number into one row, for collectives that concatenate rows.
fn as_rows(part: Part) -> Result<Part> {
    let Part { dtype, shape } = part;
    let shape = if shape.dims().is_empty() { Shape::new(&[1])? } else { shape };
    Ok(Part { dtype, shape })
}

impl Membership {
    /// The name of the next message of a way; takes its number.
    fn message_of(&self, set: ProcessSetId, way: Way) -> Result<Numbered> {
        self.names.lock().message(set, way).ok_or_else(|| {
            GradwireError::Invalid(format!(
                "this rank has used {PAIRS} different pairs of a peer and a tag, which is the \
                 limit; reuse tags"
            ))
        })
    }

    /// A number for an unnamed operation of this thread. With `any_thread`, the program orders its
    /// threads itself.
    pub(crate) fn unnamed(
        &self,
        set: ProcessSetId,
        kind: &'static str,
        any_thread: bool,
    ) -> Result<Numbered> {
        let in_flight =
            |name: &str| TensorName::new(name).is_ok_and(|n| self.shared.is_used(&(set, n)));
        // If the program orders its threads itself, they count as one.
        let thread = (!any_thread).then(|| thread::current().id());
        self.names.lock().unnamed(set, kind, thread, in_flight).map_err(|other| {
            GradwireError::Invalid(format!(
                "two threads of rank {} have unnamed operations in flight at once: '{other}', and \
                 now another {kind}. Unnamed operations are paired by their order, which threads \
                 don't have: give them names (Options::name), or start them from one thread",
                self.world.rank
            ))
        })
    }

    /// The call of an unnamed operation has started it, or has returned its number.
    pub(crate) fn settle(&self, set: ProcessSetId, numbered: &Numbered, has_started: bool) {
        let mut names = self.names.lock();
        names.started(set, numbered);
        if !has_started {
            names.take_back(set, numbered);
        }
    }
}

impl Session {
    /// A call for `request`, with the process set, name and priority from `common`, from the line
    /// that calls this.
    #[track_caller]
    pub(crate) fn call(&self, common: Common, request: Request) -> Result<Call> {
        let Common { name, priority, process_set, origin, kind } = common;
        let site = self.site();
        let membership = self.membership();
        let set = membership.sets.lock().of_member(process_set.as_ref())?;
        let kind = kind.unwrap_or(request.collective.name());
        Ok(Call { membership, set, name, kind, way: None, priority, origin, request, site })
    }

    /// Starts an operation on these inputs, one for each tensor or none.
    pub(crate) fn start(
        &self,
        call: Call,
        inputs: &[&Memory],
        into: Target<'_>,
    ) -> Result<Started> {
        let membership = call.membership.clone();
        let started = self.check_process().and_then(|()| self.start_checked(call, inputs, &into));
        membership.shared.noted(started)
    }

    fn start_checked(&self, call: Call, inputs: &[&Memory], into: &Target<'_>) -> Result<Started> {
        let Call { membership, set, name, kind, way, priority, origin, request, site } = call;
        // Before memory is allocated: nothing has started if this fails.
        request.validate()?;
        let given = if let Target::Given(given) = into { Some(*given) } else { None };
        self.check_memory(inputs.iter().copied().chain(given))?;
        let number = set.number();
        let expected = request.expected(
            gradwire_proto::Rank(membership.world.rank),
            set.len(),
            set.position().unwrap_or_default(),
        );
        let new = |(part, expected): (usize, &Expected)| {
            let shape = expected.shape.clone().filter(|_| matches!(into, Target::New));
            shape.map(|shape| self.new_buffer(request.dtype_of(part), shape)).transpose()
        };
        let outputs: Vec<Option<Buffer>> =
            expected.iter().enumerate().map(new).collect::<Result<_>>()?;
        let mut spare = None;
        let mut memory: Vec<Keep> = Vec::new();
        let (mut from, mut to) = (Vec::new(), Vec::new());
        for (part, output) in outputs.iter().enumerate() {
            let input = inputs.get(part).copied();
            let output = match into {
                Target::InPlace => input,
                Target::Given(given) => Some(*given),
                Target::New => output.as_ref().map(Payload::memory),
            };
            // Every input and output needs a place, even if it is ignored or empty.
            let any = match input.or(output) {
                Some(memory) => memory,
                None => spare.insert(self.buffer_unfilled(DType::U8, &[0])?).memory(),
            };
            let (input, output) = (input.unwrap_or(any), output.unwrap_or(any));
            from.push(input.place());
            to.push(output.place());
            // The program gets its own tensors back however the operation ends, but new memory only
            // if the operation succeeds.
            let result = match into {
                Target::New => output.lend(),
                Target::InPlace | Target::Given(_) => output.lend_mut(),
            };
            let has_result = expected[part].shape.is_some();
            memory.extend([input.lend(), result.with_result(has_result)]);
        }
        // Last, so that a refused call is not counted: other ranks don't know of it.
        let numbered = match (way, &name) {
            (Some(way), _) => Some(membership.message_of(number, way)?),
            (None, None) => Some(membership.unnamed(number, kind, self.limits().any_thread)?),
            (None, Some(_)) => None,
        };
        let name = numbered.as_ref().map(|numbered| numbered.name.clone()).or(name);
        let name = TensorName::new(&name.unwrap_or_default())?;
        if let (Some(numbered), None) = (&numbered, way) {
            let free = membership.shared.wait_for_name(&(number, name.clone()));
            free.inspect_err(|_| membership.settle(number, numbered, false))?;
        }
        let rank = membership.world.rank;
        let inspection = Inspection::of(self.limits().check_finite, rank, &request, inputs);
        let submission = Submission {
            ticket: 0, // `submit` sets it
            process_set: number.0,
            name: name.clone(),
            request,
            priority,
            origin,
            // Checks all of them, so that each copy counts once.
            copied: inputs.iter().filter(|memory| memory.take_copied()).count() > 0,
            inputs: from,
            outputs: to,
            site: membership.shared.learned.describe(site),
        };
        let movable = !matches!(into, Target::InPlace);
        let submitted = self.submit(&membership.shared, submission, memory, movable, inspection);
        if let Some(numbered) = &numbered {
            membership.settle(number, numbered, submitted.is_ok());
        }
        let ticket = submitted?;
        Ok(Started { membership, ticket, name, set: number, outputs, expected })
    }

    /// Submits an operation, now or when this clone's gate is opened. Returns its ticket.
    fn submit(
        &self,
        shared: &Arc<Shared>,
        submission: Submission,
        memory: Vec<Keep>,
        movable: bool,
        inspection: Option<Inspection>,
    ) -> Result<u64> {
        let mut prepared = shared.prepare(submission, memory, movable)?;
        prepared.inspection = inspection;
        let ticket = prepared.ticket();
        let submitted = match self.gate() {
            None => shared.submit(&prepared),
            Some(gate) => gate.pass(shared, prepared),
        };
        submitted.inspect_err(|_| shared.withdraw(ticket))?;
        Ok(ticket)
    }

    /// Waits for an operation.
    pub(crate) fn finish(&self, started: Started) -> Result<Finished> {
        // The wait may drop the owner of another buffer, which runs code of the program and may
        // panic. The daemon still has the tensor that the caller has borrowed.
        let membership = &started.membership;
        let unwinding = Unwinding::new(&membership.shared, &started.name);
        let outcome = membership.shared.wait(started.ticket, self.deadline());
        unwinding.did_not_happen();
        let what = || format!("the operation on tensor '{}'", started.name);
        let late = || Err(self.out_of_time(membership, &what()));
        let done = membership.shared.noted(outcome.unwrap_or_else(late))?;
        Ok(started.finish(done))
    }

    /// A handle of an operation that owns its tensors, or the tensors if it was not started.
    pub(crate) fn handle_with<I: Send + 'static, R>(
        &self,
        started: Result<Started>,
        tensor: I,
        result: impl FnOnce(I, Finished) -> Result<R> + Send + 'static,
    ) -> Start<R, I> {
        match started {
            Ok(started) => Ok(self.handle(started, |finished| result(tensor, finished))),
            Err(error) => Err(NotStarted { tensor, error: Box::new(error) }),
        }
    }

    /// A handle of an operation. `result` computes the handle's result.
    pub(crate) fn handle<R>(
        &self,
        started: Started,
        result: impl FnOnce(Finished) -> Result<R> + Send + 'static,
    ) -> Handle<R> {
        let (ticket, name) = (started.ticket, started.name.clone());
        let session = self.pinned_to(started.membership.clone());
        Handle::operation(session, ticket, name, move |done| result(started.finish(done)))
    }
}
