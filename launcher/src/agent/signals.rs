//! Signals for the ranks of a host. Each reaches the process that has joined the job; signals of a
//! terminal reach the whole process group of the rank, as with srun and mpirun
//! ([`processes::ask`]).
//!
//! After SIGTSTP, the daemon is suspended too, once all ranks here are: a daemon that runs would
//! take suspended ranks for dead. Ranks that handle the signal and go on still need it. A host
//! without ranks, such as a server, can't know what ranks elsewhere do: its daemon is suspended
//! after them.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gradwire_services::launch::Role;
use procfs::process::Process;
use rustix::process::{Pid, Signal, kill_process};

use crate::processes;

/// The interval at which an agent looks whether its ranks are suspended.
pub const LOOK: Duration = Duration::from_millis(20);

/// How long after the signal the daemon of a host without ranks is suspended: later than the ranks
/// on other hosts, and long before their daemons would be taken for dead.
const AFTER_RANKS: Duration = Duration::from_millis(500);

/// What is suspended on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Suspended {
    /// Nothing.
    #[default]
    Nothing,
    /// The ranks have been asked to suspend themselves, at this time. The launcher does so, too.
    Ranks(Instant),
    /// All ranks and the daemon.
    All,
}

impl Suspended {
    /// Passes a signal on to the processes of this host. Returns what is suspended then.
    #[must_use]
    pub fn pass_on(self, signal: Signal, alive: &BTreeMap<Role, u32>) -> Self {
        if signal == Signal::CONT {
            // First, so that no rank misses it.
            signal_daemon(signal, alive);
        }
        for group in ranks(alive) {
            processes::ask(group, signal);
        }
        match signal {
            Signal::CONT => Self::Nothing,
            Signal::TSTP => Self::Ranks(Instant::now()),
            _ => self,
        }
    }

    /// Suspends the daemon if all ranks are suspended, or if there are none and it is time. Returns
    /// what is suspended then.
    #[must_use]
    pub fn look(self, alive: &BTreeMap<Role, u32>) -> Self {
        let Self::Ranks(since) = self else { return self };
        let mut ranks = ranks(alive).peekable();
        let is_early = ranks.peek().is_none() && since.elapsed() < AFTER_RANKS;
        if is_early || !ranks.all(is_suspended) {
            return self;
        }
        signal_daemon(Signal::STOP, alive);
        Self::All
    }
}

fn ranks(alive: &BTreeMap<Role, u32>) -> impl Iterator<Item = Pid> {
    let ranks = alive.iter().filter(|(role, _)| matches!(role, Role::Rank(_)));
    ranks.filter_map(|(_, pid)| Pid::from_raw(i32::try_from(*pid).ok()?))
}

fn signal_daemon(signal: Signal, alive: &BTreeMap<Role, u32>) {
    let pid = alive.get(&Role::Daemon).and_then(|pid| i32::try_from(*pid).ok());
    if let Some(daemon) = pid.and_then(Pid::from_raw) {
        let _ = kill_process(daemon, signal);
    }
}

fn is_suspended(rank: Pid) -> bool {
    let stat = Process::new(rank.as_raw_nonzero().get()).and_then(|process| process.stat());
    stat.is_ok_and(|stat| stat.state == 'T')
}
