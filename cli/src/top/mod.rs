//! `gradwire top`: watches a running job in a terminal. If standard output is not a terminal, it
//! writes a plain line for each snapshot instead.
//!
//! - `look`: a snapshot, and its colors (pure)
//! - `screen`: what the user has chosen with keys (pure)
//! - `panes`: the tables (pure)
//! - `draw`: the screen (pure)
//! - this file: the terminal, and the end

mod draw;
mod look;
mod panes;
mod screen;

use std::{env, io, io::IsTerminal, thread};

use gradwire_launcher::error::CommandError;
use gradwire_proto::pb::StatusResponse;
use gradwire_viewer::view::{self, Lags, Shares};
use ratatui::crossterm::event::{self, Event};
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use self::{
    draw::draw,
    look::Look,
    screen::{Asked, Screen},
};
use crate::{
    cluster::printable,
    status::{Watch, write},
};

/// How many events of the terminal may wait (BOUND).
const EVENTS: usize = 16;

/// Watches the job of the coordinator at `address` until the user quits.
///
/// # Errors
/// [`CommandError`] if the coordinator can't be reached, if the job ends, or if the terminal fails.
pub async fn run(address: &str) -> Result<(), CommandError> {
    let watch = Watch::start(address).await?;
    if io::stdout().is_terminal() { screen(watch).await } else { lines(watch).await }
}

/// Prints a plain line for each snapshot, and one for each new event.
async fn lines(mut watch: Watch) -> Result<(), CommandError> {
    let (mut lags, mut seen) = (Lags::default(), 0);
    loop {
        let status = watch.next().await?;
        let shares = lags.add(&status);
        let mut text = format!("{}\n", summary(&status, &shares));
        for event in status.events.iter().filter(|event| event.at_ms > seen) {
            let at = event.at_ms as f64 / 1e3;
            text.push_str(&format!("{at:.1} s: {}\n", printable(&event.text)));
        }
        seen = status.events.last().map_or(seen, |event| event.at_ms);
        if !write(&text)? {
            return Ok(());
        }
    }
}

/// A snapshot in one line.
fn summary(status: &StatusResponse, shares: &Shares) -> String {
    let steps = view::slowest(view::ranks(status))
        .map_or_else(|| "no steps yet".to_owned(), |rate| format!("{rate:.2} steps/s"));
    let straggler = view::straggler(shares).map_or_else(String::new, |(rank, share)| {
        format!(", straggler: rank {rank} ({} of the time)", view::percent(share))
    });
    let ill = status.nodes.iter().filter(|node| view::health(status, node) != "ok");
    let ill: String =
        ill.map(|node| format!(", host {}: {}", node.host, view::health(status, node))).collect();
    printable(&format!(
        "{:.1} s: job {} {}, {steps}, {} operations done, {} in flight, {} waiting{straggler}{ill}",
        status.uptime_ms as f64 / 1e3,
        status.job,
        status.phase,
        status.operations_done,
        status.operations_started.saturating_sub(status.operations_done),
        view::count(status.pending_count, "tensor"),
    ))
}

/// Restores the terminal, however the screen ends. After a panic, ratatui's hook restores it, too.
struct Restore;

impl Drop for Restore {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

async fn screen(mut watch: Watch) -> Result<(), CommandError> {
    let failed = |error: io::Error| CommandError::failed(format!("the terminal: {error}"));
    let mut asked = signal(SignalKind::terminate()).map_err(failed)?;
    let mut gone = signal(SignalKind::hangup()).map_err(failed)?;
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let _restore = Restore;
    let mut keys = keys();
    // https://no-color.org: any value except an empty one.
    let colors = env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut lags = Lags::default();
    let mut seen: Option<(StatusResponse, Shares)> = None;
    let mut chosen = Screen::default();
    loop {
        terminal
            .draw(|frame| match &seen {
                Some((status, shares)) => {
                    draw(frame, &Look { status, shares, colors }, &mut chosen)
                }
                None => draw::waiting(frame),
            })
            .map_err(failed)?;
        tokio::select! {
            status = watch.next() => {
                let status = status?;
                let shares = lags.add(&status);
                chosen.remember(&status);
                seen = Some((status, shares));
            }
            event = keys.recv() => match event {
                Some(Ok(Event::Key(key))) if chosen.key(&key) == Asked::Quit => return Ok(()),
                // The screen is drawn again, with the new choice or the new size.
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(failed(error)),
                None => return Ok(()),
            },
            _ = asked.recv() => return Ok(()),
            _ = gone.recv() => return Ok(()),
        }
    }
}

/// The user's input. Reading blocks, so it has a thread, which ends with the process.
fn keys() -> mpsc::Receiver<io::Result<Event>> {
    let (sender, keys) = mpsc::channel(EVENTS);
    thread::spawn(move || {
        loop {
            let event = event::read();
            let failed = event.is_err();
            if sender.blocking_send(event).is_err() || failed {
                return;
            }
        }
    });
    keys
}

#[cfg(test)]
mod tests {
    use gradwire_tests::sample;

    use super::*;

    #[test]
    fn a_plain_line_summarises_a_snapshot() {
        let mut status = sample::status(5000);
        status.nodes[1].silent_ms = 4000;
        let shares = Lags::default().add(&status);
        assert_eq!(
            summary(&status, &shares),
            "5.0 s: job j1 running, 20.00 steps/s, 9 operations done, 1 in flight, 0 tensors \
             waiting, straggler: rank 3 (80 % of the time), host b: silent 4 s"
        );
    }
}
