//! The requests of a call, and the result of a rank, as data.

use gradwire_proto::{Collective, Request, Shape};

use gradwire_reference::{Dice, Values, fill};

/// The form of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// The call returns when it is done. All ranks must make such calls in the same order.
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
    /// The participating ranks, ascending: the members of the process set that have not joined, or
    /// the sender and the receiver.
    pub ranks: Vec<u32>,
    /// The request of each of these ranks.
    pub requests: Vec<Request>,
    /// The message's tag.
    pub tag: u32,
    /// The form of the call.
    pub form: Form,
    /// Whether the result is a new tensor, if the API has both forms.
    pub apart: bool,
    /// The numbers of contributions.
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
    /// The number of rows from each rank, if the API returns that.
    pub rows: Vec<u64>,
}

/// The result of a rank for each tensor, `None` if it has none.
pub type Got = Vec<Option<Piece>>;

impl Call {
    /// A call in which all ranks make the same request.
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

    /// The request of one rank.
    ///
    /// # Panics
    /// If the rank does not take part.
    pub fn request(&self, rank: u32) -> &Request {
        let at = self.ranks.binary_search(&rank).expect("a rank that takes part");
        &self.requests[at]
    }

    /// The request of the first rank, for properties that all requests share.
    pub fn common(&self) -> &Request {
        &self.requests[0]
    }

    /// The contribution of a rank as one of its tensors.
    pub fn input(&self, rank: u32, part: usize) -> Vec<u8> {
        let request = self.request(rank);
        let mut bytes = vec![0; request.bytes_of(part) as usize];
        let mut dice = Dice::of(&[self.seed, part as u64, rank.into()]);
        let (dtype, op) = (request.dtype_of(part), request.reduce_op);
        fill(dtype, op, self.values, &mut dice, &mut bytes);
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
