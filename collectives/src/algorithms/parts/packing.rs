//! Spanning trees, each for a part of the piece, packed such that no line, uplink or link is busy
//! for longer than necessary (Wang et al., "Blink: Fast and Generic Collectives for Distributed
//! ML", MLSys 2020).
//!
//! The piece consists of small equal *units*. Each gets the tree with the cheapest links at that
//! moment; prices grow steeply with the load, as in Blink's approximation by multiplicative
//! weights. Then units are removed and routed again as long as time allows. Trees with few units
//! are left out where that costs little, because a tree is a block, and each block has its own
//! messages. The computation consists of sums, products and comparisons in a fixed order, so all
//! nodes find the same trees (SAME).
//!
//! What an allreduce sends up a tree comes down again, so a link of its trees has the same load in
//! both directions, and any participant may be the root. The trees of a broadcast have one root
//! and are used in one direction, those of a reduction to one participant are the same backwards.

mod loads;

use std::{cell::RefCell, collections::BTreeMap, rc::Rc};

use self::loads::{Loads, Network};
use crate::topology::Topology;

/// The number of units: a multiple of the number of participants, and more if these are few.
fn units_for(nodes: usize) -> usize {
    let least = if nodes <= 8 { 256 } else { 64 };
    nodes * usize::div_ceil(least, nodes)
}

/// How many links all passes but the first one examine: some hundred microseconds.
const LOOKS: usize = 1 << 17;

/// The most passes in which units are routed again.
const MAX_PASSES: usize = 6;

/// A tree with less than half of the mean is left out if the load of the busiest link grows at most
/// by this factor.
const BEARABLE: f64 = 1.05;

/// A spanning tree and how many units it carries.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Tree {
    pub(crate) root: u32,
    /// The parent of each participant; of the root itself.
    pub(crate) parents: Vec<u32>,
    pub(crate) units: u32,
}

/// Trees that share a piece, those with most units first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Packing {
    pub(crate) trees: Vec<Tree>,
    /// How long the busiest line or link is busy, as a multiple of the time that one with the usual
    /// rate takes for the piece.
    pub(crate) busy: f64,
    /// The traffic out of or into a rack, divided by its nodes; the largest, in pieces.
    pub(crate) uplink: f64,
}

/// The tree with these links, rooted at its centre.
fn centred(parents: &[usize], root: usize) -> (u32, Vec<u32>) {
    let nodes = parents.len();
    let mut links = vec![Vec::new(); nodes];
    for (child, &parent) in parents.iter().enumerate().filter(|(child, _)| *child != root) {
        links[child].push(parent);
        links[parent].push(child);
    }
    // The centre is the middle of the longest path. The last node found from any start is its end.
    let search = |from: usize| {
        let mut above = vec![from; nodes];
        let mut order = vec![from];
        let mut at = 0;
        while at < order.len() {
            let node = order[at];
            let before = above[node];
            for &next in links[node].iter().filter(|&&next| next != before) {
                above[next] = node;
                order.push(next);
            }
            at += 1;
        }
        (order[nodes - 1], above)
    };
    let (end, _) = search(root);
    let (mut other, above) = search(end);
    let mut way = vec![other];
    while other != end {
        other = above[other];
        way.push(other);
    }
    let centre = way[way.len() / 2];
    let (_, above) = search(centre);
    (centre as u32, above.into_iter().map(|parent| parent as u32).collect())
}

/// The topology, the root and the most trees of a packing.
type Key = (Topology, Option<u32>, u32);

/// How many packings a thread keeps (BOUND).
const KEPT: usize = 4;

thread_local! {
    /// The last packings: pieces of all sizes have the same ones.
    static LAST: RefCell<Vec<(Key, Rc<Packing>)>> = const { RefCell::new(Vec::new()) };
}

/// The result of [`pack`], which takes up to a millisecond, from the cache if possible.
pub(crate) fn packed(topology: &Topology, root: Option<u32>, most: u32) -> Rc<Packing> {
    LAST.with_borrow_mut(|last| {
        let is_it = |known: &(Key, Rc<Packing>)| {
            let (of, from, trees) = &known.0;
            (of, *from, *trees) == (topology, root, most)
        };
        if let Some((_, known)) = last.iter().find(|known| is_it(known)) {
            return Rc::clone(known);
        }
        let packing = Rc::new(pack(topology, root, most));
        last.truncate(KEPT - 1);
        last.insert(0, ((topology.clone(), root, most), Rc::clone(&packing)));
        packing
    })
}

/// Packs at most `most` trees among the participants of a topology, all from `root` if there is
/// one.
pub(crate) fn pack(topology: &Topology, root: Option<u32>, most: u32) -> Packing {
    let network = Network::new(topology);
    let nodes = network.nodes;
    let units = units_for(nodes);
    let root = root.map(|root| root as usize);
    let mut loads = Loads::new(&network, root.is_none());
    let mut routed: Vec<(usize, Vec<usize>)> = Vec::with_capacity(units);
    for _ in 0..units {
        let tree = loads.cheapest(root);
        loads.add(tree.0, &tree.1, 1.0);
        routed.push(tree);
    }
    let mut best = (f64::INFINITY, Vec::new());
    let least = usize::from(root.is_some());
    let passes = MAX_PASSES.min(LOOKS / (units * nodes * nodes)).max(least);
    for pass in 0..=passes {
        // The first units were routed before the others, so they are routed again in any case.
        let again = if pass == 0 { units / 8 } else { units };
        for old in &mut routed[..again] {
            loads.add(old.0, &old.1, -1.0);
            *old = loads.cheapest(root);
            loads.add(old.0, &old.1, 1.0);
        }
        let busy = loads.busy(units as f64);
        if busy < best.0 {
            best = (busy, routed.clone());
        }
    }
    let mut counted: BTreeMap<(u32, Vec<u32>), u32> = BTreeMap::new();
    for (from, parents) in &best.1 {
        let tree = match root {
            None => centred(parents, *from),
            Some(root) => {
                (root as u32, parents.iter().map(|&parent| parent as u32).collect::<Vec<u32>>())
            }
        };
        *counted.entry(tree).or_default() += 1;
    }
    let trees = counted.into_iter().map(|((root, parents), units)| Tree { root, parents, units });
    let mut trees: Vec<Tree> = trees.collect();
    trees.sort_by_key(|tree| std::cmp::Reverse(tree.units));
    thinned(&network, trees, most as usize, root.is_none(), best.0 * BEARABLE)
}

/// Leaves out trees with few units.
fn thinned(
    network: &Network,
    mut trees: Vec<Tree>,
    most: usize,
    both: bool,
    bearable: f64,
) -> Packing {
    let mut loads = Loads::new(network, both);
    let add = |loads: &mut Loads<'_>, tree: &Tree, sign: f64| {
        let parents: Vec<usize> = tree.parents.iter().map(|&parent| parent as usize).collect();
        loads.add(tree.root as usize, &parents, sign * f64::from(tree.units));
    };
    let mut units = 0;
    for tree in &trees {
        units += tree.units;
        add(&mut loads, tree, 1.0);
    }
    while trees.len() > 1 {
        let last = &trees[trees.len() - 1];
        let left = units - last.units;
        add(&mut loads, last, -1.0);
        let is_small = 2 * last.units * (trees.len() as u32) < units;
        let goes = trees.len() > most || (is_small && loads.busy(left.into()) <= bearable);
        if !goes {
            add(&mut loads, last, 1.0);
            break;
        }
        units = left;
        trees.pop();
    }
    Packing { busy: loads.busy(units.into()), uplink: loads.uplink(units.into()), trees }
}

#[cfg(test)]
mod tests {
    use rand::{RngExt, SeedableRng};
    use rand_xoshiro::SplitMix64;

    use super::*;
    use crate::links::Links;

    fn linked(pairs: Vec<u32>, line: u32, nodes: u32) -> Topology {
        let links = Links::new(vec![line; nodes as usize], 0, pairs).unwrap();
        Topology::flat(nodes).with_links(Some(links))
    }

    /// All ways to divide participants into groups, as the group of each.
    fn partitions(nodes: usize) -> Vec<Vec<usize>> {
        let mut all = vec![vec![0]];
        for _ in 1..nodes {
            let longer = |groups: Vec<usize>| {
                let next = groups.iter().max().unwrap() + 1;
                (0..=next)
                    .map(move |group| groups.iter().copied().chain([group]).collect::<Vec<usize>>())
            };
            all = all.into_iter().flat_map(longer).collect();
        }
        all
    }

    fn rate(topology: &Topology, a: usize, b: usize) -> f64 {
        f64::from(topology.links().unwrap().pair(a as u32, b as u32))
    }

    /// The median of a network's pairs, by which `busy` is counted.
    fn usual(topology: &Topology) -> f64 {
        let nodes = topology.participants() as usize;
        let mut all: Vec<f64> = Vec::new();
        for a in 0..nodes {
            all.extend((0..a).map(|b| rate(topology, a, b)));
        }
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    }

    fn random_pairs(nodes: u32, random: &mut SplitMix64) -> Vec<u32> {
        let many = nodes * (nodes - 1) / 2;
        (0..many).map(|_| [1, 100, 300, 1000, 1700][random.random_range(0..5)]).collect()
    }

    /// Where links are the limit, the rate is near the least that any partition of the participants
    /// allows (Nash-Williams and Tutte: the rate between its groups, divided by their number less
    /// one).
    #[test]
    fn trees_reach_what_partitions_allow() {
        let mut random = SplitMix64::seed_from_u64(5);
        for nodes in 2..=6u32 {
            for _ in 0..40 {
                let topology = linked(random_pairs(nodes, &mut random), 1_000_000, nodes);
                let many = nodes as usize;
                let allowed = partitions(many).into_iter().filter_map(|groups| {
                    let number = groups.iter().max().unwrap() + 1;
                    let mut between = 0.0;
                    for a in 0..many {
                        let others = (0..a).filter(|&b| groups[a] != groups[b]);
                        between += others.map(|b| rate(&topology, a, b)).sum::<f64>();
                    }
                    (number > 1).then(|| between / (number - 1) as f64)
                });
                let allowed = allowed.fold(f64::INFINITY, f64::min);
                let reached = usual(&topology) / pack(&topology, None, 128).busy;
                assert!(reached <= allowed * 1.000_001, "{reached} of {allowed}");
                assert!(reached >= 0.85 * allowed, "{reached} of {allowed}: {topology:?}");
            }
        }
    }

    /// The limit from one root is the least cut between it and another participant (Edmonds).
    #[test]
    fn broadcasts_reach_what_cuts_allow() {
        let mut random = SplitMix64::seed_from_u64(6);
        for nodes in 2..=8u32 {
            for _ in 0..20 {
                let topology = linked(random_pairs(nodes, &mut random), 1_000_000, nodes);
                let root = random.random_range(0..nodes);
                let cuts = (0..1u32 << nodes).filter(|set| set & (1 << root) != 0);
                let cut = |set: u32| {
                    let inside = (0..nodes).filter(move |node| set & (1 << node) != 0);
                    let outside = move || (0..nodes).filter(move |node| set & (1 << node) == 0);
                    inside
                        .flat_map(|a| outside().map(move |b| (a, b)))
                        .map(|(a, b)| rate(&topology, a as usize, b as usize))
                        .sum::<f64>()
                };
                let allowed = cuts.map(cut).filter(|&cut| cut > 0.0).fold(f64::INFINITY, f64::min);
                let reached = usual(&topology) / pack(&topology, Some(root), 128).busy;
                assert!(reached <= allowed * 1.000_001, "{reached} of {allowed}");
                assert!(reached >= 0.75 * allowed, "{reached} of {allowed}: {topology:?}");
            }
        }
    }

    /// Behind a switch each participant is the centre of a star, and sends no more than in a ring.
    #[test]
    fn equal_lines_get_stars() {
        for nodes in [2, 3, 4, 8, 16, 64] {
            let packing = pack(&Topology::flat(nodes), None, 128);
            let least = 2.0 * f64::from(nodes - 1) / f64::from(nodes);
            assert!(packing.busy <= 1.001 * least, "{nodes}: {} of {least}", packing.busy);
            let is_star = |tree: &Tree| tree.parents.iter().all(|&parent| parent == tree.root);
            assert!(packing.trees.iter().all(is_star), "{packing:?}");
            let down = pack(&Topology::flat(nodes), Some(nodes / 2), 128);
            assert!(down.busy <= if nodes < 32 { 1.1 } else { 1.5 }, "{nodes}: {}", down.busy);
        }
    }

    /// A participant with a faster line is the centre of more trees.
    #[test]
    fn faster_lines_carry_more() {
        for (rates, least) in [
            (vec![1, 1, 1, 3], 1.0),
            (vec![1; 8], 1.75),
            (vec![1, 1, 1, 1, 1, 1, 1, 2], 112.0 / 72.0),
            (vec![2, 2, 2, 4, 4, 4], 10.0 / 9.0),
        ] {
            let topology = Topology::flat(rates.len() as u32).with_lines(&rates);
            let busy = pack(&topology, None, 128).busy;
            assert!((busy / least - 1.0).abs() < 0.1, "{rates:?}: {busy}, not {least}");
        }
    }

    /// As little as possible leaves a rack, for any rates of uplinks and for unknown ones.
    #[test]
    fn uplinks_are_crossed_as_rarely_as_possible() {
        let racks = Topology::from_racks((0..32).map(|node| node / 8).collect());
        let with = |share| Links::new(vec![900; 32], share, Vec::new());
        for share in [10, 25, 50, 100, 300] {
            let topology = racks.clone().with_links(with(share));
            let packing = pack(&topology, None, 128);
            assert!(packing.uplink <= 1.02 * 1.5 / 8.0, "{share}: {}", packing.uplink);
            let least = 1.9375f64.max(1.5 / (f64::from(share) * 8.0 / 900.0));
            assert!(packing.busy <= 1.05 * least, "{share}: {} of {least}", packing.busy);
            let down = pack(&topology, Some(3), 128);
            assert!(down.uplink <= 1.1 / 8.0, "{share}: {}", down.uplink);
        }
        let packing = pack(&racks, None, 128);
        assert!(packing.uplink <= 1.02 * 1.5 / 8.0, "{}", packing.uplink);
    }

    #[test]
    fn fewer_trees_are_possible() {
        let topology = Topology::flat(8);
        for most in [1, 2, 5, 8] {
            assert_eq!(pack(&topology, None, most).trees.len(), most as usize);
        }
        let mut random = SplitMix64::seed_from_u64(9);
        let topology = linked(random_pairs(9, &mut random), 1000, 9);
        assert_eq!(pack(&topology, None, 64), pack(&topology.clone(), None, 64), "SAME");
    }
}
