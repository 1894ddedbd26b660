//! Draws the screen of `gradwire top`. Pure: a snapshot goes in, cells come out.
//!
//! A large screen shows all panes, a small one only the chosen one. Colors are never the only mark:
//! each mark is also a word or a number.

use gradwire_proto::pb::Entry;
use gradwire_viewer::view;
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    text::{Line, Span},
    widgets::{Block, Cell, Paragraph, Row, Table, Wrap},
};

use super::{
    look::Look,
    panes,
    screen::{Pane, Screen},
};
use crate::cluster::printable;

/// A screen of this size shows all panes.
const LARGE: (u16, u16) = (120, 30);

/// The width of a cell in the map of links.
const CELL: u16 = 6;

const KEYS: &str = "1-6 Tab pane  ↑↓ scroll  s sort  r reverse  / filter  q quit";

/// The screen before the first snapshot.
pub(super) fn waiting(frame: &mut Frame<'_>) {
    frame.render_widget(Paragraph::new("waiting for the coordinator; q quits"), frame.area());
}

/// Draws a snapshot of a job.
pub(super) fn draw(frame: &mut Frame<'_>, look: &Look<'_>, screen: &mut Screen) {
    let look = *look;
    let area = frame.area();
    let is_large = area.width >= LARGE.0 && area.height >= LARGE.1;
    let tabs = u16::from(!is_large);
    let [head, tabs_at, body, foot] = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(tabs),
        Constraint::Min(3),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(header(look, is_large), head);
    if is_large {
        all(frame, body, look, screen);
    } else {
        frame.render_widget(tab_line(screen), tabs_at);
        pane(frame, body, look, screen, screen.pane);
    }
    frame.render_widget(footer(screen), foot);
}

/// Draws all panes.
fn all(frame: &mut Frame<'_>, area: Rect, look: Look<'_>, screen: &mut Screen) {
    let [body, foot] =
        Layout::vertical([Constraint::Min(6), Constraint::Percentage(30)]).areas(area);
    let [left, right] =
        Layout::horizontal([Constraint::Percentage(62), Constraint::Percentage(38)]).areas(body);
    let hosts = u16::try_from(look.status.nodes.len()).unwrap_or(u16::MAX).saturating_add(3);
    let hosts = Constraint::Length(hosts.min(left.height / 2));
    let [hosts_at, ranks_at] = Layout::vertical([hosts, Constraint::Min(3)]).areas(left);
    let halves = Layout::vertical([Constraint::Percentage(60), Constraint::Percentage(40)]);
    let [links_at, operations_at] = halves.areas(right);
    let [decisions_at, events_at] = halves.areas(foot);
    for (at, of) in [
        (hosts_at, Pane::Hosts),
        (ranks_at, Pane::Ranks),
        (links_at, Pane::Links),
        (operations_at, Pane::Operations),
        (decisions_at, Pane::Decisions),
        (events_at, Pane::Events),
    ] {
        if of == Pane::Links && screen.pane != Pane::Links && screen.filter.is_empty() {
            frame.render_widget(map(look, at), at);
        } else {
            pane(frame, at, look, screen, of);
        }
    }
}

fn header(look: Look<'_>, is_large: bool) -> Paragraph<'static> {
    let status = look.status;
    let steps = view::slowest(view::ranks(status))
        .map_or_else(|| "no steps yet".to_owned(), |rate| format!("{rate:.2} steps/s"));
    let (job, phase) = (&status.job, &status.phase);
    let (up, done) = (status.uptime_ms as f64 / 1e3, status.operations_done);
    let flying = status.operations_started.saturating_sub(done);
    let first = if is_large {
        let waiting = view::count(status.pending_count, "tensor");
        format!(
            "job {job}  {phase}  up {up:.0} s  {steps}  {done} operations done, {flying} in \
             flight  {waiting} waiting"
        )
    } else {
        let waiting = status.pending_count;
        format!(
            "{job}  {phase}  {up:.0} s  {steps}  {done} done  {flying} in flight  \
             {waiting} waiting"
        )
    };
    let second = match (&status.failure, view::straggler_in_words(look.shares)) {
        (Some(failure), _) => {
            Span::styled(printable(&format!("failed: {}", failure.what)), look.alarm())
        }
        (None, Some(straggler)) => Span::styled(straggler, look.alarm()),
        (None, None) => Span::raw("no straggler"),
    };
    let first = Line::from(printable(&first)).style(Style::new().add_modifier(Modifier::BOLD));
    Paragraph::new(vec![first, Line::from(second)])
}

/// The names of the panes, with their keys.
fn tab_line(screen: &Screen) -> Line<'static> {
    let tab = |(at, of): (usize, Pane)| {
        let style = match of == screen.pane {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => Style::new(),
        };
        [Span::styled(format!(" {} {} ", at + 1, of.name()), style), Span::raw(" ")]
    };
    Line::from(Pane::ALL.into_iter().enumerate().flat_map(tab).collect::<Vec<_>>())
}

fn footer(screen: &Screen) -> Line<'static> {
    let filter = &screen.filter;
    Line::from(match (screen.types, filter.is_empty()) {
        (true, _) => format!("filter: {filter}_  (Enter keeps it, Esc clears it)"),
        (false, false) => format!("filter: {filter}  (Esc clears it)  {KEYS}"),
        (false, true) => KEYS.to_owned(),
    })
}

/// Draws one pane.
fn pane(frame: &mut Frame<'_>, area: Rect, look: Look<'_>, screen: &mut Screen, of: Pane) {
    let Some(mut sheet) = panes::of(of, look, screen) else {
        return log(frame, area, look, screen, of);
    };
    screen.limit_order(of, sheet.head.len());
    let order = screen.order(of);
    sheet.arrange(screen, order);
    // Without the border and the head.
    let page = usize::from(area.height.saturating_sub(3));
    let (count, top) = (sheet.rows.len(), screen.limit_top(of, sheet.rows.len(), page));
    let by = order.column.map(|column| format!(", by {}", sheet.head[column]));
    let reversed = if order.reversed { ", reversed" } else { "" };
    let title = sheet.title + &place(top, page, count) + &by.unwrap_or_default() + reversed;
    let head = Row::new(sheet.head);
    let rows =
        sheet.rows.into_iter().skip(top).take(page).map(|row| {
            Row::new(row.into_iter().map(|cell| Cell::from(cell.text).style(cell.style)))
        });
    let table = Table::new(rows, sheet.widths)
        .header(head.style(Style::new().add_modifier(Modifier::UNDERLINED)))
        .block(block(title, screen, of));
    frame.render_widget(table, area);
}

/// Which of `count` rows are shown, if that is not all.
fn place(top: usize, page: usize, count: usize) -> String {
    match page < count && page > 0 {
        true => format!(" {}-{} of {count}", top + 1, (top + page).min(count)),
        false => String::new(),
    }
}

fn block(title: String, screen: &Screen, of: Pane) -> Block<'static> {
    let style = match of == screen.pane {
        true => Style::new().add_modifier(Modifier::BOLD),
        false => Style::new(),
    };
    Block::bordered().title(Span::styled(title, style))
}

/// Draws the decisions or the events, the newest first.
fn log(frame: &mut Frame<'_>, area: Rect, look: Look<'_>, screen: &mut Screen, of: Pane) {
    let entries = match of {
        Pane::Decisions => &look.status.decisions,
        _ => &look.status.events,
    };
    let shown = |entry: &&Entry| screen.shows([entry.text.as_str()].into_iter());
    let shown: Vec<&Entry> = entries.iter().rev().filter(shown).collect();
    let page = usize::from(area.height.saturating_sub(2));
    // Texts may need several lines, so the last one can be the first on the screen.
    let top = screen.limit_top(of, shown.len() + page.saturating_sub(1), page);
    let line = |entry: &&Entry| {
        Line::from(format!("{:>8.1} s  {}", entry.at_ms as f64 / 1e3, printable(&entry.text)))
    };
    let lines: Vec<_> = shown.iter().skip(top).take(page).map(line).collect();
    let title = of.name().to_owned() + &place(top, 1, if top > 0 { shown.len() } else { 0 });
    let text = Paragraph::new(lines).wrap(Wrap { trim: false }).block(block(title, screen, of));
    frame.render_widget(text, area);
}

/// The traffic from each node (row) to each other node (column), as far as there is space.
fn map(look: Look<'_>, area: Rect) -> Table<'static> {
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

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::{NodeStatus, StatusResponse};
    use gradwire_tests::sample::status;
    use gradwire_viewer::view::Lags;
    use ratatui::{
        Terminal,
        backend::TestBackend,
        crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
        style::Color,
    };

    use super::*;

    /// The screen after these keys.
    fn after(
        keys: &[KeyCode],
        status: &StatusResponse,
        colors: bool,
        (width, height): (u16, u16),
    ) -> TestBackend {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let shares = Lags::default().add(status);
        let look = Look { status, shares: &shares, colors };
        let mut screen = Screen::default();
        screen.remember(status);
        terminal.draw(|frame| draw(frame, &look, &mut screen)).unwrap();
        for key in keys {
            screen.key(&KeyEvent::new(*key, KeyModifiers::NONE));
            terminal.draw(|frame| draw(frame, &look, &mut screen)).unwrap();
        }
        terminal.backend().clone()
    }

    fn screen(status: &StatusResponse, colors: bool, size: (u16, u16)) -> TestBackend {
        after(&[], status, colors, size)
    }

    /// 256 nodes with two ranks each. Host 200 is silent.
    fn many() -> StatusResponse {
        let mut many = status(5000);
        let node = many.nodes[0].clone();
        let number = |at: u32| {
            let mut node =
                NodeStatus { host: format!("n{at}\u{1b}[2J"), first_rank: at * 2, ..node.clone() };
            let ranks = &mut node.report.as_mut().unwrap().ranks;
            ranks.iter_mut().enumerate().for_each(|(local, rank)| {
                rank.rank = at * 2 + local as u32;
                rank.step_seconds = f64::from(rank.rank) / 1e3;
            });
            node
        };
        many.nodes = (0..256).map(number).collect();
        many.nodes[200].silent_ms = 9000;
        many
    }

    #[test]
    fn all_figures_are_on_a_large_screen() {
        let text = screen(&status(5000), true, (130, 40)).to_string();
        for part in [
            "job j1  running  up 5 s  20.00 steps/s  9 operations done, 1 in flight",
            "straggler: rank 3: the others wait for it 80 % of the time",
            "│0 a ",
            "3     b          103     50.0    0 %              80 %   █            straggler",
            "links: share of the sender's line",
            "40 %",
            "10 fc.weight",
            "host b",
            "0.9 s  ring for up to 1024 bytes: by the model",
            "0.0 s  the world is complete: 2 nodes",
        ] {
            assert!(text.contains(part), "no {part:?} in\n{text}");
        }
    }

    #[test]
    fn each_pane_fits_80_columns_and_24_rows() {
        let small = (80, 24);
        for (key, parts) in [
            ('1', ["straggler", " waited ", "a         100", "80 %"]),
            ('2', ["health", "ops/s", "memory", "64.0 MiB"]),
            ('3', ["of the line", "47.7 MiB/s", "40 %", "9.5 MiB/s"]),
            ('4', ["10 fc.weight", "1 tensor", "30 ms", "host b"]),
            ('5', ["decisions", "by the model", "1-6 Tab pane", "q quit"]),
            ('6', ["events", "the world is complete", "/ filter", "6 events"]),
        ] {
            let text = after(&[KeyCode::Char(key)], &status(5000), true, small).to_string();
            for part in parts {
                assert!(text.contains(part), "no {part:?} in\n{text}");
            }
            assert!(text.contains("9 done  1 in flight  0 waiting"), "{text}");
        }
    }

    #[test]
    fn a_long_table_scrolls_sorts_and_filters() {
        let small = (80, 24);
        let many = many();
        let text = |keys: &[KeyCode]| after(keys, &many, true, small).to_string();
        let first = |text: &str| {
            let row = text.lines().nth(5).unwrap_or_default();
            let start = row.find('│').map_or(row, |at| &row[at + '│'.len_utf8()..]);
            start.split_whitespace().next().unwrap_or_default().to_owned()
        };
        assert!(text(&[]).contains("ranks (512) 1-17 of 512"), "{}", text(&[]));
        let end = text(&[KeyCode::End]);
        assert!(end.contains(" 496-512 of 512"), "{end}");
        let page = text(&[KeyCode::PageDown, KeyCode::Down]);
        assert!(page.contains(" 19-35 of 512"), "{page}");
        // The third column is sorted by its numbers, the largest first.
        let by_time = text(&[KeyCode::Char('s'); 4]);
        assert!(by_time.contains("1-17 of 512, by ms/step─"), "{by_time}");
        assert_eq!(first(&by_time), "511", "{by_time}");
        let keys = [[KeyCode::Char('s'); 4].as_slice(), &[KeyCode::Char('r')]].concat();
        assert_eq!(first(&text(&keys)), "0");
        let typed = "/n77".chars().map(KeyCode::Char);
        let filter: Vec<KeyCode> = typed.chain([KeyCode::Enter]).collect();
        let found = text(&filter);
        assert!(found.contains("154 ") && found.contains("155 "), "{found}");
        assert!(!found.contains("n78") && found.contains("filter: n77"), "{found}");
        let hosts = text(&[KeyCode::Char('2')]);
        assert!(hosts.contains("│200 n200"), "problems come first\n{hosts}");
    }

    #[test]
    fn a_failed_rank_and_its_host_are_marked() {
        let mut failed = status(5000);
        let failure = gradwire_proto::pb::Failure {
            what: "its process was killed".into(),
            rank: Some(2),
            host: "b".into(),
            ..Default::default()
        };
        failed.failure = Some(failure);
        let text = screen(&failed, false, (130, 40)).to_string();
        assert_eq!(text.matches("its process was killed").count(), 1, "{text}");
        let marked = text.lines().filter(|line| line.contains(" failed "));
        assert_eq!(marked.count(), 2, "the host and the rank\n{text}");
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
        let many = many();
        let text = screen(&many, true, (130, 40)).to_string();
        assert!(text.contains("200 n200") && text.contains("silent 9 s"), "{text}");
        assert!(!text.contains('\u{1b}'), "TRUST");
        let keys: Vec<_> = (1..=6_u8).map(|at| KeyCode::Char((b'0' + at).into())).collect();
        for size in [(40, 20), (80, 24), (1, 1), (10, 3), (300, 100)] {
            for status in [&many, &StatusResponse::default(), &status(1)] {
                after(&keys, status, true, size);
                after(&[KeyCode::End, KeyCode::Char('s')], status, true, size);
            }
        }
    }
}
