//! The participants of a collective, and which of them are near each other.
//!
//! Participants are in racks. Racks may be in groups, such as the racks of a pod, these in larger
//! ones, and so on: each of these levels is a *tier*. Tier 1 is the racks, tier 2 the groups of
//! racks. Inside a group links are at least as fast as between groups of its tier.
//!
//! A topology also has the rates of the participants' lines, where they differ, and the order in
//! which the members of a group are visited, where it is not that of their numbers.

use std::{cmp::Ordering, collections::BTreeMap, iter};

use gradwire_proto::MAX_TIERS;

use crate::links::{Links, MAX_LINE_MBIT};

/// The participants, and the groups that they are in.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Topology {
    /// The group of each participant in each tier, the racks first: small numbers that differ where
    /// groups do. There is at least one tier. A tier above the racks has several groups, and fewer
    /// than the tier before it.
    tiers: Vec<Vec<u32>>,
    /// How many of the last participants are servers.
    servers: u32,
    /// The rate of each participant's line in the largest unit in which all are whole numbers;
    /// empty if all are equal, or if they are not known.
    lines: Vec<u32>,
    /// The rates of lines, uplinks and links, if they are known.
    links: Option<Links>,
    /// The place of each participant in the order in which they are visited; empty if that is the
    /// order of their numbers.
    places: Vec<u32>,
}

impl Topology {
    /// `participants` in one rack.
    pub fn flat(participants: u32) -> Self {
        Self::from_racks(vec![0; participants as usize])
    }

    /// The rack of each participant, without a tier above them.
    pub fn from_racks(racks: Vec<u32>) -> Self {
        Self::of_nested(vec![racks])
    }

    /// The group of each participant in each tier, the racks first. Redundant tiers are left out.
    /// `None` if there are no tiers or too many, if they have different lengths, or if a group is
    /// in several groups of the next tier.
    pub fn from_tiers(tiers: Vec<Vec<u32>>) -> Option<Self> {
        let participants = tiers.first()?.len();
        let is_inside = |inner: &[u32], outer: &[u32]| {
            let mut groups = BTreeMap::new();
            iter::zip(inner, outer)
                .all(|(inner, outer)| groups.entry(inner).or_insert(outer) == &outer)
        };
        let fits = tiers.len() <= MAX_TIERS
            && tiers.iter().all(|tier| tier.len() == participants)
            && tiers.windows(2).all(|two| is_inside(&two[0], &two[1]));
        fits.then(|| Self::of_nested(tiers))
    }

    /// From the label of each participant, such as `pod1/r3`: a path of names from the outermost
    /// group to the rack. Participants with the same label share a rack, and those whose labels
    /// begin with the same names share the groups of these names. A label with fewer names than
    /// others is a rack of its own in the group that it names. The empty label is like any other,
    /// so unlabelled participants share a rack. Groups are numbered in order of appearance.
    pub fn from_labels<S: AsRef<str>>(labels: &[S]) -> Self {
        let labels = || labels.iter().map(AsRef::as_ref);
        let names = labels().map(|label| label.split('/').count()).max().unwrap_or(1);
        let outer = (1..names.min(MAX_TIERS)).rev();
        let outer = outer.map(|names| numbered(labels().map(|label| first_names(label, names))));
        Self::of_nested(iter::once(numbered(labels())).chain(outer).collect())
    }

    /// Leaves out redundant tiers: those above the racks that have one group, or the groups of the
    /// tier before.
    fn of_nested(tiers: Vec<Vec<u32>>) -> Self {
        let mut before = usize::MAX;
        let mut kept = Vec::with_capacity(tiers.len());
        for tier in tiers {
            let groups = count(&tier);
            if kept.is_empty() || (1 < groups && groups < before) {
                kept.push(tier);
                before = groups;
            }
        }
        Self { tiers: kept, servers: 0, lines: Vec::new(), links: None, places: Vec::new() }
    }

    /// Some of the participants, in this order.
    ///
    /// # Panics
    /// If one of them isn't a participant.
    #[must_use]
    pub fn part(&self, participants: impl IntoIterator<Item = u32>) -> Self {
        let participants: Vec<u32> = participants.into_iter().collect();
        let of = |tier: &Vec<u32>| participants.iter().map(|&p| tier[p as usize]).collect();
        let contributors = self.contributors();
        let servers = participants.iter().filter(|&&p| p >= contributors).count() as u32;
        debug_assert!(
            participants.iter().rev().take(servers as usize).all(|&p| p >= contributors),
            "servers are not the last ones of {participants:?}"
        );
        let lines = if self.lines.is_empty() { Vec::new() } else { of(&self.lines) };
        let places = if self.places.is_empty() { Vec::new() } else { of(&self.places) };
        let links = self.links.as_ref().map(|links| links.part(&participants));
        let part = Self { servers, links, ..Self::of_nested(self.tiers.iter().map(of).collect()) };
        Self { places: ranked(&places), ..part.with_lines(&lines) }
    }

    /// The same with `racks` as the rack of each participant, and no tier above them; empty `racks`
    /// leave all tiers as they are. Participants are visited in `order`, as far as that keeps
    /// groups together; an empty one is the order of their numbers. `None` if `racks` has another
    /// length, or if `order` does not name each participant once.
    pub fn arranged(self, racks: &[u32], order: &[u32]) -> Option<Self> {
        let participants = self.participants() as usize;
        let fits = |list: &[u32]| list.is_empty() || list.len() == participants;
        if !fits(racks) || !fits(order) {
            return None;
        }
        let tiers = if racks.is_empty() { self.tiers } else { vec![racks.to_vec()] };
        if order.is_empty() {
            return Some(Self { tiers, places: Vec::new(), ..self });
        }
        let mut places = vec![u32::MAX; participants];
        for (place, &participant) in (0..).zip(order) {
            *places.get_mut(participant as usize).filter(|place| **place == u32::MAX)? = place;
        }
        // Groups are numbered in the order in which they are visited.
        let renumbered = |tier: Vec<u32>| {
            let visited = numbered(order.iter().map(|&participant| tier[participant as usize]));
            places.iter().map(|&place| visited[place as usize]).collect()
        };
        let tiers = tiers.into_iter().map(renumbered).collect();
        Some(Self { tiers, places: ranked(&places), ..self })
    }

    /// The same in the order of the numbers, with groups numbered in that order, too. Topologies
    /// that differ only in order and in the numbers of groups become equal.
    #[must_use]
    pub fn unordered(self) -> Self {
        let tiers = self.tiers.into_iter().map(|tier| numbered(tier.into_iter())).collect();
        Self { tiers, places: Vec::new(), ..self }
    }

    /// The same with the last `servers` participants as servers: nodes without ranks, which
    /// contribute nothing and get no result, but may reduce for the others.
    ///
    /// # Panics
    /// If no other participant is left.
    #[must_use]
    pub fn with_servers(self, servers: u32) -> Self {
        let leaves_some = servers == 0 || servers < self.participants();
        assert!(leaves_some, "no participants besides {servers} servers");
        Self { servers, ..self }
    }

    /// The same with the rate of each participant's line in Mbit/s, or 0 if it is not known. If one
    /// rate is unknown, all lines count as equal.
    ///
    /// # Panics
    /// If `mbit` is not empty and does not have one rate for each participant.
    #[must_use]
    pub fn with_lines(self, mbit: &[u32]) -> Self {
        let is_given = !mbit.is_empty() && mbit.iter().all(|&rate| rate > 0);
        assert!(mbit.is_empty() || mbit.len() == self.racks().len(), "one rate for each");
        let bounded = || mbit.iter().map(|&rate| rate.min(MAX_LINE_MBIT));
        let unit = bounded().fold(0, greatest_common_divisor);
        let differ = is_given && bounded().any(|rate| Some(rate) != bounded().next());
        let lines = if differ { bounded().map(|rate| rate / unit).collect() } else { Vec::new() };
        Self { lines, ..self }
    }

    /// The same with these rates of lines and links, if they are for the same number of
    /// participants.
    #[must_use]
    pub fn with_links(self, links: Option<Links>) -> Self {
        let links = links.filter(|links| links.participants() == self.participants());
        Self { links, ..self }
    }

    /// The rates of lines and links, if they are known.
    pub fn links(&self) -> Option<&Links> {
        self.links.as_ref()
    }

    /// The same without servers.
    #[must_use]
    pub fn without_servers(&self) -> Self {
        if self.servers == 0 { self.clone() } else { self.part(0..self.contributors()) }
    }

    /// How many servers there are: the last participants.
    pub fn servers(&self) -> u32 {
        self.servers
    }

    /// Whether all lines have one rate, as far as that is known.
    pub fn has_equal_lines(&self) -> bool {
        self.lines.is_empty()
    }

    /// The rate of a participant's line, as a multiple of a unit that all have in common.
    pub fn line(&self, participant: u32) -> u32 {
        self.lines.get(participant as usize).copied().unwrap_or(1)
    }

    /// The rate of each participant's line, in a common unit; empty if all are equal.
    pub fn lines(&self) -> &[u32] {
        &self.lines
    }

    /// The time of a byte on the slowest line, as a multiple of its time on the median line (of two
    /// middle lines, the faster).
    pub(crate) fn slowest(&self) -> f64 {
        let mut lines = self.lines.clone();
        lines.sort_unstable();
        let usual = lines.get(lines.len() / 2);
        let slowest = lines.first().zip(usual);
        slowest.map_or(1.0, |(&slowest, &usual)| f64::from(usual) / f64::from(slowest))
    }

    /// Whether participants should own different shares: there are servers, or lines of different
    /// rates.
    pub fn has_shares(&self) -> bool {
        self.servers > 0 || !self.has_equal_lines()
    }

    /// How many participants are not servers.
    pub fn contributors(&self) -> u32 {
        self.participants() - self.servers
    }

    /// How many participants there are.
    pub fn participants(&self) -> u32 {
        self.racks().len() as u32
    }

    /// The group of each participant in each tier, the racks first.
    pub fn tiers(&self) -> &[Vec<u32>] {
        &self.tiers
    }

    /// The rack of each participant.
    pub fn racks(&self) -> &[u32] {
        &self.tiers[0]
    }

    /// All participants in an order that keeps each group of each tier together, so that a ring
    /// crosses from group to group as rarely as it can.
    pub fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.participants()).collect();
        order.sort_by(|&a, &b| self.compare(a as usize, b as usize));
        order
    }

    /// Compares by the outermost group first.
    fn compare(&self, a: usize, b: usize) -> Ordering {
        let of = |participant: usize| {
            let place = self.places.get(participant).copied();
            self.tiers.iter().rev().map(move |tier| tier[participant]).chain(place)
        };
        of(a).cmp(of(b))
    }

    /// The members of each group of a tier, in [`order`](Self::order).
    ///
    /// # Panics
    /// If the topology doesn't have this tier.
    pub fn groups(&self, tier: usize) -> Vec<Vec<u32>> {
        let order = self.order();
        order.chunk_by(|&a, &b| self.same_group(tier, a, b)).map(<[u32]>::to_vec).collect()
    }

    /// The members of each rack.
    pub fn members(&self) -> Vec<Vec<u32>> {
        self.groups(1)
    }

    /// Whether two participants are in the same group of a tier.
    ///
    /// # Panics
    /// If the topology doesn't have this tier.
    pub fn same_group(&self, tier: usize, a: u32, b: u32) -> bool {
        let groups = &self.tiers[tier - 1];
        groups[a as usize] == groups[b as usize]
    }

    /// Whether two participants are in the same rack.
    pub fn same_rack(&self, a: u32, b: u32) -> bool {
        self.same_group(1, a, b)
    }

    /// How many tiers the way between two participants crosses: none inside a rack, one between
    /// racks of a group, and so on.
    pub fn distance(&self, a: u32, b: u32) -> usize {
        (1..=self.tiers.len()).filter(|&tier| !self.same_group(tier, a, b)).count()
    }
}

/// The first names of a label, or all of it.
fn first_names(label: &str, names: usize) -> &str {
    let end = label.match_indices('/').nth(names - 1);
    end.map_or(label, |(at, _)| &label[..at])
}

pub(crate) fn greatest_common_divisor(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

/// The place of each number among all of them, from 0; empty if they ascend.
fn ranked(numbers: &[u32]) -> Vec<u32> {
    if numbers.is_sorted() {
        return Vec::new();
    }
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    numbers.iter().map(|number| sorted.partition_point(|other| other < number) as u32).collect()
}

/// A number for each name, in order of appearance.
fn numbered<T: Ord>(names: impl Iterator<Item = T>) -> Vec<u32> {
    let mut numbers = BTreeMap::new();
    let number = |name| {
        let next = numbers.len() as u32;
        *numbers.entry(name).or_insert(next)
    };
    names.map(number).collect()
}

/// How many groups a tier has.
fn count(tier: &[u32]) -> usize {
    let mut groups = tier.to_vec();
    groups.sort_unstable();
    groups.dedup();
    groups.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_become_racks_and_racks_stay_together() {
        let topology = Topology::from_labels(&["b", "", "b", "a", ""]);
        assert_eq!(topology.tiers(), [[0, 1, 0, 2, 1]]);
        assert_eq!(topology.order(), [0, 2, 1, 4, 3]);
        assert_eq!(topology.members(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert!(topology.same_rack(1, 4) && !topology.same_rack(0, 1));
    }

    #[test]
    fn paths_become_tiers_and_groups_stay_together() {
        let labels = ["z1/p/r1", "z2/p/r1", "z1/q/r1", "z1/p/r2", "z2/p/r1", "z1/p/r1", "z2/q/r1"];
        let topology = Topology::from_labels(&labels);
        let racks = vec![0, 1, 2, 3, 1, 0, 4];
        assert_eq!(topology.tiers(), [racks, vec![0, 1, 2, 0, 1, 0, 3], vec![0, 1, 0, 0, 1, 0, 1]]);
        assert_eq!(topology.order(), [0, 5, 3, 2, 1, 4, 6]);
        assert_eq!(topology.groups(3), [vec![0, 5, 3, 2], vec![1, 4, 6]]);
        assert_eq!([5, 3, 2, 1].map(|other| topology.distance(0, other)), [0, 1, 2, 3]);
    }

    /// Even labels that are refused elsewhere have a meaning, and none panics.
    #[test]
    fn labels_may_have_different_depths() {
        // Labels without a rack's name share a rack: in pod a, and without a pod.
        let topology = Topology::from_labels(&["a", "a/b", "", "c/d", "a", "c/e", ""]);
        assert_eq!(topology.tiers(), [[0, 1, 2, 3, 0, 4, 2], [0, 0, 1, 2, 0, 2, 1]]);
        let deep = "x/".repeat(100);
        let topology = Topology::from_labels(&[&deep, &format!("{deep}y"), "/", "//"]);
        assert_eq!(topology.participants(), 4);
        assert!(topology.tiers().len() <= MAX_TIERS && !topology.same_rack(0, 1));
    }

    #[test]
    fn redundant_tiers_are_left_out() {
        let same = [
            Topology::from_labels(&["r1", "r2", "r2"]),
            Topology::from_labels(&["pod/r1", "pod/r2", "pod/r2"]),
            Topology::from_labels(&["p1/r", "p2/r", "p2/r"]),
            Topology::from_tiers(vec![vec![0, 1, 1], vec![5, 7, 7], vec![3; 3]]).unwrap(),
        ];
        assert!(same.iter().all(|topology| *topology == same[0]), "{same:?}");
        // A part of the participants may have fewer tiers.
        let all = Topology::from_labels(&["p1/r1", "p1/r2", "p2/r1"]);
        assert_eq!(all.part([0, 1]).tiers(), [[0, 1]]);
        assert_eq!(all.part([2]).tiers(), [[2]]);
        assert_eq!(all.part(0..3), all);
    }

    #[test]
    fn one_unknown_line_makes_all_equal() {
        let flat = || Topology::flat(3).with_servers(1);
        let lines = |mbit: &[u32]| flat().with_lines(mbit);
        assert_eq!(lines(&[25_000, 25_000, 100_000]).lines(), [1, 1, 4]);
        assert_eq!(lines(&[30, 20, 10]).line(0), 3);
        for equal in [&[][..], &[7, 7, 7], &[0, 5, 9], &[0, 0, 0], &[u32::MAX, MAX_LINE_MBIT, !0]] {
            assert_eq!(lines(equal), flat(), "{equal:?}");
            assert_eq!(lines(equal).line(2), 1);
        }
        // The lines of a part may be equal, or have another unit.
        assert_eq!(lines(&[25, 25, 100]).part([0, 1]), Topology::flat(2));
        assert_eq!(lines(&[10, 20, 40]).part([1, 2]).lines(), [1, 2]);
        assert_eq!(lines(&[10, 20, 40]).without_servers().lines(), [1, 2]);
    }

    #[test]
    fn an_order_keeps_groups_together() {
        let flat = || Topology::flat(4);
        let order = |topology: Topology, order: &[u32]| topology.arranged(&[], order).unwrap();
        assert_eq!(order(flat(), &[2, 0, 3, 1]).order(), [2, 0, 3, 1]);
        assert_eq!(order(flat(), &[0, 1, 2, 3]), flat());
        assert_eq!(order(flat(), &[]), flat());
        // A part keeps the order, and an ascending order is left out.
        let some = order(flat(), &[2, 0, 3, 1]).part([0, 2, 3]);
        assert_eq!(some.order(), [1, 0, 2]);
        assert_eq!(order(flat(), &[2, 0, 3, 1]).part([0, 1]), Topology::flat(2));
        assert_eq!(order(flat(), &[2, 0, 3, 1]).unordered(), flat());
        let racks = order(Topology::from_labels(&["a", "b", "a", "b"]), &[3, 0, 1, 2]);
        assert_eq!(racks.order(), [3, 1, 0, 2]);
        assert_eq!(racks.members(), [vec![3, 1], vec![0, 2]]);
        assert_eq!(racks.unordered(), Topology::from_racks(vec![0, 1, 0, 1]));
    }

    #[test]
    fn racks_may_differ_from_the_labels() {
        let found = Topology::flat(4).with_servers(1).arranged(&[0, 1, 0, 1], &[]).unwrap();
        assert_eq!(found, Topology::from_racks(vec![0, 1, 0, 1]).with_servers(1));
        let found = found.arranged(&[5, 5, 7, 7], &[3, 2, 1, 0]).unwrap();
        assert_eq!(found.order(), [3, 2, 1, 0]);
        for (racks, order) in [
            (&[0, 1][..], &[][..]),
            (&[], &[0, 1, 2]),
            (&[], &[0, 1, 2, 2]),
            (&[], &[0, 1, 2, 4]),
            (&[0; 5], &[0, 1, 2, 3]),
        ] {
            assert_eq!(Topology::flat(4).arranged(racks, order), None, "{racks:?} {order:?}");
        }
    }

    #[test]
    fn tiers_must_be_nested() {
        assert_eq!(Topology::from_tiers(Vec::new()), None);
        assert_eq!(Topology::from_tiers(vec![vec![0, 0], vec![0]]), None);
        assert_eq!(Topology::from_tiers(vec![vec![0, 1, 1], vec![0, 0, 1]]), None);
        assert_eq!(Topology::from_tiers(vec![vec![0]; 9]), None);
        assert!(Topology::from_tiers(vec![vec![0]; 8]).is_some());
    }
}
