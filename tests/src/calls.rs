//! One collective call as data: the requests of ranks, the call through the public API, and the
//! right result.
//!
//! - [`Call`]: the requests; [`Call::start`] makes the call, in all forms of the API
//! - [`Got`]: the result of a rank; [`Call::check`] compares it with the reference

mod call;
mod right;
mod start;

use gradwire_proto::{Collective, DType, Failure, Rank, ReduceOp, Request, Shape};
use gradwire_worker::{GradwireError, ProcessSet, Session};

pub use self::{
    call::{Call, Form, Got, Piece},
    start::Pending,
};
use gradwire_reference::Between;

impl Call {
    /// Makes the call as the session's rank, which must take part in it.
    ///
    /// # Errors
    /// The error of the session. A blocking form also returns the failure of the operation.
    pub fn start(&self, session: &Session, set: &ProcessSet) -> Result<Pending, GradwireError> {
        start::start(self, session, set)
    }

    /// Makes the call, waits for its result and checks it.
    ///
    /// # Errors
    /// The error of the session, or a description of the wrong result.
    pub fn run(&self, session: &Session, set: &ProcessSet, nodes: usize) -> Result<Got, String> {
        let text = |why: String| format!("{}: {why}", self.title());
        let pending = self.start(session, set).map_err(|error| text(error.to_string()))?;
        let got = pending.finish().map_err(|error| text(error.to_string()))?;
        let between = Between { nodes, compression: session.compression() };
        self.check(session.rank(), &got, between)?;
        Ok(got)
    }

    /// Compares the result of a rank with the reference.
    ///
    /// # Errors
    /// A description of the wrong result.
    pub fn check(&self, rank: u32, got: &Got, between: Between) -> Result<(), String> {
        right::check(self, rank, got, between)
            .map_err(|why| format!("rank {rank}, {}: {why}", self.title()))
    }
}

/// The failure of an operation, which all ranks get.
///
/// # Panics
/// If the operation succeeded or ended with another error.
#[track_caller]
pub fn failure<T: std::fmt::Debug>(result: Result<T, GradwireError>) -> Failure {
    match result {
        Err(GradwireError::Failed(failure)) => failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

/// Why a call was refused immediately, before any operation was started.
///
/// # Panics
/// If the call was not refused immediately.
#[track_caller]
pub fn refusal<T: std::fmt::Debug>(result: Result<T, GradwireError>) -> String {
    match result {
        Err(GradwireError::Failed(failure)) => panic!("expected an immediate refusal: {failure}"),
        Err(error) => error.to_string(),
        Ok(result) => panic!("expected a refusal, got {result:?}"),
    }
}

/// Whether the collective has groups.
pub fn has_groups(collective: Collective) -> bool {
    let grouped = [Collective::Allreduce, Collective::Allgather, Collective::ReduceScatter];
    grouped.contains(&collective)
}

/// The collectives that calls are made of.
pub const COLLECTIVES: [Collective; 10] = [
    Collective::Allreduce,
    Collective::Broadcast,
    Collective::Barrier,
    Collective::Reduce,
    Collective::Allgather,
    Collective::Gather,
    Collective::Scatter,
    Collective::ReduceScatter,
    Collective::Alltoall,
    Collective::SendReceive,
];

/// Whether the collective reduces.
pub fn reduces(collective: Collective) -> bool {
    let reduce = [Collective::Allreduce, Collective::Reduce, Collective::ReduceScatter];
    reduce.contains(&collective)
}

/// Whether requests have a root.
pub fn is_rooted(collective: Collective) -> bool {
    use Collective::{Broadcast, Gather, Reduce, Scatter};
    [Broadcast, Reduce, Gather, Scatter].contains(&collective)
}

/// A request with these dimensions, and with the root if the collective has one.
pub fn request(collective: Collective, dtype: DType, dims: &[u64], root: u32) -> Request {
    let shape = Shape::new(dims).expect("a shape");
    match collective {
        Collective::Barrier => Request::barrier(),
        _ if is_rooted(collective) => {
            Request { root: Rank(root), ..Request::plain(collective, dtype, shape) }
        }
        _ => Request::plain(collective, dtype, shape),
    }
}

/// The same request with another reduction.
pub fn with_op(request: Request, reduce_op: ReduceOp) -> Request {
    Request { reduce_op, ..request }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_result_is_noticed() {
        let one = Between::nodes(1);
        let asked = request(Collective::Allgather, DType::I16, &[2, 3], 0);
        let call = Call::same("w", &[0, 4], &asked);
        let right = Piece {
            shape: Shape::new(&[4, 3]).unwrap(),
            bytes: [call.input(0, 0), call.input(4, 0)].concat(),
            rows: vec![2, 2],
        };
        let check = |piece: &Piece| call.check(4, &vec![Some(piece.clone())], one);
        assert_eq!(check(&right), Ok(()));
        let mut swapped = right.clone();
        swapped.bytes.rotate_left(12);
        let wrong = [
            swapped,
            Piece { shape: Shape::new(&[12]).unwrap(), ..right.clone() },
            Piece { bytes: right.bytes[..23].to_vec(), ..right.clone() },
            Piece { rows: vec![1, 3], ..right.clone() },
        ];
        assert!(wrong.iter().all(|piece| check(piece).is_err()));
        let nothing = [vec![None], Vec::new()];
        assert!(nothing.iter().all(|nothing| call.check(4, nothing, one).is_err()));
        // The expected result of a reducescatter is the rank's part of the reduction.
        let asked = request(Collective::ReduceScatter, DType::U8, &[3], 0);
        let call = Call::same("w", &[0, 4], &asked);
        let sum = call.input(0, 0)[2].wrapping_add(call.input(4, 0)[2]);
        let check = |sum: u8| {
            let (shape, rows) = (Shape::new(&[1]).unwrap(), Vec::new());
            call.check(4, &vec![Some(Piece { shape, bytes: vec![sum], rows })], one)
        };
        assert!(check(sum).is_ok() && check(sum.wrapping_add(1)).is_err());
    }
}
