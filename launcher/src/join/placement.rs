//! The place of a process among the tasks that another launcher has started, and the job that
//! follows from it. All tasks draw the same conclusions, from their variables alone. Pure.

use std::collections::HashMap;

use gradwire_proto::JobId;
use sha2::{Digest, Sha256};

/// A process among the tasks of a launcher.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The program that has started the tasks.
    pub starter: &'static str,
    /// What tells this job from others, if the launcher says it. All tasks have the same.
    pub key: Option<String>,
    /// The number among all tasks, and how many there are.
    pub rank: u32,
    /// See [`Self::rank`].
    pub size: u32,
    /// The number among the tasks of this host, and how many there are.
    pub local: u32,
    /// See [`Self::local`].
    pub slots: u32,
    /// The number of this host, and how many there are.
    pub node: u32,
    /// See [`Self::node`].
    pub nodes: u32,
    /// How many of the hosts, the last ones, have no ranks and reduce for the others.
    pub servers: u32,
    /// The hosts, if the launcher names them.
    pub hosts: Vec<String>,
    /// The host of rank 0 and a free port there, if the launcher names both.
    pub master: Option<(String, u16)>,
    /// Whether the process is to start the ranks of its host, of which `rank` is the first.
    pub starts_ranks: bool,
}

/// Why the variables don't say which rank this process is: an incomplete set, or two that disagree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlacementError(pub String);

/// The variables of a process; an empty one is not set.
pub(super) struct Variables<'a>(pub(super) &'a HashMap<String, String>);

impl<'a> Variables<'a> {
    pub(super) fn get(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).map(|text| text.trim()).filter(|text| !text.is_empty())
    }

    /// The first of these that is set.
    pub(super) fn first(&self, names: &[&'static str]) -> Option<(&'static str, &'a str)> {
        names.iter().find_map(|name| Some((*name, self.get(name)?)))
    }

    pub(super) fn number(
        &self,
        names: &[&'static str],
        starter: &str,
    ) -> Result<u32, PlacementError> {
        let Some((name, text)) = self.first(names) else {
            return Err(PlacementError(format!("{starter} has not set {}", names[0])));
        };
        text.parse().map_err(|_| PlacementError(format!("{name}={text}: it must be a number")))
    }
}

/// The first port for jobs that don't name one, and the number of such ports. They are below the
/// ports that Linux gives to connections.
const PORTS: (u16, u16) = (20_000, 10_000);

impl Placement {
    /// The place of the rank with number `local` on the same host.
    #[must_use]
    pub fn beside(&self, local: u32) -> Self {
        Self { rank: self.rank - self.local + local, local, ..self.clone() }
    }

    /// The id of the `session`th job that these tasks form, and the port at which its coordinator
    /// listens by default. `meeting` replaces a key that the launcher does not give.
    pub fn job(&self, meeting: &str, session: u32) -> (JobId, u16) {
        let key = self.key.as_deref().unwrap_or(meeting);
        let digest = Sha256::digest(format!("{} {key} {session}", self.starter));
        let hex: String = digest[..8].iter().map(|byte| format!("{byte:02x}")).collect();
        let id = JobId::new(&format!("{}-{hex}", self.starter)).expect("letters and digits");
        let offset = u16::from_le_bytes([digest[8], digest[9]]) % PORTS.1;
        (id, PORTS.0 + offset)
    }

    /// The numbers on which all tasks of a host agree, by the names of the variables of a rank.
    pub(super) fn counts(&self) -> [(&'static str, u32); 2] {
        [("GRADWIRE_SIZE", self.size), ("GRADWIRE_LOCAL_SIZE", self.slots)]
    }

    /// Compares its counts with those of the first task of the host, which are among these lines.
    pub(super) fn agree(&self, lines: &str) -> Result<(), String> {
        for ((name, own), what) in self.counts().into_iter().zip(["the job", "this host"]) {
            let first = lines.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            if let Some(first) = first.filter(|first| *first != own.to_string()) {
                return Err(format!(
                    "{what} has {own} ranks by the variables of rank {}, and {first} by those of \
                     rank {}",
                    self.rank,
                    self.rank - self.local
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn placement() -> Placement {
        Placement {
            starter: "mpiexec",
            key: None,
            rank: 0,
            size: 1,
            local: 0,
            slots: 1,
            node: 0,
            nodes: 1,
            servers: 0,
            hosts: Vec::new(),
            master: None,
            starts_ranks: false,
        }
    }

    #[test]
    fn tasks_that_disagree_are_refused() {
        let second = Placement { rank: 1, size: 4, local: 1, slots: 2, ..placement() };
        assert_eq!(second.agree("A=1\nGRADWIRE_SIZE=4\nGRADWIRE_LOCAL_SIZE=2\n"), Ok(()));
        let error = second.agree("GRADWIRE_SIZE=6\nGRADWIRE_LOCAL_SIZE=2\n").unwrap_err();
        let expected = "the job has 4 ranks by the variables of rank 1, and 6 by those of rank 0";
        assert_eq!(error, expected);
        let error = second.agree("GRADWIRE_SIZE=4\nGRADWIRE_LOCAL_SIZE=4\n").unwrap_err();
        assert!(error.starts_with("this host has 2 ranks by"), "{error}");
    }

    #[test]
    fn each_session_is_a_job_of_its_own() {
        let placement = placement();
        let (first, port) = placement.job("a", 0);
        assert_eq!(placement.job("a", 0), (first.clone(), port));
        assert!((PORTS.0..PORTS.0 + PORTS.1).contains(&port), "{port}");
        assert!(first.as_str().starts_with("mpiexec-"), "{first}");
        assert_ne!(placement.job("a", 1).0, first);
        assert_ne!(placement.job("b", 0).0, first);
    }
}
