//! Checks an announcement before it counts (TRUST), and bounds the size of messages (BOUND).

use gradwire_proto::{Agreed, Collective, Rank, Request, TensorName, convert::TensorRef};

use super::tensor::{CallKinds, peers};
use crate::model::{
    event::Announcement, process_set::ProcessSet, round::Text, text, violation::Violation,
};

/// Checks that a join, and nothing else, is named "join". All ranks that join a process set meet
/// under this name.
pub(super) fn name(announcement: &Announcement) -> Result<(), Violation> {
    let mut submitted = announcement.submitted.iter();
    match &announcement.tensor {
        TensorRef::Name(name) if name.as_str() == Request::JOIN => {
            match submitted.find(|s| s.request.collective != Collective::Join) {
                None => Ok(()),
                Some(other) => Err(Violation::Protocol(format!(
                    "announced {} under the name '{name}', which is reserved for joins",
                    other.request.collective
                ))),
            }
        }
        tensor if submitted.any(|s| s.request.collective == Collective::Join) => {
            Err(Violation::Protocol(format!(
                "announced a join as {} instead of '{}'",
                described(tensor),
                Request::JOIN
            )))
        }
        _ => Ok(()),
    }
}

fn described(tensor: &TensorRef) -> String {
    match tensor {
        TensorRef::Id(id) => format!("tensor id {id}"),
        TensorRef::Name(name) => format!("tensor '{name}'"),
    }
}

/// Checks that the ranks of an announcement are this node's, each at most once, and that their
/// requests concern them. Returns these ranks.
pub(super) fn ranks(announcement: &Announcement, local: &[Rank]) -> Result<Vec<Rank>, Violation> {
    if local.is_empty() {
        let set = announcement.set;
        return Err(Violation::Protocol(format!(
            "announced a tensor of process set {set}, in which it has no ranks"
        )));
    }
    let mut given: Vec<Rank> = Vec::new();
    for submitted in &announcement.submitted {
        let peers = peers(&submitted.request);
        for rank in &submitted.ranks {
            if local.binary_search(rank).is_err() {
                return Err(Violation::Protocol(format!(
                    "announced a tensor for rank {rank}, which is not its own"
                )));
            }
            if let Some([from, to]) = peers.filter(|peers| !peers.contains(rank)) {
                return Err(Violation::Protocol(format!(
                    "announced a send from rank {from} to rank {to} for rank {rank}"
                )));
            }
            given.push(*rank);
        }
    }
    let number = given.len();
    given.sort_unstable();
    given.dedup();
    if given.len() != number {
        return Err(Violation::Protocol(
            "announced a tensor twice for the same rank in one message".into(),
        ));
    }
    Ok(given)
}

/// Whether an announcement, together with the ranks that the node announced `before` in this round,
/// covers all required ranks of the node. For a join, any rank is enough. For a send and receive,
/// its local ranks are required. Otherwise, all ranks that have not joined are required.
pub(super) fn is_whole(
    announcement: &Announcement,
    given: &[Rank],
    before: &[Rank],
    kinds: CallKinds,
    local: &[Rank],
    set: &ProcessSet,
) -> bool {
    if kinds.only_joins() {
        return !given.is_empty();
    }
    let there = |rank: &Rank| given.contains(rank) || before.contains(rank);
    let needed = |rank: &Rank| {
        local.binary_search(rank).is_ok() && !set.joined().contains(rank) && !there(rank)
    };
    if given.is_empty() {
        return false;
    }
    if kinds.only_sends() {
        let mut peers = announcement.submitted.iter().filter_map(|s| peers(&s.request)).flatten();
        return !peers.any(|rank| needed(&rank));
    }
    !local.iter().any(needed)
}

/// Checks that none of the ranks that a node announces by id has joined.
pub(super) fn all_there(ranks: &[Rank], set: &ProcessSet, name: &str) -> Result<(), Violation> {
    let joined: Vec<Rank> =
        ranks.iter().copied().filter(|rank| set.joined().contains(rank)).collect();
    if ranks.is_empty() {
        return Err(Violation::Protocol(format!(
            "announced tensor '{name}' by its id, but none of its ranks takes part"
        )));
    }
    if !joined.is_empty() {
        return Err(Violation::Protocol(format!(
            "announced tensor '{name}' by its id, although {} joined before",
            text::named_ranks(&joined)
        )));
    }
    Ok(())
}

/// The violation for an announcement that lacks ranks.
pub(super) fn incomplete(announcement: &Announcement, local: &[Rank]) -> Violation {
    let given: usize = announcement.submitted.iter().map(|s| s.ranks.len()).sum();
    let tensor = described(&announcement.tensor);
    Violation::Protocol(format!("announced {tensor} for {given} of its {} ranks", local.len()))
}

/// The most bytes of a segment that refers to its tensor by name, and of the agreed request, which
/// the first such segment in an operation contains.
pub(super) fn text_by_name(name: &TensorName, agreed: &Agreed) -> Text {
    let request = agreed.request();
    let dims = (0..request.parts()).map(|part| request.shape_of(part).dims().len() + 2);
    // A number takes at most ten bytes. There may be many rows, so each is counted exactly: one
    // byte for every seven bits. The enclosing messages take a few bytes each.
    let row = |&rows: &u64| (u64::BITS - rows.leading_zeros()).div_ceil(7).max(1) as usize;
    let rows: usize = agreed.rows().iter().map(row).sum();
    Text {
        each: name.as_str().len() + 64,
        first: rows + 10 * (request.list.len() + dims.sum::<usize>()) + 64,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gradwire_proto::{Collective, DType, Request, Shape, pb};
    use prost::Message as _;

    use super::*;

    /// BOUND: the stated size of a segment holds for the largest possible one.
    #[test]
    fn segments_are_within_the_stated_size() {
        let shape = Shape::new(&[1 << 53]).unwrap();
        let request = Request {
            list: vec![u64::MAX; 4096],
            ..Request::plain(Collective::Alltoall, DType::C128, shape)
        };
        let agreed = Arc::new(Agreed::from_parts(request, vec![u64::MAX; 1000]));
        let name = TensorName::new(&"x".repeat(1024)).unwrap();
        let segment = pb::Segment {
            tensor: Some(TensorRef::Name(name.clone()).into()),
            part: u32::MAX,
            offset: u64::MAX,
            count: u64::MAX,
            agreed: Some(pb::Agreed::from(&*agreed)),
        };
        let text = text_by_name(&name, &agreed);
        assert!(segment.encoded_len() + 6 <= text.each + text.first);
        let further = pb::Segment { agreed: None, ..segment };
        assert!(further.encoded_len() + 6 <= text.each);
    }

    #[test]
    fn small_rows_are_short() {
        let name = TensorName::new("w").unwrap();
        let request = Request::plain(Collective::Alltoall, DType::U8, Shape::new(&[0]).unwrap());
        let few = Agreed::from_parts(request.clone(), Vec::new());
        let many = Agreed::from_parts(request, vec![127; 1000]);
        let more = text_by_name(&name, &many).first - text_by_name(&name, &few).first;
        assert_eq!(more, 1000);
    }
}
