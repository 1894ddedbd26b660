//! Servers: nodes without ranks that reduce for the others (Jiang et al., "A Unified Architecture
//! for Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020, which
//! describes BytePS).
//!
//! Each block has an owner. Everybody sends it what is to be added, and gets the result back: two
//! messages one after the other. A participant that is an owner saves the way of its own
//! contribution, a server saves nothing and sends nothing of its own. So that all are equally busy,
//! with n participants and k servers, of n² + kn − 2k parts each participant owns n − k and each
//! server 2(n − 1). Then the busiest sends 2n(n−1)/(n² + kn − 2k) times the piece: twice (n−1)/n
//! without servers, as much as the ring, and once with as many servers as participants. More of
//! them only share what servers do.
//!
//! A server sends only what has come from everybody. So that it begins early, blocks are cut into
//! segments, and everybody sends the first segment of each owner before the second one: then a
//! piece of q segments that is alone takes 1 + 1/q times as long as its line is busy, not twice as
//! long.
//!
//! Without servers it is [`direct`](super::circulant). Only an allreduce has servers.

use super::{
    build::{self, Builder},
    circulant,
    kind::Roles,
    shape::{Cluster, Shape},
};
use crate::{
    schedule::{Action, Block, GRAIN, Schedule, split},
    topology::Topology,
};

/// How many parts of the piece a participant and a server own, of all parts.
#[derive(Debug, Clone, Copy)]
struct Parts {
    participant: u64,
    server: u64,
    all: u64,
}

impl Parts {
    fn new(topology: &Topology) -> Self {
        let (n, k) = (u64::from(topology.contributors()), u64::from(topology.servers()));
        let (participant, server) = if k < n { (n - k, 2 * (n - 1)) } else { (0, 1) };
        Self { participant, server, all: n * participant + k * server }
    }

    fn of(self, topology: &Topology, owner: u32) -> u64 {
        if owner < topology.contributors() { self.participant } else { self.server }
    }
}

/// The least elements of a segment, and the most segments that the size decides for.
const SEGMENT: u64 = 1 << 14;
const MAX_SEGMENTS: u64 = 8;

/// A block, which is a segment of what its owner has.
#[derive(Debug, Clone, Copy)]
struct Owned {
    owner: u32,
    segment: u32,
    block: Block,
}

/// The blocks with their owners, `least` of each at least. A small piece has none for some.
fn owned(topology: &Topology, least: u32, count: u64) -> Vec<Owned> {
    let parts = Parts::new(topology);
    let grains = count.div_ceil(GRAIN);
    let (mut before, mut offset) = (0, 0);
    let mut blocks = Vec::with_capacity(topology.participants() as usize);
    for owner in 0..topology.participants() {
        before += parts.of(topology, owner);
        let share = u128::from(grains) * u128::from(before) / u128::from(parts.all);
        let end = (share as u64 * GRAIN).min(count);
        let own = end - offset;
        if own > 0 {
            let segments = (own / SEGMENT).clamp(1, MAX_SEGMENTS).max(least.into());
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

pub(super) fn allreduce(topology: &Topology, segments: u32, me: u32, count: u64) -> Schedule {
    let (contributors, all) = (topology.contributors(), topology.participants());
    if topology.servers() == 0 {
        return circulant::direct(topology, me, count);
    }
    let is_server = me >= contributors;
    if contributors == 1 || count == 0 {
        let mut alone = build::alone(all, me, count, Roles::default());
        alone.servers = topology.servers();
        if is_server {
            alone.steps.clear();
        }
        return alone;
    }
    let owned = owned(topology, segments, count);
    let mut builder = Builder::new(owned.len());
    // Everybody begins with another owner. Both ends of a message agree on its time: the segment,
    // and how far it goes around the circle of all.
    let ahead = |from: u32, to: u32| (to + all - from) % all;
    // Those who are so far away, the nearest first.
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
                    // A server has nothing to add the first one to.
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
pub(super) fn shape(topology: &Topology, segments: u32, cluster: &Cluster) -> Shape {
    if topology.servers() == 0 {
        return circulant::shape_direct(cluster);
    }
    let parts = Parts::new(topology);
    let part = |parts_of: u64| parts_of as f64 / parts.all as f64;
    let (own, server) = (part(parts.participant), part(parts.server));
    let (n, all) = (f64::from(topology.contributors()), cluster.nodes);
    // What all owners outside a rack get of it, and what its owners send to others.
    let out = |rack: &Vec<u32>| {
        let inside = rack.iter().filter(|&&one| one < topology.contributors()).count() as f64;
        let owned = inside * own + (rack.len() as f64 - inside) * server;
        (inside * (1.0 - owned) + owned * (n - inside)) / rack.len() as f64
    };
    let uplink = if cluster.racks > 1.0 {
        topology.members().iter().map(out).fold(0.0, f64::max)
    } else {
        0.0
    };
    let owners = if own > 0.0 { all } else { all - n };
    let segments = MAX_SEGMENTS.max(segments.into()) as f64;
    let sends = n.max(owners - 1.0 + if own > 0.0 { n - 1.0 } else { 0.0 });
    Shape {
        line: (1.0 + (n - 2.0) * own).max(n * server),
        senders: n as u32,
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
