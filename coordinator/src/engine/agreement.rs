//! The table that names every rank and what it asked for when the ranks do not agree.
//!
//! ```text
//! the ranks disagree on dtype and shape
//!   ranks  collective  dtype  shape   op   root  prescale  postscale  times
//!   0-2,5  allreduce   f32    [2, 3]  sum  0     1         1          1
//!   3-4    allreduce   *f16   *[6]    sum  0     1         1          1
//! ```

use std::collections::BTreeMap;

use gradwire_proto::{Failure, FailureKind, Rank, Request};

use super::text;

const COLUMNS: [&str; 8] =
    ["collective", "dtype", "shape", "op", "root", "prescale", "postscale", "times"];
const TIMES: usize = 7;

/// The most lines of one table; a control message has a size limit (BOUND).
const MOST_ROWS: usize = 64;

/// The longest cell, in characters.
const MOST_CHARACTERS: usize = 64;

/// The longest list of ranks in one line, in characters.
const MOST_RANKS: usize = 1024;

type Cells = [String; 8];

/// What one or more ranks asked for, and how many times.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) ranks: Vec<Rank>,
    pub(crate) request: Request,
    pub(crate) times: u32,
}

fn cells(answer: &Answer) -> Cells {
    let r = &answer.request;
    [
        r.collective.to_string(),
        r.dtype.to_string(),
        text::excerpt(&r.shape.to_string(), MOST_CHARACTERS),
        r.reduce_op.to_string(),
        r.root.to_string(),
        r.prescale.to_string(),
        r.postscale.to_string(),
        answer.times.to_string(),
    ]
}

/// What most ranks have in one column; of equals, what the lowest rank has.
fn usual(rows: &[(Vec<Rank>, Cells)], column: usize) -> &str {
    let mut votes: Vec<(&str, usize)> = Vec::new();
    for (ranks, cells) in rows {
        let value = cells[column].as_str();
        match votes.iter_mut().find(|(v, _)| *v == value) {
            Some((_, number)) => *number += ranks.len(),
            None => votes.push((value, ranks.len())),
        }
    }
    // `max_by_key` gives the last of equals, so look from the end to get the first.
    votes.iter().rev().max_by_key(|(_, number)| *number).map_or("", |(value, _)| value)
}

fn hint(differing: &[usize]) -> &'static str {
    match (differing.contains(&TIMES), differing.len()) {
        (true, 1) => {
            "wait for the handle before a name is submitted again, or give the second tensor \
             another name"
        }
        (true, _) => {
            "make the same call on every rank, and wait for its handle before a name is submitted \
             again; cells with * differ from what most ranks sent"
        }
        (false, _) => {
            "make the same call on every rank, in particular the same model and optimizer; cells \
             with * differ from what most ranks sent"
        }
    }
}

/// The failure that tells every rank what each of them sent.
pub(crate) fn disagreement(tensor: &str, answers: &[Answer]) -> Failure {
    let mut groups: BTreeMap<Cells, Vec<Rank>> = BTreeMap::new();
    for answer in answers {
        groups.entry(cells(answer)).or_default().extend(&answer.ranks);
    }
    let mut rows: Vec<(Vec<Rank>, Cells)> = groups
        .into_iter()
        .map(|(cells, mut ranks)| {
            ranks.sort_unstable();
            ranks.dedup();
            (ranks, cells)
        })
        .collect();
    rows.sort();

    let usual: Vec<String> = (0..COLUMNS.len())
        .map(|column| if column == TIMES { "1" } else { usual(&rows, column) }.to_owned())
        .collect();
    let differing: Vec<usize> = (0..COLUMNS.len())
        .filter(|&column| rows.iter().any(|(_, cells)| cells[column] != usual[column]))
        .collect();

    let mut lines = vec![head(&rows, &differing)];
    lines.extend(table(&rows, &usual));
    Failure::new(FailureKind::Disagreement, lines.join("\n")).hint(hint(&differing)).tensor(tensor)
}

fn head(rows: &[(Vec<Rank>, Cells)], differing: &[usize]) -> String {
    if differing == [TIMES] {
        let mut twice: Vec<Rank> = rows
            .iter()
            .filter(|(_, cells)| cells[TIMES] != "1")
            .flat_map(|(ranks, _)| ranks.iter().copied())
            .collect();
        twice.sort_unstable();
        let who = text::excerpt(&text::named_ranks(&twice), MOST_RANKS);
        return format!("submitted a second time before it was done, by {who}");
    }
    let names: Vec<&str> = differing.iter().map(|&column| COLUMNS[column]).collect();
    let names = match names.as_slice() {
        [] => "what the tensor is".to_owned(),
        [one] => (*one).to_owned(),
        [init @ .., last] => format!("{} and {last}", init.join(", ")),
    };
    format!("the ranks disagree on {names}")
}

fn table(rows: &[(Vec<Rank>, Cells)], usual: &[String]) -> Vec<String> {
    let mut grid: Vec<Vec<String>> =
        vec![std::iter::once("ranks").chain(COLUMNS).map(str::to_owned).collect()];
    for (ranks, cells) in rows.iter().take(MOST_ROWS) {
        let ranks = text::excerpt(&text::ranks(ranks.iter().copied()), MOST_RANKS);
        let marked = cells.iter().zip(usual).map(|(cell, usual)| {
            let mark = if cell == usual { "" } else { "*" };
            format!("{mark}{cell}")
        });
        grid.push(std::iter::once(ranks).chain(marked).collect());
    }
    let widths: Vec<usize> = (0..=COLUMNS.len())
        .map(|column| grid.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
        .collect();
    let mut lines: Vec<String> = grid
        .iter()
        .map(|row| {
            let padded: Vec<String> =
                row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:<width$}")).collect();
            format!("  {}", padded.join("  ").trim_end())
        })
        .collect();
    if rows.len() > MOST_ROWS {
        let mut rest: Vec<Rank> =
            rows[MOST_ROWS..].iter().flat_map(|(ranks, _)| ranks.iter().copied()).collect();
        rest.sort_unstable();
        rest.dedup();
        let more = rows.len() - MOST_ROWS;
        let who = text::excerpt(&text::named_ranks(&rest), MOST_RANKS);
        lines.push(format!("  and {more} more different answers, of {who}"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{DType, ReduceOp, Shape};

    use super::*;

    fn answer(ranks: impl IntoIterator<Item = u32>, dims: &[u64], times: u32) -> Answer {
        let shape = Shape::new(dims).unwrap();
        let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
        Answer { ranks: ranks.into_iter().map(Rank).collect(), request, times }
    }

    #[test]
    fn the_minority_is_marked_and_everybody_is_named() {
        let failure = disagreement(
            "w",
            &[answer([3], &[6], 1), answer([0, 1], &[2, 3], 1), answer([2], &[2, 3], 1)],
        );
        assert_eq!(
            failure.what,
            "the ranks disagree on shape\n  \
               ranks  collective  dtype  shape   op   root  prescale  postscale  times\n  \
               0-2    allreduce   f32    [2, 3]  sum  0     1         1          1\n  \
               3      allreduce   f32    *[6]    sum  0     1         1          1"
        );
        assert_eq!(failure.tensor, "w");
    }

    #[test]
    fn a_tie_is_decided_for_the_lowest_rank() {
        let failure = disagreement("w", &[answer([1], &[6], 1), answer([0], &[9], 1)]);
        assert!(failure.what.contains("*[6]") && !failure.what.contains("*[9]"), "{failure}");
    }

    #[test]
    fn many_different_answers_stay_within_a_message() {
        let answers: Vec<Answer> =
            (0..5000).map(|rank| answer([rank], &[u64::from(rank) + 1], 1)).collect();
        let failure = disagreement("w", &answers);
        assert!(failure.what.len() < 64 << 10, "{}", failure.what.len());
        assert!(failure.what.contains("and 4936 more different answers, of ranks 64-4999"));
    }
}
