//! Shows reports of errors that several ranks write alike only once, and leaves out the middle of
//! long ones. Pure.
//!
//! When a job fails, all its ranks end with the same error. A rank says when it is about to write
//! one ([`gradwire_services::launch::LAST_WORDS`]). Then its standard error is held for a moment,
//! and lines that are the same on several ranks are shown once, with the numbers of these ranks.
//! Nothing is lost: the files of `--output-dir` have the output of each rank.

use std::{
    collections::VecDeque,
    mem,
    time::{Duration, Instant},
};

use gradwire_services::launch::{LineEnd, Stream, Text};

use super::lines::{Line, Source};

/// How long the standard error of a rank is held: ranks of one job notice a failure at about the
/// same time.
pub const HOLD: Duration = Duration::from_millis(400);

/// The longest time that lines are held if other ranks keep beginning.
const LONGEST: Duration = Duration::from_secs(2);

/// The most bytes that are held (BOUND).
const MAX_BYTES: usize = 4 << 20;

/// How many lines of a report are shown at its beginning, where the traceback is, and at its end.
const FIRST: usize = 150;
const LAST: usize = 30;

/// The text of a line, and how it ends.
type Written = (Text, LineEnd);

/// The lines of a report, without those in the middle of a long one.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    first: Vec<Written>,
    last: VecDeque<Written>,
    left_out: usize,
}

impl Report {
    /// Adds a line. Returns how many bytes are left out because of it.
    fn push(&mut self, written: Written) -> usize {
        let goes_on = self.first.last().is_some_and(|(_, end)| *end == LineEnd::Open);
        if goes_on || self.first.len() < FIRST {
            self.first.push(written);
            return 0;
        }
        self.last.push_back(written);
        let mut bytes = 0;
        while self.last.len() > LAST
            && let Some((text, end)) = self.last.pop_front()
        {
            self.left_out += usize::from(end != LineEnd::Open);
            bytes += text.as_bytes().len();
        }
        bytes
    }

    /// How many bytes it holds.
    fn bytes(&self) -> usize {
        self.first.iter().chain(&self.last).map(|(text, _)| text.as_bytes().len()).sum()
    }

    /// The report without the prefixes of a rank.
    fn plain(self, rank: u32) -> Self {
        let plain = |(text, end): Written| (plain(&text, rank), end);
        let first = self.first.into_iter().map(plain).collect();
        Self { first, last: self.last.into_iter().map(plain).collect(), ..self }
    }

    fn into_lines(self) -> impl Iterator<Item = Written> {
        let Self { first, last, left_out } = self;
        let note = (left_out > 0).then(|| {
            let text = format!("… ({left_out} lines; --output-dir DIR writes all to a file)");
            (Text::Utf8(text), LineEnd::Newline)
        });
        first.into_iter().chain(note).chain(last)
    }
}

/// What a rank has written since it began.
#[derive(Debug)]
struct Held {
    rank: u32,
    report: Report,
    has_ended: bool,
}

/// The standard error of the ranks that are about to report an error.
#[derive(Debug, Default)]
pub struct Fold {
    /// In the order in which they began.
    held: Vec<Held>,
    bytes: usize,
    since: Option<Instant>,
    /// How many ranks have begun less than [`HOLD`] ago.
    recent: usize,
}

impl Fold {
    /// A rank begins to report an error. [`Fold::over`] must follow after [`HOLD`].
    pub fn begin(&mut self, rank: u32, now: Instant) {
        self.since.get_or_insert(now);
        self.recent += 1;
        match self.held.iter_mut().find(|held| held.rank == rank) {
            Some(held) => held.has_ended = false,
            None => self.held.push(Held { rank, report: Report::default(), has_ended: false }),
        }
    }

    /// A rank has written its report, or its process has ended. Returns lines as [`Fold::over`].
    pub fn end(&mut self, rank: u32, now: Instant) -> Vec<Line> {
        let Some(held) = self.held.iter_mut().find(|held| held.rank == rank) else {
            return Vec::new();
        };
        held.has_ended = true;
        self.release_if_over(now)
    }

    /// Holds a line, or returns it.
    pub fn take(&mut self, line: Line) -> Option<Line> {
        let (Source::Rank(rank), Stream::Stderr) = (&line.source, line.stream) else {
            return Some(line);
        };
        let Some(held) = self.held.iter_mut().find(|held| held.rank == *rank) else {
            return Some(line);
        };
        self.bytes += line.text.as_bytes().len();
        self.bytes -= held.report.push((line.text, line.end));
        None
    }

    /// [`HOLD`] has passed since a rank began. Returns lines if no other rank has begun since and
    /// all long reports have ended, or if they have been held for long.
    pub fn over(&mut self, now: Instant) -> Vec<Line> {
        self.recent = self.recent.saturating_sub(1);
        self.release_if_over(now)
    }

    /// Whether it holds too much.
    pub fn is_full(&self) -> bool {
        self.bytes > MAX_BYTES
    }

    /// Returns the lines whose time is over. A long report stays until it ends, because its last
    /// lines are not known before.
    fn release_if_over(&mut self, now: Instant) -> Vec<Line> {
        let is_unfinished = |held: &mut Held| held.report.left_out > 0 && !held.has_ended;
        let is_late = self.since.is_some_and(|since| now - since >= LONGEST);
        let may_wait = self.recent > 0 || self.held.iter_mut().any(is_unfinished);
        if may_wait && !is_late {
            return Vec::new();
        }
        let kept: Vec<_> = self.held.extract_if(.., is_unfinished).collect();
        let lines = self.release();
        self.bytes = kept.iter().map(|held| held.report.bytes()).sum();
        self.held = kept;
        lines
    }

    /// Returns all lines that are held.
    pub fn release(&mut self) -> Vec<Line> {
        let Self { held, .. } = mem::replace(self, Self { recent: self.recent, ..Self::default() });
        // Each report with the ranks that wrote it, in the order of the first of them.
        let mut reports: Vec<(Vec<u32>, Report)> = Vec::new();
        for Held { rank, report, .. } in held {
            let plain = report.plain(rank);
            match reports.iter_mut().find(|(_, known)| *known == plain) {
                Some((ranks, _)) => ranks.push(rank),
                None => reports.push((vec![rank], plain)),
            }
        }
        let lines = reports.into_iter().flat_map(|(mut ranks, report)| {
            ranks.sort_unstable();
            let source = match ranks[..] {
                [rank] => Source::Rank(rank),
                _ => Source::Ranks(ranks),
            };
            report.into_lines().map(move |(text, end)| {
                let source = source.clone();
                Line { source, stream: Stream::Stderr, text, end, hidden: false }
            })
        });
        lines.collect()
    }
}

/// A line without the prefix that `torch.distributed` adds: it has the rank's number, as ours does.
fn plain(text: &Text, rank: u32) -> Text {
    let bytes = text.as_bytes();
    Text::from(bytes.strip_prefix(format!("[rank{rank}]: ").as_bytes()).unwrap_or(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(rank: u32, text: &str) -> Line {
        let (source, stream) = (Source::Rank(rank), Stream::Stderr);
        Line { source, stream, text: text.into(), end: LineEnd::Newline, hidden: false }
    }

    fn shown(lines: Vec<Line>) -> Vec<(Source, String)> {
        lines.into_iter().map(|line| (line.source, line.text.to_string())).collect()
    }

    #[test]
    fn equal_reports_are_shown_once() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        assert!(fold.take(line(1, "a warning")).is_some(), "nothing was announced");
        for rank in [3, 0, 1, 2] {
            fold.begin(rank, now);
        }
        for text in ["Traceback", "lost"] {
            for rank in [0, 2, 3] {
                assert!(fold.take(line(rank, text)).is_none());
            }
        }
        assert!(fold.take(line(1, "[rank1]: Traceback")).is_none());
        assert!(fold.take(line(1, "[rank1]: a hole")).is_none());
        let out = Line { stream: Stream::Stdout, ..line(1, "result") };
        assert!(fold.take(out).is_some(), "only standard error is held");
        assert!((0..3).all(|_| fold.over(now).is_empty()), "others may have the same");
        let (alike, alone) = (Source::Ranks(vec![0, 2, 3]), Source::Rank(1));
        let expected = [
            (alike.clone(), "Traceback".to_owned()),
            (alike, "lost".to_owned()),
            (alone.clone(), "Traceback".to_owned()),
            (alone, "a hole".to_owned()),
        ];
        assert_eq!(shown(fold.over(now)), expected);
        assert!(fold.take(line(0, "later")).is_some());
    }

    #[test]
    fn the_middle_of_a_long_report_is_left_out() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        let count = 100_000;
        for rank in [0, 1] {
            fold.begin(rank, now);
        }
        let write = |fold: &mut Fold, numbers: std::ops::Range<usize>| {
            for number in numbers {
                for rank in [0, 1] {
                    assert!(fold.take(line(rank, &format!("line {number}"))).is_none());
                }
            }
        };
        write(&mut fold, 0..count / 2);
        assert!(fold.over(now).is_empty() && fold.over(now).is_empty(), "it has not ended");
        write(&mut fold, count / 2..count);
        assert!(!fold.is_full(), "BOUND");
        assert!(fold.end(0, now).is_empty(), "the other one may be the same");
        let lines = shown(fold.end(1, now));
        assert_eq!(lines.len(), FIRST + 1 + LAST);
        let note = format!("… ({} lines; --output-dir DIR writes all to a file)", count - 180);
        assert_eq!(lines[FIRST], (Source::Ranks(vec![0, 1]), note));
        assert_eq!(lines.last().unwrap().1, format!("line {}", count - 1));
        assert!(fold.take(line(0, "later")).is_some(), "the rank goes on");
        // It may be stopped in the middle of its report.
        for rank in [0, 1] {
            fold.begin(rank, now);
        }
        write(&mut fold, 0..count);
        assert!(fold.over(now).is_empty() && fold.over(now).is_empty());
        assert_eq!(fold.end(1, now + LONGEST).len(), FIRST + 1 + LAST, "WAIT");
        assert_eq!(fold.release().len(), FIRST + 1 + LAST);
    }

    #[test]
    fn nothing_is_held_for_long() {
        let (mut fold, now) = (Fold::default(), Instant::now());
        fold.begin(0, now);
        fold.take(line(0, "x"));
        fold.begin(1, now + LONGEST);
        assert_eq!(fold.over(now + LONGEST).len(), 1, "WAIT");
        fold.begin(0, now);
        for _ in 0..5 {
            assert!(!fold.is_full());
            fold.take(line(0, &"x".repeat(1 << 20)));
        }
        assert!(fold.is_full(), "BOUND");
        assert_eq!(fold.release().len(), 5);
        assert!(!fold.is_full());
    }
}
