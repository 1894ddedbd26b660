//! `gradwire run --progress`: one line about the running job, which is rewritten at the end of the
//! terminal: steps, time per step, share of the exchange, slowest rank.

use std::{
    io::{self, IsTerminal},
    net::SocketAddr,
};

use clap::ValueEnum;
use gradwire_proto::pb::StatusResponse;
use gradwire_viewer::view::{self, Lags, Shares};
use ratatui::crossterm::terminal;
use tokio::sync::watch;

use crate::status::Watch;

/// The width of a terminal that does not tell it.
const COLUMNS: u16 = 80;

/// Whether the line is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum When {
    /// On a terminal.
    #[default]
    Auto,
    /// Not at all.
    Never,
}

impl When {
    /// Whether the line is shown on the standard error of this process.
    pub fn applies(self) -> bool {
        self == Self::Auto && io::stderr().is_terminal()
    }
}

/// Sends lines about each epoch of a job that `served` announces, until the job ends.
pub async fn follow(
    mut served: watch::Receiver<Option<(u64, SocketAddr)>>,
    lines: watch::Sender<String>,
) {
    while served.changed().await.is_ok() {
        let Some((_, address)) = *served.borrow_and_update() else { continue };
        // The report of the launcher says how the job ended.
        let Ok(mut watch) = Watch::start(&address.to_string()).await else { continue };
        let mut lags = Lags::default();
        while let Ok(status) = watch.next().await {
            let shares = lags.add(&status);
            let (columns, _) = terminal::size().unwrap_or((COLUMNS, 0));
            // A full line would wrap.
            let room = usize::from(columns).saturating_sub(1);
            lines.send_replace(line(&status, &shares).chars().take(room).collect());
        }
        lines.send_replace(String::new());
    }
}

/// A job in one line.
fn line(status: &StatusResponse, shares: &Shares) -> String {
    let Some(steps) = view::ranks(status).map(|rank| rank.steps).filter(|steps| *steps > 0).min()
    else {
        let operations = status.operations_done;
        return format!("gradwire: {}, no steps yet, {operations} operations done", status.phase);
    };
    let mut parts = vec![format!("step {steps}")];
    if let Some(rate) = view::slowest(view::ranks(status)) {
        parts.push(match 1.0 / rate {
            seconds if seconds < 1.0 => format!("{:.0} ms/step", seconds * 1e3),
            seconds => format!("{seconds:.1} s/step"),
        });
    }
    if let Some(share) = view::exposed_of_all(status) {
        parts.push(format!("exchange {}", view::percent(share)));
    }
    if let Some((rank, share)) = view::straggler(shares) {
        let share = view::percent(share);
        parts.push(format!("slowest: rank {rank}, waited for {share}"));
    }
    format!("gradwire: {}", parts.join("  "))
}

#[cfg(test)]
mod tests {
    use gradwire_tests::sample;

    use super::*;

    #[test]
    fn a_line_has_steps_exchange_and_the_slowest() {
        let mut status = sample::status(5000);
        let shares = Lags::default().add(&status);
        assert_eq!(
            line(&status, &shares),
            "gradwire: step 100  50 ms/step  exchange 52 %  slowest: rank 3, waited for 80 %"
        );
        for node in &mut status.nodes {
            for rank in &mut node.report.as_mut().unwrap().ranks {
                (rank.steps, rank.step_seconds) = (0, 0.0);
            }
        }
        let line = line(&status, &Shares::default());
        assert_eq!(line, "gradwire: running, no steps yet, 9 operations done");
    }
}
