//! Finds out that no rank of the job can ever go on (docs/decisions/034-provable-deadlocks.md).
//!
//! A node says that each of its ranks can do nothing until an operation ends. That is so for the
//! whole job if every node says so, has carried out all answers, and nothing is in flight here. A
//! node's word counts once it was repeated and the node has sent nothing else in between: then
//! nothing ended on the node after it had looked.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::{
    EPOCH_MEETING, FUNCTION_MEETING, Failure, FailureKind, NodeId, ProcessSetId, Rank, VOTE,
};

use crate::{
    membership::members::Members,
    model::{event::StuckRank, text},
};

/// The most lines of a table (BOUND).
const MAX_ROWS: usize = 16;

/// The longest list of ranks in a line, in characters.
const MAX_RANKS: usize = 160;

/// What the operations are that Gradwire itself starts for elastic jobs.
const OWN: [(&str, &str); 4] = [
    (EPOCH_MEETING, "the beginning of an epoch"),
    (VOTE, "the vote at a commit, a step, or the end of an elastic function"),
    (FUNCTION_MEETING, "the meeting in which ranks receive an elastic state"),
    ("allgather_object.elastic.change", "a commit, or a question for new hosts"),
];

/// What a node has said, and whether it has repeated that.
#[derive(Debug)]
struct Word {
    last: u64,
    ranks: Vec<StuckRank>,
    repeated: bool,
}

/// What the nodes have said.
#[derive(Debug, Default)]
pub(crate) struct Deadlock {
    words: BTreeMap<NodeId, Word>,
    /// Whether it was reported, and nothing has changed since.
    pub(crate) is_reported: bool,
}

impl Deadlock {
    /// A node has sent something else: it did something, or is about to.
    pub(crate) fn moved(&mut self, node: NodeId) {
        self.words.remove(&node);
        self.is_reported = false;
    }

    /// A node says that none of its ranks can go on, after it has carried out the answer `last`.
    /// Ignored unless it names exactly its ranks that have not left (TRUST): it may say this before
    /// it says that another rank has left.
    pub(crate) fn say(
        &mut self,
        node: NodeId,
        last: u64,
        ranks: Vec<StuckRank>,
        members: &Members,
    ) {
        let Some(member) = members.get(node) else { return };
        let remain = member.ranks().filter(|rank| !member.left.contains_key(rank));
        if !remain.eq(ranks.iter().map(|stuck| stuck.rank)) {
            self.words.remove(&node);
            return;
        }
        let before = self.words.get(&node);
        let repeated = before.is_some_and(|before| before.last == last && before.ranks == ranks);
        if !repeated {
            self.is_reported = false;
        }
        self.words.insert(node, Word { last, ranks, repeated });
    }

    /// Whether no rank can ever go on, if nothing is in flight and `last` is the last answer.
    pub(crate) fn is_certain(&self, last: u64, members: &Members) -> bool {
        let is_certain = |word: &Word| word.repeated && word.last == last;
        let mut waiting =
            members.iter().filter(|(_, member)| !member.is_server() && !member.has_left());
        !self.words.is_empty()
            && waiting.all(|(node, _)| self.words.get(&node).is_some_and(is_certain))
    }

    /// The failure that shows what each rank waits for.
    pub(crate) fn failure(&self) -> Failure {
        let ranks = self.words.values().flat_map(|word| &word.ranks);
        let mut rows: BTreeMap<(ProcessSetId, &str, &str, u32, &str), Vec<Rank>> = BTreeMap::new();
        for StuckRank { rank, set, name, call, in_flight, site } in ranks {
            rows.entry((*set, name, call, *in_flight, site)).or_default().push(*rank);
        }
        let mut rows: Vec<_> = rows.into_iter().map(|(waits, ranks)| (ranks, waits)).collect();
        rows.sort();
        let different: BTreeSet<_> =
            rows.iter().map(|(_, (set, name, ..))| (*set, *name)).collect();
        let head = if different.len() > 1 {
            "the ranks wait for different operations, and none of these can ever be complete"
        } else {
            "all ranks wait for an operation that can never be complete"
        };
        let names =
            rows.iter().map(|(ranks, _)| text::excerpt(&text::named_ranks(ranks), MAX_RANKS));
        let names: Vec<String> = names.take(MAX_ROWS).collect();
        let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let mut lines = vec![head.to_owned()];
        for (name, (_, (set, tensor, call, in_flight, site))) in names.iter().zip(&rows) {
            let place = match *set {
                ProcessSetId::GLOBAL => String::new(),
                set => format!(" in process set {set}"),
            };
            let own = OWN.iter().find(|(name, _)| name == tensor);
            let own = own.map_or_else(String::new, |(_, what)| format!(" ({what})"));
            let more = match in_flight.saturating_sub(1) {
                0 => String::new(),
                more => format!(", with {more} more in flight"),
            };
            let line = match (site.is_empty(), more.is_empty()) {
                (true, _) => String::new(),
                (false, true) => format!(" at {site}"),
                (false, false) => format!(", at {site}"),
            };
            lines.push(format!("  {name:<width$}  {call} '{tensor}'{own}{place}{more}{line}"));
        }
        if let Some(more) = rows.len().checked_sub(MAX_ROWS).filter(|more| *more > 0) {
            lines.push(format!("  and {more} more"));
        }
        let hint = "make the same calls in the same order on every rank, or give operations names \
                    and don't block in one while another rank blocks in the next; if one rank has \
                    caught an error, look at its output";
        Failure::new(FailureKind::Disagreement, lines.join("\n")).hint(hint)
    }
}
