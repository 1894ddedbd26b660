//! What a call asks for, and what a rank received, as data.

use gradwire_proto::{Collective, Request, Shape};

use crate::reference::{self, Dice, Values};

/// How a call is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The call returns when it is done. All ranks have to make such calls in the same order.
    Blocking,
    /// The call returns a handle.
    Handle,
}

/// A collective call of some ranks.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its name; `None` for an unnamed call. Send and receive have no name.
    pub name: Option<String>,
    /// Its priority.
    pub priority: i32,
    /// The ranks that take part, ascending: the members of the process set that have not joined, or
    /// the sender and the receiver.
    pub ranks: Vec<u32>,
    /// What each of these ranks asks for.
    pub requests: Vec<Request>,
    /// The message's tag.
    pub tag: u32,
    /// How the call is made.
    pub form: Form,
    /// Where the API has both forms: whether the result is a new tensor.
    pub apart: bool,
    /// The numbers that ranks contribute.
    pub values: Values,
    /// The seed of the contributions.
    pub seed: u64,
}

/// One result: its shape and its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its shape, as the API returns it.
    pub shape: Shape,
    /// Its elements.
    pub bytes: Vec<u8>,
    /// How many rows each rank contributed, where the API returns that.
    pub rows: Vec<u64>,
}

/// What a rank received: the result of each tensor, `None` where it has no result.
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
    /// If the rank does not take part.
    pub fn request(&self, rank: u32) -> &Request {
        let at = self.ranks.binary_search(&rank).expect("a rank that takes part");
        &self.requests[at]
    }

    /// The request of the first rank, for what is the same in all requests.
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

    /// Whether all ranks receive the same bits (SAME).
    pub fn is_shared(&self) -> bool {
        let shared = [Collective::Allreduce, Collective::Broadcast, Collective::Allgather];
        shared.contains(&self.common().collective)
    }

    /// A line that describes the call.
    pub fn title(&self) -> String {
        let request = self.common();
        let name = self.name.as_deref().unwrap_or("without a name");
        let shapes: Vec<String> = self.requests.iter().map(|r| r.shape.to_string()).collect();
        let lists: Vec<&Vec<u64>> = self.requests.iter().map(|request| &request.list).collect();
        format!(
            "{} '{name}' of ranks {:?} ({} {}, root {}, factors {} and {}, shapes {}, lists \
             {lists:?}, {} more, {:?}{})",
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
