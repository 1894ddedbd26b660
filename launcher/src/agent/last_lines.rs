//! The last lines that each rank has written. The daemon gets them, for those who ask what a rank
//! does.

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
    lines: VecDeque<String>,
    /// Whether the next line is written over the last one, as progress bars are.
    is_overwritten: bool,
    is_new: bool,
}

impl LastLines {
    /// The rank has written this line, or this part of a long one.
    pub(super) fn push(&self, text: &Text, end: LineEnd) {
        let bytes = text.as_bytes();
        let line = String::from_utf8_lossy(&bytes[..bytes.len().min(MAX_BYTES)]);
        let line = line.trim_end();
        if line.is_empty() {
            return;
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_overwritten {
            kept.lines.pop_back();
        } else if kept.lines.len() == MAX_LAST_LINES {
            kept.lines.pop_front();
        }
        kept.lines.push_back(line.to_owned());
        (kept.is_overwritten, kept.is_new) = (end == LineEnd::Return, true);
    }

    /// The lines, if there are new ones since the last call.
    fn take_new(&self) -> Option<Vec<String>> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut kept.is_new).then(|| kept.lines.iter().cloned().collect())
    }
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
        lines.push(&Text::from("é".repeat(1000).as_str()), LineEnd::Newline);
        let news: Vec<_> = all.news().collect();
        let [Notice::Wrote { rank: Rank(3), lines }] = &news[..] else { panic!("{news:?}") };
        assert_eq!(lines.len(), MAX_LAST_LINES, "BOUND");
        let (last, others) = lines.split_last().unwrap();
        assert_eq!(last, &"é".repeat(MAX_BYTES / 2), "BOUND");
        assert_eq!(others.last().unwrap(), "100 %");
        assert_eq!(others[others.len() - 2], "line 19");
        assert_eq!(all.news().count(), 0, "nothing new");
        all.remove(Rank(3));
        assert_eq!(all.news().count(), 0);
    }
}
