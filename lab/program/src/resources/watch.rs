//! The probes of one rank. Each rank probes its own process. The first rank of a node also probes
//! the daemon and the coordinator there.

use gradwire_launcher::error::CommandError;
use gradwire_worker::Session;

use super::{calls::Counter, figures::Seen};

use crate::process::{Beside, Usage};

/// The processes that a rank measures.
#[derive(Debug)]
pub struct Watch {
    probes: Vec<Probe>,
}

#[derive(Debug)]
struct Probe {
    pid: u32,
    counter: Option<Counter>,
    before: Usage,
    seen: Seen,
}

impl Watch {
    /// The processes that this rank measures.
    ///
    /// # Errors
    /// [`CommandError`] without a daemon on this rank's node.
    pub fn of(session: &Session) -> Result<Self, CommandError> {
        let rank = session.rank();
        let nodes = session.nodes();
        let own = nodes.iter().find(|n| (n.first_rank..n.first_rank + n.slots).contains(&rank));
        let host = own.map_or_else(String::new, |node| node.host.clone());
        let probe = |name: String, pid| Probe {
            pid,
            counter: None,
            before: Usage::default(),
            seen: Seen { host: host.clone(), process: name, ..Seen::default() },
        };
        let mut probes = Vec::new();
        if own.is_some_and(|node| node.first_rank == rank) {
            let beside = Beside::look()?;
            probes.push(probe("daemon".to_owned(), beside.daemon));
            probes.extend(beside.coordinator.map(|pid| probe("coordinator".to_owned(), pid)));
        }
        probes.push(probe(format!("rank {rank}"), std::process::id()));
        Ok(Self { probes })
    }

    /// Marks the beginning of the idle time.
    ///
    /// # Errors
    /// [`CommandError`] if a process has ended.
    pub fn idle_begins(&mut self) -> Result<(), CommandError> {
        for probe in &mut self.probes {
            probe.before = Usage::of(probe.pid)?;
        }
        Ok(())
    }

    /// Marks the end of the idle time.
    ///
    /// # Errors
    /// As for [`Self::idle_begins`].
    pub fn idle_ends(&mut self) -> Result<(), CommandError> {
        for probe in &mut self.probes {
            let now = Usage::of(probe.pid)?;
            probe.seen.idle_cpu = (now.cpu - probe.before.cpu).max(0.0);
            probe.seen.idle_waits = now.waits.saturating_sub(probe.before.waits);
        }
        Ok(())
    }

    /// Samples the processes after `steps` steps.
    ///
    /// # Errors
    /// As for [`Self::idle_begins`].
    pub fn sample(&mut self, steps: u32) -> Result<(), CommandError> {
        for probe in &mut self.probes {
            probe.seen.samples.insert(steps, Usage::of(probe.pid)?.into());
        }
        Ok(())
    }

    /// Begins counting system calls, if possible.
    pub fn calls_begin(&mut self) {
        for probe in &mut self.probes {
            match Counter::start(probe.pid) {
                Ok(counter) => probe.counter = Some(counter),
                Err(why) => probe.seen.uncounted = Some(why),
            }
        }
    }

    /// Ends counting system calls.
    pub fn calls_end(&mut self) {
        for probe in &mut self.probes {
            let Some(counter) = probe.counter.take() else { continue };
            match counter.stop() {
                Ok(calls) => probe.seen.calls = Some(calls),
                Err(why) => probe.seen.uncounted = Some(why),
            }
        }
    }

    /// The measurements of each process.
    pub fn seen(self) -> Vec<Seen> {
        self.probes.into_iter().map(|probe| probe.seen).collect()
    }
}
