//! Classifies an announcement, given what the node has announced before. Pure.
//!
//! A node announces a tensor once per round. But messages cross: a node may report a second
//! submission when its round is already over. And a node announces each rank of a join or of a send
//! and receive separately. [`case`] implements the table at `Announcement` in `coordinator.proto`,
//! row by row; `tests/testdata/announcements.txt` has a scenario for each row.

use gradwire_proto::{NodeId, Rank};

use super::tensor::{CallKinds, Tensor};
use crate::model::{event::Announcement, round::Progress};

/// What an announcement carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Carries {
    /// Only the id.
    Id,
    /// Full requests, none of them a second submission.
    Requests,
    /// Full requests; some of them are second submissions.
    Mixed,
    /// Only second submissions.
    Duplicates,
}

impl Carries {
    pub(super) fn of(announcement: &Announcement) -> Self {
        let submitted = &announcement.submitted;
        match submitted.iter().filter(|submitted| submitted.duplicate).count() {
            _ if submitted.is_empty() => Self::Id,
            0 => Self::Requests,
            all if all == submitted.len() => Self::Duplicates,
            _ => Self::Mixed,
        }
    }
}

/// What the node has already announced for the tensor in this round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// Nothing.
    Nothing,
    /// Other ranks, for a tensor that may be announced rank by rank.
    OtherRanks,
    /// Only second submissions.
    Duplicates,
    /// The tensor.
    Tensor,
}

/// What a node has announced for a tensor in this round, before it announces the ranks `given` with
/// requests of these `kinds`. Also returns the ranks of its earlier announcements.
pub(super) fn before(
    tensor: Option<&Tensor>,
    node: NodeId,
    given: &[Rank],
    kinds: CallKinds,
) -> (Before, Vec<Rank>) {
    let Some(tensor) = tensor.filter(|tensor| tensor.has_announced(node)) else {
        return (Before::Nothing, Vec::new());
    };
    let earlier: Vec<Rank> =
        tensor.requests_of(node).flat_map(|s| s.ranks.iter().copied()).collect();
    let others = !given.is_empty() && !given.iter().any(|rank| earlier.contains(rank));
    let by_rank = tensor.kinds.is_partial() || kinds.is_partial();
    let before = match earlier.is_empty() {
        true => Before::Tensor,
        false if others && by_rank => Before::OtherRanks,
        false if tensor.requests_of(node).all(|s| s.duplicate) => Before::Duplicates,
        false => Before::Tensor,
    };
    (before, earlier)
}

/// The facts on which the case of an announcement depends.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    pub(super) carries: Carries,
    pub(super) before: Before,
    /// The node's progress with the tensor's last round.
    pub(super) progress: Progress,
    /// Whether one of the node's ranks has joined and waits for the others.
    pub(super) has_joined: bool,
    /// Whether the announcement, together with earlier ones, covers all required ranks.
    pub(super) is_whole: bool,
}

/// How an announcement is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Case {
    /// It counts.
    Counts,
    /// It arrives after the end of its round, and is ignored.
    Late,
    /// Its second submissions are added to the round's table.
    AddsDuplicates,
    /// It replaces the node's earlier announcement.
    Replaces,
    /// The node announces a tensor before it has completed the last round.
    TooEarly,
    /// The node announces a tensor again.
    Again,
    /// Ranks are missing from it.
    Incomplete,
}

/// The case of an announcement. Each arm is a row of the table in `coordinator.proto`; the first
/// matching row applies.
pub(super) fn case(facts: Facts) -> Case {
    let Facts { carries, before, progress, has_joined, is_whole } = facts;
    match (before, carries) {
        // The last rank of a node to submit a tensor has not submitted it before, unless a join
        // made the node announce it. So this announcement belongs to a round that has ended.
        (Before::Nothing, Carries::Duplicates) if !has_joined => Case::Late,
        (Before::Nothing, Carries::Duplicates) if progress != Progress::Done => Case::Late,
        (Before::Nothing, _) if progress == Progress::Queued => Case::TooEarly,
        (Before::Nothing, Carries::Id) => Case::Counts,
        (Before::Nothing, Carries::Duplicates) if !is_whole => Case::Late,
        (Before::Nothing, _) if !is_whole => Case::Incomplete,
        (Before::Nothing, _) => Case::Counts,

        (_, Carries::Mixed | Carries::Duplicates) => Case::AddsDuplicates,
        (Before::OtherRanks, _) if !is_whole => Case::Incomplete,
        (Before::OtherRanks, _) => Case::Counts,
        // A node may have reported a second submission just after the tensor had failed. That
        // looked like a first announcement, and this is the real one.
        (Before::Duplicates, _) => Case::Replaces,
        (Before::Tensor, _) => Case::Again,
    }
}
