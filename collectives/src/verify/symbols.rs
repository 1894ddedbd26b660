//! Running schedules on symbols instead of numbers: whose contributions a block holds (ONE), and in
//! which order they were added up (SAME).

use std::{
    collections::BTreeSet,
    hash::{DefaultHasher, Hash, Hasher},
    rc::Rc,
};

use super::{error::VerifyError, graph::Graph};
use crate::{
    algorithms::Roles,
    schedule::{Action, Schedule},
};

/// Whose contributions a block holds, each once: a bit per participant.
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

/// The canonical order of additions of these participants: the first ones in pairs, until a power
/// of two is left, and then along a binary tree of aligned groups.
pub(super) fn canonical(participants: &[u32]) -> u64 {
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
#[derive(Debug, Clone)]
struct Value {
    contributors: Contributors,
    /// A hash of the order in which they were added up.
    order: u64,
    /// The same, and what was rounded meanwhile.
    association: u64,
    /// Where what is sent is rounded, both ends go on with the rounded value.
    is_rounded: bool,
}

impl Value {
    /// A participant's own contribution.
    fn of(participant: u32, words: usize) -> Self {
        let order = leaf(participant);
        let contributors = only(participant, words);
        Self { contributors, order, association: order, is_rounded: false }
    }

    fn rounded(&self) -> Self {
        Self { is_rounded: true, ..self.clone() }
    }

    /// The sum of two, or whose contribution is in both.
    fn plus(&self, right: &Self) -> Result<Self, u32> {
        let pairs = || self.contributors.iter().zip(&right.contributors);
        if let Some(contributor) = lowest(pairs().map(|(left, right)| left & right)) {
            return Err(contributor);
        }
        let mut hasher = DefaultHasher::new();
        for value in [self, right] {
            (value.association, value.is_rounded).hash(&mut hasher);
        }
        let contributors = pairs().map(|(left, right)| left | right).collect();
        let (order, association) = (sum(self.order, right.order), hasher.finish());
        Ok(Self { contributors, order, association, is_rounded: false })
    }
}

/// What all participants hold, have sent and have published.
struct State {
    blocks: usize,
    /// By participant and block.
    work: Vec<Option<Rc<Value>>>,
    published: Vec<bool>,
    /// Who published a block first, and how it was added up.
    first: Vec<Option<(u32, u64)>>,
    /// The orders of additions of what was published.
    orders: BTreeSet<u64>,
    /// Whose contributions each block should hold in the end; none for those of all.
    wanted: Vec<Option<u32>>,
    /// The contributions of all.
    all: Contributors,
}

impl State {
    /// What a step does to a block. `received`: what a receive gets. Returns what a send sends.
    fn act(
        &mut self,
        action: Action,
        (participant, step, block): (u32, u32, u32),
        received: Option<Rc<Value>>,
    ) -> Result<Option<Rc<Value>>, VerifyError> {
        let at = participant as usize * self.blocks + block as usize;
        let nothing = VerifyError::Nothing { participant, step, block };
        if action.writes() && self.published[at] {
            return Err(VerifyError::Late { participant, step, block });
        }
        match action {
            Action::ReduceLocal => {
                self.work[at] = Some(Rc::new(Value::of(participant, self.all.len())));
            }
            Action::Send { .. } => {
                let held = self.work[at].as_ref().ok_or(nothing)?;
                let sent = Rc::new(held.rounded());
                self.work[at] = Some(sent.clone());
                return Ok(Some(sent));
            }
            Action::RecvCopy { .. } => self.work[at] = Some(received.ok_or(nothing)?),
            Action::RecvReduce { theirs_first, .. } => {
                let (Some(mine), Some(theirs)) = (&self.work[at], received) else {
                    return Err(nothing);
                };
                let (left, right) = if theirs_first { (&theirs, mine) } else { (mine, &theirs) };
                let sum = left.plus(right).map_err(|contributor| VerifyError::Twice {
                    participant,
                    step,
                    block,
                    contributor,
                })?;
                self.work[at] = Some(Rc::new(sum));
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
        let held = self.work[at].as_ref().ok_or(nothing)?;
        let one = self.wanted[block as usize].map(|one| only(one, self.all.len()));
        let wanted = one.as_ref().unwrap_or(&self.all);
        let pairs = || held.contributors.iter().zip(wanted);
        let missing = lowest(pairs().map(|(held, all)| all & !held));
        let extra = lowest(pairs().map(|(held, all)| held & !all));
        let fault = missing.map(|c| (c, "missing")).or(extra.map(|c| (c, "too much")));
        if let Some((contributor, fault)) = fault {
            return Err(VerifyError::Result { participant, step, block, contributor, fault });
        }
        let first = &mut self.first[block as usize];
        let &mut (other, association) = first.get_or_insert((participant, held.association));
        if association != held.association {
            return Err(VerifyError::Association { participant, step, block, other });
        }
        self.orders.insert(held.order);
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
    let words = schedules.len().div_ceil(64);
    let mut all = vec![0; words];
    for contributor in 0..participants {
        all[contributor as usize / 64] |= 1 << (contributor % 64);
    }
    let blocks = schedules.first().map_or(0, |schedule| schedule.blocks.len());
    let mut state = State {
        blocks,
        work: vec![None; schedules.len() * blocks],
        published: vec![false; schedules.len() * blocks],
        first: vec![None; blocks],
        orders: BTreeSet::new(),
        wanted: roles.iter().map(|roles| roles.from).collect(),
        all,
    };
    let mut on_the_way: Vec<Vec<Option<Rc<Value>>>> = vec![Vec::new(); graph.steps()];
    for &node in order {
        let (participant, at) = graph.step(node);
        let schedule = &schedules[participant];
        let step = &schedule.steps[at];
        let mut received = graph.sender(node).map(|send| std::mem::take(&mut on_the_way[send]));
        for (nth, block) in step.blocks().enumerate() {
            let received = received.as_mut().and_then(|all| all.get_mut(nth)?.take());
            if schedule.blocks[block as usize].count == 0 {
                on_the_way[node].push(None); // nothing is in it, and nothing has to be
                continue;
            }
            let place = (participant as u32, at as u32, block);
            let sent = state.act(step.action, place, received)?;
            if sent.is_some() {
                on_the_way[node].push(sent);
            }
        }
    }
    Ok(state.orders.pop_first().filter(|_| state.orders.is_empty()))
}
