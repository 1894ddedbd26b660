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

/// The ranks that have submitted a tensor, and those that have not.
#[derive(Debug, Default)]
struct Wait {
    waited: Duration,
    waiting: BTreeSet<Rank>,
    missing: BTreeSet<Rank>,
}

impl Engine {
    /// Why the job waits, as far as these nodes have answered.
    pub fn explain(
        &self,
        answers: &BTreeMap<NodeId, pb::Explained>,
        now: Duration,
    ) -> pb::Explanation {
        let mut waits = self.known_waits(now);
        for (node, answer) in answers {
            for partly in &answer.partly {
                self.add_partly(*node, partly, &mut waits);
            }
        }
        let mut waits: Vec<_> =
            waits.into_iter().filter(|(_, wait)| !wait.missing.is_empty()).collect();
        waits.sort_by_key(|(_, wait)| std::cmp::Reverse(wait.waited));
        let wait_count = waits.len() as u64;
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
            waits: waits.into_iter().take(MAX_PENDING).map(to_wire).collect(),
            wait_count,
            ranks: ranks.flatten().collect(),
            hosts: members.iter().map(|(_, member)| member.node.host.clone()).collect(),
            first_ranks: members.iter().map(|(_, member)| member.node.first_rank.0).collect(),
            silent_hosts: silent.map(|(_, member)| member.node.host.clone()).collect(),
            text: String::new(),
            saved: saved.collect(),
        }
    }

    /// The waits for tensors that at least one node has announced.
    fn known_waits(&self, now: Duration) -> BTreeMap<(ProcessSetId, String), Wait> {
        let slots = self.agreement.table.pending();
        let waits = slots.filter_map(|(slot, since, _)| {
            let (set, name, waiting) = self.agreement.waiting(slot)?;
            let (.., missing) = self.agreement.missing(slot)?;
            let wait = Wait {
                waited: now.saturating_sub(since),
                waiting: waiting.into_iter().collect(),
                missing: missing.into_iter().collect(),
            };
            Some(((set, text::excerpt(name, MAX_NAME)), wait))
        });
        waits.collect()
    }

    /// Adds a tensor that some ranks of a node have submitted, and others have not.
    fn add_partly(
        &self,
        node: NodeId,
        partly: &pb::PartlySubmitted,
        waits: &mut BTreeMap<(ProcessSetId, String), Wait>,
    ) {
        let id = ProcessSetId(partly.process_set);
        // The set may have been removed meanwhile, or does not exist (TRUST).
        let Some(set) = self.agreement.sets.get(id) else { return };
        let local = |ranks: &[u32]| -> BTreeSet<Rank> {
            let known = ranks.iter().copied().map(Rank);
            known.filter(|rank| set.local(node).contains(rank)).collect()
        };
        let (submitted, missing) = (local(&partly.submitted), local(&partly.missing));
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

fn to_wire(((set, name), wait): ((ProcessSetId, String), Wait)) -> pb::Wait {
    pb::Wait {
        process_set: set.0,
        name,
        waiting_ms: milliseconds(wait.waited),
        waiting: numbers(&wait.waiting),
        missing: numbers(&wait.missing),
    }
}
