//! What the user of `gradwire top` has chosen: the pane, its place, its order, and a filter; and
//! what the screen remembers of earlier snapshots. Pure: keys and snapshots go in.

use std::collections::{BTreeMap, VecDeque};

use gradwire_proto::pb::StatusResponse;
use gradwire_viewer::view;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// How many steps a sparkline shows (BOUND).
pub(super) const SPARKS: usize = 12;

/// The time between two values of a sparkline: daemons report as often.
const SPARK_MS: u64 = 1000;

/// The longest filter, in characters (BOUND).
const MAX_FILTER: usize = 64;

/// A part of the screen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Pane {
    Ranks,
    Hosts,
    Links,
    Operations,
    Decisions,
    Events,
}

impl Pane {
    pub(super) const ALL: [Self; 6] =
        [Self::Ranks, Self::Hosts, Self::Links, Self::Operations, Self::Decisions, Self::Events];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ranks => "ranks",
            Self::Hosts => "hosts",
            Self::Links => "links",
            Self::Operations => "operations",
            Self::Decisions => "decisions",
            Self::Events => "events",
        }
    }

    fn at(self, steps: isize) -> Self {
        let count = Self::ALL.len() as isize;
        Self::ALL[(self as isize + steps).rem_euclid(count) as usize]
    }
}

/// The order of a pane's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Order {
    /// The column; `None` for the order in which problems come first.
    pub(super) column: Option<usize>,
    pub(super) reversed: bool,
}

/// What a key asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// The screen has changed, or nothing has.
    Draw,
    Quit,
}

/// What the user has chosen, and what is remembered.
#[derive(Debug)]
pub(super) struct Screen {
    pub(super) pane: Pane,
    pub(super) filter: String,
    /// Whether keys go into the filter.
    pub(super) types: bool,
    /// The first row of each pane. Drawing limits it to the rows that there are.
    pub(super) tops: [usize; Pane::ALL.len()],
    orders: [Order; Pane::ALL.len()],
    /// The time per step of each rank, the newest last.
    sparks: BTreeMap<u32, VecDeque<f64>>,
    sparked_ms: u64,
    /// The number of rows of a page when it was drawn last.
    pub(super) page: usize,
}

impl Default for Screen {
    fn default() -> Self {
        let (filter, types, tops, orders, sparks, sparked_ms, page) = Default::default();
        Self { pane: Pane::Ranks, filter, types, tops, orders, sparks, sparked_ms, page }
    }
}

impl Screen {
    /// The order of the rows of a pane.
    pub(super) fn order(&self, pane: Pane) -> Order {
        self.orders[pane as usize]
    }

    /// Whether a row with these cells is shown.
    pub(super) fn shows<'a>(&self, mut cells: impl Iterator<Item = &'a str>) -> bool {
        let wanted = self.filter.to_lowercase();
        wanted.is_empty() || cells.any(|cell| cell.to_lowercase().contains(&wanted))
    }

    /// Remembers the times per step of a snapshot.
    pub(super) fn remember(&mut self, status: &StatusResponse) {
        if status.uptime_ms < self.sparked_ms {
            // Another epoch.
            self.sparks.clear();
        } else if !self.sparks.is_empty() && status.uptime_ms < self.sparked_ms + SPARK_MS {
            return;
        }
        self.sparked_ms = status.uptime_ms;
        for rank in view::ranks(status) {
            let times = self.sparks.entry(rank.rank).or_default();
            if times.len() == SPARKS {
                times.pop_front();
            }
            times.push_back(view::steps_per_second(rank).map_or(0.0, |rate| 1.0 / rate));
        }
    }

    /// The last times per step of a rank as a line of blocks: the slowest one is the highest.
    pub(super) fn spark(&self, rank: u32) -> String {
        const BLOCKS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
        let Some(times) = self.sparks.get(&rank) else { return String::new() };
        let most = times.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let block = |time: &f64| match time / most {
            share if share > 0.0 => BLOCKS[((share * 8.0) as usize).min(7)],
            _ => ' ',
        };
        times.iter().map(block).collect()
    }

    /// Handles a key.
    pub(super) fn key(&mut self, key: &KeyEvent) -> Asked {
        if key.kind == KeyEventKind::Release {
            return Asked::Draw;
        }
        let is_interrupt =
            key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if is_interrupt {
            return Asked::Quit;
        }
        if self.types {
            self.type_key(key.code);
            return Asked::Draw;
        }
        let (top, page) = (&mut self.tops[self.pane as usize], self.page.max(1));
        match key.code {
            KeyCode::Char('q') => return Asked::Quit,
            KeyCode::Up | KeyCode::Char('k') => *top = top.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => *top = top.saturating_add(1),
            KeyCode::PageUp => *top = top.saturating_sub(page),
            KeyCode::PageDown | KeyCode::Char(' ') => *top = top.saturating_add(page),
            KeyCode::Home | KeyCode::Char('g') => *top = 0,
            KeyCode::End | KeyCode::Char('G') => *top = usize::MAX,
            KeyCode::Tab | KeyCode::Right => self.pane = self.pane.at(1),
            KeyCode::BackTab | KeyCode::Left => self.pane = self.pane.at(-1),
            KeyCode::Char(digit @ '1'..='6') => {
                self.pane = Pane::ALL[digit as usize - '1' as usize];
            }
            KeyCode::Char('s') => {
                let order = &mut self.orders[self.pane as usize];
                // Drawing limits it to the columns that there are.
                order.column = Some(order.column.map_or(0, |column| column + 1));
            }
            KeyCode::Char('r') => {
                let order = &mut self.orders[self.pane as usize];
                order.reversed = !order.reversed;
            }
            KeyCode::Char('/') => self.types = true,
            KeyCode::Esc => self.filter.clear(),
            _ => {}
        }
        Asked::Draw
    }

    fn type_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.types = false,
            KeyCode::Esc => {
                self.types = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(typed) if self.filter.chars().count() < MAX_FILTER => {
                self.filter.push(typed);
            }
            _ => {}
        }
    }

    /// Replaces an order by a column that does not exist by the order in which problems come first.
    pub(super) fn limit_order(&mut self, pane: Pane, columns: usize) {
        let order = &mut self.orders[pane as usize];
        if order.column.is_some_and(|column| column >= columns) {
            order.column = None;
        }
    }

    /// The first of `count` rows that is shown on a page of `page` rows.
    pub(super) fn limit_top(&mut self, pane: Pane, count: usize, page: usize) -> usize {
        let top = &mut self.tops[pane as usize];
        *top = (*top).min(count.saturating_sub(page));
        if pane == self.pane {
            self.page = page;
        }
        *top
    }
}

#[cfg(test)]
mod tests {
    use gradwire_tests::sample::status;

    use super::*;

    fn press(screen: &mut Screen, codes: &[KeyCode]) -> Asked {
        let keys = codes.iter().map(|code| KeyEvent::new(*code, KeyModifiers::NONE));
        keys.map(|key| screen.key(&key)).last().unwrap()
    }

    #[test]
    fn q_and_ctrl_c_quit() {
        let mut screen = Screen::default();
        assert_eq!(press(&mut screen, &[KeyCode::Char('c')]), Asked::Draw);
        assert_eq!(press(&mut screen, &[KeyCode::Char('q')]), Asked::Quit);
        let ctrl_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(screen.key(&ctrl_c), Asked::Quit);
        // While a filter is typed, q is a letter.
        assert_eq!(press(&mut screen, &[KeyCode::Char('/'), KeyCode::Char('q')]), Asked::Draw);
        assert_eq!(screen.key(&ctrl_c), Asked::Quit);
    }

    #[test]
    fn a_filter_is_typed_and_taken_back() {
        let mut screen = Screen::default();
        assert!(screen.shows(["anything"].into_iter()));
        press(&mut screen, &"/Node2x".chars().map(KeyCode::Char).collect::<Vec<_>>());
        press(&mut screen, &[KeyCode::Backspace, KeyCode::Enter]);
        assert_eq!((screen.filter.as_str(), screen.types), ("Node2", false));
        assert!(screen.shows(["7", "the node2"].into_iter()), "in any case");
        assert!(!screen.shows(["7", "node3"].into_iter()));
        press(&mut screen, &[KeyCode::Esc]);
        assert!(screen.shows(["node3"].into_iter()));
        screen.types = true;
        press(&mut screen, &[KeyCode::Char('x'); 500]);
        assert_eq!(screen.filter.len(), MAX_FILTER, "BOUND");
    }

    #[test]
    fn places_and_orders_stay_within_the_rows() {
        let mut screen = Screen::default();
        press(&mut screen, &[KeyCode::End]);
        assert_eq!(screen.limit_top(Pane::Ranks, 100, 20), 80);
        press(&mut screen, &[KeyCode::PageUp, KeyCode::Up]);
        assert_eq!(screen.limit_top(Pane::Ranks, 100, 20), 59);
        assert_eq!(screen.limit_top(Pane::Ranks, 3, 20), 0);
        press(&mut screen, &[KeyCode::Tab]);
        assert_eq!(screen.pane, Pane::Hosts);
        press(&mut screen, &[KeyCode::BackTab, KeyCode::BackTab]);
        assert_eq!(screen.pane, Pane::Events);
        press(&mut screen, &[KeyCode::Char('3')]);
        assert_eq!(screen.pane, Pane::Links);
        // Each s is the next column, and after the last one comes the order by problems.
        let mut columns = Vec::new();
        for _ in 0..4 {
            press(&mut screen, &[KeyCode::Char('s')]);
            screen.limit_order(Pane::Links, 2);
            columns.push(screen.order(Pane::Links).column);
        }
        assert_eq!(columns, [Some(0), Some(1), None, Some(0)]);
        assert_eq!(screen.order(Pane::Hosts), Order::default());
    }

    #[test]
    fn a_sparkline_shows_the_last_steps() {
        let mut screen = Screen::default();
        let mut status = status(1000);
        for (at, step) in [0.05, 0.1, 0.2, 0.4].into_iter().enumerate() {
            status.uptime_ms = 1000 * (at as u64 + 1);
            for node in &mut status.nodes {
                node.report.as_mut().unwrap().ranks[0].step_seconds = step;
            }
            screen.remember(&status);
            // A second look at the same report adds nothing.
            status.uptime_ms += 500;
            screen.remember(&status);
        }
        assert_eq!(screen.spark(0), "▂▃▅█");
        assert_eq!(screen.spark(1), "████", "always the same");
        assert_eq!(screen.spark(9), "");
        for second in 10..99 {
            status.uptime_ms = 1000 * second;
            screen.remember(&status);
        }
        assert_eq!(screen.spark(0).chars().count(), SPARKS, "BOUND");
        status.uptime_ms = 10;
        screen.remember(&status);
        assert_eq!(screen.spark(0).chars().count(), 1, "another epoch");
    }
}
