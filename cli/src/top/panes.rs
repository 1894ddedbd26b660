//! The panes of `gradwire top` as rows of cells, which are filtered, sorted and cut here. Pure.

use std::cmp::Ordering;

use gradwire_proto::{Rank, pb::NodeStatus};
use gradwire_viewer::view;
use ratatui::{
    layout::Constraint,
    style::{Color, Style},
};

use super::{
    look::Look,
    screen::{Order, Pane, SPARKS, Screen},
};
use crate::cluster::printable;

/// One cell. Cells are sorted by their numbers, or by their texts if they have none.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) style: Style,
    number: Option<f64>,
}

fn text(text: impl Into<String>) -> Cell {
    Cell { text: text.into(), style: Style::new(), number: None }
}

fn number(number: f64, text: impl Into<String>) -> Cell {
    Cell { text: text.into(), style: Style::new(), number: Some(number) }
}

/// A number that may be unknown, which is less than all others.
fn maybe(number: Option<f64>, show: impl Fn(f64) -> String) -> Cell {
    let text = number.map_or_else(String::new, show);
    Cell { text, style: Style::new(), number: Some(number.unwrap_or(f64::MIN)) }
}

impl Cell {
    fn styled(self, style: Style) -> Self {
        Self { style, ..self }
    }

    /// Large numbers and early letters come first.
    fn compare(&self, other: &Self) -> Ordering {
        match (self.number, other.number) {
            (Some(one), Some(other)) => other.total_cmp(&one),
            _ => self.text.cmp(&other.text),
        }
    }
}

/// A table.
#[derive(Debug)]
pub(super) struct Sheet {
    pub(super) title: String,
    pub(super) head: Vec<&'static str>,
    pub(super) widths: Vec<Constraint>,
    pub(super) rows: Vec<Vec<Cell>>,
}

impl Sheet {
    fn new(title: String, columns: &[(&'static str, Constraint)], rows: Vec<Vec<Cell>>) -> Self {
        let (head, widths) = columns.iter().copied().unzip();
        Self { title, head, widths, rows }
    }

    /// Keeps the rows that the filter shows, in the order of the pane.
    pub(super) fn arrange(&mut self, screen: &Screen, Order { column, reversed }: Order) {
        self.rows.retain(|row| screen.shows(row.iter().map(|cell| cell.text.as_str())));
        if let Some(column) = column {
            self.rows.sort_by(|one, other| one[column].compare(&other[column]));
        }
        if reversed {
            self.rows.reverse();
        }
    }
}

const fn wide(width: u16) -> Constraint {
    Constraint::Length(width)
}

/// The table of a pane; `None` for the logs, which are texts.
pub(super) fn of(pane: Pane, look: Look<'_>, screen: &Screen) -> Option<Sheet> {
    match pane {
        Pane::Ranks => Some(ranks(look, screen)),
        Pane::Hosts => Some(hosts(look)),
        Pane::Links => Some(links(look)),
        Pane::Operations => Some(operations(look)),
        Pane::Decisions | Pane::Events => None,
    }
}

fn name(look: Look<'_>, node: u32) -> String {
    let found = look.status.nodes.get(node as usize);
    found.map_or_else(|| node.to_string(), |node| printable(&node.host))
}

/// The ranks, those that the others wait for most first.
fn ranks(look: Look<'_>, screen: &Screen) -> Sheet {
    let straggler = view::straggler(look.shares).map(|(rank, _)| rank);
    let failed = look.status.failure.as_ref().and_then(|failure| failure.rank);
    let mut rows: Vec<Vec<Cell>> = Vec::new();
    for node in &look.status.nodes {
        let host = printable(&node.host);
        for rank in node.report.iter().flat_map(|report| &report.ranks) {
            let waited = look.shares.get(&rank.rank).copied().unwrap_or_default();
            let mark = match rank.rank {
                it if Some(it) == failed => "failed",
                it if Some(it) == straggler => "straggler",
                _ => "",
            };
            let style = if mark.is_empty() { Style::new() } else { look.alarm() };
            let parts = view::parts(rank, node, look.shares);
            let row = [
                // Small ranks first.
                number(-f64::from(rank.rank), rank.rank.to_string()),
                text(host.clone()),
                number(rank.steps.into(), rank.steps.to_string()),
                number(rank.step_seconds, format!("{:.1}", rank.step_seconds * 1e3)),
                number(rank.exposed, view::percent(rank.exposed)),
                text(cause(&parts)),
                number(waited, view::percent(waited)),
                text(screen.spark(rank.rank)),
                text(mark),
            ];
            rows.push(row.map(|cell| cell.styled(style)).into());
        }
    }
    let title = format!("ranks ({})", rows.len());
    rows.sort_by(|one, other| one[6].compare(&other[6]));
    let columns = [
        ("rank", wide(5)),
        ("host", Constraint::Min(9)),
        ("steps", wide(7)),
        ("ms/step", wide(7)),
        ("blocked", wide(7)),
        ("by", wide(8)),
        ("waited", wide(6)),
        ("last steps", wide(SPARKS as u16)),
        ("", wide(9)),
    ];
    Sheet::new(title, &columns, rows)
}

/// What a rank is blocked by most; empty if it is hardly blocked.
fn cause(parts: &view::Parts) -> &'static str {
    let causes = [
        (parts.ranks, "ranks"),
        (parts.negotiation, "order"),
        (parts.transfer, "transfer"),
        (parts.copies, "copies"),
    ];
    let most = causes.into_iter().max_by(|one, other| one.0.total_cmp(&other.0));
    most.filter(|(share, _)| *share >= 0.05).map_or("", |(_, name)| name)
}

/// The hosts, unhealthy ones first.
fn hosts(look: Look<'_>) -> Sheet {
    let row = |(at, node): (usize, &NodeStatus)| {
        let health = view::health(look.status, node);
        let style = if health == "ok" { look.color(Color::Green) } else { look.alarm() };
        let last = (u64::from(node.first_rank) + u64::from(node.slots)).saturating_sub(1);
        let ranks = match node.slots {
            0 => "server".to_owned(),
            _ => format!("{}-{last}", node.first_rank),
        };
        let report = node.report.as_ref();
        let steps = report.and_then(|it| view::slowest(it.ranks.iter()));
        let pieces = report.map(|it| f64::from(it.pieces_in_flight));
        vec![
            text(format!("{at} {}", printable(&node.host))),
            number(-f64::from(node.first_rank), ranks),
            text(health).styled(style),
            maybe(steps, |it| format!("{it:.2}")),
            maybe(report.and_then(view::exposed), view::percent),
            maybe(report.map(|it| it.operations_per_second), |it| format!("{it:.0}")),
            maybe(pieces, |it| format!("{it:.0}")),
            maybe(report.map(|it| it.resident_bytes as f64), view::bytes),
        ]
    };
    let mut rows: Vec<Vec<Cell>> = look.status.nodes.iter().enumerate().map(row).collect();
    rows.sort_by_key(|row| row[2].text == "ok");
    let columns = [
        ("host", Constraint::Min(12)),
        ("ranks", wide(9)),
        ("health", wide(10)),
        ("steps/s", wide(7)),
        ("blocked", wide(7)),
        ("ops/s", wide(6)),
        ("pieces", wide(6)),
        ("memory", wide(8)),
    ];
    Sheet::new(format!("hosts ({})", look.status.nodes.len()), &columns, rows)
}

/// The links with traffic, those with the most first.
fn links(look: Look<'_>) -> Sheet {
    let flows = view::flows(look.status);
    let row = |((from, to), flow): (&(u32, u32), &view::Flow)| {
        vec![
            text(name(look, *from)),
            text(name(look, *to)),
            number(flow.rate, format!("{}/s", view::bytes(flow.rate))),
            maybe(flow.share, view::percent).styled(look.heat(flow.share.unwrap_or_default())),
        ]
    };
    let mut rows: Vec<Vec<Cell>> =
        flows.iter().filter(|(_, flow)| flow.rate > 0.0).map(row).collect();
    rows.sort_by(|one, other| one[2].compare(&other[2]));
    let columns = [
        ("from", Constraint::Min(12)),
        ("to", Constraint::Min(12)),
        ("rate", wide(12)),
        ("of the line", wide(11)),
    ];
    Sheet::new(format!("links ({})", rows.len()), &columns, rows)
}

/// The operations in flight and the tensors that wait for ranks, those that take longest first.
fn operations(look: Look<'_>) -> Sheet {
    let status = look.status;
    let of_time = |ms: u64| number(ms as f64, format!("{ms} ms"));
    let running = status.operations.iter().map(|it| {
        let hosts: Vec<String> = it.missing_nodes.iter().map(|node| name(look, *node)).collect();
        let tensors = view::count(it.tensor_count, "tensor");
        vec![
            text(format!("{} {}", it.sequence, printable(&it.tensors.join(", ")))),
            text(tensors),
            of_time(it.running_ms),
            text(format!("host {}", hosts.join(", "))),
        ]
    });
    let waiting = status.pending.iter().map(|it| {
        let missing = Rank::list(it.missing_ranks.iter().copied().map(Rank));
        vec![
            text(printable(&it.name)),
            text("waits"),
            of_time(it.waiting_ms),
            text(format!("rank {missing}")),
        ]
    });
    let mut rows: Vec<Vec<Cell>> = running.chain(waiting).collect();
    rows.sort_by(|one, other| one[2].compare(&other[2]));
    let columns = [
        ("operation or tensor", Constraint::Min(14)),
        ("", wide(9)),
        ("for", wide(8)),
        ("waits for", Constraint::Min(9)),
    ];
    let title = format!("operations in flight ({})", status.operations.len());
    Sheet::new(title, &columns, rows)
}
