//! Signals of a launcher: those that ask it to end, those that it passes on to the ranks, and those
//! that must not depend on its starter.
//!
//! A signal that was ignored when the process began stays ignored: `nohup` needs that, and a shell
//! ignores signals for background jobs.

use std::{future::poll_fn, io, task::Poll};

use procfs::process::Process;
use rustix::process::{Signal, getpid, kill_process};
use tokio::signal::unix::{self, SignalKind, signal};

/// The signals that a launcher passes on to its ranks, as srun and mpirun do: a batch system warns
/// a job before its time is over, and a terminal suspends it. In the order in which those that came
/// together are passed on: a job that is suspended and continued at once must go on.
const PASSED: [Signal; 5] = [Signal::USR1, Signal::USR2, Signal::TSTP, Signal::CONT, Signal::WINCH];

/// The signal with this number, if launchers pass it on (TRUST).
pub fn passed(number: i32) -> Option<Signal> {
    PASSED.into_iter().find(|signal| signal.as_raw() == number)
}

/// Suspends this process, as the default action of SIGTSTP does. Returns when it continues.
///
/// # Errors
/// The error of the system.
pub fn suspend() -> io::Result<()> {
    Ok(kill_process(getpid(), Signal::STOP)?)
}

/// Makes this process independent of what its starter does with two signals. A starter that ignores
/// SIGCHLD passes that on, and then the system does not say how children end. A limit of file sizes
/// sends SIGXFSZ, which ends a process silently; with a handler, the write fails instead.
///
/// # Errors
/// The error of the system.
pub fn heed() -> io::Result<()> {
    for raw in [Signal::CHILD, Signal::XFSZ].map(Signal::as_raw) {
        // The handler stays without a receiver. Programs that are started do not inherit it.
        drop(signal(SignalKind::from_raw(raw))?);
    }
    Ok(())
}

/// Receives the signals of Ctrl-C, Ctrl-\, `kill` and a closed terminal.
#[derive(Debug)]
pub struct Endings(Heard);

impl Endings {
    /// Listens from now on.
    ///
    /// # Errors
    /// The error of the system.
    pub fn listen() -> io::Result<Self> {
        Heard::listen([Signal::INT, Signal::QUIT, Signal::TERM, Signal::HUP]).map(Self)
    }

    /// The next one. Cancel-safe.
    pub async fn next(&mut self) -> i32 {
        self.0.next().await
    }
}

/// Receives the signals that are passed on to the ranks.
#[derive(Debug)]
pub struct Passed(Heard);

impl Passed {
    /// Listens from now on. From then on, none of them ends or suspends this process.
    ///
    /// # Errors
    /// The error of the system.
    pub fn listen() -> io::Result<Self> {
        Heard::listen(PASSED).map(Self)
    }

    /// The next one. Cancel-safe.
    pub async fn next(&mut self) -> i32 {
        self.0.next().await
    }
}

#[derive(Debug)]
struct Heard(Vec<(i32, unix::Signal)>);

impl Heard {
    fn listen(all: impl IntoIterator<Item = Signal>) -> io::Result<Self> {
        let ignored = ignored();
        let heeded = all.into_iter().map(Signal::as_raw).filter(|raw| !ignored.contains(raw));
        let listen = |raw: i32| Ok((raw, signal(SignalKind::from_raw(raw))?));
        Ok(Self(heeded.map(listen).collect::<io::Result<_>>()?))
    }

    async fn next(&mut self) -> i32 {
        poll_fn(|context| {
            for (number, signal) in &mut self.0 {
                if let Poll::Ready(Some(())) = signal.poll_recv(context) {
                    return Poll::Ready(*number);
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// The signals that this process ignores; none if that is unknown.
fn ignored() -> Vec<i32> {
    let status = Process::myself().and_then(|process| process.status());
    let mask = status.map_or(0, |status| status.sigign);
    (1..=64).filter(|number| mask >> (number - 1) & 1 == 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_found() {
        // Every Rust program ignores it from its start.
        assert!(ignored().contains(&Signal::PIPE.as_raw()));
        assert!(!ignored().contains(&Signal::TERM.as_raw()));
    }

    #[test]
    fn only_some_signals_are_passed_on() {
        assert_eq!(passed(Signal::USR1.as_raw()), Some(Signal::USR1));
        for other in [0, -1, 65, Signal::KILL.as_raw(), Signal::TERM.as_raw()] {
            assert_eq!(passed(other), None, "{other}");
        }
    }
}
