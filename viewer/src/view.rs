//! Figures about a running job, derived from the coordinator's snapshots. Pure.
//!
//! The coordinator counts how long tensors have waited for each rank since the job began. The
//! present rate follows from two snapshots ([`Lags`]).

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use gradwire_proto::pb::{NodeReport, NodeStatus, RankReport, StatusResponse};

/// The time over which waits for ranks are compared.
const WINDOW: Duration = Duration::from_secs(10);

/// An older snapshot says nothing about now: no viewer has watched since.
const TOO_OLD: Duration = Duration::from_secs(15);

/// The most snapshots of that time (BOUND); the coordinator sends two per second.
const MAX_SNAPSHOTS: usize = 64;

/// A straggler is waited for in more than this share of the time.
const STRAGGLING: f64 = 0.1;

/// A node that is silent for longer than this is unhealthy.
const SILENT_MS: u64 = 2000;

/// How long the others waited for each rank, as a share of some time.
pub type Shares = BTreeMap<u32, f64>;

/// The waits of the last seconds.
#[derive(Debug, Default)]
pub struct Lags {
    /// Uptime in seconds, and seconds by rank.
    snapshots: VecDeque<(f64, BTreeMap<u32, f64>)>,
}

impl Lags {
    /// Adds a snapshot. Returns the shares of the last seconds; for the first snapshot since the
    /// job began, and for a late one since the snapshot before.
    pub fn add(&mut self, status: &StatusResponse) -> Shares {
        let uptime = status.uptime_ms as f64 / 1e3;
        let lags: BTreeMap<u32, f64> = status.lags.iter().map(|it| (it.rank, it.seconds)).collect();
        let is_older = |than: Duration, at: Option<&(f64, _)>| {
            at.is_some_and(|(at, _)| uptime - at >= than.as_secs_f64())
        };
        while self.snapshots.len() >= MAX_SNAPSHOTS
            || is_older(WINDOW, self.snapshots.get(1))
            || self.snapshots.len() > 1 && is_older(TOO_OLD, self.snapshots.front())
        {
            self.snapshots.pop_front();
        }
        let (began, before) = self.snapshots.front().cloned().unwrap_or_default();
        let passed = (uptime - began).max(1e-3);
        let share = |(rank, seconds): (&u32, &f64)| {
            let more = seconds - before.get(rank).copied().unwrap_or_default();
            (*rank, (more / passed).clamp(0.0, 1.0))
        };
        let shares = lags.iter().map(share).collect();
        self.snapshots.push_back((uptime, lags));
        shares
    }
}

/// The rank that is slower than the others: they wait for it often, and longer than for all others
/// together.
pub fn straggler(shares: &Shares) -> Option<(u32, f64)> {
    let (&rank, &share) = shares.iter().max_by(|one, other| one.1.total_cmp(other.1))?;
    let all: f64 = shares.values().sum();
    (share > STRAGGLING && share > all - share).then_some((rank, share))
}

/// The straggler in words.
pub fn straggler_in_words(shares: &Shares) -> Option<String> {
    let (rank, share) = straggler(shares)?;
    let share = percent(share);
    Some(format!("straggler: rank {rank}: the others wait for it {share} of the time"))
}

/// Steps per second of a rank. A rank that stands still gets slower with time.
pub fn steps_per_second(rank: &RankReport) -> Option<f64> {
    let seconds = rank.step_seconds.max(rank.since_step_seconds);
    (rank.step_seconds > 0.0 && seconds > 0.0).then(|| 1.0 / seconds)
}

/// Steps per second of the slowest of these ranks, without ranks that make no steps.
pub fn slowest<'a>(ranks: impl Iterator<Item = &'a RankReport>) -> Option<f64> {
    ranks.filter_map(steps_per_second).min_by(f64::total_cmp)
}

/// The reported ranks of a job.
pub fn ranks(status: &StatusResponse) -> impl Iterator<Item = &RankReport> {
    status.nodes.iter().filter_map(|node| node.report.as_ref()).flat_map(|report| &report.ranks)
}

/// The mean share of the time in which the ranks of a node were blocked.
pub fn exposed(report: &NodeReport) -> Option<f64> {
    let sum: f64 = report.ranks.iter().map(|rank| rank.exposed).sum();
    (!report.ranks.is_empty()).then(|| sum / report.ranks.len() as f64)
}

/// The mean share of the time in which the ranks of a job were blocked.
pub fn exposed_of_all(status: &StatusResponse) -> Option<f64> {
    let (count, sum) =
        ranks(status).fold((0.0, 0.0), |(count, sum), rank| (count + 1.0, sum + rank.exposed));
    (count > 0.0).then_some(sum / count)
}

/// Whether the failure of the job names this node, or one of its ranks.
pub fn has_failed(status: &StatusResponse, node: &NodeStatus) -> bool {
    status.failure.as_ref().is_some_and(|failure| {
        let ranks = node.first_rank..node.first_rank.saturating_add(node.slots);
        failure.host == node.host || failure.rank.is_some_and(|rank| ranks.contains(&rank))
    })
}

/// The health of a node of this job, in a word or two.
pub fn health(status: &StatusResponse, node: &NodeStatus) -> String {
    let stalled = node.report.as_ref().map_or(0, |report| report.stalled_tensors);
    if has_failed(status, node) {
        "failed".to_owned()
    } else if node.silent_ms > SILENT_MS {
        format!("silent {:.0} s", node.silent_ms as f64 / 1e3)
    } else if stalled > 0 {
        format!("{stalled} stalled")
    } else if !node.left_ranks.is_empty() {
        format!("{} left", node.left_ranks.len())
    } else {
        "ok".to_owned()
    }
}

/// How a rank spends its time, as shares of it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Parts {
    /// It is not blocked.
    pub compute: f64,
    /// It waits until other ranks have submitted.
    pub ranks: f64,
    /// It waits for the order of the coordinator, although all ranks have submitted.
    pub negotiation: f64,
    /// It waits until the result is on its node.
    pub transfer: f64,
    /// It waits until the result is in its memory.
    pub copies: f64,
}

/// How a rank of `node` spends its time. Its daemon can't know whether an order is late because of
/// ranks of other nodes; `shares` says for how long tensors waited for those.
pub fn parts(rank: &RankReport, node: &NodeStatus, shares: &Shares) -> Parts {
    let blocked = rank.blocked.unwrap_or_default();
    let here = node.first_rank..node.first_rank.saturating_add(node.slots);
    let others: f64 =
        shares.iter().filter(|(rank, _)| !here.contains(rank)).map(|(_, share)| share).sum();
    let others = others.min(blocked.negotiate);
    Parts {
        compute: (1.0 - rank.exposed).clamp(0.0, 1.0),
        ranks: blocked.gather + others,
        negotiation: blocked.negotiate - others,
        transfer: blocked.transfer,
        copies: blocked.publish,
    }
}

/// The traffic from one node to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Flow {
    /// Bytes per second.
    pub rate: f64,
    /// As a share of the line of the sender, if that is known.
    pub share: Option<f64>,
}

/// The traffic between nodes, by sender and receiver. A node reports only its busiest peers, so the
/// reports of receivers are used, too.
pub fn flows(status: &StatusResponse) -> BTreeMap<(u32, u32), Flow> {
    let mut flows = BTreeMap::new();
    let lines: Vec<Option<f64>> = status
        .nodes
        .iter()
        .map(|node| Some(node.report.as_ref()?.line_bytes_per_second? as f64))
        .collect();
    for (at, node) in (0..).zip(&status.nodes) {
        for peer in node.report.iter().flat_map(|report| &report.peers) {
            for (from, to, rate) in [
                (at, peer.node, peer.sent_bytes_per_second),
                (peer.node, at, peer.received_bytes_per_second),
            ] {
                let line = lines.get(from as usize).copied().flatten();
                let share = line.filter(|line| *line > 0.0).map(|line| rate / line);
                let flow = flows.entry((from, to)).or_insert(Flow { rate, share });
                if rate > flow.rate {
                    *flow = Flow { rate, share };
                }
            }
        }
    }
    flows
}

/// Bytes, or bytes per second, in a few characters.
pub fn bytes(bytes: f64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes.max(0.0);
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = usize::from(unit > 0 && value < 100.0);
    format!("{value:.digits$} {}", UNITS[unit])
}

/// A number with its noun: `1 node`, `2 nodes`, `2 batches`.
pub fn count(number: u64, of: &str) -> String {
    let ending = match number {
        1 => "",
        _ if of.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {of}{ending}")
}

/// A share in whole percent.
pub fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use gradwire_proto::pb::Blocked;
    use gradwire_tests::sample::status;

    use super::*;

    #[test]
    fn words_agree_with_their_number() {
        let texts = [(1, "host"), (0, "host"), (1, "batch"), (87, "batch")];
        let texts = texts.map(|(number, of)| count(number, of));
        assert_eq!(texts, ["1 host", "0 hosts", "1 batch", "87 batches"]);
    }

    #[test]
    fn the_straggler_is_the_rank_others_wait_for() {
        let mut lags = Lags::default();
        let first = lags.add(&status(5000));
        assert_eq!(
            straggler(&first).map(|(rank, share)| (rank, percent(share))),
            Some((3, "80 %".into()))
        );
        // After this, no rank waits for rank 3; soon it is no longer a straggler.
        let mut later = status(5000);
        let mut shares = first;
        for second in 6..30 {
            later.uptime_ms = second * 1000;
            shares = lags.add(&later);
        }
        assert_eq!(straggler(&shares), None, "{shares:?}");
        assert!(lags.snapshots.len() <= MAX_SNAPSHOTS, "BOUND");
        // No viewer for ten minutes. Then others wait for rank 3 again: it is soon a straggler,
        // although it was not on average.
        let lag = |seconds: f64, uptime_ms| {
            let mut status = status(uptime_ms);
            status
                .lags
                .iter_mut()
                .filter(|lag| lag.rank == 3)
                .for_each(|lag| lag.seconds = seconds);
            status
        };
        lags.add(&lag(4.0, 630_000));
        let now = (1..=4).map(|at| lags.add(&lag(4.0 + 0.4 * at as f64, 630_000 + 500 * at)));
        assert_eq!(straggler(&now.last().unwrap()).map(|(rank, _)| rank), Some(3));
        // Two equally slow ranks are not stragglers.
        assert_eq!(straggler(&[(0, 0.4), (1, 0.4)].into()), None);
        assert_eq!(straggler(&[(0, 0.05)].into()), None);
    }

    #[test]
    fn waits_for_other_nodes_are_not_negotiation() {
        let mut status = status(1000);
        let rank = &mut status.nodes[0].report.as_mut().unwrap().ranks[0];
        rank.exposed = 0.75;
        rank.blocked =
            Some(Blocked { gather: 0.125, negotiate: 0.375, transfer: 0.25, publish: 0.0 });
        let rank = status.nodes[0].report.as_ref().unwrap().ranks[0];
        // Rank 1 is on the same node.
        let parts = |shares: &Shares| parts(&rank, &status.nodes[0], shares);
        let expected =
            Parts { compute: 0.25, ranks: 0.125, negotiation: 0.375, transfer: 0.25, copies: 0.0 };
        assert_eq!(parts(&[(1, 0.5)].into()), expected);
        let (ranks, negotiation) = (0.375, 0.125);
        assert_eq!(parts(&[(3, 0.25)].into()), Parts { ranks, negotiation, ..expected });
        let (ranks, negotiation) = (0.5, 0.0);
        assert_eq!(parts(&[(2, 0.5), (3, 0.5)].into()), Parts { ranks, negotiation, ..expected });
    }

    #[test]
    fn rates_and_health_follow_from_reports() {
        let mut status = status(1000);
        assert_eq!(slowest(ranks(&status)), Some(20.0));
        assert_eq!(exposed(status.nodes[1].report.as_ref().unwrap()), Some(0.35));
        let flows = flows(&status);
        assert_eq!(flows[&(0, 1)], Flow { rate: 5e7, share: Some(0.4) });
        assert_eq!(flows[&(1, 0)], Flow { rate: 1e7, share: None });
        status.nodes[0].silent_ms = 2500;
        status.nodes[1].report.as_mut().unwrap().stalled_tensors = 2;
        let healths = |of: &StatusResponse| of.nodes.iter().map(|it| health(of, it)).collect();
        let found: Vec<String> = healths(&status);
        assert_eq!(found, ["silent 2 s", "2 stalled"]);
        // Only the node at fault has failed, whether it is named or only its rank.
        let failure = gradwire_proto::pb::Failure { rank: Some(3), ..Default::default() };
        status.failure = Some(failure);
        assert_eq!(healths(&status)[1], "failed");
        let host = gradwire_proto::pb::Failure { host: "a".into(), ..Default::default() };
        status.failure = Some(host);
        assert_eq!(healths(&status), ["failed", "2 stalled"]);
        // A rank that has stood still for 4 s makes at most a step in that time.
        let still =
            RankReport { step_seconds: 0.05, since_step_seconds: 4.0, ..RankReport::default() };
        assert_eq!(steps_per_second(&still), Some(0.25));
        assert_eq!(steps_per_second(&RankReport::default()), None);
        assert_eq!([0.0, 999.0, 1536.0, 1e12].map(bytes), ["0 B", "999 B", "1.5 KiB", "931 GiB"]);
    }
}
