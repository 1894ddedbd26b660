//! Reports waits that take too long, with the missing ranks or hosts (WAIT), and ends the job if
//! one takes much too long.

use std::{collections::BTreeMap, time::Duration};

use gradwire_proto::{Failure, FailureKind, ProcessSetId, Rank, Request};

use crate::{
    agreement::Agreement, dispatch::credit::Flight, membership::members::Members, model::text,
};

/// The missing ranks of a process set.
type Missing = (ProcessSetId, Vec<Rank>);

/// What is late, in lines.
#[derive(Debug, Default)]
pub(crate) struct Late {
    /// One for all tensors that wait for the same ranks.
    pub(crate) tensors: Vec<String>,
    /// One for each operation that was sent out.
    pub(crate) operations: Vec<String>,
}

/// When to check next, and how many tensors are stalled.
///
/// A wait is reported when it has lasted one limit, two limits, four, and so on. Checks are at
/// least a tenth of a limit apart, so waits that began together are reported together.
#[derive(Debug)]
pub(crate) struct Stall {
    limit: Duration,
    /// The wait after which the job ends; zero: never.
    shutdown: Duration,
    last: Duration,
    next: Option<Duration>,
    /// When a rank was last paused: a pause does not count for the wait that ends the job.
    paused: Duration,
    /// How many tensors were stalled at the last check.
    pub(crate) stalled: usize,
}

impl Stall {
    /// `limit` must not be zero.
    pub(crate) fn new(limit: Duration, shutdown: Duration) -> Self {
        let (last, paused) = Default::default();
        Self { limit, shutdown, last, next: None, paused, stalled: 0 }
    }

    /// Some rank is paused.
    pub(crate) fn pause(&mut self, now: Duration) {
        self.paused = now;
    }

    /// Schedules a check after one limit, if none is scheduled.
    pub(crate) fn watch(&mut self, now: Duration) {
        self.next.get_or_insert(now + self.first_limit());
    }

    fn first_limit(&self) -> Duration {
        if self.shutdown.is_zero() { self.limit } else { self.limit.min(self.shutdown) }
    }

    /// The time of the next check.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        self.next
    }

    /// How often a wait must have been reported by the time `at`.
    fn reports(&self, since: Duration, at: Duration) -> u32 {
        let limits = at.saturating_sub(since).as_nanos() / self.limit.as_nanos().max(1);
        limits.checked_ilog2().map_or(0, |doublings| doublings + 1)
    }

    /// Whether a wait must be reported now; updates the time of the next check.
    fn is_due(&self, since: Duration, now: Duration, next: &mut Option<Duration>) -> bool {
        let passed = self.reports(since, now);
        let mut at = since.saturating_add(self.limit.saturating_mul(1 << passed.min(31)));
        if !self.shutdown.is_zero() {
            at = at.min(since + self.shutdown);
        }
        *next = Some(next.map_or(at, |next| next.min(at)));
        passed > self.reports(since, self.last)
    }

    /// The failure of a job in which a tensor has waited too long for its ranks.
    pub(crate) fn too_long(
        &self,
        now: Duration,
        agreement: &Agreement,
        members: &Members,
    ) -> Option<Failure> {
        if self.shutdown.is_zero() || self.next.is_none_or(|next| now < next) {
            return None;
        }
        let pending = agreement.table.pending();
        let awaited = pending.filter(|(slot, ..)| agreement.is_awaited(*slot, members));
        let (slot, since, _) = awaited.min_by_key(|(_, since, _)| *since)?;
        let waited = now.saturating_sub(since);
        let counts = waited.min(now.saturating_sub(self.paused));
        let (set, name, missing) = agreement.missing(slot).filter(|_| counts >= self.shutdown)?;
        let place = match set {
            ProcessSetId::GLOBAL => String::new(),
            set => format!(" in process set {set}"),
        };
        let what = format!(
            "it has waited{place} {} for {}, longer than negotiation.stall_shutdown_ms allows",
            text::seconds(waited),
            places(&missing, members)
        );
        let hint = "see what those ranks do; make the same calls on all ranks";
        Some(Failure::new(FailureKind::Timeout, what).tensor(name).hint(hint))
    }

    /// What is late now.
    pub(crate) fn look(
        &mut self,
        now: Duration,
        agreement: &Agreement,
        flight: &Flight,
        members: &Members,
    ) -> Late {
        if self.next.is_none_or(|next| now < next) {
            return Late::default();
        }
        let mut next = None;
        let mut stalled = 0;
        let mut late: BTreeMap<Missing, Vec<(Duration, &str)>> = BTreeMap::new();
        for (slot, since, _) in agreement.table.pending() {
            // Such as the removal of a process group, after a rank that left it early.
            if !agreement.is_awaited(slot, members) {
                continue;
            }
            stalled += usize::from(self.reports(since, now) > 0);
            if self.is_due(since, now, &mut next)
                && let Some((set, name, missing)) = agreement.missing(slot)
            {
                late.entry((set, missing)).or_default().push((since, name));
            }
        }
        let tensors: Vec<String> = late
            .into_iter()
            .map(|((set, missing), mut tensors)| {
                tensors.sort_unstable();
                let waited = text::seconds(now.saturating_sub(tensors[0].0));
                let names = text::some_names(tensors.iter().map(|(_, name)| *name), 3);
                let (noun, have) =
                    if tensors.len() == 1 { ("tensor", "has") } else { ("tensors", "have") };
                let place = match set {
                    ProcessSetId::GLOBAL => String::new(),
                    set => format!(" of process set {set}"),
                };
                let ranks = places(&missing, members);
                if let [(_, Request::INIT)] = tensors[..] {
                    return format!(
                        "the other ranks have waited {waited} for {ranks} to call init()"
                    );
                }
                format!("{noun} {names}{place} {have} waited {waited} for {ranks}")
            })
            .collect();
        let mut operations = Vec::new();
        for (sequence, flying) in flight.iter() {
            if self.is_due(flying.since, now, &mut next) {
                let slow = members.iter().filter(|(node, _)| flying.has(*node));
                let slow: Vec<&str> = slow.map(|(_, m)| m.node.host.as_str()).collect();
                let time = text::seconds(now.saturating_sub(flying.since));
                let noun = if slow.len() == 1 { "host" } else { "hosts" };
                let place = format!("{noun} {}", slow.join(", "));
                operations
                    .push(format!("operation {sequence} is not done on {place} after {time}"));
            }
        }
        self.stalled = stalled;
        self.last = now;
        self.next = next.map(|next| next.max(now + self.first_limit() / 10));
        Late { tensors, operations }
    }
}

/// A text such as `ranks 2-3 on host b, rank 5 on host c`.
fn places(ranks: &[Rank], members: &Members) -> String {
    let parts: Vec<String> = members
        .iter()
        .filter_map(|(_, member)| {
            let own: Vec<Rank> =
                member.ranks().filter(|rank| ranks.binary_search(rank).is_ok()).collect();
            let host = &member.node.host;
            (!own.is_empty()).then(|| format!("{} on host {host}", text::named_ranks(&own)))
        })
        .collect();
    parts.join(", ")
}
