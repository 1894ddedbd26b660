//! Finds racks and the best ring order, where the measured links make them clear. Pure.
//!
//! Racks are searched only if no node has a label. A link is near or far, by its latency or by its
//! rate. The near links must divide the nodes into racks of two or more: all links inside racks are
//! near, and all others far. A slow node, or a link that was slow by chance, never looks like that.
//!
//! An order is used only if all links are known, and if its slowest link is clearly faster than
//! that of the usual order.

use std::collections::BTreeMap;

use gradwire_collectives::Topology;

use crate::model::network::{Arrangement, LinkMeasured};

/// The fewest nodes of a rack; with fewer, slow nodes would look like racks.
const LEAST: usize = 2;

/// From this many nodes on, a smaller difference is clear. Fewer nodes may look divided by chance:
/// four nodes have only three ways to be in two racks, and pairs are measured in three rounds.
const MANY: u32 = 6;

/// The smallest ratio of the latencies of far and near links, for few nodes and for many.
const FAR_LATENCY: [f64; 2] = [2.0, 1.5];

/// The smallest ratio of the rates of near and far links, for few nodes and for many.
const FAR_RATE: [f64; 2] = [1.5, 1.2];

/// Latencies that differ by less, in seconds, count as equal on any network.
const LEAST_LATENCY: f64 = 10e-6;

/// An order is better if its slowest link is at least this many times as fast.
const BETTER: f64 = 1.25;

/// The links by the numbers of their nodes, the smaller first.
type Links<'a> = BTreeMap<(u32, u32), &'a LinkMeasured>;

/// The arrangement that follows from the links, if any.
pub(super) fn arrange(
    topology: &Topology,
    are_labelled: bool,
    links: &[LinkMeasured],
) -> Option<Arrangement> {
    let links: Links<'_> = links.iter().map(|link| ((link.from.0, link.to.0), link)).collect();
    let nodes = topology.participants();
    let racks = if are_labelled { None } else { racks(nodes, &links) };
    let (racks, of_racks) = racks.unwrap_or_default();
    let arranged = topology.clone().arranged(&racks, &[])?;
    let (order, of_order) = order(&arranged, &links).unwrap_or_default();
    let reasons: Vec<String> =
        [of_racks, of_order].into_iter().filter(|reason| !reason.is_empty()).collect();
    (!reasons.is_empty()).then(|| Arrangement { racks, order, reason: reasons.join("; ") })
}

/// The rack of each node, and the reason.
fn racks(nodes: u32, links: &Links<'_>) -> Option<(Vec<u32>, String)> {
    let size = usize::from(nodes >= MANY);
    let by_rate = divide(nodes, links, |link| 1.0 / link.rate, FAR_RATE[size], 0.0);
    let by_latency = || divide(nodes, links, |link| link.latency, FAR_LATENCY[size], LEAST_LATENCY);
    let in_words = |racks: &[u32]| {
        let count = racks.iter().max().map_or(0, |last| last + 1);
        format!("no node has a rack label, and the links show {count} racks")
    };
    if let Some((racks, near, far)) = by_rate {
        let mbit = |per_byte: f64| 8e-6 / per_byte;
        let reason = format!(
            "{}: at least {:.0} Mbit/s inside racks, at most {:.0} Mbit/s between them",
            in_words(&racks),
            mbit(near),
            mbit(far)
        );
        return Some((racks, reason));
    }
    let (racks, near, far) = by_latency()?;
    let reason = format!(
        "{}: at most {:.0} µs inside racks, at least {:.0} µs between them",
        in_words(&racks),
        near * 1e6,
        far * 1e6
    );
    Some((racks, reason))
}

/// Divides nodes by the costs of links. Returns the rack of each node, the largest cost inside
/// racks, and the smallest cost between them.
fn divide(
    nodes: u32,
    links: &Links<'_>,
    cost: impl Fn(&LinkMeasured) -> f64,
    ratio: f64,
    difference: f64,
) -> Option<(Vec<u32>, f64, f64)> {
    let mut costs: Vec<f64> = links.values().map(|link| cost(link)).collect();
    costs.sort_by(f64::total_cmp);
    let gaps = costs.windows(2).map(|two| (two[0], two[1]));
    let gaps = gaps.filter(|(near, far)| far / near >= ratio && far - near >= difference);
    let mut gaps: Vec<(f64, f64)> = gaps.collect();
    gaps.sort_by(|a, b| (b.1 / b.0).total_cmp(&(a.1 / a.0)));
    gaps.into_iter().find_map(|(most, least)| {
        let near = |link: &LinkMeasured| cost(link) <= most;
        let racks = joined(nodes, links, near);
        let sizes = racks.iter().fold(BTreeMap::new(), |mut sizes, rack| {
            *sizes.entry(rack).or_insert(0) += 1;
            sizes
        });
        let same = |&(a, b): &(u32, u32)| racks[a as usize] == racks[b as usize];
        let is_clear = sizes.len() > 1
            && sizes.values().all(|&size| size >= LEAST)
            && links.iter().all(|(pair, link)| same(pair) == near(link));
        is_clear.then_some((racks, most, least))
    })
}

/// Numbers the groups of nodes that are connected by near links.
fn joined(nodes: u32, links: &Links<'_>, near: impl Fn(&LinkMeasured) -> bool) -> Vec<u32> {
    let mut group: Vec<u32> = (0..nodes).collect();
    for (&(a, b), link) in links {
        let (a, b) = (group[a as usize], group[b as usize]);
        if a != b && near(link) {
            group.iter_mut().filter(|of| **of == a.max(b)).for_each(|of| *of = a.min(b));
        }
    }
    let mut numbers = BTreeMap::new();
    let number = |of| {
        let next = numbers.len() as u32;
        *numbers.entry(of).or_insert(next)
    };
    group.into_iter().map(number).collect()
}

/// The cost of a ring: the seconds per byte of its slowest link, and the sum over all links.
type Ring = (f64, f64);

/// The cost of a ring. Only links inside racks count, because the measured rate of a link between
/// racks depends on how many nodes shared the uplink.
fn ring(topology: &Topology, order: &[u32], links: &Links<'_>) -> Option<Ring> {
    let after = order.iter().cycle().skip(1);
    let pairs = order.iter().zip(after).filter(|&(&a, &b)| topology.same_rack(a, b));
    let costs = pairs.map(|(&a, &b)| {
        let link = links.get(&(a.min(b), a.max(b)))?;
        Some(1.0 / link.rate)
    });
    let costs: Vec<f64> = costs.collect::<Option<_>>()?;
    Some((costs.iter().copied().fold(0.0, f64::max), costs.iter().sum()))
}

/// An order of the nodes in which a ring has faster links, and the reason.
fn order(topology: &Topology, links: &Links<'_>) -> Option<(Vec<u32>, String)> {
    let nodes = topology.participants() as usize;
    if nodes < 4 || links.len() < nodes * (nodes - 1) / 2 {
        return None;
    }
    let usual = topology.order();
    let before = ring(topology, &usual, links)?;
    let mut best = (before, usual);
    // Reversing a part of the ring changes two of its links (2-opt). `arranged` keeps racks
    // together in any order.
    loop {
        let parts = (0..nodes).flat_map(|start| (start + 2..=nodes).map(move |end| (start, end)));
        let better = parts.filter_map(|(start, end)| {
            let mut order = best.1.clone();
            order[start..end].reverse();
            let order = topology.clone().arranged(&[], &order)?.order();
            Some((ring(topology, &order, links)?, order))
        });
        let better =
            better.min_by(|a, b| a.0.partial_cmp(&b.0).unwrap_or(std::cmp::Ordering::Equal));
        match better {
            Some(better) if better.0 < best.0 => best = better,
            _ => break,
        }
    }
    let ((slowest, _), order) = best;
    if before.0 / slowest < BETTER {
        return None;
    }
    let mbit = |per_byte: f64| 8e-6 / per_byte;
    let reason = format!(
        "a ring in the order {} has links of at least {:.0} Mbit/s, instead of {:.0} Mbit/s",
        order.iter().map(u32::to_string).collect::<Vec<_>>().join(", "),
        mbit(slowest),
        mbit(before.0)
    );
    Some((order, reason))
}
