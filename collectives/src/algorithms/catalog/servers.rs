//! Servers: nodes without ranks that reduce for the others (Jiang et al., "A Unified Architecture
//! for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020, which
//! describes BytePS).
//!
//! Each block has an owner. Every participant sends it its contribution, and gets the result back:
//! two messages one after the other. A participant that is an owner need not send its own
//! contribution; a server has none. To keep all equally busy, with n participants and k servers,
//! each participant owns n − k and each server 2(n − 1) of n² + kn − 2k parts. Then the busiest
//! node sends 2n(n−1)/(n² + kn − 2k) times the piece: twice (n−1)/n without servers, as much as the
//! ring, and once with as many servers as participants. Further servers only share what servers do.
//!
//! Nodes with faster lines own more, unless `weights=equal` is given. With `servers=K` only the
//! first K servers own a part.
//!
//! A server can send only what all participants have contributed to. To let it begin early, blocks
//! are cut into segments, and every participant sends the first segment of each owner before the
//! second one. Then a single piece of q segments takes 1 + 1/q times as long as its line is busy,
//! not twice as long.
//!
//! Without servers and with equal lines it is [`direct`]. Only an allreduce has servers.

use std::ops::{Range, RangeInclusive};

use super::{direct, prelude::*};
use crate::{algorithms::kind::Roles, schedule::Steps};

const SERVERS: Parameter = Parameter {
    name: "servers",
    about: "how many of the first servers own a part, at most",
    values: Values::Number { least: 0, most: 4096, usual: 4096 },
};

const WEIGHTS: Parameter = Parameter {
    name: "weights",
    about: "whether nodes with faster lines own more",
    values: Values::Word(&["lines", "equal"]),
};

pub(super) struct Servers;

impl Definition for Servers {
    fn about(&self) -> About {
        About {
            idea: "nodes without ranks own blocks and reduce them; their shares keep all nodes \
                   equally busy",
            cost: "2α + 2n(n−1)/(n²+kn−2k)·S·β for k servers and n = M other nodes; k ≥ n: \
                   2α + S·β",
            when: "hosts to spare, lines of different rates",
            source: "Jiang et al., \"A Unified Architecture for Accelerating Distributed DNN \
                     Training in Heterogeneous GPU/CPU Clusters\", OSDI 2020",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS, SERVERS, WEIGHTS]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        allreduce(topology, Wanted::of(spec), me, count)
    }

    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        cost(topology, Wanted::of(spec), cluster)
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&direct::Direct)
    }

    /// The cost already counts segments.
    fn in_segments(&self, _: Kind, _segments: f64, cost: Shape) -> Shape {
        cost
    }

    fn symmetries(&self, _: &Spec, topology: &Topology) -> Vec<Symmetry> {
        let around = Symmetry::around(topology.order());
        [around].into_iter().chain(Symmetry::of_all_tiers(topology)).collect()
    }

    fn takes_servers(&self) -> bool {
        true
    }
}

/// How much of the piece each owner has, as parts of all, so that no line is busy for longer than
/// necessary.
///
/// A participant that owns a share x of the piece S sends and receives (1 + (n−2)x)·S, and a server
/// with a share y sends and receives n·y·S. With rates B and C of their lines, these are done at T
/// if x ≤ (T·B/S − 1)/(n−2) and y ≤ T·C/(n·S). All shares add up to 1, so the least T is S/min B,
/// because each participant sends its own piece, or that at which all lines are full:
/// 2n(n−1)·S/(nΣB + (n−2)ΣC). This solves BytePS's linear program for any rates; for equal ones it
/// is the paper's result. In the first case lines have room left, and servers get as much as they
/// can take.
#[derive(Debug, Clone)]
struct Parts {
    /// The parts of each owner, the servers last. Whole numbers, so all nodes compute the same
    /// (SAME).
    of: Vec<u128>,
    all: u128,
    /// How long the slowest line of a participant is busy, as a multiple of the time that its own
    /// piece takes.
    line: f64,
}

/// The parameters of a spec.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    segments: u32,
    /// The most servers that own a part, the first ones.
    servers: u32,
    /// Whether lines count as equal.
    equal: bool,
}

impl Wanted {
    /// All servers, with shares by the rates of lines, in blocks by their size.
    pub(super) const USUAL: Self = Self { segments: 1, servers: u32::MAX, equal: false };

    pub(super) fn of(spec: &Spec) -> Self {
        let (servers, equal) = (spec.number("servers"), spec.number("weights") == 1);
        Self { segments: spec.segments(), servers, equal }
    }
}

impl Parts {
    fn new(topology: &Topology, wanted: Wanted) -> Self {
        let n = u128::from(topology.contributors());
        let end = topology.contributors().saturating_add(wanted.servers);
        let rate = |owner| match owner {
            idle if idle >= end => 0,
            _ if wanted.equal => 1,
            owner => u128::from(topology.line(owner)),
        };
        let rates: Vec<u128> = (0..topology.participants()).map(rate).collect();
        let (own, servers) = rates.split_at(n as usize);
        let (sum, slowest) = (own.iter().sum::<u128>(), own.iter().min().copied().unwrap_or(1));
        let served: u128 = servers.iter().sum();
        // All lines together, in a unit in which they are full at 2n(n−1).
        let (full, needed) = (n * sum + n.saturating_sub(2) * served, 2 * n * (n - 1));
        let (participants, of_server, line): (Vec<u128>, u128, f64) =
            if n > 2 && needed * slowest >= full {
                let line = (needed * slowest) as f64 / full as f64;
                (own.iter().map(|rate| needed * rate - full).collect(), 2 * (n - 1) * (n - 2), line)
            } else if served >= n * slowest {
                (vec![0; n as usize], 1, 1.0)
            } else {
                // Participants share the rest by how much faster their lines are than the slowest
                // one. Two participants share it by their rates, because it makes no difference.
                let room = |rate: &u128| if n > 2 { rate - slowest } else { *rate };
                let left = n * slowest - served;
                let all = own.iter().map(room).sum();
                (own.iter().map(|rate| left * room(rate)).collect(), all, 1.0)
            };
        let servers = servers.iter().map(|rate| of_server * rate);
        let of: Vec<u128> = participants.into_iter().chain(servers).collect();
        Self { all: of.iter().sum(), of, line }
    }

    /// How many own a part.
    fn owners(&self) -> u64 {
        self.of.iter().filter(|&&parts| parts > 0).count() as u64
    }

    /// The share of an owner in the piece.
    fn share(&self, owner: u32) -> f64 {
        self.of[owner as usize] as f64 / self.all as f64
    }
}

/// The fewest elements of a segment, and the most segments by size.
const SEGMENT: u64 = 1 << 14;
const MAX_SEGMENTS: u64 = 8;

/// BOUND: the most blocks of all owners together, unless there are more owners.
const MAX_BLOCKS: u64 = 4096;

/// The fewest and the most segments of each of `owners`, if at least `least` are asked for.
fn segments(owners: u64, least: u32) -> RangeInclusive<u64> {
    let bound = (MAX_BLOCKS / owners).max(1);
    let least = u64::from(least).clamp(1, bound);
    least..=MAX_SEGMENTS.min(bound).max(least)
}

/// A block, which is a segment of what its owner has.
#[derive(Debug, Clone, Copy)]
struct Owned {
    owner: u32,
    segment: u32,
    block: Block,
}

/// The blocks with their owners. In a small piece some have none.
fn owned(topology: &Topology, wanted: Wanted, count: u64) -> Vec<Owned> {
    let parts = Parts::new(topology, wanted);
    let segments = segments(parts.owners(), wanted.segments);
    let grains = count.div_ceil(GRAIN);
    let (mut before, mut offset) = (0, 0);
    let mut blocks = Vec::with_capacity(topology.participants() as usize);
    for owner in 0..topology.participants() {
        before += parts.of[owner as usize];
        let share = u128::from(grains) * before / parts.all;
        let end = (share as u64 * GRAIN).min(count);
        let own = end - offset;
        if own > 0 {
            let segments = (own / SEGMENT).clamp(*segments.start(), *segments.end());
            blocks.extend((0..).zip(split(own, segments)).map(|(segment, block)| Owned {
                owner,
                segment,
                block: Block { offset: offset + block.offset, ..block },
            }));
        }
        offset = end;
    }
    blocks
}

/// The schedule with one participant besides the servers, or without elements.
pub(super) fn alone(topology: &Topology, me: u32, count: u64) -> Schedule {
    let mut alone = build::alone(topology.participants(), me, count, Roles::default());
    alone.servers = topology.servers();
    if me >= topology.contributors() {
        alone.steps = Steps::default();
    }
    alone
}

pub(super) fn allreduce(topology: &Topology, wanted: Wanted, me: u32, count: u64) -> Schedule {
    let (contributors, all) = (topology.contributors(), topology.participants());
    if !topology.has_shares() {
        return direct::allreduce(topology, me, count);
    }
    let is_server = me >= contributors;
    if contributors == 1 || count == 0 {
        return alone(topology, me, count);
    }
    let owned = owned(topology, wanted, count);
    let mut builder = Builder::new(owned.len());
    // Each participant begins with another owner. Both ends of a message agree on its time: the
    // segment, and its distance around the circle of all.
    let ahead = |from: u32, to: u32| (to + all - from) % all;
    // The participants by distance, the nearest first.
    let others = |other: fn(u32, u32, u32) -> u32| {
        let others = (1..all).map(move |time| (time, other(me, time, all) % all));
        others.filter(|&(_, peer)| peer < contributors)
    };
    for (block, &Owned { owner, segment, .. }) in (0..).zip(&owned) {
        let (up, down) = (segment * all, (segment + 1) * all);
        if owner == me {
            if !is_server {
                builder.add(up, Action::ReduceLocal, block);
            }
            for (at, (time, peer)) in others(|me, time, all| me + all - time).enumerate() {
                let takes = match at {
                    // A server has nothing to add the first contribution to.
                    0 if is_server => Action::copy(peer),
                    _ => Action::reduce(peer, peer < me),
                };
                builder.add(up + time, takes, block);
            }
            for (time, peer) in others(|me, time, _| me + time) {
                builder.add(down + time, Action::send(peer), block);
            }
        } else if !is_server {
            let time = up + ahead(me, owner);
            builder.add(time, Action::ReduceLocal, block);
            builder.add(time, Action::send(owner), block);
            builder.add(down + ahead(owner, me), Action::copy(owner), block);
        }
        if !is_server {
            builder.add(down + all, Action::Publish, block);
        }
    }
    let blocks = owned.iter().map(|owned| owned.block).collect();
    Schedule { servers: topology.servers(), ..builder.finish(all, me, blocks) }
}

/// The cost of an allreduce of n participants and k servers: 2α + 2n(n−1)/(n² + kn − 2k)·S·β, and
/// as much of 2(n−1)²/(n² + kn − 2k)·S·γ, for k < n.
pub(super) fn cost(topology: &Topology, wanted: Wanted, cluster: &Cluster) -> Shape {
    if !topology.has_shares() {
        return direct::cost(cluster);
    }
    let parts = Parts::new(topology, wanted);
    let largest = |owners: Range<u32>| owners.map(|one| parts.share(one)).fold(0.0, f64::max);
    let own = largest(0..topology.contributors());
    let server = largest(topology.contributors()..topology.participants());
    let n = f64::from(topology.contributors());
    // What a rack sends to owners outside, and what its owners send to others.
    let out = |rack: &Vec<u32>| {
        let inside = rack.iter().filter(|&&one| one < topology.contributors()).count() as f64;
        let owned: f64 = rack.iter().map(|&one| parts.share(one)).sum();
        (inside * (1.0 - owned) + owned * (n - inside)) / rack.len() as f64
    };
    let uplink = if cluster.racks > 1.0 {
        topology.members().iter().map(out).fold(0.0, f64::max)
    } else {
        0.0
    };
    let owning = parts.owners();
    let segments = *self::segments(owning, wanted.segments).end() as f64;
    let owners = owning as f64;
    let sends = n.max(owners - 1.0 + if own > 0.0 { n - 1.0 } else { 0.0 });
    Shape {
        line: parts.line,
        senders: n as u32,
        burst: ((n - 1.0) * own).max(n * server),
        uplink,
        reduced: (n - 1.0) * own.max(server),
        messages: sends * segments,
        // The owner of a single block gets it from all and sends it to all.
        least_messages: 2.0 * n,
        blocks: owners * segments,
        least_block: 4.0 * SEGMENT as f64,
        first: owners,
        ..cluster.hops(2.0, 2.0)
    }
}
