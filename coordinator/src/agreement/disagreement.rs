//! The table of what each rank requested when the ranks disagree.
//!
//! ```text
//! the ranks disagree on dtype and shape
//!   ranks  dtype  shape
//!   0-2,5  f32    [2, 3]
//!   3-4    *f16   *[6]
//! ```
//!
//! It shows what must be equal on all ranks ([`Request::common`]). A cell with a leading `*`
//! differs from what most ranks requested. In a shape, `*` marks a first dimension that may differ,
//! and `-` a shape that only one rank knows. For a group, it shows the first tensor in which the
//! ranks differ. Columns that are equal on all ranks are left out. The last column, which is not
//! compared, shows the lines of the programs, as far as they are known: a node that announces a
//! tensor by its id does not repeat them.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::{Collective, Failure, FailureKind, Rank, Request, Shape};

use crate::model::text;

const COLUMNS: [&str; 10] = [
    "collective",
    "dtype",
    "shape",
    "op",
    "root",
    "prescale",
    "postscale",
    "tensors",
    "list",
    "times",
];
const COLLECTIVE: usize = 0;
const DTYPE: usize = 1;
const SHAPE: usize = 2;
const TIMES: usize = 9;

/// The most rows of a table; a control message has a size limit (BOUND).
const MAX_ROWS: usize = 16;

/// The most characters of a cell; longer ones are cut to this length.
const MAX_CHARACTERS: usize = 64;

/// The longest list of ranks in one line, in characters.
const MAX_RANKS: usize = 160;

type Cells = [String; 10];

/// The call sites of the ranks that have requested the same.
type Sites<'a> = BTreeMap<Cells, BTreeSet<&'a str>>;

/// What one or more ranks requested, and how many times.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) ranks: Vec<Rank>,
    pub(crate) request: Request,
    pub(crate) times: u32,
    /// Where the programs have called it, as far as it is known.
    pub(crate) sites: Vec<String>,
}

fn shape(request: &Request, shape: &Shape) -> String {
    match request.collective {
        Collective::Scatter | Collective::SendReceive => "-".to_owned(),
        Collective::Allgather | Collective::Gather | Collective::Alltoall => {
            let rest = shape.dims().iter().skip(1).map(|dim| format!(", {dim}"));
            format!("[*{}]", rest.collect::<String>())
        }
        // What the program gave, and not the part that this request reduces.
        Collective::Allreduce if !request.list.is_empty() => format!("{:?}", request.list),
        _ => shape.to_string(),
    }
}

fn list(request: &Request) -> String {
    let list = &request.list;
    match request.collective {
        Collective::Allreduce | Collective::Alltoall | Collective::Scatter => "-".to_owned(),
        Collective::AddProcessSet => {
            Rank::list(list.iter().map(|&rank| Rank(u32::try_from(rank).unwrap_or(u32::MAX))))
        }
        _ if list.is_empty() => "-".to_owned(),
        _ => list.iter().map(ToString::to_string).collect::<Vec<_>>().join(","),
    }
}

/// The cells of an answer in full length; they are compared before they are cut.
fn cells(answer: &Answer, part: usize) -> Cells {
    let r = &answer.request;
    let (dtype, shape) = match part < r.parts() {
        true => (r.dtype_of(part).to_string(), shape(r, r.shape_of(part))),
        false => ("-".to_owned(), "-".to_owned()),
    };
    [
        r.collective.to_string(),
        dtype,
        shape,
        r.reduce_op.to_string(),
        r.root.to_string(),
        r.prescale.to_string(),
        r.postscale.to_string(),
        r.parts().to_string(),
        list(r),
        answer.times.to_string(),
    ]
}

/// The first tensor in which the groups of ranks differ, among the tensors that all groups have.
fn differing_part(answers: &[Answer]) -> usize {
    let parts = answers.iter().map(|answer| answer.request.parts()).min().unwrap_or(1);
    let commons: Vec<Request> = answers.iter().map(|answer| answer.request.common()).collect();
    let differs = |part: &usize| {
        commons.windows(2).any(|pair| {
            pair[0].dtype_of(*part) != pair[1].dtype_of(*part)
                || pair[0].shape_of(*part) != pair[1].shape_of(*part)
        })
    };
    (0..parts).find(differs).unwrap_or(0)
}

/// The only dimension in which the shapes of the ranks differ; `None` if there are several, or if
/// the shapes have different numbers of dimensions.
fn differing_dimension(answers: &[Answer], part: usize) -> Option<usize> {
    let requests = answers.iter().map(|answer| answer.request.common());
    let shapes: BTreeSet<Vec<u64>> = requests
        .filter(|request| part < request.parts())
        .map(|request| request.shape_of(part).dims().to_vec())
        .collect();
    let first = shapes.first()?;
    if shapes.iter().any(|dims| dims.len() != first.len()) {
        return None;
    }
    let mut differing =
        (0..first.len()).filter(|&at| shapes.iter().any(|dims| dims[at] != first[at]));
    differing.next().filter(|_| differing.next().is_none())
}

/// The cell that most ranks have in a column; in a tie, that of the lowest rank.
fn usual(rows: &[(Vec<Rank>, Cells)], column: usize) -> &str {
    let mut votes: Vec<(&str, usize)> = Vec::new();
    for (ranks, cells) in rows {
        let value = cells[column].as_str();
        match votes.iter_mut().find(|(v, _)| *v == value) {
            Some((_, number)) => *number += ranks.len(),
            None => votes.push((value, ranks.len())),
        }
    }
    // `max_by_key` returns the last of equal ones, so the reversed order returns the first.
    votes.iter().rev().max_by_key(|(_, number)| *number).map_or("", |(value, _)| value)
}

fn hint(differing: &[usize]) -> &'static str {
    match (differing.contains(&TIMES), differing.len()) {
        (true, 1) => {
            "wait for the handle before you submit the same name again, or use another name for \
             the second tensor"
        }
        (true, _) => {
            "make the same call on every rank, and wait for its handle before you submit the same \
             name again; cells with * differ from those of most ranks"
        }
        (false, _) => {
            "make the same call on every rank, with the same model and optimizer; cells with * \
             differ from those of most ranks"
        }
    }
}

/// The failure that shows every rank what each of them requested.
pub(crate) fn disagreement(tensor: &str, answers: &[Answer]) -> Failure {
    let part = differing_part(answers);
    let mut groups: BTreeMap<Cells, Vec<Rank>> = BTreeMap::new();
    let mut sites = Sites::new();
    for answer in answers {
        let cells = cells(answer, part);
        if !answer.sites.is_empty() {
            let all = sites.entry(cells.clone()).or_default();
            all.extend(answer.sites.iter().map(String::as_str));
        }
        groups.entry(cells).or_default().extend(&answer.ranks);
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

    let mut lines = vec![head(&rows, &differing, part, differing_dimension(answers, part))];
    lines.extend(table(&rows, &usual, &differing, &sites));
    Failure::new(FailureKind::Disagreement, lines.join("\n")).hint(hint(&differing)).tensor(tensor)
}

fn head(
    rows: &[(Vec<Rank>, Cells)],
    differing: &[usize],
    part: usize,
    dimension: Option<usize>,
) -> String {
    if differing == [TIMES] {
        let mut twice: Vec<Rank> = rows
            .iter()
            .filter(|(_, cells)| cells[TIMES] != "1")
            .flat_map(|(ranks, _)| ranks.iter().copied())
            .collect();
        twice.sort_unstable();
        let who = text::excerpt(&text::named_ranks(&twice), MAX_RANKS);
        return format!("submitted again by {who} before the first submission was done");
    }
    let name = |&column: &usize| {
        let name = COLUMNS[column];
        let in_group = match column {
            DTYPE | SHAPE if part > 0 => format!(" of tensor {part} of the group"),
            _ => String::new(),
        };
        match dimension.filter(|_| column == SHAPE && !differing.contains(&COLLECTIVE)) {
            Some(at) => format!("{name}{in_group} (dimension {at})"),
            None => format!("{name}{in_group}"),
        }
    };
    let names: Vec<String> = differing.iter().map(name).collect();
    let names = match names.as_slice() {
        [] => "the request".to_owned(),
        [one] => one.clone(),
        [init @ .., last] => format!("{} and {last}", init.join(", ")),
    };
    format!("the ranks disagree on {names}")
}

/// Where the cells of a column begin to differ, in characters.
fn first_difference(rows: &[(Vec<Rank>, Cells)], column: usize) -> usize {
    let first = rows.first().map_or("", |(_, cells)| cells[column].as_str());
    let others = rows.iter().filter_map(|(_, cells)| text::difference(&cells[column], first));
    others.min().unwrap_or(0)
}

/// The cell with the lines of the programs.
fn called_at(sites: &Sites<'_>, cells: &Cells) -> String {
    let mut all = sites.get(cells).into_iter().flatten();
    match (all.next(), all.count()) {
        (None, _) => "-".to_owned(),
        (Some(first), 0) => (*first).to_owned(),
        (Some(first), more) => format!("{first} and {}", text::count(more, "other place")),
    }
}

fn table(
    rows: &[(Vec<Rank>, Cells)],
    usual: &[String],
    differing: &[usize],
    sites: &Sites<'_>,
) -> Vec<String> {
    // If requests differ in something that has no column, all columns are shown.
    let all: Vec<usize> = (0..COLUMNS.len()).collect();
    let shown = if differing.is_empty() { &all[..] } else { differing };
    let heads = shown.iter().map(|&column| COLUMNS[column].to_owned());
    let differ: Vec<usize> =
        (0..COLUMNS.len()).map(|column| first_difference(rows, column)).collect();
    let mut grid: Vec<Vec<String>> =
        vec![std::iter::once("ranks".to_owned()).chain(heads).collect()];
    let has_sites = !sites.is_empty();
    grid[0].extend(has_sites.then(|| "called at".to_owned()));
    for (ranks, cells) in rows.iter().take(MAX_ROWS) {
        let ranks = text::excerpt(&Rank::list(ranks.iter().copied()), MAX_RANKS);
        let marked = shown.iter().map(|&column| {
            let (cell, usual) = (&cells[column], &usual[column]);
            let (mark, at) = match text::difference(cell, usual) {
                None => ("", differ[column]),
                Some(at) => ("*", at),
            };
            format!("{mark}{}", text::excerpt_around(cell, at, MAX_CHARACTERS))
        });
        let site = has_sites.then(|| called_at(sites, cells));
        grid.push(std::iter::once(ranks).chain(marked).chain(site).collect());
    }
    let widths: Vec<usize> = (0..grid[0].len())
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
    if rows.len() > MAX_ROWS {
        let mut rest: Vec<Rank> =
            rows[MAX_ROWS..].iter().flat_map(|(ranks, _)| ranks.iter().copied()).collect();
        rest.sort_unstable();
        rest.dedup();
        let more = rows.len() - MAX_ROWS;
        let who = text::excerpt(&text::named_ranks(&rest), MAX_RANKS);
        lines.push(format!("  and {more} more different requests, from {who}"));
    }
    lines
}

#[cfg(test)]
mod tests;
