//! Checks a submission against the rank's process sets and memory (TRUST), and puts it into the
//! queue. A submission that a correct library never sends ends the job. A mistake of the program
//! only fails that submission.

use std::sync::{Arc, OnceLock};

use gradwire_proto::{
    Collective, Failure, FailureKind, ProcessSetId, Rank, Request, Shape, TensorName,
    clock::nanoseconds, pb,
};
use gradwire_shm::control::{Place, Submission};
use gradwire_trace::{Event, Kind, time};

use crate::{
    control::node::Node,
    metrics,
    model::{
        job::Outgoing,
        members::Members,
        memory::Span,
        tensor::{LocalTensor, TensorKey, Ticket, pair},
    },
    queue::{Submitted, TensorQueue},
    workers::worker::Worker,
};

/// A mistake in one submission, and what to do about it.
struct Invalid {
    what: String,
    hint: &'static str,
}

/// Why a submission does not reach the queue.
enum Refused {
    Invalid(Invalid),
    Nonsense(String),
}

/// Puts one submission into the queue. An error is a violation of the protocol by the worker.
pub(super) fn take(node: &Node, worker: &Worker, submission: Submission) -> Result<(), String> {
    let Some(queue) = node.queue() else { return Ok(()) };
    metrics::submission(submission.request.collective, submission.origin);
    let set = ProcessSetId(submission.process_set);
    let (ticket, name) = (submission.ticket, submission.name.clone());
    let site = worker.sites.text(&submission.site);
    worker.recorded.submitted(&submission, &site);
    if node.recorder.is_on() {
        let event = Event::new(Kind::Read, time::now_ns(), ticket);
        let name = node.tracer.names().number(name.as_str());
        node.recorder.record(Event { other: worker.rank.0, name, ..event });
    }
    let taken = if submission.request.collective == Collective::Join {
        join(node, queue, worker, &submission)
    } else {
        check(queue, worker, set, submission, site)
            .map(|local| queue.submit(TensorKey { set, name: name.clone() }, local))
    };
    match taken {
        Ok(submitted) => answer(node, worker, ticket, &name, submitted),
        Err(Refused::Nonsense(why)) => return Err(why),
        Err(Refused::Invalid(invalid)) => fail(node, worker, ticket, name.as_str(), invalid),
    }
    Ok(())
}

/// Submits a checked request that had to wait until its name was free.
pub(super) fn resubmit(node: &Node, key: TensorKey, local: LocalTensor) {
    let (Some(queue), Some(worker)) = (node.queue(), node.workers.get(local.local_rank)) else {
        return;
    };
    let (ticket, name) = (local.ticket, key.name.clone());
    answer(node, &worker, ticket, &name, queue.submit(key, local));
}

/// Acts on the result of a submission.
fn answer(node: &Node, worker: &Worker, ticket: u64, name: &TensorName, submitted: Submitted) {
    match submitted {
        Submitted::Waits => {}
        Submitted::Announce(announced) => {
            note_announced(node, &announced.key);
            if let (true, Some(latest)) = (node.recorder.is_on(), &announced.latest) {
                let (end_ns, waited_ns) = (time::now_ns(), nanoseconds(latest.waited));
                let event = Event::new(Kind::Gather, end_ns.saturating_sub(waited_ns), 0);
                let name = node.tracer.names().number(name.as_str());
                node.recorder.record(Event { duration_ns: waited_ns, name, ..event });
            }
            node.job.send(Outgoing::Ready(announced));
        }
        Submitted::RankLeft(gone) => {
            let failure = node.rank_left(gone).tensor(name.as_str());
            node.ensure_sent(worker, worker.fail(vec![ticket], &failure));
        }
        Submitted::Refused(refusal) => {
            let invalid = Invalid { what: refusal.to_string(), hint: refusal.hint() };
            fail(node, worker, ticket, name.as_str(), invalid);
        }
    }
}

/// Records that all local ranks have submitted a tensor.
fn note_announced(node: &Node, key: &TensorKey) {
    let Some(tensor) = node.queue().and_then(|queue| queue.announced(key)) else { return };
    let (flight, at_ns) = (node.flight(), node.tracer.ns(tensor.announced));
    for local in tensor.locals() {
        flight.announced(local.local_rank, local.ticket, at_ns);
    }
}

/// Fails one submission (TELL); the job goes on.
fn fail(node: &Node, worker: &Worker, ticket: u64, name: &str, invalid: Invalid) {
    let failure = Failure::new(FailureKind::Invalid, invalid.what)
        .rank(worker.rank)
        .host(node.config.host.clone())
        .tensor(name)
        .hint(invalid.hint);
    metrics::failure(failure.kind);
    node.ensure_sent(worker, worker.fail(vec![ticket], &failure));
}

/// Joins immediately, without waiting for other local ranks.
fn join(
    node: &Node,
    queue: &TensorQueue,
    worker: &Worker,
    submission: &Submission,
) -> Result<Submitted, Refused> {
    let Submission { ticket, process_set, request, priority, .. } = submission;
    let answer = Ticket { local_rank: worker.local_rank, ticket: *ticket };
    match queue.join(ProcessSetId(*process_set), answer, request.clone(), *priority) {
        Ok(announced) => {
            announced.iter().for_each(|announced| note_announced(node, &announced.key));
            node.job.send(Outgoing::Joined(announced));
            Ok(Submitted::Waits)
        }
        Err(submitted) => Ok(submitted),
    }
}

/// Checks a rank's request against its process set and its memory.
fn check(
    queue: &TensorQueue,
    worker: &Worker,
    set: ProcessSetId,
    submission: Submission,
    site: Arc<str>,
) -> Result<LocalTensor, Refused> {
    let Submission { ticket, name, request, priority, inputs, outputs, copied, .. } = submission;
    let members = queue.admit(set, worker.local_rank).map_err(|refusal| {
        Refused::Invalid(Invalid { what: refusal.to_string(), hint: refusal.hint() })
    })?;
    validate(&name, &request, set, &members, worker.rank).map_err(Refused::Invalid)?;
    let places = |what: &str, places: &[Place], bytes: &dyn Fn(usize) -> u64| {
        spans(worker, &request, places, bytes)
            .map_err(|why| Refused::Nonsense(format!("the {what} of tensor '{name}': {why}")))
    };
    let is_read = match request.collective {
        Collective::Scatter | Collective::SendReceive => worker.rank == request.root,
        _ => true,
    };
    let inputs =
        places("input", &inputs, &|part| if is_read { request.bytes_of(part) } else { 0 })?;
    metrics::contribution(inputs.iter().map(Span::bytes).sum(), copied);
    let position = members.position(worker.rank).unwrap_or_default();
    let expected = request.expected(worker.rank, members.ranks.len(), position);
    let outputs =
        places("output", &outputs, &|part| bytes(&request, part, expected[part].shape.as_ref()))?;
    let local_rank = worker.local_rank;
    let allocated = OnceLock::new();
    Ok(LocalTensor { local_rank, ticket, request, priority, inputs, outputs, allocated, site })
}

/// Finds mistakes that can be seen without the requests of other ranks.
fn validate(
    name: &TensorName,
    request: &Request,
    set: ProcessSetId,
    members: &Members,
    rank: Rank,
) -> Result<(), Invalid> {
    let collective = request.collective;
    if name.as_str() == Request::JOIN {
        let what = format!("'{}' is reserved for joins, but this is {collective}", Request::JOIN);
        return Err(Invalid { what, hint: "use another name" });
    }
    if let Some((from, to)) = pair(request) {
        if rank != from && rank != to {
            let what = format!("rank {rank} is neither the sender {from} nor the receiver {to}");
            return Err(Invalid { what, hint: "only those two submit it" });
        }
        if let Some(end) = [from, to].into_iter().find(|end| members.position(*end).is_none()) {
            let what = format!("rank {end} is not a member of process set {set}");
            let hint = "send to and receive from ranks of the job, in a set of both";
            return Err(Invalid { what, hint });
        }
    }
    let of_all = matches!(collective, Collective::AddProcessSet | Collective::RemoveProcessSet);
    if of_all && set != ProcessSetId::GLOBAL {
        let what = format!(
            "{collective} must be called by all ranks of the job, not in process set {set}"
        );
        return Err(Invalid { what, hint: "call it in process set 0" });
    }
    Ok(())
}

/// The bytes of a result with this shape; 0 without one.
fn bytes(request: &Request, part: usize, shape: Option<&Shape>) -> u64 {
    shape.map_or(0, |shape| shape.elements() * request.dtype_of(part).size() as u64)
}

/// The memory at the worker's places, one for each tensor of the request.
fn spans(
    worker: &Worker,
    request: &Request,
    places: &[Place],
    bytes: &dyn Fn(usize) -> u64,
) -> Result<Vec<Span>, String> {
    if places.len() != request.parts() {
        return Err(format!("{} places for {} tensors", places.len(), request.parts()));
    }
    let span = |(part, place): (usize, &Place)| {
        let bytes = bytes(part);
        if bytes == 0 {
            // A tensor without elements needs no memory, so a worker without memory may submit it.
            return Ok(Span::empty());
        }
        let align = request.dtype_of(part).size() as u64;
        worker.memory.resolve(*place, bytes, align).map_err(|error| error.to_string())
    };
    places.iter().enumerate().map(span).collect()
}

/// A worker has allocated memory for results of unexpected shapes. An error is a violation of the
/// protocol by the worker.
pub(super) fn allocated(
    node: &Node,
    worker: &Worker,
    allocated: &pb::Allocated,
) -> Result<(), String> {
    let ticket = allocated.ticket;
    let answer = Ticket { local_rank: worker.local_rank, ticket };
    let Some(operations) = node.operations() else { return Ok(()) };
    let Some(asked) = operations.pending.asked(answer) else {
        if node.job.ending().is_some() {
            return Ok(());
        }
        return Err(format!(
            "it allocated memory for submission {ticket}, which was not requested"
        ));
    };
    let is_it = |local: &&LocalTensor| local.answer() == answer;
    let Some(local) = asked.tensor.locals().iter().find(is_it) else { return Ok(()) };
    let place = |place: &pb::Place| Place { segment: place.segment, offset: place.offset };
    let places: Vec<Place> = allocated.places.iter().map(place).collect();
    let outputs = &asked.outputs;
    let bytes = |part: usize| bytes(&local.request, part, outputs[part].0.as_ref());
    let spans = spans(worker, &local.request, &places, &bytes)
        .map_err(|why| format!("the memory for tensor '{}': {why}", asked.tensor.key.name))?;
    operations.allocated(answer, spans);
    Ok(())
}

#[cfg(test)]
mod tests {
    use gradwire_proto::DType;

    use super::*;
    use crate::model::world::tests::world;

    #[test]
    fn mistakes_of_a_single_rank_are_refused() {
        let world = world(0, &[2, 2]);
        let set = ProcessSetId(3);
        let members = Members::of(&world, vec![Rank(0), Rank(1), Rank(3)]).unwrap();
        let name = TensorName::new("t").unwrap();
        let send = |to| Request {
            root: Rank(1),
            list: vec![to],
            ..Request::plain(Collective::SendReceive, DType::F32, Shape::default())
        };
        let text = |request: &Request, rank| {
            validate(&name, request, set, &members, Rank(rank)).err().map(|invalid| invalid.what)
        };
        assert_eq!(text(&send(3), 1), None);
        assert_eq!(text(&send(3), 3), None);
        let neither = text(&send(3), 0).unwrap();
        assert_eq!(neither, "rank 0 is neither the sender 1 nor the receiver 3");
        let stranger = text(&send(2), 1).unwrap();
        assert_eq!(stranger, "rank 2 is not a member of process set 3");
        let remove = Request { list: vec![3], ..Request::empty(Collective::RemoveProcessSet) };
        assert!(text(&remove, 1).unwrap().contains("must be called by all ranks"));
        let all = ProcessSetId::GLOBAL;
        assert!(validate(&name, &remove, all, &members, Rank(1)).is_ok());
        let join = TensorName::new(Request::JOIN).unwrap();
        let taken = validate(&join, &Request::barrier(), all, &members, Rank(1)).unwrap_err();
        assert_eq!(taken.what, "'join' is reserved for joins, but this is barrier");
    }
}
