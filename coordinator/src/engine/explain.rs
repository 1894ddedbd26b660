//! The waits of the job: what the engine knows about tensors, with what the nodes say about tensors
//! that only some of their ranks have submitted. A node announces a tensor once all of its ranks
//! have submitted it, so the engine alone can't tell which ranks of a node are missing.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_proto::{NodeId, ProcessSetId, Rank, pb};

use super::Engine;
use crate::model::{
    status::{MAX_PENDING, milliseconds, numbers},
    text,
};

/// The longest name in an explanation, in characters (BOUND).
const MAX_NAME: usize = 256;

/// Shorter waits are only counted when they end.
const LASTING: Duration = Duration::from_secs(1);

/// The ranks that have submitted a tensor, and those that have not.
#[derive(Debug, Default)]
struct Wait {
    waited: Duration,
    waiting: BTreeSet<Rank>,
    missing: BTreeSet<Rank>,
    /// When the first node announced it; `None` if none has.
    announced: Option<Duration>,
}

/// By process set and name.
type Waits = BTreeMap<(ProcessSetId, String), Wait>;

/// The latest reports of the nodes, by number.
type Reports = BTreeMap<u32, pb::NodeReport>;

impl Engine {
    /// Why the job waits, as far as these nodes have answered.
    pub fn explain(
        &self,
        answers: &BTreeMap<NodeId, pb::Explained>,
        now: Duration,
    ) -> pb::Explanation {
        let partly = answers.iter().map(|(node, answer)| (*node, answer.partly.as_slice()));
        let waits = self.waits(partly, now);
        let wait_count = self.wait_count(&waits);
        let waits = longest(waits.into_iter().filter(|(_, wait)| !wait.missing.is_empty()));
        let members = self.membership.members();
        let ranks = answers.iter().filter_map(|(node, answer)| {
            // Ranks that are not on the node are left out (TRUST).
            let member = members.get(*node)?;
            let own: BTreeSet<u32> = member.ranks().map(|rank| rank.0).collect();
            let ranks = answer.ranks.iter().filter(move |rank| own.contains(&rank.rank));
            let host = member.node.host.clone();
            let named =
                move |rank: &pb::RankState| pb::RankState { host: host.clone(), ..rank.clone() };
            Some(ranks.take(member.node.slots as usize).map(named))
        });
        let saved = answers.iter().filter_map(|(node, answer)| {
            let host = members.get(*node)?.node.host.clone();
            Some(pb::Saved { host, ..answer.saved.clone()? })
        });
        let silent = members.iter().filter(|(node, member)| {
            !member.is_server() && !member.has_left() && !answers.contains_key(node)
        });
        pb::Explanation {
            job: self.config.job.to_string(),
            phase: self.phase().name().to_owned(),
            reason: self.why(),
            waits: waits.into_iter().map(to_wire).collect(),
            wait_count,
            ranks: ranks.flatten().collect(),
            hosts: members.iter().map(|(_, member)| member.node.host.clone()).collect(),
            first_ranks: members.iter().map(|(_, member)| member.node.first_rank.0).collect(),
            silent_hosts: silent.map(|(_, member)| member.node.host.clone()).collect(),
            text: String::new(),
            saved: saved.collect(),
        }
    }

    /// The tensors that have waited longest for a rank, oldest first, and the number of all. They
    /// include those that only the reports of the nodes mention.
    pub(super) fn pending_status(
        &self,
        reports: &Reports,
        now: Duration,
    ) -> (Vec<pb::PendingTensor>, u64) {
        let waits = self.waits(partly(reports), now);
        let more = reports.values().map(|report| report.more_partly.into()).max();
        let count = self.wait_count(&waits) + more.unwrap_or(0);
        let pending = longest(waits.into_iter()).into_iter();
        let pending = pending.map(|((set, name), wait)| pb::PendingTensor {
            process_set: set.0,
            name,
            waiting_ms: milliseconds(wait.waited),
            missing_ranks: numbers(&wait.missing),
        });
        (pending.collect(), count)
    }

    /// Counts the waits so far for a rank or node that alone is missing. Otherwise a long wait
    /// would only be seen after its end.
    pub fn count_lasting(&mut self, reports: &Reports, now: Duration) {
        let mut pending = self.agreement.table.pending();
        let lasts = pending.any(|(_, since, _)| now.saturating_sub(since) >= LASTING);
        if !lasts && reports.values().all(|report| report.partly.is_empty()) {
            return;
        }
        let waits = self.waits(partly(reports), now);
        let ages = reports.values().map(|report| Duration::from_millis(report.age_ms));
        let reported = now.saturating_sub(ages.max().unwrap_or_default());
        for wait in waits.into_values().filter(|wait| wait.waited >= LASTING) {
            // A tensor that no node has announced may have completed since the reports.
            let until = if wait.announced.is_some() { now } else { reported };
            let waiting = &mut self.agreement.waiting;
            if let (Some(&rank), 1) = (wait.missing.first(), wait.missing.len()) {
                waiting.lasts_for_rank(rank, until.saturating_sub(wait.waited), until);
            }
            let members = self.membership.members();
            let mut nodes = wait.missing.iter().map(|rank| members.node_of(*rank));
            if let (Some(since), Some(node)) = (wait.announced, nodes.next())
                && nodes.all(|other| other == node)
            {
                waiting.lasts_for_node(node, since, until);
            }
        }
    }

    /// The number of tensors that wait, of which these are the oldest.
    fn wait_count(&self, waits: &Waits) -> u64 {
        let others = waits.values().filter(|wait| wait.announced.is_none()).count();
        (self.agreement.table.waiting() + others) as u64
    }

    /// The tensors that have waited longest, and all those that only some ranks of a node have
    /// submitted, as far as nodes have said.
    fn waits<'a>(
        &self,
        partly: impl Iterator<Item = (NodeId, &'a [pb::PartlySubmitted])>,
        now: Duration,
    ) -> Waits {
        let partly: Vec<(NodeId, &pb::PartlySubmitted)> =
            partly.flat_map(|(node, all)| all.iter().map(move |it| (node, it))).collect();
        let key = |set: u32, name: &str| (ProcessSetId(set), text::excerpt(name, MAX_NAME));
        let named: BTreeSet<_> =
            partly.iter().map(|(_, it)| key(it.process_set, &it.name)).collect();
        let mut pending: Vec<_> = self.agreement.table.pending().collect();
        pending.sort_unstable_by_key(|(slot, since, _)| (*since, *slot));
        let mut waits: Waits = BTreeMap::new();
        for (at, (slot, since, _)) in pending.into_iter().enumerate() {
            let Some((set, name, missing)) = self.agreement.missing(slot) else { continue };
            let key = key(set.0, name);
            if at >= MAX_PENDING && !named.contains(&key) {
                continue;
            }
            let waiting = self.agreement.waiting(slot).map(|(.., ranks)| ranks);
            waits.insert(
                key,
                Wait {
                    waited: now.saturating_sub(since),
                    waiting: waiting.unwrap_or_default().into_iter().collect(),
                    missing: missing.into_iter().collect(),
                    announced: Some(since),
                },
            );
        }
        for (node, partly) in partly {
            self.add_partly(node, partly, &mut waits);
        }
        waits
    }

    /// Adds a tensor that some ranks of a node have submitted, and others have not.
    fn add_partly(&self, node: NodeId, partly: &pb::PartlySubmitted, waits: &mut Waits) {
        let id = ProcessSetId(partly.process_set);
        // The set may have been removed meanwhile, or does not exist (TRUST).
        let Some(set) = self.agreement.sets.get(id) else { return };
        let local = |ranks: &[u32]| -> BTreeSet<Rank> {
            let known = ranks.iter().copied().map(Rank);
            known.filter(|rank| set.local(node).contains(rank)).collect()
        };
        let (submitted, missing) = (local(&partly.submitted), local(&partly.missing));
        if submitted.is_empty() {
            return;
        }
        let key = (id, text::excerpt(&partly.name, MAX_NAME));
        let wait = waits.entry(key).or_insert_with(|| {
            // No node has announced it, so at first nobody has submitted it.
            let all = set.members().iter().filter(|rank| !set.joined().contains(rank));
            let missing = if partly.is_pair { BTreeSet::new() } else { all.copied().collect() };
            Wait { missing, ..Wait::default() }
        });
        wait.waited = wait.waited.max(Duration::from_millis(partly.waiting_ms));
        for rank in &submitted {
            wait.missing.remove(rank);
        }
        wait.waiting.extend(submitted);
        wait.missing.extend(missing);
    }
}

/// What the nodes report about tensors that only some of their ranks have submitted.
fn partly(reports: &Reports) -> impl Iterator<Item = (NodeId, &[pb::PartlySubmitted])> {
    reports.iter().map(|(node, report)| (NodeId(*node), report.partly.as_slice()))
}

/// The waits that have lasted longest, the oldest first.
fn longest(
    waits: impl Iterator<Item = ((ProcessSetId, String), Wait)>,
) -> Vec<((ProcessSetId, String), Wait)> {
    let mut waits: Vec<_> = waits.collect();
    waits.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.waited));
    waits.truncate(MAX_PENDING);
    waits
}

fn to_wire(((set, name), wait): ((ProcessSetId, String), Wait)) -> pb::Wait {
    pb::Wait {
        process_set: set.0,
        name,
        waiting_ms: milliseconds(wait.waited),
        waiting: numbers(&wait.waiting),
        missing: numbers(&wait.missing),
    }
}
