use gradwire_proto::{DType, Part, ReduceOp};

use super::*;

fn answer(ranks: impl IntoIterator<Item = u32>, dims: &[u64], times: u32) -> Answer {
    let shape = Shape::new(dims).unwrap();
    let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
    Answer { ranks: ranks.into_iter().map(Rank).collect(), request, times, sites: Vec::new() }
}

fn asks(rank: u32, request: Request) -> Answer {
    Answer { ranks: vec![Rank(rank)], request, times: 1, sites: Vec::new() }
}

#[test]
fn the_minority_is_marked_and_all_are_named() {
    let failure = disagreement(
        "w",
        &[answer([3], &[6], 1), answer([0, 1], &[2, 3], 1), answer([2], &[2, 3], 1)],
    );
    assert_eq!(
        failure.text(),
        "the ranks disagree on shape\n  \
           ranks  shape\n  \
           0-2    [2, 3]\n  \
           3      *[6]"
    );
    assert_eq!(failure.tensor, "w");
}

#[test]
fn the_lines_of_the_programs_are_shown() {
    let at = |answer: Answer, sites: &[&str]| Answer {
        sites: sites.iter().map(ToString::to_string).collect(),
        ..answer
    };
    let failure = disagreement(
        "w",
        &[
            at(answer([0], &[2, 3], 1), &["train.py:12 in step"]),
            at(answer([1, 2], &[2, 3], 1), &["train.py:12 in step", "train.py:30 in test"]),
            at(answer([3], &[6], 1), &["train.py:14 in step"]),
            answer([4], &[7], 1),
        ],
    );
    assert_eq!(
        failure.text(),
        "the ranks disagree on shape\n  \
           ranks  shape   called at\n  \
           0-2    [2, 3]  train.py:12 in step and 1 other place\n  \
           3      *[6]    train.py:14 in step\n  \
           4      *[7]    -"
    );
}

#[test]
fn ties_are_decided_for_the_lowest_rank() {
    let failure = disagreement("w", &[answer([1], &[6], 1), answer([0], &[9], 1)]);
    assert!(failure.text().contains("*[6]") && !failure.text().contains("*[9]"), "{failure}");
}

#[test]
fn many_different_requests_fit_in_a_message() {
    let answers: Vec<Answer> =
        (0..5000).map(|rank| answer([rank], &[u64::from(rank) + 1], 1)).collect();
    let failure = disagreement("w", &answers);
    assert!(failure.text().len() < 64 << 10, "{}", failure.text().len());
    assert!(failure.text().contains("and 4984 more different requests, from ranks 16-4999"));
}

#[test]
fn a_single_differing_dimension_is_named() {
    let gathers = |rank: u32, dims: &[u64]| {
        let shape = Shape::new(dims).unwrap();
        asks(rank, Request::plain(Collective::Allgather, DType::F32, shape))
    };
    let failure =
        disagreement("w", &[gathers(0, &[7, 3]), gathers(1, &[5, 3]), gathers(2, &[7, 4])]);
    assert_eq!(
        failure.text(),
        "the ranks disagree on shape (dimension 1)\n  \
           ranks  shape\n  \
           0-1    [*, 3]\n  \
           2      *[*, 4]"
    );
}

#[test]
fn the_differing_tensor_of_a_group_is_shown() {
    let group = |rank: u32, rows: &[u64]| {
        let shape = |rows: u64| Shape::new(&[rows]).unwrap();
        let more = rows[1..].iter().map(|&r| Part { dtype: DType::F16, shape: shape(r) });
        let first = Request::allreduce(DType::F32, shape(rows[0]), ReduceOp::Sum);
        asks(rank, Request { more: more.collect(), ..first })
    };
    let failure = disagreement("g", &[group(0, &[1, 2, 3]), group(1, &[1, 2, 4])]);
    assert_eq!(
        failure.text(),
        "the ranks disagree on shape of tensor 2 of the group (dimension 0)\n  \
           ranks  shape\n  \
           0      [3]\n  \
           1      *[4]"
    );
    let failure = disagreement("g", &[group(0, &[1, 2, 3]), group(1, &[1])]);
    assert!(failure.text().starts_with("the ranks disagree on tensors\n"), "{failure}");
}

#[test]
fn lists_are_shown_where_they_matter() {
    let adds = |rank: u32, list: &[u64]| {
        asks(rank, Request { list: list.to_vec(), ..Request::empty(Collective::AddProcessSet) })
    };
    let failure = disagreement("s", &[adds(0, &[0, 1, 2]), adds(1, &[0, 2])]);
    assert_eq!(
        failure.text(),
        "the ranks disagree on list\n  \
           ranks  list\n  \
           0      0-2\n  \
           1      *0,2"
    );
}

/// Cells are compared in full, and shown where they differ.
#[test]
fn long_lists_that_differ_late_are_distinguished() {
    let adds = |rank: u32, last: u64| {
        let list: Vec<u64> = (0..100).map(|at| 2 * at).chain([last]).collect();
        asks(rank, Request { list, ..Request::empty(Collective::AddProcessSet) })
    };
    let failure = disagreement("s", &[adds(0, 301), adds(1, 301), adds(2, 303)]);
    let text = failure.text();
    let mut lines = text.lines();
    assert_eq!(lines.next(), Some("the ranks disagree on list"));
    let rows: Vec<&str> = lines.skip(1).collect();
    assert_eq!(rows.len(), 2, "{failure}");
    assert!(rows[0].trim_start().starts_with("0-1 ") && rows[0].contains(" …"), "{failure}");
    assert!(rows[0].contains("196,198,301") && !rows[0].contains('*'), "{failure}");
    assert!(rows[1].contains(" *…") && rows[1].contains("196,198,303"), "{failure}");
    assert!(rows.iter().all(|row| row.chars().count() < 200), "BOUND: {failure}");
}
