//! Runs schedules on symbols instead of numbers: which contributions a block holds (ONE), and in
//! which order they were added up (SAME).

use std::{
    collections::{BTreeSet, HashMap},
    hash::{DefaultHasher, Hash, Hasher},
};

use super::{error::VerifyError, graph::Graph};
use crate::{
    algorithms::Roles,
    schedule::{Action, Schedule},
};

/// The participants whose contributions a block holds once: a bit for each.
type Contributors = Vec<u64>;

fn only(participant: u32, words: usize) -> Contributors {
    let mut set = vec![0; words];
    set[participant as usize / 64] |= 1 << (participant % 64);
    set
}

/// The lowest participant in `set`, if there is one.
fn lowest(mut set: impl Iterator<Item = u64>) -> Option<u32> {
    let (at, word) = (0u32..).zip(&mut set).find(|&(_, word)| word != 0)?;
    Some(at * 64 + word.trailing_zeros())
}

/// The order of additions of one contribution alone.
fn leaf(participant: u32) -> u64 {
    let mut hasher = DefaultHasher::new();
    participant.hash(&mut hasher);
    hasher.finish()
}

/// The order of additions of a sum of two.
fn sum(left: u64, right: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (left, right).hash(&mut hasher);
    hasher.finish()
}

/// The [`Report::order`](super::Report::order) of the canonical order of additions over these
/// participants: the first 2(M − 2^⌊log2 M⌋) of them in pairs, and then all along a binary tree of
/// aligned groups.
///
/// # Panics
/// Without participants.
pub fn canonical_order(participants: &[u32]) -> u64 {
    let rounds = participants.len().ilog2();
    let (pairs, single) = participants.split_at(2 * (participants.len() - (1 << rounds)));
    let pairs = pairs.chunks(2).map(|pair| sum(leaf(pair[0]), leaf(pair[1])));
    let mut sums: Vec<u64> = pairs.chain(single.iter().copied().map(leaf)).collect();
    while sums.len() > 1 {
        sums = sums.chunks(2).map(|two| sum(two[0], two[1])).collect();
    }
    sums[0]
}

/// What a block holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Value {
    /// Its number among all sums.
    sum: u32,
    /// Whether it was sent: both ends go on with what the wire type makes of it.
    is_rounded: bool,
}

/// All sums that some block has held. Blocks that are added up alike share them.
struct Sums {
    /// How many words a set of contributors has.
    words: usize,
    /// The contributors of each sum.
    contributors: Vec<u64>,
    /// A hash of the order of additions of each sum.
    orders: Vec<u64>,
    /// The same, including what was rounded.
    associations: Vec<u64>,
    /// The sum of each pair that was added.
    of: HashMap<(Value, Value), u32>,
}

impl Sums {
    /// The contributions alone, numbered as their participants.
    fn new(participants: u32) -> Self {
        let words = (participants as usize).div_ceil(64);
        let orders: Vec<u64> = (0..participants).map(leaf).collect();
        Self {
            words,
            contributors: (0..participants).flat_map(|one| only(one, words)).collect(),
            associations: orders.clone(),
            orders,
            of: HashMap::new(),
        }
    }

    fn contributors(&self, sum: u32) -> &[u64] {
        &self.contributors[sum as usize * self.words..][..self.words]
    }

    /// The sum of two, or a participant whose contribution is in both.
    fn plus(&mut self, left: Value, right: Value) -> Result<Value, u32> {
        if let Some(&sum) = self.of.get(&(left, right)) {
            return Ok(Value { sum, is_rounded: false });
        }
        let pairs = || self.contributors(left.sum).iter().zip(self.contributors(right.sum));
        if let Some(contributor) = lowest(pairs().map(|(left, right)| left & right)) {
            return Err(contributor);
        }
        let both: Contributors = pairs().map(|(left, right)| left | right).collect();
        let mut hasher = DefaultHasher::new();
        for value in [left, right] {
            (self.associations[value.sum as usize], value.is_rounded).hash(&mut hasher);
        }
        let order = sum(self.orders[left.sum as usize], self.orders[right.sum as usize]);
        let number = self.orders.len() as u32;
        self.contributors.extend(both);
        self.orders.push(order);
        self.associations.push(hasher.finish());
        self.of.insert((left, right), number);
        Ok(Value { sum: number, is_rounded: false })
    }
}

/// What all participants hold and have published.
struct SymbolState {
    blocks: usize,
    sums: Sums,
    /// By participant and block.
    work: Vec<Option<Value>>,
    published: Vec<bool>,
    /// The participant that published each block first, and how it was added up.
    first: Vec<Option<(u32, u64)>>,
    /// The orders of additions of what was published.
    orders: BTreeSet<u64>,
    /// The participant whose contribution each block should hold in the end; none for all.
    wanted: Vec<Option<u32>>,
    /// The contributions of all.
    all: Contributors,
}

impl SymbolState {
    /// Applies a step to a block. `received` is the value of a receive. Returns the value of a
    /// send.
    fn act(
        &mut self,
        action: Action,
        (participant, step, block): (u32, u32, u32),
        received: Option<Value>,
    ) -> Result<Option<Value>, VerifyError> {
        let at = participant as usize * self.blocks + block as usize;
        let nothing = VerifyError::Nothing { participant, step, block };
        if action.writes() && self.published[at] {
            return Err(VerifyError::Late { participant, step, block });
        }
        match action {
            Action::ReduceLocal => {
                self.work[at] = Some(Value { sum: participant, is_rounded: false });
            }
            Action::Send { .. } => {
                let held = self.work[at].as_mut().ok_or(nothing)?;
                held.is_rounded = true;
                return Ok(Some(*held));
            }
            Action::RecvCopy { .. } => self.work[at] = Some(received.ok_or(nothing)?),
            Action::RecvReduce { theirs_first, .. } => {
                let (Some(mine), Some(theirs)) = (self.work[at], received) else {
                    return Err(nothing);
                };
                let (left, right) = if theirs_first { (theirs, mine) } else { (mine, theirs) };
                let sum = self.sums.plus(left, right).map_err(|contributor| {
                    VerifyError::Twice { participant, step, block, contributor }
                })?;
                self.work[at] = Some(sum);
            }
            Action::Publish => self.publish((participant, step, block), at)?,
        }
        Ok(None)
    }

    fn publish(
        &mut self,
        (participant, step, block): (u32, u32, u32),
        at: usize,
    ) -> Result<(), VerifyError> {
        let nothing = VerifyError::Nothing { participant, step, block };
        let held = self.work[at].ok_or(nothing)?.sum;
        let wanted = match self.wanted[block as usize] {
            Some(one) => self.sums.contributors(one),
            None => &self.all,
        };
        let pairs = || self.sums.contributors(held).iter().zip(wanted);
        let missing = lowest(pairs().map(|(held, all)| all & !held));
        let extra = lowest(pairs().map(|(held, all)| held & !all));
        let fault = missing.map(|c| (c, "missing")).or(extra.map(|c| (c, "too much")));
        if let Some((contributor, fault)) = fault {
            return Err(VerifyError::Result { participant, step, block, contributor, fault });
        }
        let added_up = self.sums.associations[held as usize];
        let first = &mut self.first[block as usize];
        let &mut (other, association) = first.get_or_insert((participant, added_up));
        if association != added_up {
            return Err(VerifyError::Association { participant, step, block, other });
        }
        self.orders.insert(self.sums.orders[held as usize]);
        self.published[at] = true;
        Ok(())
    }
}

/// Runs in `order`; without races and cycles any order is as good as another. Returns the order of
/// additions, if it is the same for all blocks.
pub(super) fn run(
    schedules: &[Schedule],
    roles: &[Roles],
    graph: &Graph,
    order: &[usize],
) -> Result<Option<u64>, VerifyError> {
    let participants = schedules.len() as u32;
    let sums = Sums::new(participants);
    let mut all = vec![0; sums.words];
    let contributors = (0..participants).filter(|&one| !schedules[one as usize].is_server(one));
    for contributor in contributors {
        all[contributor as usize / 64] |= 1 << (contributor % 64);
    }
    let blocks = schedules.first().map_or(0, |schedule| schedule.blocks.len());
    let mut state = SymbolState {
        blocks,
        sums,
        work: vec![None; schedules.len() * blocks],
        published: vec![false; schedules.len() * blocks],
        first: vec![None; blocks],
        orders: BTreeSet::new(),
        wanted: roles.iter().map(|roles| roles.from).collect(),
        all,
    };
    // For each send, where its values begin in `sent`.
    let mut starts = vec![0; graph.steps()];
    let mut sent: Vec<Option<Value>> = Vec::new();
    for &node in order {
        let (participant, at) = graph.step(node);
        let schedule = &schedules[participant];
        let step = schedule.steps.at(at);
        let from = graph.sender(node).map(|sender| starts[sender]);
        starts[node] = sent.len();
        for (nth, block) in step.blocks().enumerate() {
            let is_empty = schedule.blocks[block as usize].count == 0;
            let received = from.and_then(|from| sent[from + nth]);
            let place = (participant as u32, at as u32, block);
            // An empty block holds nothing, and need not hold anything.
            let value = if is_empty { None } else { state.act(step.action, place, received)? };
            if step.action.sends_to().is_some() {
                sent.push(value);
            }
        }
    }
    Ok(state.orders.pop_first().filter(|_| state.orders.is_empty()))
}
