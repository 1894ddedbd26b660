//! The result for a tensor that all nodes have announced. Either all ranks request the same and it
//! is possible, or every rank learns why it will never run.

use std::collections::BTreeMap;

use gradwire_proto::{
    Agreed, Collective, Failure, FailureKind, Impossible, Priority, ProcessSetId, Rank, Request,
};

use super::{
    disagreement::{Answer, disagreement},
    sets::refuse,
    tensor::{Tensor, peers},
};
use crate::model::{
    plan::{MAX_FLOWS, Plan},
    process_set::ProcessSet,
    text,
};

/// What all ranks that take part have agreed on.
#[derive(Debug)]
pub(super) struct Consent {
    pub(super) agreed: Agreed,
    pub(super) priority: Priority,
    /// The members that take part, ascending.
    pub(super) members: Vec<Rank>,
    /// The members that would take part but have joined, ascending.
    pub(super) absent: Vec<Rank>,
}

/// Compares the requests of all ranks for a tensor that is complete.
pub(super) fn settle(tensor: &Tensor, set: &ProcessSet) -> Result<Consent, Failure> {
    let name = tensor.name.as_str();
    let Some((common, priority)) = tensor.common(set) else {
        return Err(disagreement(name, &answers(tensor, set)));
    };
    let answers = tensor.answers(set);
    let members: Vec<Rank> = answers.keys().copied().collect();
    let absent = tensor.silent(set);
    check(tensor.set, set, &common, members.len(), &absent).map_err(|f| f.tensor(name))?;
    let requests: Vec<&Request> = answers.values().map(AsRef::as_ref).collect();
    match Agreed::of(&members, &requests) {
        Ok(agreed) => Ok(Consent { agreed, priority, members, absent }),
        Err(impossible) => Err(explain(&impossible).tensor(name)),
    }
}

/// Every rank's request, and how many times it submitted the tensor.
fn answers(tensor: &Tensor, set: &ProcessSet) -> Vec<Answer> {
    let mut rows: Vec<(Rank, Request, u32, &[String])> = Vec::new();
    let mut sites: BTreeMap<Rank, &[String]> = BTreeMap::new();
    for (_, submitted) in &tensor.requests {
        sites.extend(submitted.ranks.iter().map(|rank| (*rank, &submitted.sites[..])));
    }
    for (rank, request) in tensor.answers(set) {
        let sites = sites.get(&rank).copied().unwrap_or_default();
        rows.push((rank, request.into_owned(), 1, sites));
    }
    let at: BTreeMap<Rank, usize> = (0..).zip(&rows).map(|(at, row)| (row.0, at)).collect();
    for (_, submitted) in tensor.requests.iter().filter(|(_, s)| s.duplicate) {
        submitted.ranks.iter().filter_map(|rank| at.get(rank)).for_each(|&at| rows[at].2 = 2);
    }
    for submitted in &tensor.duplicates {
        for &rank in &submitted.ranks {
            match rows.iter_mut().find(|row| row.0 == rank && row.1 == submitted.request) {
                Some(row) => row.2 = 2,
                None => rows.push((rank, submitted.request.clone(), 2, &submitted.sites)),
            }
        }
    }
    let answer = |(rank, request, times, sites): (_, _, _, &[String])| Answer {
        ranks: vec![rank],
        request,
        times,
        sites: sites.to_vec(),
    };
    rows.into_iter().map(answer).collect()
}

/// Checks which ranks take part, and how many parts the result has.
fn check(
    id: ProcessSetId,
    set: &ProcessSet,
    common: &Request,
    members: usize,
    absent: &[Rank],
) -> Result<(), Failure> {
    let collective = common.collective;
    let is_rooted = matches!(
        collective,
        Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter
    );
    for rank in is_rooted.then_some([common.root; 2]).or(peers(common)).into_iter().flatten() {
        if !set.contains(rank) {
            return Err(refuse(
                format!("rank {rank} of this {collective} is not in {}", text::set(id, set)),
                "roots, senders and receivers are ranks of the whole job, and must be members of \
                 the process set",
            ));
        }
    }
    let sets = matches!(collective, Collective::AddProcessSet | Collective::RemoveProcessSet);
    if sets && id != ProcessSetId::GLOBAL {
        return Err(refuse(
            format!("{collective} is not possible in process set {id}"),
            "process sets are added and removed by all ranks together, in process set 0",
        ));
    }
    check_absent(common, absent)?;
    let flows = Plan::flows(common, members);
    if flows > MAX_FLOWS {
        return Err(refuse(
            format!(
                "{collective} of {} between {} consists of {flows} parts, but at most {MAX_FLOWS} \
                 are possible",
                text::count(common.parts(), "tensor"),
                text::count(members, "rank"),
            ),
            "make smaller groups, or use smaller process sets",
        ));
    }
    Ok(())
}

fn check_absent(common: &Request, absent: &[Rank]) -> Result<(), Failure> {
    if absent.is_empty() {
        return Ok(());
    }
    let collective = common.collective;
    let who = text::named_ranks(absent);
    let have = if absent.len() == 1 { "has" } else { "have" };
    let has_root = match collective {
        Collective::Allreduce | Collective::Allgather | Collective::Barrier => true,
        Collective::Broadcast | Collective::Reduce | Collective::Gather => {
            absent.binary_search(&common.root).is_err()
        }
        _ => {
            return Err(refuse(
                format!("{who} {have} joined, but {collective} needs all ranks"),
                "call join only after this operation is done on all ranks; allreduce, reduce, \
                 broadcast, allgather, gather and barrier work without ranks that have joined",
            ));
        }
    };
    if !has_root {
        let what = format!("the root {} of this {collective} has joined", common.root);
        return Err(refuse(what, "use a root that has not joined"));
    }
    Ok(())
}

fn explain(impossible: &Impossible) -> Failure {
    let failure = Failure::new(FailureKind::Invalid, impossible.to_string());
    match impossible {
        Impossible::NotAMember { .. } => failure.hint("use a rank that takes part"),
        Impossible::Splits { rank, .. }
        | Impossible::TooManyRows { rank, .. }
        | Impossible::Uneven { rank, .. } => failure.rank(*rank).hint(
            "give one number of rows for each member of the process set, in rank order; their sum \
             must not exceed the rows of the tensor",
        ),
        Impossible::Type(_) => failure.hint("the tensors of all ranks together are too large"),
        Impossible::Other(_) => failure,
    }
}
