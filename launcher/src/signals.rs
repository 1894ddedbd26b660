//! Signals that ask this process to end.
//!
//! A signal that was ignored when the process began stays ignored: `nohup` needs that, and a shell
//! ignores signals for background jobs.

use std::{future::poll_fn, io, task::Poll};

use procfs::process::Process;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives the signals of Ctrl-C, `kill` and a closed terminal.
#[derive(Debug)]
pub struct Endings(Vec<(i32, Signal)>);

impl Endings {
    /// Listens from now on.
    pub fn listen() -> io::Result<Self> {
        let ignored = ignored();
        let all = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let heeded = all.into_iter().filter(|kind| !ignored.contains(&kind.as_raw_value()));
        let listen = |kind: SignalKind| Ok((kind.as_raw_value(), signal(kind)?));
        Ok(Self(heeded.map(listen).collect::<io::Result<_>>()?))
    }

    /// The next one. Cancel-safe.
    pub async fn next(&mut self) -> i32 {
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
        assert!(ignored().contains(&rustix::process::Signal::PIPE.as_raw()));
        assert!(!ignored().contains(&rustix::process::Signal::TERM.as_raw()));
    }
}
