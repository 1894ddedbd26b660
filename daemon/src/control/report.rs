//! What this node does, for those who watch the job. The heartbeat thread takes it from counters
//! that exist in any case. It goes with a heartbeat, so nobody wakes up for it.
//!
//! The daemon computes the rates: the coordinator keeps only the newest report. Lists are bounded,
//! so that a report has at most 1 KiB (BOUND).

use std::time::{Duration, Instant};

use gradwire_proto::pb;
use procfs::process::Process;

use super::node::{Node, Running};
use crate::metrics;

/// The time between two reports, unless heartbeats are rarer.
const INTERVAL: Duration = Duration::from_secs(1);

/// How far before that a heartbeat may take one.
const EARLY: Duration = Duration::from_millis(100);

/// How many reports use one reading of the rate of the line.
const LINE_REPORTS: u32 = 60;

/// The most ranks of a report, the first ones (BOUND).
const MAX_RANKS: usize = 32;

/// The most peers of a report, those with which the node exchanges most (BOUND).
const MAX_PEERS: usize = 24;

/// Counters of a rank.
#[derive(Debug, Clone, Copy, Default)]
struct RankCounts {
    steps: u64,
    blocked: Duration,
    last_step: Option<Instant>,
    /// Seconds per step when it last made some.
    step_seconds: f32,
}

/// Counters of the node at one moment.
#[derive(Debug, Clone)]
struct Counts {
    at: Instant,
    ranks: Vec<RankCounts>,
    /// Bytes sent to each node and received from it.
    traffic: Vec<(u64, u64)>,
}

/// Makes the reports of this node.
#[derive(Debug, Default)]
pub(super) struct Reporter {
    before: Option<Counts>,
    line_rate: u64,
    made: u32,
}

impl Reporter {
    /// The next report, if it is time for one and the world has formed.
    pub(super) fn next(&mut self, node: &Node, now: Instant) -> Option<pb::Report> {
        let running = node.running()?;
        if self.before.as_ref().is_some_and(|before| now < before.at + INTERVAL - EARLY) {
            return None;
        }
        if self.made.is_multiple_of(LINE_REPORTS) {
            self.line_rate = running.paths.line_rate().unwrap_or_default();
        }
        self.made = self.made.wrapping_add(1);
        let counts = counts(node, running, now);
        let before = self.before.replace(counts)?;
        let counts = self.before.as_mut()?;
        let stalled = running.queue.overdue(now, node.config.stall_warning);
        let workers = node.workers.all();
        let statm = Process::myself().and_then(|me| me.statm());
        Some(pb::Report {
            line_bytes_per_second: self.line_rate,
            resident_bytes: statm.map_or(0, |it| it.resident * procfs::page_size()),
            shared_bytes: workers.iter().map(|worker| worker.memory.bytes()).sum(),
            pieces_in_flight: metrics::pieces_in_flight(),
            queued_tensors: number(running.queue.len()),
            stalled_tensors: number(stalled),
            ..rates(&before, counts)
        })
    }
}

fn number(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn counts(node: &Node, running: &Running, now: Instant) -> Counts {
    let mut ranks = vec![RankCounts::default(); (node.config.slots as usize).min(MAX_RANKS)];
    for worker in node.workers.all() {
        let Some(rank) = ranks.get_mut(worker.local_rank as usize) else { continue };
        let total = worker.activity.look();
        rank.steps = total.steps;
        rank.blocked = total.blocked;
        rank.last_step = total.since_step.and_then(|since| now.checked_sub(since));
    }
    let traffic = running.traffic.iter().map(metrics::PeerTraffic::bytes).collect();
    Counts { at: now, ranks, traffic }
}

/// What has changed between two moments. Notes in `now` what the next call needs.
fn rates(before: &Counts, now: &mut Counts) -> pb::Report {
    let passed = now.at.saturating_duration_since(before.at).as_secs_f64().max(1e-3);
    let mut report = pb::Report::default();
    for (index, rank) in now.ranks.iter_mut().enumerate() {
        let last = before.ranks.get(index).copied().unwrap_or_default();
        rank.step_seconds = step_seconds(&last, rank);
        let blocked = rank.blocked.saturating_sub(last.blocked).as_secs_f64();
        let since = rank.last_step.map(|at| now.at.saturating_duration_since(at).as_secs_f32());
        report.rank_steps.push(u32::try_from(rank.steps).unwrap_or(u32::MAX));
        report.rank_step_seconds.push(rank.step_seconds);
        report.rank_exposed.push((blocked / passed).min(1.0) as f32);
        report.rank_since_step_seconds.push(since.unwrap_or_default());
    }
    let rate = |now: u64, before: u64| (now.saturating_sub(before) as f64 / passed) as f32;
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

/// Seconds per step. A rank may need many reports for one step; until its next one, what was
/// measured last counts.
fn step_seconds(before: &RankCounts, now: &RankCounts) -> f32 {
    let made = now.steps.saturating_sub(before.steps);
    match (before.last_step, now.last_step) {
        (Some(first), Some(last)) if made > 0 => {
            (last.saturating_duration_since(first).as_secs_f64() / made as f64) as f32
        }
        _ => before.step_seconds,
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::MAX_REPORT;
    use prost::Message;

    use super::*;

    fn counts(at: Instant, ranks: usize, traffic: &[(u64, u64)]) -> Counts {
        Counts { at, ranks: vec![RankCounts::default(); ranks], traffic: traffic.to_vec() }
    }

    #[test]
    fn rates_are_those_of_the_time_that_has_passed() {
        let began = Instant::now();
        let after = |ms| began + Duration::from_millis(ms);
        let mut before = counts(began, 2, &[(0, 0), (1000, 500)]);
        before.ranks[0] = RankCounts {
            steps: 10,
            blocked: Duration::from_secs(1),
            last_step: Some(began),
            step_seconds: 7.0,
        };
        let mut now = counts(after(2000), 2, &[(0, 0), (5000, 2500)]);
        now.ranks[0] = RankCounts {
            steps: 14,
            blocked: Duration::from_millis(1500),
            last_step: Some(after(1800)),
            step_seconds: 0.0,
        };
        let report = rates(&before, &mut now);
        assert_eq!(report.rank_steps, [14, 0]);
        assert_eq!(report.rank_step_seconds, [0.45, 0.0]);
        assert_eq!(report.rank_exposed, [0.25, 0.0]);
        assert_eq!(report.rank_since_step_seconds, [0.2, 0.0]);
        assert_eq!(report.peers, [1]);
        assert_eq!(report.sent_bytes_per_second, [2000.0]);
        assert_eq!(report.received_bytes_per_second, [1000.0]);
        // No step for a while: the last ones count.
        let mut later = Counts { at: after(3000), ..now.clone() };
        assert_eq!(rates(&now, &mut later).rank_step_seconds, [0.45, 0.0]);
    }

    /// BOUND: whatever the counters are.
    #[test]
    fn a_report_has_at_most_1_kib() {
        let began = Instant::now();
        let mut before = counts(began, MAX_RANKS, &[(0, 0); 300]);
        let later = began + Duration::from_millis(3);
        let mut now = counts(later, MAX_RANKS, &[(u64::MAX, u64::MAX); 300]);
        before.ranks.iter_mut().for_each(|rank| rank.last_step = Some(began));
        now.ranks.iter_mut().for_each(|rank| {
            *rank = RankCounts {
                steps: u64::MAX,
                blocked: Duration::MAX,
                last_step: Some(later),
                step_seconds: 1.0,
            };
        });
        let report = pb::Report {
            line_bytes_per_second: u64::MAX,
            resident_bytes: u64::MAX,
            shared_bytes: u64::MAX,
            pieces_in_flight: u32::MAX,
            queued_tensors: u32::MAX,
            stalled_tensors: u32::MAX,
            ..rates(&before, &mut now)
        };
        assert_eq!((report.rank_steps.len(), report.peers.len()), (MAX_RANKS, MAX_PEERS));
        let bytes = report.encoded_len();
        assert!(bytes <= MAX_REPORT && bytes > MAX_REPORT - 200, "{bytes}");
    }
}
