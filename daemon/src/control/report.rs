//! Reports on this node for viewers of the job. The heartbeat thread makes them from counters that
//! exist anyway, and sends them with heartbeats, so no extra wake-up is needed.
//!
//! The daemon computes the rates: the coordinator keeps only the newest report. Lists are bounded,
//! so that a report has at most 2 KiB (BOUND).

use std::time::{Duration, Instant};

use gradwire_proto::pb;
use procfs::process::Process;
use prost::Message;

use super::node::{Node, Running};
use crate::{
    metrics,
    model::blocked::{self, Phase},
    workers::activity::Total,
};

/// The time between two reports, unless heartbeats are less frequent.
const INTERVAL: Duration = Duration::from_secs(1);

/// How much earlier a heartbeat may carry a report.
const EARLY: Duration = Duration::from_millis(100);

/// How many reports use one reading of the line's rate.
const LINE_REPORTS: u32 = 60;

/// A report has the first ranks, up to this number (BOUND).
const MAX_RANKS: usize = 32;

/// A report has the peers with the most traffic, up to this number (BOUND).
const MAX_PEERS: usize = 24;

/// Shorter waits for local ranks are normal.
const LEAST_WAIT: Duration = Duration::from_secs(1);

/// The most bytes of tensors that wait for local ranks (BOUND).
const MAX_PARTLY_BYTES: usize = 1024;

/// Counters of the node at one moment.
#[derive(Debug, Clone)]
struct Counts {
    at: Instant,
    ranks: Vec<Total>,
    /// What each of these ranks waits for.
    phases: Vec<Option<Phase>>,
    operations: u64,
    /// Bytes sent to each node and received from it.
    traffic: Vec<(u64, u64)>,
}

#[derive(Debug, Default)]
pub(super) struct Reporter {
    before: Option<Counts>,
    line_rate: u64,
    made: u32,
}

impl Reporter {
    /// The next report, if it is time for one and the world has formed.
    pub(super) fn next(&mut self, node: &Node, now: Instant) -> Option<pb::Report> {
        let running = node.running.get()?;
        if self.before.as_ref().is_some_and(|before| now < before.at + INTERVAL - EARLY) {
            return None;
        }
        if self.made.is_multiple_of(LINE_REPORTS) {
            self.line_rate = running.paths.line_rate().unwrap_or_default();
        }
        self.made = self.made.wrapping_add(1);
        let counts = counts(node, running, now);
        let before = self.before.replace(counts)?;
        let counts = self.before.as_ref()?;
        let stalled = running.queue.overdue(now, node.config.stall_warning);
        let partly = fitting(running.queue.partly(now, LEAST_WAIT));
        let more = running.queue.overdue(now, LEAST_WAIT).saturating_sub(partly.len());
        let workers = node.workers.all();
        let statm = Process::myself().and_then(|me| me.statm());
        Some(pb::Report {
            line_bytes_per_second: self.line_rate,
            resident_bytes: statm.map_or(0, |it| it.resident * procfs::page_size()),
            shared_bytes: workers.iter().map(|worker| worker.memory.bytes()).sum(),
            pieces_in_flight: metrics::pieces_in_flight(),
            queued_tensors: number(running.queue.len()),
            stalled_tensors: number(stalled),
            partly,
            more_partly: number(more),
            paused_ranks: paused(workers.iter().map(|it| (it.local_rank, it.pause.is_on()))),
            ..rates(&before, counts)
        })
    }
}

/// A bit for each of the first ranks that is paused.
fn paused(ranks: impl Iterator<Item = (u32, bool)>) -> u32 {
    let first = ranks.filter(|(local, is_on)| *is_on && *local < u32::BITS);
    first.fold(0, |bits, (local, _)| bits | 1 << local)
}

/// The first of these tensors that fit into a report.
fn fitting(partly: Vec<pb::PartlySubmitted>) -> Vec<pb::PartlySubmitted> {
    let mut left = MAX_PARTLY_BYTES;
    let fits = |tensor: &pb::PartlySubmitted| {
        // With its tag and its length.
        let bytes = tensor.encoded_len() + 4;
        let fits = bytes <= left;
        left -= if fits { bytes } else { 0 };
        fits
    };
    partly.into_iter().filter(fits).collect()
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn counts(node: &Node, running: &Running, now: Instant) -> Counts {
    let mut ranks = vec![Total::default(); (node.config.slots as usize).min(MAX_RANKS)];
    for worker in node.workers.all() {
        if let Some(rank) = ranks.get_mut(worker.local_rank as usize) {
            *rank = worker.activity.look();
        }
    }
    let traffic = running.traffic.iter().map(metrics::PeerTraffic::bytes).collect();
    let phases = running.queue.phases(ranks.len());
    Counts { at: now, ranks, phases, operations: metrics::operations(), traffic }
}

/// The rates of change between two moments.
fn rates(before: &Counts, now: &Counts) -> pb::Report {
    let passed = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let mut report = pb::Report::default();
    for (index, rank) in now.ranks.iter().enumerate() {
        let last = before.ranks.get(index).copied().unwrap_or_default();
        let blocked = rank.blocked.saturating_sub(last.blocked);
        let parts = std::array::from_fn(|at| rank.parts[at].saturating_sub(last.parts[at]));
        let phase = now.phases.get(index).copied().flatten();
        let since = rank.last_step.map(|at| now.at.saturating_duration_since(at).as_secs_f32());
        report.rank_steps.push(u32::try_from(rank.steps).unwrap_or(u32::MAX));
        report.rank_step_seconds.push(rank.step.unwrap_or_default().as_secs_f32());
        report.rank_exposed.push((blocked.as_secs_f64() / passed).min(1.0) as f32);
        let shares = blocked::shares(blocked, &parts, phase, passed);
        report.rank_blocked.extend(shares.map(|share| (share * 255.0).round() as u8));
        report.rank_since_step_seconds.push(since.unwrap_or_default());
    }
    let rate = |now: u64, before: u64| (now.saturating_sub(before) as f64 / passed) as f32;
    report.operations_per_second = rate(now.operations, before.operations);
    let nothing = vec![(0, 0); now.traffic.len()];
    let last = if before.traffic.is_empty() { &nothing } else { &before.traffic };
    let peers = now.traffic.iter().zip(last).enumerate();
    let mut peers: Vec<(u32, f32, f32)> = peers
        .map(|(node, (now, last))| (number(node), rate(now.0, last.0), rate(now.1, last.1)))
        .filter(|(_, sent, received)| sent + received > 0.0)
        .collect();
    peers.sort_by(|one, other| (other.1 + other.2).total_cmp(&(one.1 + one.2)));
    peers.truncate(MAX_PEERS);
    for (node, sent, received) in peers {
        report.peers.push(node);
        report.sent_bytes_per_second.push(sent);
        report.received_bytes_per_second.push(received);
    }
    report
}

#[cfg(test)]
mod tests {
    use gradwire_proto::MAX_REPORT;

    use super::*;

    fn counts(at: Instant, ranks: usize, traffic: &[(u64, u64)]) -> Counts {
        let (ranks, phases) = (vec![Total::default(); ranks], vec![None; ranks]);
        Counts { at, ranks, phases, operations: 0, traffic: traffic.to_vec() }
    }

    #[test]
    fn rates_are_per_second_since_the_last_report() {
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        let mut before = counts(began, 2, &[(0, 0), (1000, 500)]);
        before.ranks[0] = Total {
            steps: 10,
            blocked: Duration::from_secs(1),
            last_step: Some(began),
            ..Total::default()
        };
        let mut now = counts(after(2000), 2, &[(0, 0), (5000, 2500)]);
        now.ranks[0] = Total {
            steps: 14,
            blocked: Duration::from_millis(1500),
            parts: [100, 0, 300, 0].map(Duration::from_millis),
            last_step: Some(after(1800)),
            step: Some(Duration::from_millis(450)),
            ..Total::default()
        };
        now.phases[0] = Some(Phase::Negotiate);
        now.operations = 8;
        let report = rates(&before, &now);
        // Blocked for 500 ms of 2 s; 100 ms of these belong to what it still waits for.
        assert_eq!(report.rank_blocked, [13, 13, 38, 0, 0, 0, 0, 0]);
        assert_eq!(report.operations_per_second, 4.0);
        assert_eq!(report.rank_steps, [14, 0]);
        assert_eq!(report.rank_step_seconds, [0.45, 0.0]);
        assert_eq!(report.rank_exposed, [0.25, 0.0]);
        assert_eq!(report.rank_since_step_seconds, [0.2, 0.0]);
        assert_eq!(report.peers, [1]);
        assert_eq!(report.sent_bytes_per_second, [2000.0]);
        assert_eq!(report.received_bytes_per_second, [1000.0]);
        // Without a new step the last value stays.
        let later = Counts { at: after(3000), ..now.clone() };
        assert_eq!(rates(&now, &later).rank_step_seconds, [0.45, 0.0]);
    }

    /// BOUND: for any counters.
    #[test]
    fn a_report_has_at_most_2_kib() {
        let began = Instant::now();
        let mut before = counts(began, MAX_RANKS, &[(0, 0); 300]);
        let later = began + Duration::from_millis(3);
        let mut now = counts(later, MAX_RANKS, &[(u64::MAX, u64::MAX); 300]);
        before.ranks.iter_mut().for_each(|rank| rank.last_step = Some(began));
        now.operations = u64::MAX;
        now.ranks.iter_mut().for_each(|rank| {
            *rank = Total {
                steps: u64::MAX,
                blocked: Duration::MAX,
                parts: [Duration::MAX / 8; 4],
                last_step: Some(later),
                step: Some(Duration::MAX),
                ..Total::default()
            };
        });
        let tensor = |name: usize| pb::PartlySubmitted {
            process_set: u32::MAX,
            name: "n".repeat(name),
            waiting_ms: u64::MAX,
            submitted: (1 << 30..).take(20).collect(),
            missing: (1 << 30..).take(20).collect(),
            is_pair: true,
        };
        let partly = fitting([100, 2000, 90, 90, 90, 40, 0, 0].map(tensor).into());
        let names: Vec<usize> = partly.iter().map(|tensor| tensor.name.len()).collect();
        assert_eq!(names, [100, 90, 90]);
        let report = pb::Report {
            partly,
            more_partly: u32::MAX,
            line_bytes_per_second: u64::MAX,
            resident_bytes: u64::MAX,
            shared_bytes: u64::MAX,
            pieces_in_flight: u32::MAX,
            queued_tensors: u32::MAX,
            stalled_tensors: u32::MAX,
            ..rates(&before, &now)
        };
        assert_eq!((report.rank_steps.len(), report.peers.len()), (MAX_RANKS, MAX_PEERS));
        let bytes = report.encoded_len();
        assert!(bytes <= MAX_REPORT && bytes > MAX_REPORT - 500, "{bytes}");
    }
}
