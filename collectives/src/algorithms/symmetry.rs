//! Participants that do the same: one of each class represents all of them.
//!
//! Participants have places in an order, and a place has *digits*, like a number. Some digits are
//! *free*: adding the same to such a digit of all places, without a carry, maps each participant to
//! another one with the same schedule, that is, with the same steps on blocks of the same size and
//! with peers at the same distance. So the schedule of the participant whose free digits are all 0
//! is enough. A ring has one digit; in RAT members take turns in the same way in each rack.
//!
//! Links may differ even where participants do the same. Code that collapses a run has to check
//! that ([`Symmetry::generators`]).

use super::parts::tiers::Tiers;
use crate::{
    schedule::{Schedule, StepView},
    topology::Topology,
};

/// A digit of a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Digit {
    size: u32,
    /// Whether participants that differ only in it do the same.
    is_free: bool,
}

/// Which participants do the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Symmetry {
    /// The participant at each place.
    order: Vec<u32>,
    /// The place of each participant.
    place: Vec<u32>,
    /// The digits, the fastest first.
    digits: Vec<Digit>,
    /// Whether the messages of a class have gaps at the same bytes.
    has_same_gaps: bool,
}

impl Symmetry {
    /// From the order of places, and the size of each digit with whether it is free.
    fn new(order: Vec<u32>, digits: &[(u32, bool)]) -> Self {
        let mut place = vec![0; order.len()];
        for (at, &participant) in (0..).zip(&order) {
            place[participant as usize] = at;
        }
        let digits = digits.iter().map(|&(size, is_free)| Digit { size, is_free }).collect();
        Self { order, place, digits, has_same_gaps: false }
    }

    /// All participants, around a circle in this order.
    pub(super) fn around(order: Vec<u32>) -> Self {
        let nodes = order.len() as u32;
        Self::new(order, &[(nodes, true)])
    }

    /// Whole groups of the outermost tier.
    pub(super) fn of_outermost(topology: &Topology) -> Option<Self> {
        let (nodes, tiers) = (topology.participants(), Tiers::new(topology));
        let groups = tiers.count(tiers.top() - 1);
        let is_even = nodes.is_multiple_of(groups) && groups > 1 && groups < nodes;
        let digits = [(nodes / groups, false), (groups, true)];
        is_even.then(|| Self::new(tiers.order, &digits))
    }

    /// In all tiers at once, if each has groups of one size.
    pub(super) fn of_all_tiers(topology: &Topology) -> Option<Self> {
        let digits: Vec<_> = regular(topology)?.into_iter().map(|size| (size, true)).collect();
        Some(Self::new(topology.order(), &digits))
    }

    /// The members of racks. Racks begin with different blocks, so their messages have gaps at
    /// different bytes. Inside a rack the gaps are at the same bytes.
    pub(super) fn in_racks(topology: &Topology) -> Option<Self> {
        let [members, racks] = regular(topology)?[..] else { return None };
        let one = Self::new(topology.order(), &[(members, true), (racks, false)]);
        Some(Self { has_same_gaps: true, ..one })
    }

    /// Adds or subtracts the free digits of two places, and keeps the others.
    fn moved(&self, participant: u32, by: u32, add: impl Fn(u32, u32, u32) -> u32) -> u32 {
        let (mut from, mut by) = (self.place[participant as usize], self.place[by as usize]);
        let (mut place, mut unit) = (0, 1);
        for &Digit { size, is_free } in &self.digits {
            let digit = from % size;
            place += unit * if is_free { add(digit, by % size, size) } else { digit };
            (from, by, unit) = (from / size, by / size, unit * size);
        }
        self.order[place as usize]
    }

    /// How many participants each class has.
    pub fn class_size(&self) -> u32 {
        self.digits.iter().filter(|digit| digit.is_free).map(|digit| digit.size).product()
    }

    /// One participant of each class, ascending by place.
    pub fn representatives(&self) -> Vec<u32> {
        self.order.iter().copied().filter(|&one| self.representative(one) == one).collect()
    }

    /// The representative of a participant's class.
    pub fn representative(&self, participant: u32) -> u32 {
        self.seen_from(participant, participant)
    }

    /// Maps `participant`, as seen from `me`, to its counterpart as seen from the representative of
    /// `me`.
    pub fn seen_from(&self, me: u32, participant: u32) -> u32 {
        self.moved(participant, me, |digit, by, size| (digit + size - by) % size)
    }

    /// The inverse of [`Self::seen_from`].
    pub fn seen_by(&self, me: u32, participant: u32) -> u32 {
        self.moved(participant, me, |digit, by, size| (digit + by) % size)
    }

    /// For each free digit, the participant that each one becomes when 1 is added to it. A network
    /// that stays the same under each of these permutations stays the same under all of them.
    pub fn generators(&self) -> Vec<Vec<u32>> {
        let mut unit = 1;
        let mut all = Vec::new();
        for &Digit { size, is_free } in &self.digits {
            if is_free && size > 1 {
                let by = self.order[unit as usize];
                all.push((0..self.order.len() as u32).map(|one| self.seen_by(by, one)).collect());
            }
            unit *= size;
        }
        all
    }

    /// Whether it holds for a piece, by the schedule of any participant: all blocks have the same
    /// size, all participants have the same number of them, and chunks of at most `chunk` elements
    /// are cut alike. A message that wraps around the end of the piece is cut there: if that
    /// differs inside a class, no chunk may have parts of several blocks.
    pub fn holds(&self, schedule: &Schedule, chunk: u64) -> bool {
        let blocks = &schedule.blocks;
        let count = blocks.first().map_or(0, |block| block.count);
        let is_even = blocks.iter().all(|block| block.count == count);
        let is_one = |step: StepView<'_>| step.blocks().nth(1).is_none();
        let mut messages = schedule.steps.iter().filter(|step| step.action.sends_to().is_some());
        let is_cut_alike =
            self.has_same_gaps || count.is_multiple_of(chunk.max(1)) || messages.all(is_one);
        is_even && blocks.len().is_multiple_of(self.order.len()) && is_cut_alike
    }
}

/// The sizes of the groups of all tiers that have several parts, the smallest first. None if the
/// groups of a tier have different sizes.
pub(super) fn regular(topology: &Topology) -> Option<Vec<u32>> {
    let tiers = Tiers::new(topology);
    let sizes = tiers.regular();
    let several = (1..=tiers.top()).filter(|&level| tiers.most(level) > 1).count();
    (sizes.len() == several).then_some(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        algorithms::{Algorithm, Kind, Spec, generate, symmetry},
        schedule::{Action, Schedule},
    };

    /// What a schedule does, in no particular order: actions with peers as seen from the
    /// representative, elements, and dependencies.
    fn seen(schedule: &Schedule, symmetry: &Symmetry) -> Vec<(Action, u64, usize)> {
        let from = |peer: u32| symmetry.seen_from(schedule.me, peer);
        let action = |action: Action| match action {
            Action::Send { peer, message } => Action::Send { peer: from(peer), message },
            Action::RecvCopy { peer, message } => Action::RecvCopy { peer: from(peer), message },
            // The order of operands depends on numbers.
            Action::RecvReduce { peer, message, .. } => {
                Action::RecvReduce { peer: from(peer), message, theirs_first: false }
            }
            other => other,
        };
        let steps = schedule.steps.iter();
        let mut all: Vec<_> = steps
            .map(|step| (action(step.action), schedule.elements(step), step.after.len()))
            .collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn all_of_a_class_do_the_same() {
        for (nodes, size) in [(2, 2), (5, 5), (12, 12), (12, 4), (16, 2), (16, 8), (30, 5), (64, 8)]
        {
            let topology = Topology::from_racks((0..nodes).map(|node| node / size).collect());
            for &algorithm in Algorithm::ALL {
                let spec = Spec::usual(algorithm);
                for symmetry in symmetry(Kind::Allreduce, &spec, &topology) {
                    let count = 512 * u64::from(nodes);
                    let of = |me| generate(Kind::Allreduce, spec, &topology, me, count);
                    assert!(symmetry.holds(&of(0), 64), "{spec}");
                    assert!(
                        !symmetry.holds(&generate(Kind::Allreduce, spec, &topology, 0, 65), 64)
                    );
                    let stand: Vec<u32> = symmetry.representatives();
                    assert_eq!(stand.len() as u32 * symmetry.class_size(), nodes, "{spec}");
                    for me in 0..nodes {
                        let other = symmetry.representative(me);
                        assert!(stand.contains(&other));
                        assert_eq!(seen(&of(me), &symmetry), seen(&of(other), &symmetry), "{spec}");
                        for peer in 0..nodes {
                            let there = symmetry.seen_from(me, peer);
                            assert_eq!(symmetry.seen_by(me, there), peer);
                        }
                    }
                }
            }
        }
    }
}
