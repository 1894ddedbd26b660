//! The report at the end of a job: picks the root cause among several, and names its process, host,
//! reason and hint (TELL). Pure.
//!
//! A failed job is seen from two sides. The launcher sees how processes end. The daemons report a
//! [`Failure`], which says more: what the ranks disagree on, or which rank gives no sign of life.
//! The report shows that failure, unless it is about a process whose end the launcher has seen.

use std::{path::Path, time::Duration};

use gradwire_proto::{Failure, FailureKind, SEE_OUTPUT};
use gradwire_services::launch::{ProcessEnd, Role, signal_name};

/// A service that ends because a rank died can seem to end before that rank: one agent sees both
/// ends, in any order. Between ends closer than this, it matters which process reacts to which.
pub(super) const TOGETHER: Duration = Duration::from_millis(20);

/// The end of a daemon counts as this much earlier if it has its own cause: the daemon was killed,
/// or the system refused it something. Its ranks end because of it, and on a busy machine their
/// ends may be seen well before its own.
const OWN_CAUSE: Duration = Duration::from_secs(1);

/// When such an end counts: always after a process that is blamed.
fn with_own_cause(at: Duration) -> Duration {
    at.saturating_sub(OWN_CAUSE).max(Duration::from_nanos(1))
}

/// The exit code of a daemon whose job has failed. Any other code means that it had its own cause.
const JOB_FAILED: i32 = 1;

/// The most rows of a report on a terminal of [`COLUMNS`]: a screen, with a prompt.
const MAX_ROWS: usize = 22;

/// The characters of a row.
const COLUMNS: usize = 80;

/// The longest line of a report, in characters: three of them fit.
const MAX_CHARS: usize = 6 * COLUMNS;

/// The exit code of a job that lost no rank, but too many daemons. It is `EX_TEMPFAIL` of
/// `sysexits.h`: batch systems and scripts can start such a job again.
const TEMPORARY: u8 = 75;

/// The exit code of a job that failed for another reason than a rank or a signal.
const OTHER: u8 = 1;

/// The lines at the beginning of a report say what happened, and those at its end are a hint or the
/// end of a table. They are left out last.
const KEPT_FIRST: usize = 2;
const KEPT_LAST: usize = 3;

/// One thing that went wrong. Times are since the launch began.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub enum Cause {
    /// The job could not start. The hint may be empty.
    NotStarted { what: String, hint: String },
    /// A process failed after it ran for `ran`; `tail` has its last lines on standard error.
    /// `received`: it is a rank, and ends because of this failure, which another process caused.
    Ended {
        role: Role,
        host: String,
        pid: u32,
        end: ProcessEnd,
        at: Duration,
        ran: Duration,
        received: Option<Box<Failure>>,
        tail: Vec<String>,
    },
    /// A rank has ended well, but others wait for it to form a further job.
    Absent { role: Role, host: String, waiting: Vec<Role>, at: Duration },
    /// The connection to a host broke.
    Lost { host: String, what: String, at: Duration },
    /// The daemon of a host was stopped by a signal, and a rank there failed.
    DaemonStopped { host: String, pid: u32, at: Duration },
    /// A signal asked the agent of a host to end, so it ends all processes there.
    Asked { host: String, what: String, at: Duration },
    /// This signal asked the launcher to end.
    Interrupted(i32),
    /// Output can't be written.
    Output(String),
}

impl Cause {
    /// The order of causes; the first is the root: an interruption, then the earliest. A killed
    /// process does not react to others, so its end counts as [`TOGETHER`] earlier: others see its
    /// socket close before the agent sees its end. Ranks that end because of another process, and
    /// services, which react to ranks, come last.
    fn order(&self, failure: Option<&Failure>) -> (u8, Duration) {
        // A failure that the daemons have reported says what the cause is.
        let consequence = if failure.is_none() { 3 } else { 2 };
        match self {
            Self::Interrupted(_) => (0, Duration::ZERO),
            Self::Output(_) => (1, Duration::ZERO),
            Self::Ended { role, host, .. } if failure.is_some_and(|f| blames(f, *role, host)) => {
                (2, Duration::ZERO)
            }
            Self::Ended { role: Role::Daemon, end, at, .. }
                if *end != ProcessEnd::Code(JOB_FAILED) =>
            {
                (2, with_own_cause(*at))
            }
            // Before the daemon that the agent has ended, and the ranks that notice.
            Self::Asked { at, .. } | Self::DaemonStopped { at, .. } => (2, with_own_cause(*at)),
            Self::Ended { end: ProcessEnd::Signal(_) | ProcessEnd::OutOfMemory, at, .. } => {
                (2, at.saturating_sub(TOGETHER))
            }
            Self::Ended { role: Role::Rank(_), at, received: None, .. } => (2, *at),
            Self::Lost { at, .. } | Self::Absent { at, .. } => (2, *at + TOGETHER),
            Self::Ended { role: Role::Rank(_), at, .. } => (consequence, *at),
            Self::Ended { at, .. } => (consequence, *at + TOGETHER),
            Self::NotStarted { .. } => (4, Duration::ZERO),
        }
    }

    fn at(&self) -> Option<Duration> {
        match self {
            Self::Ended { at, .. }
            | Self::Absent { at, .. }
            | Self::Lost { at, .. }
            | Self::DaemonStopped { at, .. }
            | Self::Asked { at, .. } => Some(*at),
            _ => None,
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Ended { role: Role::Rank(_), end, .. } => end.exit_code().max(1),
            Self::Interrupted(signal) => ProcessEnd::Signal(*signal).exit_code(),
            _ => OTHER,
        }
    }

    /// What happened, in one line.
    pub(super) fn headline(&self) -> String {
        match self {
            Self::NotStarted { what, .. } => what.clone(),
            Self::Ended { role, host, pid, end, ran, .. } => {
                let seconds = ran.as_secs_f64();
                format!("{role} on host {host} (pid {pid}) {end}, {seconds:.1} s after start")
            }
            Self::Absent { role, host, waiting, .. } => {
                let first = waiting.first().map(Role::to_string).unwrap_or_default();
                let others = match waiting.len() {
                    0 | 1 => format!("{first}, which has called init() again, waits"),
                    count => format!("{count} ranks, which have called init() again, wait"),
                };
                format!("{role} on host {host} has ended, but {others} for it")
            }
            Self::Lost { host, what, .. } => {
                format!("the connection to host {host} was lost: {what}")
            }
            Self::DaemonStopped { host, pid, .. } => format!(
                "the daemon on host {host} (pid {pid}) did not respond: a signal or a debugger has \
                 stopped it"
            ),
            Self::Asked { host, what, .. } => format!("host {host} left the job: {what}"),
            Self::Interrupted(signal) => {
                format!("interrupted by {}", signal_name(*signal).unwrap_or("a signal"))
            }
            Self::Output(why) => format!("output can't be written: {why}"),
        }
    }

    /// Whether this says more than the failure that the daemons reported: the process had its own
    /// reason to end, and the failure is only that it ended.
    fn explains(&self, failure: &Failure) -> bool {
        match self {
            Self::Ended { role: Role::Rank(rank), .. } => {
                let is_about_end =
                    matches!(failure.kind, FailureKind::WorkerLost | FailureKind::RankLeft);
                is_about_end && failure.rank.is_some_and(|blamed| blamed.0 == *rank)
            }
            Self::Ended { role: Role::Daemon, end, .. } => *end != ProcessEnd::Code(JOB_FAILED),
            Self::Lost { .. } | Self::DaemonStopped { .. } | Self::Asked { .. } => true,
            Self::Absent { .. } => true,
            Self::NotStarted { .. } => true,
            Self::Interrupted(_) | Self::Output(_) => true,
        }
    }

    /// Whether a failure that this explains adds something to it. A daemon with its own exit code
    /// stopped for the reason it reported. If a daemon was killed, the others know the tensors in
    /// progress; otherwise they only noticed that it was gone.
    fn goes_with(&self, failure: &Failure) -> bool {
        match self {
            Self::Ended { role: Role::Daemon, host, end, .. } => {
                matches!(end, ProcessEnd::Code(_))
                    || (failure.rank.is_none()
                        && failure.host == *host
                        && !failure.tensor.is_empty())
            }
            _ => true,
        }
    }

    fn lines(&self, others_ran: bool) -> Vec<String> {
        let headline = self.headline();
        let others = if others_ran { "; the other ranks were stopped" } else { "" };
        match self {
            Self::NotStarted { hint, .. } => {
                [format!("error: {headline}")].into_iter().chain(hint_line(hint)).collect()
            }
            Self::Ended { tail, .. } => {
                let mut lines = vec![format!("gradwire: {headline}{others}")];
                if !tail.is_empty() {
                    lines.push("gradwire: its last lines on standard error:".to_owned());
                    lines.extend(tail.iter().map(|line| format!("  {line}")));
                }
                lines
            }
            Self::Lost { .. } | Self::DaemonStopped { .. } | Self::Asked { .. } => {
                vec![format!("gradwire: {headline}{others}")]
            }
            Self::Absent { .. } => vec![
                format!("gradwire: {headline}{others}"),
                "hint: all ranks must call init() equally often".to_owned(),
            ],
            Self::Interrupted(_) | Self::Output(_) => {
                vec![format!("gradwire: {headline}; everything was stopped")]
            }
        }
    }
}

fn hint_line(hint: &str) -> Option<String> {
    (!hint.is_empty()).then(|| format!("hint: {}", printable(hint)))
}

/// Removes control characters: text of another process must not move the cursor (TRUST).
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).collect()
}

/// Cuts lines, and leaves out lines in the middle, so that all are on a screen.
fn on_a_screen(mut lines: Vec<String>) -> Vec<String> {
    for line in &mut lines {
        let length = line.chars().count();
        if length > MAX_CHARS {
            *line = line.chars().take(MAX_CHARS - 40).collect();
            line.push_str(&format!("… ({length} characters)"));
        }
    }
    let rows = |line: &String| line.chars().count().div_ceil(COLUMNS).max(1);
    let mut left_out = 0;
    // How many lines at the end stay.
    let last = |lines: &[String]| KEPT_LAST.min(lines.len().saturating_sub(KEPT_FIRST));
    while lines.len() > KEPT_FIRST + 1
        && lines.iter().map(rows).sum::<usize>() + usize::from(left_out > 0) > MAX_ROWS
    {
        let at = lines.len() - last(&lines);
        lines.remove(at.max(KEPT_FIRST + 1) - 1);
        left_out += 1;
    }
    if left_out > 0 {
        lines.insert(lines.len() - last(&lines), format!("  … {left_out} more lines"));
    }
    lines
}

/// A failure with its table, without its hint.
fn failure_lines(failure: &Failure) -> Vec<String> {
    let mut failure = failure.clone();
    failure.details.hint.clear();
    let mut lines: Vec<_> = failure.to_string().lines().map(printable).collect();
    if let Some(first) = lines.first_mut() {
        *first = format!("gradwire: the job failed: {first}");
    }
    lines
}

/// What the other daemons say about the node of a killed daemon, besides that it is lost: its
/// ranks, and the tensors in progress.
fn lost_node(failure: &Failure) -> Vec<String> {
    let parts = failure.what.split_once(" is lost: ");
    let parts = parts.and_then(|(who, how)| Some((who, how.split_once("in progress: ")?.1)));
    match parts {
        Some((who, names)) => vec![format!("gradwire: it was {who}; in progress: {names}")],
        None => failure_lines(failure),
    }
}

/// The root cause in one line, without a table; `None` without causes. For a daemon without
/// a reported failure it includes the last line of standard error.
pub fn summary(causes: &[Cause], failure: Option<&Failure>) -> Option<String> {
    let first = first(causes, failure)?;
    let text = match (first, failure) {
        (first, Some(failure)) if !first.explains(failure) => failure.headline(),
        (Cause::Ended { role: Role::Daemon, tail, .. }, _) => {
            let words = tail.last().map(|line| format!(": {line}")).unwrap_or_default();
            format!("{}{words}", first.headline())
        }
        _ => first.headline(),
    };
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What ended an epoch, as the beginning of a line, and when; without a cause, `now`.
pub fn loss(causes: &[Cause], failure: Option<&Failure>, now: Duration) -> (String, Duration) {
    let (first, at) = match (first(causes, failure), failure) {
        (Some(cause), Some(failure)) if !cause.explains(failure) => {
            (failure.clone().hint("").headline(), cause.at())
        }
        (Some(Cause::Ended { role, host, end, at, .. }), _) => {
            (format!("{role} on host {host} {end}"), Some(*at))
        }
        (Some(cause), _) => (cause.headline(), cause.at()),
        (None, _) => ("a failure".to_owned(), None),
    };
    (printable(&first), at.unwrap_or(now))
}

/// The root cause. The process that the daemons blame goes first, whatever the clocks say.
fn first<'a>(causes: &'a [Cause], failure: Option<&Failure>) -> Option<&'a Cause> {
    causes.iter().min_by_key(|cause| cause.order(failure))
}

/// Whether a failure is the loss of a process or a host, so that ranks which end because of it are
/// not its cause.
fn is_a_loss(failure: &Failure) -> bool {
    match failure.kind {
        FailureKind::WorkerLost
        | FailureKind::NodeLost
        | FailureKind::ConnectionLost
        | FailureKind::CoordinatorLost
        | FailureKind::RankLeft
        | FailureKind::Timeout => true,
        // A rank may have given up, and then its exit code counts.
        FailureKind::Cancelled => failure.rank.is_none(),
        _ => false,
    }
}

/// Whether a failure blames this process: a rank, or the daemon of a host.
pub fn blames(failure: &Failure, role: Role, host: &str) -> bool {
    match role {
        Role::Rank(rank) => failure.rank.is_some_and(|blamed| blamed.0 == rank),
        Role::Daemon => failure.blames_daemon() && failure.host == host,
    }
}

/// The end of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobReport {
    /// The launcher's exit code.
    pub code: u8,
    /// The last lines, for standard error.
    pub lines: Vec<String>,
    /// The process whose output says more, if there is one.
    pub output_of: Option<Role>,
}

impl JobReport {
    /// The report of a job that succeeded.
    pub fn well() -> Self {
        Self { code: 0, lines: Vec::new(), output_of: None }
    }

    /// The report of a job that the daemons declared to have failed, while no process failed.
    fn failed(failure: &Failure) -> Self {
        let lines =
            failure_lines(failure).into_iter().chain(hint_line(&failure.details.hint)).collect();
        let output_of = failure.rank.map_or(Role::Daemon, |rank| Role::Rank(rank.0));
        Self { code: OTHER, lines: on_a_screen(lines), output_of: Some(output_of) }
    }

    /// The job ends because it has lost too many daemons. An interruption keeps its own code.
    #[must_use]
    pub fn temporary(mut self) -> Self {
        if self.code == OTHER {
            self.code = TEMPORARY;
        }
        self
    }

    /// The report on all causes; the root cause decides. If the job could not start, all reasons
    /// are listed, since each must be fixed. `failure` is what the daemons reported; `others_ran`
    /// says whether there were other ranks to stop.
    pub fn new(causes: &[Cause], failure: Option<&Failure>, others_ran: bool) -> Self {
        let Some(first) = first(causes, failure) else {
            return failure.map_or_else(Self::well, Self::failed);
        };
        // Daemons that ranks have started for a further job report nothing to the launcher.
        if let (None, Cause::Ended { received: Some(failure), .. }) = (failure, first) {
            return Self::new(causes, Some(failure), others_ran);
        }
        let mut lines = match (first, failure) {
            (Cause::NotStarted { .. }, _) => causes
                .iter()
                .filter(|cause| matches!(cause, Cause::NotStarted { .. }))
                .flat_map(|cause| cause.lines(false))
                .collect(),
            (first, Some(failure)) if !first.explains(failure) => failure_lines(failure),
            // The daemon has reported why it stopped, and that goes first.
            (Cause::Ended { role: Role::Daemon, end: ProcessEnd::Code(_), .. }, Some(failure)) => {
                let mut lines = failure_lines(failure);
                lines.extend(first.lines(others_ran).into_iter().next());
                lines
            }
            (Cause::Ended { role: Role::Daemon, .. }, Some(failure))
                if first.goes_with(failure) =>
            {
                let mut lines = first.lines(others_ran);
                lines.extend(lost_node(failure));
                lines
            }
            _ => first.lines(others_ran),
        };
        // For a killed daemon, the hint of the others says how to find out its end, which is known.
        if let (Cause::Ended { role, end, .. }, Some(failure)) = (first, failure)
            && (!first.explains(failure) || first.goes_with(failure))
            && (*role != Role::Daemon || matches!(end, ProcessEnd::Code(_)))
        {
            // The report has just shown that output.
            let hint = Some(&failure.details.hint).filter(|hint| *hint != SEE_OUTPUT);
            lines.extend(hint.and_then(|hint| hint_line(hint)));
        }
        let blamed = failure.filter(|failure| !first.explains(failure)).and_then(|f| f.rank);
        let output_of = match first {
            Cause::Ended { role, .. } => Some(blamed.map_or(*role, |rank| Role::Rank(rank.0))),
            _ => None,
        };
        let code = match failure {
            Some(failure) if !first.explains(failure) && is_a_loss(failure) => OTHER,
            _ => first.exit_code(),
        };
        Self { code, lines: on_a_screen(lines), output_of }
    }

    /// Adds where to find the output of the processes: in `directory`, if there is one. With
    /// `verbose`, that of the daemons was shown, too.
    #[must_use]
    pub fn with_output(mut self, directory: Option<&Path>, verbose: bool) -> Self {
        let Some(role) = self.output_of else { return self };
        self.lines.push(match directory {
            Some(directory) => {
                format!("full output: {}, with a folder for each process", directory.display())
            }
            None if role == Role::Daemon && !verbose => {
                "full output: run again with --verbose, or with --output-dir DIR".to_owned()
            }
            None => "full output: above; --output-dir DIR also writes it to files".to_owned(),
        });
        self
    }
}

#[cfg(test)]
mod tests;
