//! The output and the end of a job, with assertions for tests.

use std::{os::unix::process::ExitStatusExt, process::ExitStatus, time::Duration};

/// The README promises five seconds after a fault. An overloaded machine may take twice as long. A
/// wait without a deadline would take longer than this.
const NOTIFIED_WITHIN: Duration = Duration::from_secs(10);

/// A line of the launcher's output.
#[derive(Debug, Clone)]
pub struct Line {
    /// When it was received, since the start.
    pub after: Duration,
    /// Whether it was on standard error.
    pub is_error: bool,
    /// Its text, without the line end.
    pub text: String,
}

/// A line printed by a `gradwire-test-rank`.
#[derive(Debug, Clone)]
pub struct Said {
    /// The rank that printed it.
    pub rank: u32,
    /// When it was printed, as [`super::now_us`].
    pub at_us: u64,
    /// Its first word, which names the event.
    pub word: String,
    /// The rest of the line.
    pub text: String,
}

impl Line {
    /// What a rank says with it, if it is a line of one.
    pub fn said(&self) -> Option<Said> {
        let (rank, rest) = self.text.strip_prefix('[')?.split_once("] @")?;
        let mut parts = rest.splitn(3, ' ');
        let (at, word, text) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Said {
            rank: rank.parse().ok()?,
            at_us: at.parse().ok()?,
            word: word.to_owned(),
            text: text.replace("\\n", "\n"),
        })
    }
}

/// How a job ended.
#[derive(Debug)]
pub struct Report {
    pub(super) status: ExitStatus,
    /// When it was started, as [`super::now_us`].
    pub began_us: u64,
    /// How long it ran.
    pub took: Duration,
    /// All its output.
    pub lines: Vec<Line>,
}

impl Report {
    /// The exit code; a signal is `128 + n`.
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| 128 + self.status.signal().unwrap_or_default())
    }

    /// The text on standard error, without the lines of ranks and services.
    pub fn verdict(&self) -> String {
        let own = self.lines.iter().filter(|line| line.is_error && !line.text.starts_with('['));
        own.map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n")
    }

    /// The text on standard output.
    pub fn output(&self) -> String {
        let lines = self.lines.iter().filter(|line| !line.is_error);
        lines.map(|line| line.text.as_str()).collect::<Vec<_>>().join("\n")
    }

    /// All output, for a failed assertion.
    pub fn all(&self) -> String {
        let lines = self.lines.iter().map(|line| {
            let stream = if line.is_error { "err" } else { "out" };
            format!("{:8.3} {stream} {}", line.after.as_secs_f64(), line.text)
        });
        let lines: Vec<_> = lines.collect();
        format!("exit code {} after {:?}\n{}", self.code(), self.took, lines.join("\n"))
    }

    /// The lines with this word.
    pub fn said(&self, word: &str) -> Vec<Said> {
        self.lines.iter().filter_map(Line::said).filter(|said| said.word == word).collect()
    }

    /// Asserts the exit code.
    #[track_caller]
    pub fn assert_code(&self, code: i32) {
        assert_eq!(self.code(), code, "{}", self.all());
    }

    /// Asserts that the launcher's own lines contain all of these parts.
    #[track_caller]
    pub fn assert_verdict(&self, parts: &[&str]) {
        let verdict = self.verdict();
        for part in parts {
            assert!(verdict.contains(part), "no {part:?} in the verdict of {}", self.all());
        }
    }

    /// TELL: asserts that each of these ranks failed once, with an error that contains all these
    /// parts, within the promised time after `fault` (as [`super::now_us`]).
    #[track_caller]
    pub fn assert_notified(&self, ranks: &[u32], fault: u64, parts: &[&str]) {
        let failed = self.said("failed");
        for rank in ranks {
            let theirs: Vec<_> = failed.iter().filter(|said| said.rank == *rank).collect();
            let [reported] = theirs[..] else {
                panic!("TELL: rank {rank} was notified {} times: {}", theirs.len(), self.all());
            };
            for part in parts {
                assert!(
                    reported.text.contains(part),
                    "TELL: no {part:?} on rank {rank}: {}",
                    self.all()
                );
            }
            let after = Duration::from_micros(reported.at_us.saturating_sub(fault));
            assert!(
                after <= NOTIFIED_WITHIN,
                "TELL: rank {rank} was notified after {after:?}: {}",
                self.all()
            );
        }
    }
}
