//! Draws the screen of `gradwire top`. Pure: a snapshot goes in, cells come out.
//!
//! Colors are never the only mark: each mark is also a word or a number.

use gradwire_proto::pb::{Entry, StatusResponse};
use gradwire_viewer::view::{self, Shares};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table, Wrap},
};

use crate::cluster::printable;

/// From this width on, links are beside hosts and ranks.
const WIDE: u16 = 120;

/// The width of a cell in the map of links.
const CELL: u16 = 6;

/// A snapshot of a job, and how to draw it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Look<'a> {
    pub(super) status: &'a StatusResponse,
    /// The share of the time in which the others wait for each rank.
    pub(super) shares: &'a Shares,
    /// Whether colors are wanted.
    pub(super) colors: bool,
}

impl Look<'_> {
    fn color(self, color: Color) -> Style {
        if self.colors { Style::new().fg(color) } else { Style::new() }
    }

    /// The style of a problem.
    fn alarm(self) -> Style {
        self.color(Color::Red).add_modifier(Modifier::BOLD)
    }

    fn heat(self, share: f64) -> Style {
        let color = match share {
            share if share >= 0.9 => Color::Red,
            share if share >= 0.5 => Color::Yellow,
            share if share > 0.0 => Color::Green,
            _ => return Style::new(),
        };
        self.color(color)
    }
}

/// The screen before the first snapshot.
pub(super) fn waiting(frame: &mut Frame<'_>) {
    frame.render_widget(Paragraph::new("waiting for the coordinator; q quits"), frame.area());
}

/// Draws a snapshot of a job.
pub(super) fn draw(frame: &mut Frame<'_>, look: &Look<'_>) {
    let look = *look;
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(2), Constraint::Min(6), Constraint::Percentage(30)])
            .areas(frame.area());
    frame.render_widget(header(look), head);
    let [left, right] = if body.width >= WIDE {
        Layout::horizontal([Constraint::Percentage(55), Constraint::Percentage(45)]).areas(body)
    } else {
        Layout::vertical([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(body)
    };
    let hosts_height = u16::try_from(look.status.nodes.len()).unwrap_or(u16::MAX).saturating_add(3);
    let [hosts_at, ranks_at] = Layout::vertical([
        Constraint::Length(hosts_height.min(left.height / 2)),
        Constraint::Min(3),
    ])
    .areas(left);
    frame.render_widget(hosts(look), hosts_at);
    frame.render_widget(ranks(look), ranks_at);
    let [links_at, operations_at] =
        Layout::vertical([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(right);
    frame.render_widget(links(look, links_at), links_at);
    frame.render_widget(operations(look), operations_at);
    let [decisions_at, events_at] =
        Layout::vertical([Constraint::Percentage(60), Constraint::Percentage(40)]).areas(foot);
    let status = look.status;
    frame.render_widget(entries("decisions", &status.decisions, decisions_at), decisions_at);
    frame.render_widget(entries("events", &status.events, events_at), events_at);
}

fn header(look: Look<'_>) -> Paragraph<'static> {
    let status = look.status;
    let steps = view::slowest(view::ranks(status))
        .map_or_else(|| "no steps yet".to_owned(), |rate| format!("{rate:.2} steps/s"));
    let first = printable(&format!(
        "job {}  {}  up {:.0} s  {steps}  {} operations done, {} in flight  {} waiting",
        status.job,
        status.phase,
        status.uptime_ms as f64 / 1e3,
        status.operations_done,
        status.operations_started.saturating_sub(status.operations_done),
        view::count(status.pending_count, "tensor")
    ));
    let second = match (&status.failure, view::straggler_in_words(look.shares)) {
        (Some(failure), _) => {
            Span::styled(printable(&format!("failed: {}", failure.what)), look.alarm())
        }
        (None, Some(straggler)) => Span::styled(straggler, look.alarm()),
        (None, None) => Span::raw("no straggler"),
    };
    Paragraph::new(vec![
        Line::from(first).style(Style::new().add_modifier(Modifier::BOLD)),
        Line::from(vec![second, Span::raw("   (q quits)")]),
    ])
}

fn table(
    title: String,
    head: &[&'static str],
    rows: Vec<Row<'static>>,
    widths: Vec<Constraint>,
) -> Table<'static> {
    let head = Row::new(head.to_vec()).style(Style::new().add_modifier(Modifier::UNDERLINED));
    Table::new(rows, widths).header(head).block(Block::bordered().title(title))
}

/// The hosts, unhealthy ones first.
fn hosts(look: Look<'_>) -> Table<'static> {
    let mut nodes: Vec<_> = look.status.nodes.iter().enumerate().collect();
    nodes.sort_by_key(|(_, node)| view::health(look.status, node) == "ok");
    let row = |(at, node): &(usize, &gradwire_proto::pb::NodeStatus)| {
        let health = view::health(look.status, node);
        let style = if health == "ok" { look.color(Color::Green) } else { look.alarm() };
        let last = (u64::from(node.first_rank) + u64::from(node.slots)).saturating_sub(1);
        let ranks = match node.slots {
            0 => "server".to_owned(),
            _ => format!("{}-{last}", node.first_rank),
        };
        let report = node.report.as_ref();
        let of = |text: Option<String>| Cell::from(text.unwrap_or_default());
        Row::new(vec![
            Cell::from(format!("{at} {}", printable(&node.host))),
            Cell::from(ranks),
            Cell::from(health).style(style),
            of(report.and_then(|it| view::slowest(it.ranks.iter())).map(|it| format!("{it:.2}"))),
            of(report.and_then(view::exposed).map(view::percent)),
            of(report.map(|it| it.pieces_in_flight.to_string())),
            of(report.map(|it| view::bytes(it.resident_bytes as f64))),
        ])
    };
    let rows = nodes.iter().map(row).collect();
    let widths = [7, 10, 7, 7, 6, 8].map(Constraint::Length);
    let widths = [Constraint::Min(12)].into_iter().chain(widths).collect();
    let head = ["host", "ranks", "health", "steps/s", "blocked", "pieces", "memory"];
    table(format!("hosts ({})", look.status.nodes.len()), &head, rows, widths)
}

/// The ranks, slowest first.
fn ranks(look: Look<'_>) -> Table<'static> {
    let straggler = view::straggler(look.shares).map(|(rank, _)| rank);
    let share = |rank: u32| look.shares.get(&rank).copied().unwrap_or_default();
    let mut ranks: Vec<_> = view::ranks(look.status).collect();
    ranks.sort_by(|one, other| share(other.rank).total_cmp(&share(one.rank)));
    let count = ranks.len();
    let rows = ranks.into_iter().map(|rank| {
        let is_slow = straggler == Some(rank.rank);
        let style = if is_slow { look.alarm() } else { Style::new() };
        Row::new(vec![
            rank.rank.to_string(),
            rank.steps.to_string(),
            format!("{:.1}", rank.step_seconds * 1e3),
            view::percent(rank.exposed),
            view::percent(share(rank.rank)),
            (if is_slow { "straggler" } else { "" }).to_owned(),
        ])
        .style(style)
    });
    let widths = [6, 10, 9, 8, 10, 10].map(Constraint::Length).to_vec();
    let head = ["rank", "steps", "ms/step", "blocked", "waited for", ""];
    table(format!("ranks ({count})"), &head, rows.collect(), widths)
}

/// The traffic from each node (row) to each other node (column), as far as there is space.
fn links(look: Look<'_>, area: Rect) -> Table<'static> {
    let flows = view::flows(look.status);
    let nodes = u32::try_from(look.status.nodes.len()).unwrap_or(u32::MAX);
    let columns = nodes.min(u32::from(area.width.saturating_sub(8) / (CELL + 1)));
    let is_known = flows.values().any(|flow| flow.share.is_some());
    let most = flows.values().map(|flow| flow.rate).fold(1.0, f64::max);
    let rows = (0..nodes).map(|from| {
        let cells = (0..columns).map(|to| match flows.get(&(from, to)) {
            Some(flow) => {
                let text = flow.share.map_or_else(|| short(flow.rate), view::percent);
                Cell::from(text).style(look.heat(flow.share.unwrap_or(flow.rate / most / 1.2)))
            }
            None => Cell::from(if from == to { "-" } else { "" }),
        });
        Row::new([Cell::from(from.to_string())].into_iter().chain(cells).collect::<Vec<_>>())
    });
    let rows: Vec<_> = rows.collect();
    let head = ["from".to_owned()].into_iter().chain((0..columns).map(|to| format!("to {to}")));
    let head = Row::new(head.collect::<Vec<_>>());
    let widths = [5].into_iter().chain((0..columns).map(|_| CELL)).map(Constraint::Length);
    let what = if is_known { "share of the sender's line" } else { "bytes per second" };
    Table::new(rows, widths.collect::<Vec<_>>())
        .header(head.style(Style::new().add_modifier(Modifier::UNDERLINED)))
        .block(Block::bordered().title(format!("links: {what}")))
}

/// Bytes per second, as short as possible.
fn short(rate: f64) -> String {
    view::bytes(rate).replace([' ', 'i', 'B'], "")
}

fn operations(look: Look<'_>) -> Paragraph<'static> {
    let line = |operation: &gradwire_proto::pb::RunningOperation| {
        let nodes = view::count(operation.missing_nodes.len() as u64, "node");
        let tensors = view::count(operation.tensor_count, "tensor");
        Line::from(printable(&format!(
            "{} {} ({tensors}) for {} ms, unfinished on {nodes}",
            operation.sequence,
            operation.tensors.join(", "),
            operation.running_ms
        )))
    };
    let lines: Vec<_> = look.status.operations.iter().map(line).collect();
    Paragraph::new(lines).block(Block::bordered().title("operations in flight"))
}

/// The newest entries that fit, newest first.
fn entries(title: &'static str, entries: &[Entry], area: Rect) -> Paragraph<'static> {
    let line = |entry: &Entry| {
        Line::from(format!("{:>8.1} s  {}", entry.at_ms as f64 / 1e3, printable(&entry.text)))
    };
    let lines: Vec<_> = entries.iter().rev().take(area.height.into()).map(line).collect();
    Paragraph::new(lines).wrap(Wrap { trim: false }).block(Block::bordered().title(title))
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use gradwire_tests::sample::status;
    use gradwire_viewer::view::Lags;

    fn screen(status: &StatusResponse, colors: bool, (width, height): (u16, u16)) -> TestBackend {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let shares = Lags::default().add(status);
        let look = Look { status, shares: &shares, colors };
        terminal.draw(|frame| draw(frame, &look)).unwrap();
        terminal.backend().clone()
    }

    #[test]
    fn all_figures_are_on_the_screen() {
        let text = screen(&status(5000), true, (130, 40)).to_string();
        for part in [
            "job j1  running  up 5 s  20.00 steps/s  9 operations done, 1 in flight",
            "straggler: rank 3: the others wait for it 80 % of the time",
            "│0 a ",
            "3      103        50.0      0 %      80 %       straggler",
            "links: share of the sender's line",
            "40 %",
            "10 fc.weight (1 tensor) for 30 ms, unfinished on 1 node",
            "0.9 s  ring for up to 1024 bytes: by the model",
            "0.0 s  the world is complete: 2 nodes",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
    }

    #[test]
    fn without_colors_the_words_are_the_same() {
        let [colored, plain] = [true, false].map(|colors| screen(&status(5000), colors, (130, 40)));
        let foreground = |of: &TestBackend| {
            of.buffer().content.iter().filter(|cell| cell.fg != Color::Reset).count()
        };
        assert!(foreground(&colored) > 0);
        assert_eq!(foreground(&plain), 0);
        assert_eq!(colored.to_string(), plain.to_string());
    }

    /// Many nodes, no nodes, a narrow screen, a tiny screen: nothing panics, and problems come
    /// first.
    #[test]
    fn any_screen_size_works() {
        let mut many = status(5000);
        let node = many.nodes[0].clone();
        many.nodes = (0..256)
            .map(|at| gradwire_proto::pb::NodeStatus {
                host: format!("n{at}\u{1b}[2J"),
                first_rank: at * 2,
                ..node.clone()
            })
            .collect();
        many.nodes[200].silent_ms = 9000;
        let text = screen(&many, true, (130, 40)).to_string();
        assert!(text.contains("200 n200") && text.contains("silent 9 s"), "{text}");
        assert!(!text.contains('\u{1b}'), "TRUST");
        for size in [(40, 20), (80, 24), (1, 1), (10, 3), (300, 100)] {
            for status in [&many, &StatusResponse::default(), &status(1)] {
                screen(status, true, size);
            }
        }
    }
}
