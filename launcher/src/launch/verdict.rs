//! What the job came to: which of several failures is the first, and the last lines that tell
//! which process, where and why (TELL). Pure.

use std::time::Duration;

use crate::protocol::{Ended, Role, signal_name};

/// A service that ends because a rank died can look as if it ended before it: both ends are seen
/// by the same agent, in any order. Ends nearer than this are told apart by who reacts to whom.
const TOGETHER: Duration = Duration::from_millis(20);

/// How much earlier a daemon's end counts that has a cause of its own: it was killed, or the system
/// refused it something. Its ranks end because of it, and on a busy machine their ends may be seen
/// well before its own.
const OWN_CAUSE: Duration = Duration::from_secs(1);

/// The exit code of a daemon whose job has failed. With any other it ended for its own cause.
const JOB_FAILED: i32 = 1;

/// One thing that went wrong. Times are since the launch began.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Something is not there that the job needs to start.
    NotStarted {
        /// What.
        what: String,
        /// What to do; may be empty.
        hint: String,
    },
    /// A process ended badly.
    Ended {
        /// Which.
        role: Role,
        /// On which host.
        host: String,
        /// Its id.
        pid: u32,
        /// How.
        ended: Ended,
        /// When.
        at: Duration,
        /// How long it ran.
        ran: Duration,
        /// Its last lines on standard error.
        tail: Vec<String>,
    },
    /// The connection to a host broke.
    Lost {
        /// The host.
        host: String,
        /// What is known.
        what: String,
        /// When.
        at: Duration,
    },
    /// The launcher was asked to end, by this signal.
    Interrupted(i32),
    /// Output can't be written.
    Output(String),
}

impl Failure {
    /// Smaller is nearer to the root: being told to end, then time. To be killed is nobody's
    /// reaction, so it counts as [`TOGETHER`] earlier: its socket's end, to which others react, is
    /// seen before its own. Services react to ranks, so a service's own end counts as later.
    fn order(&self, blamed: Option<u32>) -> (u8, Duration) {
        match self {
            Self::Interrupted(_) => (0, Duration::ZERO),
            Self::Output(_) => (1, Duration::ZERO),
            Self::Ended { role: Role::Rank(rank), .. } if blamed == Some(*rank) => {
                (2, Duration::ZERO)
            }
            Self::Ended { role: Role::Daemon, ended, at, .. }
                if *ended != Ended::Code(JOB_FAILED) =>
            {
                // After a rank that is blamed, whatever the time.
                (2, at.saturating_sub(OWN_CAUSE).max(Duration::from_nanos(1)))
            }
            Self::Ended { ended: Ended::Signal(_), at, .. } => (2, at.saturating_sub(TOGETHER)),
            Self::Ended { role: Role::Rank(_), at, .. } => (2, *at),
            Self::Ended { at, .. } | Self::Lost { at, .. } => (2, *at + TOGETHER),
            Self::NotStarted { .. } => (3, Duration::ZERO),
        }
    }

    fn exit_code(&self) -> u8 {
        match self {
            Self::Ended { role: Role::Rank(_), ended, .. } => ended.exit_code().max(1),
            Self::Interrupted(signal) => Ended::Signal(*signal).exit_code(),
            _ => 1,
        }
    }

    /// What happened, in one line.
    fn headline(&self) -> String {
        match self {
            Self::NotStarted { what, .. } => what.clone(),
            Self::Ended { role, host, pid, ended, ran, .. } => {
                let seconds = ran.as_secs_f64();
                format!("{role} on host {host} (pid {pid}) {ended}, {seconds:.1} s after start")
            }
            Self::Lost { host, what, .. } => {
                format!("the connection to host {host} was lost: {what}")
            }
            Self::Interrupted(signal) => {
                format!("interrupted by {}", signal_name(*signal).unwrap_or("a signal"))
            }
            Self::Output(why) => format!("output can't be written: {why}"),
        }
    }

    fn tell(&self, others_ran: bool) -> Vec<String> {
        let headline = self.headline();
        let others = if others_ran { "; the other ranks were stopped" } else { "" };
        match self {
            Self::NotStarted { hint, .. } => {
                let hint = (!hint.is_empty()).then(|| format!("hint: {hint}"));
                [format!("error: {headline}")].into_iter().chain(hint).collect()
            }
            Self::Ended { tail, .. } => {
                let mut lines = vec![format!("gradwire: {headline}{others}")];
                if !tail.is_empty() {
                    lines.push("gradwire: its last lines on standard error:".to_owned());
                    lines.extend(tail.iter().map(|line| format!("  {line}")));
                }
                lines
            }
            Self::Lost { .. } => vec![format!("gradwire: {headline}{others}")],
            Self::Interrupted(_) | Self::Output(_) => {
                vec![format!("gradwire: {headline}; everything was stopped")]
            }
        }
    }
}

/// The first of several failures, in one line; `None` if there are none. Of a daemon it has the
/// daemon's own last words, which say what it has seen of others.
pub fn cause(failures: &[Failure], blamed: Option<u32>) -> Option<String> {
    let first = failures.iter().min_by_key(|failure| failure.order(blamed))?;
    let words = match first {
        Failure::Ended { role: Role::Daemon, tail, .. } => {
            tail.iter().rev().find(|line| !line.starts_with("hint: "))
        }
        _ => None,
    };
    let words = words.map(|line| format!(": {line}")).unwrap_or_default();
    let text = format!("{}{words}", first.headline());
    Some(text.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// What the job came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    /// The launcher's exit code.
    pub code: u8,
    /// The last lines, for standard error.
    pub lines: Vec<String>,
}

impl Verdict {
    /// Everything ended well.
    pub fn well() -> Self {
        Self { code: 0, lines: Vec::new() }
    }

    /// The verdict over everything that went wrong; the first failure decides. A rank that the
    /// coordinator has `blamed` failed before those that ended because of it, whatever the hosts'
    /// clocks say. What kept the job from starting is told in full: each is to be repaired.
    /// `others_ran` tells whether there were ranks to stop.
    pub fn over(failures: &[Failure], blamed: Option<u32>, others_ran: bool) -> Self {
        let Some(first) = failures.iter().min_by_key(|failure| failure.order(blamed)) else {
            return Self::well();
        };
        let lines = if matches!(first, Failure::NotStarted { .. }) {
            failures
                .iter()
                .filter(|failure| matches!(failure, Failure::NotStarted { .. }))
                .flat_map(|failure| failure.tell(false))
                .collect()
        } else {
            first.tell(others_ran)
        };
        Self { code: first.exit_code(), lines }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(role: Role, ended: Ended, at_ms: u64) -> Failure {
        Failure::Ended {
            role,
            host: "127.0.0.2".into(),
            pid: 123,
            ended,
            at: Duration::from_millis(at_ms),
            ran: Duration::from_millis(400),
            tail: vec!["out of memory".into()],
        }
    }

    #[test]
    fn the_first_rank_by_time_decides_whatever_came_in_first() {
        let failures = [
            ended(Role::Rank(0), Ended::Code(1), 1003),
            ended(Role::Rank(3), Ended::Signal(9), 1000),
            ended(Role::Daemon, Ended::Code(1), 999),
        ];
        let verdict = Verdict::over(&failures, None, true);
        assert_eq!(verdict.code, 137);
        assert_eq!(
            verdict.lines,
            [
                "gradwire: rank 3 on host 127.0.0.2 (pid 123) was killed by SIGKILL, 0.4 s after \
                 start; the other ranks were stopped",
                "gradwire: its last lines on standard error:",
                "  out of memory"
            ]
        );
    }

    #[test]
    fn a_cause_is_one_line_with_a_daemons_own_words() {
        assert_eq!(cause(&[], None), None);
        let lost = ended(Role::Daemon, Ended::Code(1), 999);
        let text = cause(&[lost], None).unwrap();
        let right = "the daemon on host 127.0.0.2 (pid 123) ended with exit code 1, 0.4 s after \
                     start: out of memory";
        assert_eq!(text, right);
        let what = "two\nlines".to_owned();
        let refused = Failure::NotStarted { what, hint: String::new() };
        assert_eq!(cause(&[refused], None).as_deref(), Some("two lines"));
    }

    #[test]
    fn the_rank_that_the_coordinator_blames_decides_over_clocks_of_different_hosts() {
        let failures =
            [ended(Role::Rank(3), Ended::Code(1), 990), ended(Role::Rank(1), Ended::Code(4), 1000)];
        assert_eq!(Verdict::over(&failures, Some(1), true).code, 4);
        assert_eq!(Verdict::over(&failures, Some(2), true).code, 1, "it has not ended by itself");
    }

    #[test]
    fn a_daemon_that_was_killed_is_the_cause_of_what_its_ranks_then_do() {
        let failures = [
            // Its ranks were faster to react than the system to say that it has ended.
            ended(Role::Rank(0), Ended::Code(1), 1000),
            ended(Role::Daemon, Ended::Signal(9), 1603),
        ];
        let verdict = Verdict::over(&failures, None, true);
        assert!(
            verdict.lines[0]
                .starts_with("gradwire: the daemon on host 127.0.0.2 (pid 123) was killed")
        );
        assert_eq!(verdict.code, 1);
    }

    #[test]
    fn a_daemon_that_ends_for_its_own_cause_goes_before_its_ranks() {
        let over = |code, blamed| {
            let failures = [
                ended(Role::Rank(0), Ended::Code(3), 1000),
                ended(Role::Daemon, Ended::Code(code), 1400),
            ];
            Verdict::over(&failures, blamed, true).lines[0].clone()
        };
        assert!(over(2, None).starts_with("gradwire: the daemon on host 127.0.0.2"));
        assert!(over(101, None).starts_with("gradwire: the daemon on host 127.0.0.2"));
        assert!(over(1, None).starts_with("gradwire: rank 0 on host"), "the job has failed");
        assert!(over(2, Some(0)).starts_with("gradwire: rank 0 on host"), "it knows better");
    }

    #[test]
    fn everything_that_keeps_a_job_from_starting_is_listed() {
        let missing = |what: &str| Failure::NotStarted { what: what.into(), hint: "do".into() };
        let verdict = Verdict::over(&[missing("a"), missing("b")], None, true);
        assert_eq!(verdict.lines, ["error: a", "hint: do", "error: b", "hint: do"]);
        assert_eq!(Verdict::over(&[], None, true), Verdict::well());
        let verdict = Verdict::over(&[missing("a"), Failure::Interrupted(2)], None, false);
        assert_eq!(verdict.code, 130);
    }
}
