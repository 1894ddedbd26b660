//! The last lines that each rank has written. The daemon gets them for commands that show what a
//! rank does.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, PoisonError},
};

use gradwire_proto::Rank;
use gradwire_services::launch::{LineEnd, MAX_LAST_LINES, Notice, Text};

/// The most bytes of a line (BOUND).
const MAX_BYTES: usize = 200;

/// The last lines of both outputs of one rank.
#[derive(Debug, Clone, Default)]
pub(super) struct LastLines(Arc<Mutex<Kept>>);

#[derive(Debug, Default)]
struct Kept {
    /// As they were written, up to [`MAX_BYTES`].
    lines: VecDeque<Vec<u8>>,
    /// How the last line ends: the next one may overwrite it, like a progress bar, or continue it.
    end: Option<LineEnd>,
    is_new: bool,
}

impl LastLines {
    /// The rank has written this line, or this part of a long one.
    pub(super) fn push(&self, text: &Text, end: LineEnd) {
        let line = text.as_bytes().trim_ascii_end();
        if line.is_empty() {
            return;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.end.replace(end) {
            Some(LineEnd::Open) => return,
            Some(LineEnd::Return) => drop(kept.lines.pop_back()),
            _ if kept.lines.len() == MAX_LAST_LINES => drop(kept.lines.pop_front()),
            _ => {}
        }
        kept.lines.push_back(line[..line.len().min(MAX_BYTES)].to_vec());
        kept.is_new = true;
    }

    /// The lines, if there are new ones since the last call.
    fn take_new(&self) -> Option<Vec<String>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = std::mem::take(&mut kept.is_new);
        // A line may have consisted of nothing but control sequences.
        let lines = || kept.lines.iter().map(|line| plain(line)).filter(|line| !line.is_empty());
        is_new.then(|| lines().collect())
    }
}

/// A line without colours and other control sequences, which would move a reader's cursor (TRUST).
fn plain(line: &[u8]) -> String {
    struct Printed(String);
    impl vte::Perform for Printed {
        fn print(&mut self, one: char) {
            self.0.push(one);
        }

        fn execute(&mut self, control: u8) {
            if control == b'\t' {
                self.0.push(' ');
            }
        }
    }
    let mut printed = Printed(String::new());
    vte::Parser::new().advance(&mut printed, line);
    printed.0
}

/// The last lines of all ranks that run on this host, by the launcher's numbers.
#[derive(Debug, Default)]
pub(super) struct AllLastLines(BTreeMap<Rank, LastLines>);

impl AllLastLines {
    /// A rank is started.
    pub(super) fn add(&mut self, rank: Rank) -> LastLines {
        let lines = LastLines::default();
        self.0.insert(rank, lines.clone());
        lines
    }

    /// The process of a rank has ended.
    pub(super) fn remove(&mut self, rank: Rank) {
        self.0.remove(&rank);
    }

    /// Notices with all lines that are new since the last call.
    pub(super) fn news(&self) -> impl Iterator<Item = Notice> {
        let news = |(rank, lines): (&Rank, &LastLines)| {
            Some(Notice::Wrote { rank: *rank, lines: lines.take_new()? })
        };
        self.0.iter().filter_map(news)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_kept() {
        let mut all = AllLastLines::default();
        let lines = all.add(Rank(3));
        assert_eq!(all.news().count(), 0);
        for number in 0..20 {
            lines.push(&Text::from(format!("line {number}").as_str()), LineEnd::Newline);
        }
        lines.push(&Text::from("  "), LineEnd::Newline);
        lines.push(&Text::from(" 50 %"), LineEnd::Return);
        lines.push(&Text::from("100 %"), LineEnd::Newline);
        lines.push(&Text::from("é".repeat(1000).as_str()), LineEnd::Open);
        lines.push(&Text::from("another part of it"), LineEnd::Newline);
        let news: Vec<_> = all.news().collect();
        let [Notice::Wrote { rank: Rank(3), lines }] = &news[..] else { panic!("{news:?}") };
        assert_eq!(lines.len(), MAX_LAST_LINES, "BOUND");
        let (last, others) = lines.split_last().unwrap();
        assert_eq!(
            plain(b"\x1b[1;32mloss\x1b[0m\t0.5\x07\x1b]0;title\x07 \xff"),
            "loss 0.5 \u{fffd}"
        );
        assert_eq!(last, &"é".repeat(MAX_BYTES / 2), "BOUND");
        assert_eq!(others.last().unwrap(), "100 %");
        assert_eq!(others[others.len() - 2], "line 19");
        assert_eq!(all.news().count(), 0, "nothing new");
        all.remove(Rank(3));
        assert_eq!(all.news().count(), 0);
    }
}
