//! What an announcement has to be before it counts (TRUST), and what still fits a message (BOUND).

use gradwire_proto::{
    Agreed, Collective, Failure, FailureKind, Rank, Request, TensorName, convert::TensorRef,
};

use super::tensor::{CallKinds, peers};
use crate::model::{
    event::Announcement, plan::Plan, process_set::ProcessSet, round::Text, text,
    violation::Violation,
};

/// The most bytes that all operations of one tensor may take in messages together, where what was
/// agreed travels with each of them (BOUND). Counted are as many operations as there have to be. A
/// tensor that is cut into more takes its text along into each of them, beside a whole piece of
/// data.
const MAX_TEXT_BY_NAME: usize = 256 << 20;

/// A join is called "join" and nothing else is: every rank that joins a process set has to find the
/// others, and no tensor of its own name in their place.
pub(super) fn name(announcement: &Announcement) -> Result<(), Violation> {
    let mut submitted = announcement.submitted.iter();
    match &announcement.tensor {
        TensorRef::Name(name) if name.as_str() == Request::JOIN => {
            match submitted.find(|s| s.request.collective != Collective::Join) {
                None => Ok(()),
                Some(other) => Err(Violation::Protocol(format!(
                    "announced {} under the name '{name}', which is for joins alone",
                    other.request.collective
                ))),
            }
        }
        tensor if submitted.any(|s| s.request.collective == Collective::Join) => {
            Err(Violation::Protocol(format!(
                "announced a join as {}, not as '{}'",
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

/// The ranks of an announcement are this node's, each at most once, and ask for nothing that is
/// none of their business. Gives them.
pub(super) fn ranks(announcement: &Announcement, local: &[Rank]) -> Result<Vec<Rank>, Violation> {
    if local.is_empty() {
        let set = announcement.set;
        return Err(Violation::Protocol(format!(
            "announced a tensor of process set {set}, where it has no ranks"
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
                    "announced for rank {rank} that rank {from} sends to rank {to}"
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
            "announced a tensor twice for one rank in one message".into(),
        ));
    }
    Ok(given)
}

/// Whether an announcement covers all of a node's ranks that it has to, with those that the node
/// announced `before` in this round. Of a join: any one. Of a send and receive: those of the two
/// that are local. Otherwise: all that have not joined.
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

/// By the id alone a node answers for ranks that are all there.
pub(super) fn all_there(ranks: &[Rank], set: &ProcessSet, name: &str) -> Result<(), Violation> {
    let joined: Vec<Rank> =
        ranks.iter().copied().filter(|rank| set.joined().contains(rank)).collect();
    if ranks.is_empty() {
        return Err(Violation::Protocol(format!(
            "announced tensor '{name}' by its id, which concerns none of its ranks"
        )));
    }
    if !joined.is_empty() {
        return Err(Violation::Protocol(format!(
            "announced tensor '{name}' by its id, also for {} that joined before",
            text::named_ranks(&joined)
        )));
    }
    Ok(())
}

/// What to say of an announcement that lacks ranks.
pub(super) fn incomplete(announcement: &Announcement, local: &[Rank]) -> Violation {
    let given: usize = announcement.submitted.iter().map(|s| s.ranks.len()).sum();
    let tensor = described(&announcement.tensor);
    Violation::Protocol(format!("announced {tensor} for {given} of its {} ranks", local.len()))
}

/// The most bytes of a segment that calls its tensor by name, and of what was agreed, which the
/// first of them in an operation has with it.
pub(super) fn text_by_name(name: &TensorName, agreed: &Agreed) -> Text {
    let request = agreed.request();
    let dims = (0..request.parts()).map(|part| request.shape_of(part).dims().len() + 2);
    // A number takes ten bytes at most, and rows, of which there may be many, seven bits a byte.
    // Each message around them takes a few.
    let row = |&rows: &u64| (u64::BITS - rows.leading_zeros()).div_ceil(7).max(1) as usize;
    let rows: usize = agreed.rows().iter().map(row).sum();
    Text {
        each: name.as_str().len() + 64,
        first: rows + 10 * (request.list.len() + dims.sum::<usize>()) + 64,
    }
}

/// Whether a tensor may travel by name, if that takes so many bytes.
pub(super) fn possible_by_name(plan: &Plan, text: Text) -> Result<(), Failure> {
    if plan.least_pieces().saturating_mul(text.first) <= MAX_TEXT_BY_NAME {
        return Ok(());
    }
    let request = plan.agreed.request();
    let what = format!(
        "{} of {} has too many parts to be sent without an id",
        request.collective,
        text::count(request.parts(), "tensor"),
    );
    let hint = "make smaller groups, let no rank join before this is done, or raise the number of \
                tensors that get an id";
    Err(Failure::new(FailureKind::Invalid, what).hint(hint))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use gradwire_proto::{Collective, DType, Request, Shape, pb};
    use prost::Message as _;

    use super::*;

    /// BOUND: what is said of the size of a segment holds for the largest there is.
    #[test]
    fn a_segment_is_not_longer_than_is_said() {
        let shape = Shape::new(&[1 << 53]).unwrap();
        let request = Request {
            list: vec![u64::MAX; 4096],
            ..Request::plain(Collective::Alltoall, DType::C128, shape)
        };
        let agreed = Arc::new(Agreed::from_parts(request, vec![u64::MAX; 1000]));
        let name = TensorName::new(&"x".repeat(1024)).unwrap();
        let segment = pb::Segment {
            tensor: Some(TensorRef::Name(name.clone()).into()),
            flow: u32::MAX,
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
