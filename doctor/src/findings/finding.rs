//! The result of a check.

use serde::Serialize;
use strum::{Display, EnumIter};

/// A check. `docs/doctor.md` has a section for each.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Display, EnumIter,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
#[expect(missing_docs, reason = "the names are those in the output")]
pub enum Check {
    Reachability,
    Versions,
    Ports,
    Address,
    Latency,
    Bandwidth,
    PathMtu,
    Clock,
    OpenFiles,
    Memlock,
    Memory,
    Memfd,
    HugePages,
    SocketBuffers,
    CongestionControl,
    Cores,
    CpuLevel,
    Gpus,
    Torch,
}

/// The status of a finding; the last is the worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Display)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum Status {
    /// As it should be.
    Pass,
    /// A job runs, but something is slow, or differs from what was asked for.
    Warn,
    /// A job fails, or would as soon as it needs this.
    Fail,
}

/// The result of one check for one host, or for two.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// What was checked.
    pub check: Check,
    /// The host; `None`: all hosts together.
    pub host: Option<String>,
    /// The other host, for a path from `host` to it.
    pub peer: Option<String>,
    /// Its status.
    pub status: Status,
    /// What was found.
    pub found: String,
    /// The same as a number, if it is one.
    pub value: Option<f64>,
    /// The unit of the number.
    pub unit: Option<&'static str>,
    /// What to do; empty with [`Status::Pass`].
    pub remedy: String,
}

impl Finding {
    /// A finding that is as it should be.
    pub fn pass(check: Check, found: impl Into<String>) -> Self {
        Self {
            check,
            host: None,
            peer: None,
            status: Status::Pass,
            found: found.into(),
            value: None,
            unit: None,
            remedy: String::new(),
        }
    }

    /// On this host.
    #[must_use]
    pub fn on(self, host: &str) -> Self {
        Self { host: Some(host.to_owned()), ..self }
    }

    /// From this host to that one.
    #[must_use]
    pub fn between(self, host: &str, peer: &str) -> Self {
        Self { peer: Some(peer.to_owned()), ..self.on(host) }
    }

    /// Adds the number.
    #[must_use]
    pub fn value(self, value: f64, unit: &'static str) -> Self {
        Self { value: Some(value), unit: Some(unit), ..self }
    }

    /// Makes it a problem with this remedy. The worst status counts.
    #[must_use]
    pub fn bad(self, status: Status, remedy: impl Into<String>) -> Self {
        if status <= self.status {
            return self;
        }
        Self { status, remedy: remedy.into(), ..self }
    }

    /// As [`Finding::bad`], on a condition.
    #[must_use]
    pub fn bad_if(self, is_so: bool, status: Status, remedy: impl Into<String>) -> Self {
        if is_so { self.bad(status, remedy) } else { self }
    }
}
