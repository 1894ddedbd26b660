//! Lines of output, and the other messages to the writing thread.

use gradwire_services::launch::{LineEnd, Stream, Text};

/// Where a line comes from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A rank. Its output is shown on the same stream and goes to files, too.
    Rank(u32),
    /// Several ranks, which wrote the same. Only shown.
    Ranks(Vec<u32>),
    /// A service or an agent, by name. It is shown on standard error. A daemon has a file, too.
    Service(String),
    /// The launcher.
    Launcher,
    /// The report at the end, whose lines get no prefix.
    Report,
}

impl Source {
    /// The daemon of a host.
    pub fn daemon(host: &str) -> Self {
        Self::Service(format!("daemon {host}"))
    }

    /// The host of a daemon.
    pub fn daemon_host(&self) -> Option<&str> {
        match self {
            Self::Service(name) => name.strip_prefix("daemon "),
            _ => None,
        }
    }
}

/// A line of output, or a part of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The process that wrote it.
    pub source: Source,
    /// The stream that it goes to.
    pub stream: Stream,
    /// Without its end.
    pub text: Text,
    /// How it ends.
    pub end: LineEnd,
    /// It goes only to the files of its source.
    pub hidden: bool,
}

impl Line {
    /// A line of the launcher.
    pub fn note(text: &str) -> Self {
        Self::own(Source::Launcher, text)
    }

    /// A line of the report at the end.
    pub fn report(text: &str) -> Self {
        Self::own(Source::Report, text)
    }

    fn own(source: Source, text: &str) -> Self {
        let text = Text::Utf8(text.to_owned());
        Self { source, stream: Stream::Stderr, text, end: LineEnd::Newline, hidden: false }
    }
}

/// What the writing thread receives.
#[derive(Debug)]
pub enum Entry {
    /// A line to write.
    Line(Line),
    /// A rank is about to report an error.
    Begins(u32),
    /// A rank has reported its error, or has ended.
    Ends(u32),
    /// The line of progress at the end of the terminal; empty to remove it.
    Progress(String),
    /// [`HOLD`](crate::launch::fold::HOLD) has passed since a rank began.
    Over,
}

impl From<Line> for Entry {
    fn from(line: Line) -> Self {
        Self::Line(line)
    }
}
