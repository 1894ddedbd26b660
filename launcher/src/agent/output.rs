//! Passes one output stream of a process on to the launcher.
//!
//! Nothing is lost, and no timeout decides when the output is complete: when the process has ended,
//! the rest of its output is in the pipe, and the system says how much that is. A child that has
//! inherited the pipe may keep it open.

use std::os::fd::AsFd;

use tokio::{
    io::{AsyncRead, AsyncReadExt},
    sync::{mpsc, oneshot},
};

use super::{
    credit::Credit,
    last_lines::LastLines,
    split::{MAX_STRETCH, Splitter},
};
use gradwire_proto::{Failure, Rank};
use gradwire_services::launch::{
    CONSEQUENCE, FORMS, LAST_WORDS, LAST_WORDS_END, LEAVES, LineEnd, Report, Role, Stream, Text,
    WAITS,
};

/// The most bytes of each text of a failure that a rank has received (BOUND).
const MAX_TEXT: usize = 4096;

/// An output that is being passed on.
#[derive(Debug)]
pub struct Pump {
    ended: oneshot::Sender<()>,
    /// Ends once everything that the process wrote before its end has been passed on.
    drained: oneshot::Receiver<()>,
}

impl Pump {
    /// The process has ended: waits until all its output has been passed on.
    pub async fn drain(self) {
        // The task may have reached the end of the pipe already.
        let _ = self.ended.send(());
        let _ = self.drained.await;
    }
}

/// One output of one process.
#[derive(Debug)]
pub struct Output {
    role: Role,
    stream: Stream,
    reports: mpsc::Sender<Report>,
    credit: Credit,
    /// The last lines of a rank, without the errors and reports that it announces.
    last: Option<LastLines>,
    is_announced: bool,
    splitter: Splitter,
}

impl Output {
    /// The output `stream` of `role`, to be sent as reports, as far as there is credit, and kept in
    /// `last`.
    pub(super) fn new(
        role: Role,
        stream: Stream,
        reports: mpsc::Sender<Report>,
        credit: Credit,
        last: Option<LastLines>,
    ) -> Self {
        let (is_announced, splitter) = Default::default();
        Self { role, stream, reports, credit, last, is_announced, splitter }
    }

    /// Passes on what is written to `pipe`, until no process has it open.
    pub fn start(self, pipe: impl AsyncRead + AsFd + Unpin + Send + 'static) -> Pump {
        let ((end, ended), (drained, all)) = (oneshot::channel(), oneshot::channel());
        tokio::spawn(self.pump(pipe, ended, drained));
        Pump { ended: end, drained: all }
    }

    async fn pump(
        mut self,
        mut pipe: impl AsyncRead + AsFd + Unpin,
        mut ended: oneshot::Receiver<()>,
        drained: oneshot::Sender<()>,
    ) {
        let mut bytes = vec![0; MAX_STRETCH];
        loop {
            let length = tokio::select! {
                biased;
                _ = &mut ended => break,
                read = pipe.read(&mut bytes) => read.unwrap_or(0),
            };
            if length == 0 {
                return self.finish().await;
            }
            self.pass_on(&bytes[..length]).await;
        }
        let mut left = rustix::io::ioctl_fionread(&pipe).unwrap_or(0);
        while left > 0 {
            let length = pipe.read(&mut bytes).await.unwrap_or(0);
            if length == 0 {
                break;
            }
            left = left.saturating_sub(length as u64);
            self.pass_on(&bytes[..length]).await;
        }
        self.finish().await;
        drop(drained);
        while let Ok(length @ 1..) = pipe.read(&mut bytes).await {
            self.pass_on(&bytes[..length]).await;
        }
        self.finish().await;
    }

    async fn pass_on(&mut self, bytes: &[u8]) {
        for line in self.splitter.push(bytes) {
            self.report(line).await;
        }
    }

    /// Passes on a last line without a newline.
    async fn finish(&mut self) {
        if let Some(line) = self.splitter.finish() {
            self.report(line).await;
        }
    }

    async fn report(&mut self, (mut text, mut end): (Text, LineEnd)) {
        let (role, stream) = (self.role, self.stream);
        if let (Role::Rank(rank), Stream::Stderr) = (role, stream)
            && let Some((before, report)) = control_line(&text, Rank(rank))
        {
            match report {
                Report::LastWords { .. } => self.is_announced = true,
                Report::LastWordsEnd { .. } => self.is_announced = false,
                _ => {}
            }
            let unfinished = Text::from(before);
            if matches!(report, Report::LastWords { .. } | Report::LastWordsEnd { .. }) {
                self.credit.take().await;
            }
            let _ = self.reports.send(report).await;
            if before.is_empty() {
                return;
            }
            // The control line begins after an unfinished line.
            (text, end) = (unfinished, LineEnd::Newline);
        }
        if let Some(last) = self.last.as_ref().filter(|_| !self.is_announced) {
            last.push(&text, end);
        }
        // A daemon speaks to the launcher itself there.
        if (role, stream) != (Role::Daemon, Stream::Stdout) {
            self.credit.take().await;
        }
        let _ = self.reports.send(Report::Output { role, stream, text, end }).await;
    }
}

/// What precedes a line with which a rank speaks to the launcher, and what it says.
fn control_line(text: &Text, rank: Rank) -> Option<(&[u8], Report)> {
    let lines = [
        (LAST_WORDS, Report::LastWords { rank }),
        (LAST_WORDS_END, Report::LastWordsEnd { rank }),
        (FORMS, Report::Forming { rank }),
        (WAITS, Report::Waiting { rank }),
        (LEAVES, Report::Leaving { rank }),
    ];
    let text = text.as_bytes();
    let mut found = lines
        .into_iter()
        .filter_map(|(line, report)| Some((text.strip_suffix(line.as_bytes())?, report)));
    found.next().or_else(|| {
        let line = CONSEQUENCE.as_bytes();
        let at = text.windows(line.len()).position(|part| part == line)?;
        // A rank may write anything there (TRUST).
        let mut failure: Failure = serde_json::from_slice(&text[at + line.len()..]).ok()?;
        failure.limit(MAX_TEXT);
        Some((&text[..at], Report::Consequence { rank, failure }))
    })
}

#[cfg(test)]
mod tests {
    use gradwire_proto::FailureKind;

    use super::*;

    #[test]
    fn control_lines_follow_unfinished_lines() {
        let read = |line: &str| {
            let text = Text::from(line);
            control_line(&text, Rank(3)).map(|(before, report)| (before.len(), report))
        };
        assert_eq!(read(&format!("50 %{WAITS}")), Some((4, Report::Waiting { rank: Rank(3) })));
        assert_eq!(read(LAST_WORDS), Some((0, Report::LastWords { rank: Rank(3) })));
        let end = Report::LastWordsEnd { rank: Rank(3) };
        assert_eq!(read(LAST_WORDS_END), Some((0, end)));
        assert_eq!(read(LEAVES), Some((0, Report::Leaving { rank: Rank(3) })));
        assert_eq!(read(&WAITS[1..]), None);
        let failure = Failure::new(FailureKind::WorkerLost, "it is lost").rank(Rank(1));
        let json = serde_json::to_string(&failure).unwrap();
        let expected = Report::Consequence { rank: Rank(3), failure };
        assert_eq!(read(&format!("50 %{CONSEQUENCE}{json}")), Some((4, expected)));
        assert_eq!(read(&format!("{CONSEQUENCE}nothing")), None);
    }
}
