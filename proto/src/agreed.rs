//! What all ranks have agreed on for a tensor, and what follows for each of them. The code is pure,
//! and the same everywhere: the coordinator makes an [`Agreed`], every daemon derives from it which
//! bytes to move where, and a worker the size of its result.
//!
//! A collective is a list of *flows*. Each moves a range from one rank's input, or from the
//! reduction of all inputs, to one rank's output or to all outputs:
//!
//! | | from | to | flows of a tensor |
//! |---|---|---|---|
//! | allreduce | all | all | one |
//! | reduce | all | root | one |
//! | broadcast | root | all | one |
//! | allgather | each member | all | one per member |
//! | gather | each member | root | one per member |
//! | scatter | root | each member | one per member |
//! | reducescatter | all | each member | one per member |
//! | alltoall | each member | each member | one per pair, by sender, then receiver |
//! | send and receive | sender | receiver | one |
//!
//! A group has these flows for each of its tensors. All flows of a tensor are moved together: a
//! piece contains the same range of each.

use crate::{
    request::Request,
    types::{Collective, NodeId, Rank, Shape, TypeError},
};

/// A segment with this part number only reports that a request without elements is done.
pub const NO_PART: u32 = u32::MAX;

/// A range to move. Offsets and count are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// Which tensor of the request.
    pub part: u32,
    /// The rank that gives the input; `None`: the reduction of all members' inputs.
    pub source: Option<Rank>,
    /// The rank that gets the output; `None`: every member.
    pub target: Option<Rank>,
    /// Its first element in the inputs.
    pub source_offset: u64,
    /// Its first element in the outputs.
    pub target_offset: u64,
    /// How many elements.
    pub count: u64,
}

/// How the flows of a tensor go between nodes. The coordinator fuses tensors of one route into a
/// piece; every daemon derives the piece's schedule from it. Both use this definition (SAME).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// From all participants to all: reduced.
    All,
    /// From one node to all participants.
    From(NodeId),
    /// From all participants to one node: reduced.
    To(NodeId),
    /// From one node to another, or within one node. No other node takes part.
    Move(NodeId, NodeId),
    /// Several flows, each with a route of its own.
    Each,
    /// No bytes move; the tensor is done.
    Nothing,
}

impl Route {
    /// The one or two nodes of a move, ascending. `None` if all participants take part.
    pub fn ends(self) -> Option<Vec<NodeId>> {
        match self {
            Self::Move(from, to) => Some(pair(from, to)),
            Self::All | Self::From(_) | Self::To(_) | Self::Each | Self::Nothing => None,
        }
    }
}

/// Two nodes, ascending, or one if both are the same.
pub fn pair(one: NodeId, other: NodeId) -> Vec<NodeId> {
    if one == other { vec![one] } else { vec![one.min(other), one.max(other)] }
}

impl Flow {
    /// The flow's route. `node_of` returns a rank's node. `None` if an end of the flow has no node
    /// (TRUST).
    pub fn route(&self, node_of: impl Fn(Rank) -> Option<NodeId>) -> Option<Route> {
        Some(match (self.source, self.target) {
            (None, None) => Route::All,
            (Some(source), None) => Route::From(node_of(source)?),
            (None, Some(target)) => Route::To(node_of(target)?),
            (Some(source), Some(target)) => Route::Move(node_of(source)?, node_of(target)?),
        })
    }
}

/// Why a request on which all ranks agree can't be carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the fields are")]
pub enum Impossible {
    /// The root, sender or receiver is not a member that takes part.
    #[error("{role} {rank} is not a member that takes part; these are {members}")]
    NotAMember { role: &'static str, rank: u64, members: String },
    /// A list does not have one entry for each member.
    #[error("rank {rank} gave {given} splits for {members} members")]
    Splits { rank: Rank, given: usize, members: usize },
    /// The splits add up to more rows than the tensor has.
    #[error("the splits of rank {rank} add up to {sum} rows, but its tensor has {rows}")]
    TooManyRows { rank: Rank, sum: u64, rows: u64 },
    /// Rows can't be split evenly.
    #[error(
        "the {rows} rows of rank {rank} can't be split evenly between {members} members: \
         give splits"
    )]
    Uneven { rank: Rank, rows: u64, members: usize },
    /// The result is too large.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// Another reason.
    #[error("{0}")]
    Other(String),
}

/// What all ranks that take part have agreed on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Agreed {
    request: Request,
    rows: Vec<u64>,
}

/// The sum, or the largest number if it overflows, which is more rows than any shape has.
fn sum<'a>(rows: impl IntoIterator<Item = &'a u64>) -> u64 {
    rows.into_iter().fold(0, |all, &rows| all.saturating_add(rows))
}

/// The number of rows that each of `members` gets from one rank's request: the entries of its list,
/// or an even split if the list is empty.
///
/// # Errors
/// [`Impossible`] if the list does not have one entry for each member, if the entries add up to
/// more rows than the tensor has, or if rows can't be split evenly.
pub fn splits(rank: Rank, request: &Request, members: usize) -> Result<Vec<u64>, Impossible> {
    let rows = request.shape.rows();
    if request.list.is_empty() {
        if !rows.is_multiple_of(members as u64) {
            return Err(Impossible::Uneven { rank, rows, members });
        }
        return Ok(vec![rows / members as u64; members]);
    }
    let given = request.list.len();
    if given != members {
        return Err(Impossible::Splits { rank, given, members });
    }
    let sum = sum(&request.list);
    if sum > rows {
        return Err(Impossible::TooManyRows { rank, sum, rows });
    }
    Ok(request.list.clone())
}

/// Whether these are the [`splits`] of one request.
fn is_split_like(request: &Request, rows: &[u64]) -> bool {
    let (all, n) = (request.shape.rows(), rows.len() as u64);
    match request.list.as_slice() {
        [] => all.is_multiple_of(n) && rows.iter().all(|&rows| rows == all / n),
        list => list == rows && sum(list) <= all,
    }
}

fn member(members: &[Rank], role: &'static str, rank: u64) -> Result<usize, Impossible> {
    let found = members.iter().position(|member| u64::from(member.0) == rank);
    found.ok_or_else(|| {
        let some: Vec<String> = members.iter().take(16).map(ToString::to_string).collect();
        let more = if members.len() > some.len() { ", …" } else { "" };
        Impossible::NotAMember { role, rank, members: format!("{}{more}", some.join(", ")) }
    })
}

impl Agreed {
    /// Agrees on the requests of all members that take part, in rank order, at least one. Their
    /// common parts ([`Request::common`]) must be equal. For a send and receive the members are the
    /// two ranks.
    pub fn of(members: &[Rank], requests: &[&Request]) -> Result<Self, Impossible> {
        assert_eq!(members.len(), requests.len(), "one request for each member");
        let first = requests[0];
        let (n, parts) = (members.len(), first.parts());
        let root = |role| member(members, role, u64::from(first.root.0));
        let mut request = first.common();
        let mut rows = Vec::new();
        match first.collective {
            Collective::Broadcast | Collective::Reduce => {
                root("root")?;
            }
            Collective::Allgather | Collective::Gather => {
                if first.collective == Collective::Gather {
                    root("root")?;
                }
                for part in 0..parts {
                    rows.extend(requests.iter().map(|request| request.shape_of(part).rows()));
                    first.shape_of(part).with_rows(sum(&rows[part * n..]))?;
                }
            }
            Collective::Scatter => {
                let root = root("root")?;
                request.shape = requests[root].shape.with_rows(0)?;
                rows = splits(members[root], requests[root], n)?;
            }
            Collective::Alltoall => {
                for (rank, request) in members.iter().zip(requests) {
                    rows.extend(splits(*rank, request, n)?);
                }
                for to in 0..n {
                    first.shape.with_rows(sum(rows.iter().skip(to).step_by(n)))?;
                }
            }
            Collective::SendReceive => {
                let sender = root("sender")?;
                let [to] = first.list[..] else {
                    return Err(Impossible::Other("a send names one receiver".into()));
                };
                member(members, "receiver", to)?;
                request.shape = requests[sender].shape.clone();
            }
            Collective::Barrier if first.shape.elements() != 0 => {
                return Err(Impossible::Other("a barrier has no elements: use shape [0]".into()));
            }
            _ => {}
        }
        Ok(Self { request, rows })
    }

    /// For a message. This does not check the rows: call [`Agreed::is_of`] (TRUST).
    pub fn from_parts(request: Request, rows: Vec<u64>) -> Self {
        Self { request, rows }
    }

    /// The common part of the requests; the first dimension is 0 where rows may differ.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Allgather, gather: each member's rows, tensor by tensor. Alltoall: the rows from each member
    /// to each, by sender. Scatter: the rows of each member. Otherwise empty.
    pub fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Whether the rows match `members`, and no input or result is too large (TRUST). For a value
    /// from a message, check this first; then nothing else here can fail. Always true for the
    /// results of [`Agreed::of`].
    pub fn is_of(&self, members: &[Rank]) -> bool {
        let (n, rows) = (members.len(), &self.rows);
        let fits = |part: usize, all: u64| self.request.shape_of(part).with_rows(all).is_ok();
        match self.request.collective {
            Collective::Allgather | Collective::Gather => {
                rows.len() == self.request.parts() * n
                    && (0..self.request.parts()).all(|part| fits(part, sum(&rows[part * n..][..n])))
            }
            Collective::Scatter => rows.len() == n && fits(0, sum(rows)),
            Collective::Alltoall => {
                rows.len() == n * n
                    && (0..n).all(|from| fits(0, sum(&rows[from * n..][..n])))
                    && (0..n).all(|to| fits(0, sum(rows.iter().skip(to).step_by(n))))
            }
            Collective::SendReceive => {
                let to = self.request.list.first();
                rows.is_empty() && members.iter().any(|rank| to == Some(&u64::from(rank.0)))
            }
            _ => rows.is_empty(),
        }
    }

    /// Whether this is what `rank` asked for. `members` are the members that take part.
    pub fn fits(&self, members: &[Rank], rank: Rank, asked: &Request) -> bool {
        self.is_of(members) && self.fits_one(members, rank, asked)
    }

    /// Like [`Agreed::fits`], for callers that have already checked [`Agreed::is_of`]; otherwise it
    /// may panic. For the steady state: it checks only what concerns this rank, and copies nothing.
    pub fn fits_one(&self, members: &[Rank], rank: Rank, asked: &Request) -> bool {
        let n = members.len();
        let Some(me) = members.iter().position(|member| *member == rank) else { return false };
        if !asked.agrees_with(&self.request) {
            return false;
        }
        match self.request.collective {
            Collective::Allgather | Collective::Gather => (0..self.request.parts())
                .all(|part| self.rows[part * n + me] == asked.shape_of(part).rows()),
            Collective::Alltoall => is_split_like(asked, &self.rows[me * n..][..n]),
            Collective::Scatter if rank == self.request.root => {
                is_split_like(asked, &self.rows)
                    && asked.shape.with_rows(0).as_ref() == Ok(&self.request.shape)
            }
            Collective::SendReceive if rank == self.request.root => {
                asked.shape == self.request.shape
            }
            _ => true,
        }
    }

    /// The relevant parts of what `rank` asked for; for texts.
    pub fn asked(&self, members: &[Rank], rank: Rank) -> Request {
        let n = members.len();
        let mut asked = self.request.clone();
        let Some(me) = members.iter().position(|member| *member == rank) else { return asked };
        let with = |shape: &Shape, rows: u64| shape.with_rows(rows).unwrap_or_default();
        match self.request.collective {
            Collective::Allgather | Collective::Gather => {
                asked.shape = with(&asked.shape, self.rows[me]);
                for (part, more) in (1..).zip(&mut asked.more) {
                    more.shape = with(&more.shape, self.rows[part * n + me]);
                }
            }
            Collective::Alltoall => {
                asked.list = self.rows[me * n..][..n].to_vec();
                asked.shape = with(&asked.shape, sum(&asked.list));
            }
            Collective::Scatter if rank == self.request.root => {
                asked.list.clone_from(&self.rows);
                asked.shape = with(&asked.shape, sum(&asked.list));
            }
            _ => {}
        }
        asked
    }

    /// The route of every tensor of the request. `node_of` returns a rank's node. `None` if an end
    /// of a flow has no node (TRUST).
    pub fn route(
        &self,
        members: &[Rank],
        node_of: impl Fn(Rank) -> Option<NodeId>,
    ) -> Option<Route> {
        if self.request.has_many_flows() {
            return Some(Route::Each);
        }
        self.flows_of(members, 0).first().map_or(Some(Route::Nothing), |flow| flow.route(node_of))
    }

    /// The flows of one tensor of the request, including empty ones. `members` are the members that
    /// take part.
    pub fn flows_of(&self, members: &[Rank], part: usize) -> Vec<Flow> {
        let n = members.len();
        let request = &self.request;
        let root = Some(request.root);
        let mut flows = Vec::new();
        let shape = request.shape_of(part);
        let row = shape.row_elements();
        let flow = Flow {
            part: part as u32,
            source: None,
            target: None,
            source_offset: 0,
            target_offset: 0,
            count: shape.elements(),
        };
        match request.collective {
            Collective::Allreduce => flows.push(flow),
            Collective::Reduce => flows.push(Flow { target: root, ..flow }),
            Collective::Broadcast => flows.push(Flow { source: root, ..flow }),
            Collective::Allgather | Collective::Gather => {
                let gather = request.collective == Collective::Gather;
                let target = root.filter(|_| gather);
                let mut target_offset = 0;
                for (member, rows) in members.iter().zip(&self.rows[part * n..]) {
                    let (source, count) = (Some(*member), rows * row);
                    flows.push(Flow { source, target, target_offset, count, ..flow });
                    target_offset += count;
                }
            }
            Collective::Scatter | Collective::ReduceScatter => {
                let scatter = request.collective == Collective::Scatter;
                let source = root.filter(|_| scatter);
                let mut source_offset = 0;
                for (at, member) in members.iter().enumerate() {
                    let rows = if scatter { self.rows[at] } else { share(shape.rows(), n, at) };
                    let (target, count) = (Some(*member), rows * row);
                    flows.push(Flow { source, target, source_offset, count, ..flow });
                    source_offset += count;
                }
            }
            Collective::Alltoall => {
                let mut filled = vec![0; n];
                for (from, source) in members.iter().enumerate() {
                    let mut source_offset = 0;
                    for (to, target) in members.iter().enumerate() {
                        let count = self.rows[from * n + to] * row;
                        let ends = Flow { source: Some(*source), target: Some(*target), ..flow };
                        let target_offset = filled[to];
                        flows.push(Flow { source_offset, target_offset, count, ..ends });
                        source_offset += count;
                        filled[to] += count;
                    }
                }
            }
            Collective::SendReceive => {
                let receiver = request.list.first().map(|&rank| Rank(rank as u32));
                flows.push(Flow { source: root, target: receiver, ..flow });
            }
            Collective::Barrier
            | Collective::Join
            | Collective::AddProcessSet
            | Collective::RemoveProcessSet => {}
        }
        flows
    }

    /// The flows of all tensors of the request, one tensor after the other.
    pub fn flows(&self, members: &[Rank]) -> Vec<Flow> {
        (0..self.request.parts()).flat_map(|part| self.flows_of(members, part)).collect()
    }

    /// The shape of each result of `rank`; `None` where it gets nothing.
    pub fn outputs(&self, members: &[Rank], rank: Rank) -> Vec<Option<Shape>> {
        let request = &self.request;
        let Some(me) = members.iter().position(|member| *member == rank) else {
            return vec![None; request.parts()];
        };
        let is_root = rank == request.root;
        let output = |part: usize| {
            let shape = request.shape_of(part);
            match request.collective {
                Collective::Allreduce | Collective::Broadcast => Some(shape.clone()),
                Collective::Reduce => is_root.then(|| shape.clone()),
                Collective::Allgather | Collective::Gather | Collective::Alltoall => {
                    let rows = self.received(members, rank, part);
                    if rows.is_empty() { None } else { shape.with_rows(sum(&rows)).ok() }
                }
                Collective::Scatter => shape.with_rows(self.rows[me]).ok(),
                Collective::ReduceScatter => {
                    shape.with_rows(share(shape.rows(), members.len(), me)).ok()
                }
                Collective::SendReceive => {
                    (request.list == [u64::from(rank.0)]).then(|| shape.clone())
                }
                _ => None,
            }
        };
        (0..request.parts()).map(output).collect()
    }

    /// Allgather, gather at the root, alltoall: the number of rows that `rank` gets from each
    /// member. Otherwise empty.
    pub fn received(&self, members: &[Rank], rank: Rank, part: usize) -> Vec<u64> {
        let n = members.len();
        let Some(me) = members.iter().position(|member| *member == rank) else {
            return Vec::new();
        };
        match self.request.collective {
            Collective::Gather if rank != self.request.root => Vec::new(),
            Collective::Allgather | Collective::Gather => self.rows[part * n..][..n].to_vec(),
            Collective::Alltoall => self.rows.iter().skip(me).step_by(n).copied().collect(),
            _ => Vec::new(),
        }
    }

    /// Whether `rank` gets exactly what its own request let it expect in a process set of `set`
    /// members ([`Request::expected`]). Then the memory that it has allocated fits, and nothing
    /// needs to be reported.
    pub fn is_expected(&self, members: &[Rank], set: usize, rank: Rank, asked: &Request) -> bool {
        let position = members.iter().position(|member| *member == rank).unwrap_or_default();
        let expected = asked.expected(rank, set, position);
        self.outputs(members, rank) == expected.iter().map(|e| e.shape.clone()).collect::<Vec<_>>()
            && (0..self.request.parts())
                .all(|part| self.received(members, rank, part) == expected[part].rows)
    }
}

/// The number of rows of the member at index `at`, if `members` members, at least one, share
/// `rows`. The first members get the remainder.
pub fn share(rows: u64, members: usize, at: usize) -> u64 {
    let members = members as u64;
    rows / members + u64::from((at as u64) < rows % members)
}

/// The most bytes that a rank allocates for the rows of others, guessing that they have as many as
/// itself (BOUND). Beyond this, the daemon asks once the size is known.
const GUESSED: u64 = 64 << 20;

/// What a rank may expect for one of its tensors.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Expected {
    /// The shape of the result; `None` if it gets nothing.
    pub shape: Option<Shape>,
    /// The number of rows from each member, as in [`Agreed::received`].
    pub rows: Vec<u64>,
}

impl Request {
    /// What `rank`, the member at `position` of a process set of `set` members, allocates before it
    /// knows what others ask for: as if all had asked for the same. One entry for each tensor,
    /// empty where the guess would be large. So a rank with many rows among ranks with few does not
    /// allocate much more than it needs.
    pub fn expected(&self, rank: Rank, set: usize, position: usize) -> Vec<Expected> {
        let is_root = rank == self.root;
        let rows_of = |shape: &Shape, rows: Vec<u64>| Expected {
            shape: shape.with_rows(sum(&rows)).ok(),
            rows,
        };
        let just = |shape: Option<Shape>| Expected { shape, rows: Vec::new() };
        let others = (set as u64).saturating_sub(1);
        let is_large = self.bytes().saturating_mul(others) > GUESSED;
        let expected = |part: usize| {
            let shape = self.shape_of(part);
            match self.collective {
                Collective::Allgather | Collective::Gather if is_large => just(None),
                Collective::Allreduce | Collective::Broadcast => just(Some(shape.clone())),
                Collective::Reduce => just(is_root.then(|| shape.clone())),
                Collective::Gather if !is_root => just(None),
                Collective::Allgather | Collective::Gather => {
                    rows_of(shape, vec![shape.rows(); set])
                }
                Collective::Alltoall if self.list.is_empty() => {
                    rows_of(shape, vec![shape.rows() / set.max(1) as u64; set])
                }
                Collective::Alltoall => rows_of(shape, self.list.clone()),
                Collective::Scatter if is_root => {
                    let own = splits(rank, self, set).ok();
                    let own = own.and_then(|splits| splits.get(position).copied());
                    just(own.and_then(|rows| shape.with_rows(rows).ok()))
                }
                Collective::Scatter => just(Some(shape.clone())),
                Collective::ReduceScatter => {
                    just(shape.with_rows(share(shape.rows(), set.max(1), position)).ok())
                }
                Collective::SendReceive => just((!is_root).then(|| shape.clone())),
                _ => just(None),
            }
        };
        (0..self.parts()).map(expected).collect()
    }
}

#[cfg(test)]
mod tests;
