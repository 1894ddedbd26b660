//! Memory for results whose size a rank can't know from its own request: of an allgather with
//! different rows, a scatter, or a message of unknown shape.
//!
//! When all ranks have agreed, the daemon reports the sizes of the results. The operation runs once
//! every local rank has answered with their places. The thread `gw-results` allocates the memory.
//! The watcher can't do that: an arena that grows waits for the daemon's receipt, which the watcher
//! receives. When `gw-results` has nothing else to do, it gives unused memory back to the system.

use std::{
    sync::mpsc::{self, RecvTimeoutError},
    time::Duration,
};

use gradwire_proto::{
    Collective, Ending, Failure, FailureKind, Request, Shape,
    pb::{self, worker_message::Message},
};
use gradwire_shm::arena::Arena;

use crate::{
    memory::{Buffer, Output, Payload},
    shared::{Shared, end::Unwatched},
};

/// How often unused memory goes back to the system.
const TIDY: Duration = Duration::from_secs(10);

/// Allocates results until the watcher has ended.
pub(crate) fn serve(
    shared: &Shared,
    arena: &Arena,
    requests: &mpsc::Receiver<(Request, pb::Allocate)>,
) {
    // An unanswered request would block all ranks.
    let _unwatched = Unwatched(shared);
    loop {
        let (request, allocate) = match requests.recv_timeout(TIDY) {
            Ok(request) => request,
            Err(RecvTimeoutError::Timeout) => {
                arena.give_back();
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let ticket = allocate.ticket;
        let sizes = match sizes(&request, allocate.outputs) {
            Ok(sizes) => sizes,
            Err(what) => {
                let what = format!("invalid results of a {}: {what}", request.collective);
                shared.finish(Ending::Failed(Failure::new(FailureKind::Protocol, what)));
                return;
            }
        };
        let mut outputs = Vec::with_capacity(sizes.len());
        for (part, (shape, rows)) in sizes.into_iter().enumerate() {
            let dtype = request.dtype_of(part);
            let bytes = shape.elements() * dtype.size() as u64;
            match arena.allocate(bytes) {
                Ok(block) => {
                    outputs.push(Output { buffer: Buffer::new(block, dtype, shape), rows });
                }
                Err(error) => {
                    // TELL: the other ranks wait for this rank's memory.
                    let reason = format!("can't allocate a result of {dtype} {shape}: {error}");
                    shared.give_up(Failure::new(FailureKind::Resource, reason));
                    return;
                }
            }
        }
        let place = |output: &Output| {
            let place = output.buffer.memory().place();
            pb::Place { segment: place.segment, offset: place.offset }
        };
        let places = outputs.iter().map(place).collect();
        shared.move_results(ticket, outputs);
        if shared.send(Message::Allocated(pb::Allocated { ticket, places }), None).is_err() {
            return; // the session has ended
        }
    }
}

impl Shared {
    /// Checks a request for memory (TRUST): once for an operation in flight whose results may go to
    /// other memory. Returns that operation's request.
    pub(crate) fn asked(&self, allocate: &pb::Allocate) -> Result<Request, Failure> {
        let ticket = allocate.ticket;
        self.ask_movable(ticket).ok_or_else(|| {
            let what = format!(
                "the daemon asked for memory for results of operation {ticket}, which is not in \
                 flight, has in-place results, or has the memory already"
            );
            Failure::new(FailureKind::Protocol, what)
        })
    }
}

/// Checks the sizes that the daemon reports (TRUST).
fn sizes(request: &Request, outputs: Vec<pb::Output>) -> Result<Vec<(Shape, Vec<u64>)>, String> {
    let parts = request.parts();
    if outputs.len() != parts {
        return Err(format!("{} of {parts} tensors", outputs.len()));
    }
    let size = |(part, output): (usize, pb::Output)| {
        let asked = request.shape_of(part);
        let shape = Shape::new(&output.shape).map_err(|error| error.to_string())?;
        let fits = match request.collective {
            Collective::Scatter | Collective::SendReceive => true,
            _ if request.has_free_rows() => asked.with_rows(shape.rows()).as_ref() == Ok(&shape),
            _ => *asked == shape,
        };
        let nothing = shape.elements() == 0 && output.rows.is_empty();
        let sum = output.rows.iter().try_fold(0u64, |sum, rows| sum.checked_add(*rows));
        let rows_fit = output.rows.is_empty() || sum == Some(shape.rows());
        if (fits || nothing) && rows_fit {
            Ok((shape, output.rows))
        } else {
            Err(format!("shape {shape} with rows {:?} for {asked}", output.rows))
        }
    };
    outputs.into_iter().enumerate().map(size).collect()
}

#[cfg(test)]
mod tests {
    use gradwire_proto::DType;

    use super::*;

    fn output(shape: &[u64], rows: &[u64]) -> pb::Output {
        pb::Output { shape: shape.to_vec(), rows: rows.to_vec() }
    }

    #[test]
    fn the_daemons_sizes_are_checked() {
        let shape = Shape::new(&[2, 3]).unwrap();
        let of = |collective| Request::plain(collective, DType::F32, shape.clone());
        let gather = of(Collective::Allgather);
        assert!(sizes(&gather, vec![output(&[5, 3], &[2, 3])]).is_ok());
        assert!(sizes(&gather, vec![output(&[0], &[])]).is_ok(), "nothing");
        assert!(sizes(&of(Collective::SendReceive), vec![output(&[7], &[])]).is_ok());
        assert!(sizes(&of(Collective::Allreduce), vec![output(&[2, 3], &[])]).is_ok());
        // TRUST
        let cases = [
            (&gather, vec![], "0 of 1 tensors"),
            (&gather, vec![output(&[5, 4], &[2, 3])], "shape [5, 4] with rows [2, 3]"),
            (&gather, vec![output(&[5, 3], &[2, 4])], "rows [2, 4]"),
            (&gather, vec![output(&[0, 3], &[1, u64::MAX])], "18446744073709551615"),
            (&gather, vec![output(&[u64::MAX, 3], &[])], "invalid shape"),
            (&of(Collective::ReduceScatter), vec![output(&[1, 3], &[])], "shape [1, 3]"),
        ];
        for (request, outputs, text) in cases {
            let error = sizes(request, outputs).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
    }
}
