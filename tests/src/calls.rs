//! One collective call as data: what every rank asks for, how a session is asked for it through
//! the public API, and what must come of it.
//!
//! - [`Call`]: what is asked for; [`Call::start`] asks, in all of the API's forms
//! - [`Got`]: what a rank got; [`Call::check`] compares it with the reference

mod right;
mod start;

use gradwire_proto::{Collective, DType, Failure, Rank, ReduceOp, Request, Shape};
use gradwire_worker::{GradwireError, ProcessSet, Session};

pub use self::start::Pending;
use crate::reference::{self, Between, Dice, Values};

/// How a session is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The call returns when it is done. All ranks have to make such calls in the same order.
    Blocking,
    /// The call gives a handle.
    Handle,
}

/// A collective call of some ranks.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its name; none for an unnamed one. Send and receive have none.
    pub name: Option<String>,
    /// Its priority.
    pub priority: i32,
    /// The ranks that take part, ascending: all of the process set that have not joined; of a send
    /// and receive the two.
    pub ranks: Vec<u32>,
    /// What each of them asks for.
    pub requests: Vec<Request>,
    /// The message's tag.
    pub tag: u32,
    /// How.
    pub form: Form,
    /// Where the API has both: whether the result is a tensor of its own.
    pub apart: bool,
    /// What numbers are contributed.
    pub values: Values,
    /// What the contributions are made of.
    pub seed: u64,
}

/// One result: its shape and its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its shape, as the API says.
    pub shape: Shape,
    /// Its elements.
    pub bytes: Vec<u8>,
    /// How many rows came from whom, where the API says so.
    pub rows: Vec<u64>,
}

/// What a rank got: for each tensor its result, none where there is none.
pub type Got = Vec<Option<Piece>>;

impl Call {
    /// A call in which all ranks ask for the same.
    pub fn same(name: impl Into<String>, ranks: &[u32], request: &Request) -> Self {
        Self {
            name: Some(name.into()),
            priority: 0,
            ranks: ranks.to_vec(),
            requests: vec![request.clone(); ranks.len()],
            tag: 0,
            form: Form::Blocking,
            apart: false,
            values: Values::Usual,
            seed: 0,
        }
    }

    /// What one rank asks for.
    ///
    /// # Panics
    /// If it does not take part.
    pub fn request(&self, rank: u32) -> &Request {
        let at = self.ranks.binary_search(&rank).expect("a rank that takes part");
        &self.requests[at]
    }

    /// What is the same for all.
    pub fn common(&self) -> &Request {
        &self.requests[0]
    }

    /// What a rank contributes as one of its tensors.
    pub fn input(&self, rank: u32, part: usize) -> Vec<u8> {
        let request = self.request(rank);
        let mut bytes = vec![0; request.bytes_of(part) as usize];
        let mut dice = Dice::of(&[self.seed, part as u64, rank.into()]);
        let (dtype, op) = (request.dtype_of(part), request.reduce_op);
        reference::fill(dtype, op, self.values, &mut dice, &mut bytes);
        bytes
    }

    /// Asks for it as the session's rank, which takes part.
    ///
    /// # Errors
    /// What the session says; of a blocking form the failure of the operation, too.
    pub fn start(&self, session: &Session, set: &ProcessSet) -> Result<Pending, GradwireError> {
        start::start(self, session, set)
    }

    /// Asks for it, waits, and compares.
    ///
    /// # Errors
    /// What the session says, or what is wrong with the result.
    pub fn run(&self, session: &Session, set: &ProcessSet, nodes: usize) -> Result<Got, String> {
        let text = |why: String| format!("{}: {why}", self.title());
        let pending = self.start(session, set).map_err(|error| text(error.to_string()))?;
        let got = pending.finish().map_err(|error| text(error.to_string()))?;
        let between = Between { nodes, compression: session.compression() };
        self.check(session.rank(), &got, between)?;
        Ok(got)
    }

    /// Compares what a rank got with the reference.
    ///
    /// # Errors
    /// With what is wrong, in words.
    pub fn check(&self, rank: u32, got: &Got, between: Between) -> Result<(), String> {
        right::check(self, rank, got, between)
            .map_err(|why| format!("rank {rank}, {}: {why}", self.title()))
    }

    /// Whether all get the same bits (SAME).
    pub fn is_shared(&self) -> bool {
        let shared = [Collective::Allreduce, Collective::Broadcast, Collective::Allgather];
        shared.contains(&self.common().collective)
    }

    /// A line that says which call it is.
    pub fn title(&self) -> String {
        let request = self.common();
        let name = self.name.as_deref().unwrap_or("without a name");
        let shapes: Vec<String> = self.requests.iter().map(|r| r.shape.to_string()).collect();
        let lists: Vec<&Vec<u64>> = self.requests.iter().map(|request| &request.list).collect();
        format!(
            "{} '{name}' of ranks {:?} ({} {}, root {}, factors {} and {}, shapes {}, lists {lists:?}, {} more, {:?}{})",
            request.collective,
            self.ranks,
            request.reduce_op,
            request.dtype,
            request.root,
            request.prescale,
            request.postscale,
            shapes.join(" "),
            request.more.len(),
            self.form,
            if self.apart { ", result apart" } else { "" },
        )
    }
}

/// The failure that an operation came to, which is told to all.
///
/// # Panics
/// If it came to anything else.
#[track_caller]
pub fn failure<T: std::fmt::Debug>(result: Result<T, GradwireError>) -> Failure {
    match result {
        Err(GradwireError::Failed(failure)) => failure,
        other => panic!("a failure was due: {other:?}"),
    }
}

/// Why a call was refused at once, before anything was started.
///
/// # Panics
/// If it was not.
#[track_caller]
pub fn refusal<T: std::fmt::Debug>(result: Result<T, GradwireError>) -> String {
    match result {
        Err(GradwireError::Failed(failure)) => panic!("this came too late: {failure}"),
        Err(error) => error.to_string(),
        Ok(result) => panic!("a refusal was due: {result:?}"),
    }
}

/// Whether groups of it can be asked for.
pub fn has_groups(collective: Collective) -> bool {
    let grouped = [Collective::Allreduce, Collective::Allgather, Collective::ReduceScatter];
    grouped.contains(&collective)
}

/// The collectives that a call can be of.
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

/// Whether it reduces.
pub fn reduces(collective: Collective) -> bool {
    let reduce = [Collective::Allreduce, Collective::Reduce, Collective::ReduceScatter];
    reduce.contains(&collective)
}

/// Whether it has a root that is asked for.
pub fn is_rooted(collective: Collective) -> bool {
    use Collective::{Broadcast, Gather, Reduce, Scatter};
    [Broadcast, Reduce, Gather, Scatter].contains(&collective)
}

/// A request of any collective with these dimensions; the root is there where it has one.
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

/// The same with another way to reduce.
pub fn with_op(request: Request, reduce_op: ReduceOp) -> Request {
    Request { reduce_op, ..request }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_result_is_seen() {
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
        // Of a reduction its part.
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
