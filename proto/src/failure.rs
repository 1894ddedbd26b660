//! One failure, reported with the same text everywhere (invariant TELL): by every rank's handle, in
//! the logs, and in the launcher's last lines.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{pb, types::Rank};

/// The cause of a failure. When several failures are reported at once, the one with the largest
/// [`FailureKind::rootness`] is the cause: others notice the death of a worker or a node as a lost
/// connection.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
#[expect(missing_docs, reason = "the comments of types.proto are the documentation")]
#[non_exhaustive]
pub enum FailureKind {
    Disagreement,
    Invalid,
    WorkerLost,
    NodeLost,
    ConnectionLost,
    CoordinatorLost,
    Protocol,
    RankLeft,
    Resource,
    Timeout,
    Cancelled,
    Internal,
}

impl FailureKind {
    /// Every kind.
    pub const ALL: &[Self] = <Self as strum::VariantArray>::VARIANTS;

    /// The name in reports and metrics.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The wire number: types.proto has the same order, after an unspecified kind.
    fn to_wire(self) -> i32 {
        self as i32 + 1
    }

    /// How close to the root cause this kind is. Among failures that are reported together, the one
    /// with the largest value is the cause.
    pub fn rootness(self) -> u8 {
        match self {
            Self::ConnectionLost | Self::Timeout => 0,
            Self::CoordinatorLost => 1,
            // A daemon that was asked to stop reports this; the cause is elsewhere.
            Self::NodeLost | Self::Cancelled => 2,
            _ => 3,
        }
    }
}

/// What happened, where, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Failure {
    /// The kind of its cause.
    pub kind: FailureKind,
    /// What happened, one line, without a full stop at the end.
    pub what: String,
    /// The rank at fault, if known.
    pub rank: Option<Rank>,
    /// Where it happened; may be empty.
    pub host: String,
    /// The tensor concerned; may be empty.
    pub tensor: String,
    /// More about it; in a box, because errors are returned often.
    pub details: Box<Details>,
}

/// More about a failure.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Details {
    /// What to do about it; may be empty.
    pub hint: String,
    /// A table or report about what happened.
    pub lines: Vec<String>,
    /// The line of the program that submitted the operation; may be empty.
    pub site: String,
    /// Whether a signal has ended the process of the rank. Other ranks do not cause that.
    #[serde(default)]
    pub killed: bool,
    /// Whether the rank has said that it is ending. How its process ends says more.
    #[serde(default)]
    pub gave_up: bool,
}

/// The hint of a failure about which only the output of its process says more.
pub const SEE_OUTPUT: &str = "see its output";

impl Failure {
    /// Whether the daemon of [`Self::host`] itself is at fault: it ran out of a resource.
    pub fn blames_daemon(&self) -> bool {
        self.kind == FailureKind::Resource && self.rank.is_none()
    }

    /// A failure without hint, rank, host and tensor. Further lines of `what` are a table or report
    /// about the first one.
    pub fn new(kind: FailureKind, what: impl Into<String>) -> Self {
        let mut what: String = what.into();
        let lines = match what.find('\n') {
            Some(end) => what.split_off(end).lines().skip(1).map(str::to_owned).collect(),
            None => Vec::new(),
        };
        let [host, tensor] = Default::default();
        let details = Box::new(Details { lines, ..Details::default() });
        Self { kind, what, rank: None, host, tensor, details }
    }

    /// Cuts each text, and the lines in all, to a number of bytes (BOUND).
    pub fn limit(&mut self, most: usize) {
        let Self { what, host, tensor, details, .. } = self;
        let Details { hint, lines, site, killed: _, gave_up: _ } = &mut **details;
        for text in [what, hint, host, tensor, site] {
            if text.len() > most {
                text.truncate(text.floor_char_boundary(most));
                text.push('…');
            }
        }
        let ends = lines.iter().scan(0, |bytes: &mut usize, line| {
            *bytes += line.len() + 1;
            Some(*bytes)
        });
        let fitting = ends.take_while(|end| *end <= most).count();
        if fitting < lines.len() {
            lines.truncate(fitting);
            lines.push("…".to_owned());
        }
    }

    /// The failure of an operation that needs a rank that never joined the job.
    pub fn never_came(rank: Rank) -> Self {
        let what = "its process ended with exit code 0 before it had joined the job, while other \
                    ranks waited for it";
        Self::new(FailureKind::RankLeft, what)
            .rank(rank)
            .hint("every rank has to join the job (init) and to make the same calls")
    }

    /// The failure of an operation that needs a rank that has left the job.
    pub fn left(rank: Rank) -> Self {
        let what = "it has left the job and can't take part any more";
        Self::new(FailureKind::RankLeft, what)
            .rank(rank)
            .hint("every rank must make the same calls, the same number of times, before it leaves")
    }

    /// What happened, with the table or report about it.
    pub fn text(&self) -> String {
        let lines = [&self.what].into_iter().chain(&self.details.lines);
        lines.map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    /// The failure in one line: without its other lines and, if there are any, without its hint.
    pub fn headline(&self) -> String {
        let mut first = self.clone();
        if !std::mem::take(&mut first.details.lines).is_empty() {
            first.details.hint.clear();
        }
        first.to_string()
    }

    /// Whether a rank that ends with this failure is not its cause: another rank is at fault, or
    /// the ranks disagree.
    pub fn is_beyond(&self, rank: Rank) -> bool {
        match self.rank {
            Some(at_fault) => at_fault != rank,
            None => self.kind == FailureKind::Disagreement,
        }
    }

    /// Whether an elastic job can go on without the part that failed: a process, a host or a
    /// connection is lost. An error of the program would occur again.
    pub fn is_recoverable(&self) -> bool {
        match self.kind {
            FailureKind::WorkerLost
            | FailureKind::NodeLost
            | FailureKind::ConnectionLost
            | FailureKind::CoordinatorLost
            | FailureKind::RankLeft => true,
            // Otherwise every rank may be there, and one of them does not make the call.
            FailureKind::Timeout => self.rank.is_some(),
            FailureKind::Disagreement
            | FailureKind::Invalid
            | FailureKind::Protocol
            | FailureKind::Resource
            | FailureKind::Cancelled
            | FailureKind::Internal => false,
        }
    }

    /// Adds what to do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.details.hint = hint.into();
        self
    }

    /// A signal has ended the process of the rank.
    #[must_use]
    pub fn killed(mut self) -> Self {
        self.details.killed = true;
        self
    }

    /// The rank has said that it is ending.
    #[must_use]
    pub fn gave_up(mut self) -> Self {
        self.details.gave_up = true;
        self
    }

    /// Adds the rank at fault.
    #[must_use]
    pub fn rank(mut self, rank: Rank) -> Self {
        self.rank = Some(rank);
        self
    }

    /// Adds the host where it happened.
    #[must_use]
    pub fn host(mut self, host: impl Into<String>) -> Self {
        self.host = host.into();
        self
    }

    /// Adds the tensor concerned.
    #[must_use]
    pub fn tensor(mut self, tensor: impl Into<String>) -> Self {
        self.tensor = tensor.into();
        self
    }
}

/// How a rank, a node or the job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// Cleanly; for a job, every rank has left.
    Finished,
    /// With this failure; for a job, every rank receives it.
    Failed(Failure),
}

impl fmt::Display for Failure {
    /// `rank 3 on host n1, tensor 'fc.weight': what happened (submitted at train.py:3 in step);
    /// hint`. The hint has its own line after other lines.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut place = Vec::new();
        match (self.rank, self.host.as_str()) {
            (Some(rank), "") => place.push(format!("rank {rank}")),
            (Some(rank), host) => place.push(format!("rank {rank} on host {host}")),
            (None, "") => {}
            (None, host) => place.push(format!("host {host}")),
        }
        if !self.tensor.is_empty() {
            place.push(format!("tensor '{}'", self.tensor));
        }
        if !place.is_empty() {
            write!(f, "{}: ", place.join(", "))?;
        }
        f.write_str(&self.what)?;
        if !self.details.site.is_empty() {
            write!(f, " (submitted at {})", self.details.site)?;
        }
        for line in &self.details.lines {
            write!(f, "\n{line}")?;
        }
        match (self.details.hint.as_str(), self.details.lines.is_empty()) {
            ("", _) => {}
            (hint, true) => write!(f, "; {hint}")?,
            (hint, false) => write!(f, "\nhint: {hint}")?,
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for pb::Failure {
    fn from(failure: Failure) -> Self {
        Self {
            kind: failure.kind.to_wire(),
            what: failure.what,
            hint: failure.details.hint,
            rank: failure.rank.map(|r| r.0),
            host: failure.host,
            tensor: failure.tensor,
            lines: failure.details.lines,
            site: failure.details.site,
            killed: failure.details.killed,
            gave_up: failure.details.gave_up,
        }
    }
}

impl From<pb::Failure> for Failure {
    /// A failure is mostly text for people, so an unknown kind becomes `Internal`.
    fn from(wire: pb::Failure) -> Self {
        let kind = FailureKind::ALL.iter().find(|kind| kind.to_wire() == wire.kind);
        Self {
            kind: *kind.unwrap_or(&FailureKind::Internal),
            what: wire.what,
            rank: wire.rank.map(Rank),
            host: wire.host,
            tensor: wire.tensor,
            details: Box::new(Details {
                hint: wire.hint,
                lines: wire.lines,
                site: wire.site,
                killed: wire.killed,
                gave_up: wire.gave_up,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_has_one_name() {
        for kind in FailureKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
            let wire = pb::FailureKind::try_from(kind.to_wire()).unwrap();
            let name = wire.as_str_name().strip_prefix("FAILURE_KIND_").unwrap();
            assert_eq!(name.to_lowercase(), kind.name());
        }
    }

    #[test]
    fn a_rank_that_only_noticed_is_not_blamed() {
        let of = |kind| Failure::new(kind, "what");
        let left = Failure::left(Rank(1));
        assert!(left.is_beyond(Rank(0)) && !left.is_beyond(Rank(1)));
        assert!(of(FailureKind::Disagreement).is_beyond(Rank(0)));
        assert!(!of(FailureKind::Resource).is_beyond(Rank(0)), "nobody else is at fault");
    }

    #[test]
    fn the_text_names_rank_host_tensor_and_hint() {
        let failure = Failure::new(FailureKind::WorkerLost, "the process was killed by SIGKILL")
            .rank(Rank(3))
            .host("n1")
            .tensor("fc.weight")
            .hint("look for the out-of-memory killer in dmesg");
        assert_eq!(
            failure.to_string(),
            "rank 3 on host n1, tensor 'fc.weight': the process was killed by SIGKILL; \
             look for the out-of-memory killer in dmesg"
        );
        assert_eq!(Failure::from(pb::Failure::from(failure.clone())), failure);
    }

    #[test]
    fn a_table_follows_the_first_line() {
        let mut failure = Failure::new(FailureKind::Disagreement, "ranks disagree\nrank 0: 1\nb")
            .hint("use one shape");
        assert_eq!((failure.what.as_str(), failure.details.lines.len()), ("ranks disagree", 2));
        assert_eq!(failure.to_string(), "ranks disagree\nrank 0: 1\nb\nhint: use one shape");
        assert_eq!(failure.headline(), "ranks disagree");
        assert_eq!(Failure::from(pb::Failure::from(failure.clone())), failure);
        failure.limit(14);
        assert_eq!(failure.to_string(), "ranks disagree\nrank 0: 1\nb\nhint: use one shape");
        failure.limit(10);
        assert_eq!(failure.to_string(), "ranks disa…\nrank 0: 1\n…\nhint: use one sh…");
        failure.details.lines.clear();
        failure.details.site = "a.py:1 in f".to_owned();
        let line = "ranks disa… (submitted at a.py:1 in f); use one sh…";
        assert_eq!([failure.to_string(), failure.headline()], [line; 2]);
    }

    #[test]
    fn only_losses_are_recoverable() {
        let late = Failure::new(FailureKind::Timeout, "it has not joined the job");
        assert!(!late.is_recoverable() && late.rank(Rank(1)).is_recoverable());
        let recoverable = |kind: &&FailureKind| Failure::new(**kind, "what").is_recoverable();
        let kinds: Vec<_> = FailureKind::ALL.iter().filter(recoverable).map(|k| k.name()).collect();
        let lost = ["worker_lost", "node_lost", "connection_lost", "coordinator_lost", "rank_left"];
        assert_eq!(kinds, lost);
    }

    #[test]
    fn a_dead_worker_outranks_broken_connections() {
        assert!(FailureKind::WorkerLost.rootness() > FailureKind::NodeLost.rootness());
        assert!(FailureKind::NodeLost.rootness() > FailureKind::ConnectionLost.rootness());
    }
}
