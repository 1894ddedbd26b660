//! Pieces in which each section has its own roles: allgather, gather, scatter, reducescatter and
//! alltoall.
//!
//! Each participant is the root of a tree. A reduction to one participant goes up its tree, a
//! contribution to all comes down its owner's tree, and a contribution to one participant goes up
//! the receiver's tree. Each link of a tree has a fixed time, and all blocks that take a link at
//! the same time are one message. So the choice of trees is the algorithm, and the same trees serve
//! all five collectives:
//!
//! | trees | messages one after the other | messages of each | sources |
//! |---|---|---|---|
//! | ring: to the next one | M−1 | M−1 | Chan et al., 2007 |
//! | circulant: by distances that fall to 1/k each round | ⌈log_k M⌉ | (k−1)⌈log_k M⌉ | Bruck et al., 1997; Träff, 2024 |
//! | direct: all to the root | 1 | M−1 | Bruck et al., 1997 |
//! | racks: by way of one member of each rack and of each group of racks | l+1 | w−1 + Σ(n−1) | Wan et al., 2020 |
//! | aligned: pairs at doubling distance, the canonical order of additions | ⌈log2 M⌉ | | Thakur, Rabenseifner & Gropp, 2005 |
//!
//! In all collectives but the alltoall each element crosses the line of a participant once. In an
//! alltoall only direct trees achieve that. The others send elements again for each hop, so they
//! suit small pieces.

use std::{collections::BTreeMap, ops::Range};

use super::{
    aligned::Groups,
    build::{self, Builder, Link, Place},
    circle::Circle,
    shape::{Cluster, Shape},
    tiers::Tiers,
};
use crate::{
    algorithms::kind::{Kind, Roles, Section},
    schedule::{Action, Block, Schedule},
    topology::Topology,
};

/// One message on the way to an owner.
#[derive(Debug, Clone, Copy)]
struct Hop {
    /// The position that receives it.
    to: u32,
    /// When: it grows with each hop.
    time: u32,
}

/// A tree for each participant. Participants are given by their positions in an order.
#[derive(Debug)]
pub(crate) enum Trees {
    Ring,
    Direct,
    Circulant(Circle),
    /// From tier to tier.
    Racks(Tiers),
    Aligned,
}

/// How far one number is after another one, around a circle of `n`.
fn around(from: u32, to: u32, n: u32) -> u32 {
    (to % n + n - from % n) % n
}

/// What one participant does with a block, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Turn {
    time: u32,
    action: Action,
}

/// At one time a participant first does what others may need. Sums and copies are separate
/// messages.
#[derive(Debug, Clone, Copy)]
enum Phase {
    Local,
    SendSum,
    SendCopy,
    Reduce,
    Copy,
}

impl Phase {
    const ALL: u32 = 5;

    fn of(self, time: u32) -> u32 {
        Self::ALL * time + self as u32
    }
}

/// Later than everything else.
const END: u32 = u32::MAX;

/// Everything that a participant does, and with which blocks: a turn is one step. Local reductions
/// are merged only if their next turns are the same, too, so that a receiving step can do them in
/// its own pass.
type Turns = BTreeMap<(Turn, Option<Turn>), Vec<Range<u32>>>;

/// An exchange, as one participant sees it.
struct Exchange {
    trees: Trees,
    /// The participant at each position.
    order: Vec<u32>,
    /// The position of each participant.
    position: Vec<u32>,
    /// The position of this participant.
    at: u32,
    turns: Turns,
    /// The place of this participant in the tree of each position, once it is known.
    places: Vec<Option<Place>>,
}

impl Exchange {
    fn new(trees: Trees, topology: &Topology, me: u32) -> Self {
        let order = match &trees {
            Trees::Circulant(circle) => circle.order.clone(),
            _ => topology.order(),
        };
        let mut position = vec![0; order.len()];
        for (at, &participant) in (0..).zip(&order) {
            position[participant as usize] = at;
        }
        let (at, nodes) = (position[me as usize], order.len());
        Self { trees, order, position, at, turns: BTreeMap::new(), places: vec![None; nodes] }
    }

    fn size(&self) -> u32 {
        self.order.len() as u32
    }

    /// The next hop of a contribution from `at` to the owner, which is another position.
    fn next(&self, at: u32, owner: u32) -> Hop {
        let size = self.size();
        match &self.trees {
            // It starts after the owner, so that it can be added to on its way.
            Trees::Ring => Hop { to: (at + 1) % size, time: around(owner + 1, at, size) },
            Trees::Direct => Hop { to: owner, time: around(at, owner, size) },
            Trees::Circulant(circle) => {
                let (to, time) = circle.next(at, owner);
                Hop { to, time }
            }
            Trees::Racks(tiers) => {
                let rack = tiers.group(1, owner);
                let root = tiers.root(rack, owner - tiers.positions(1, rack).start);
                let hop = tiers.parent(at, root);
                hop.map_or(Hop { to: owner, time: 0 }, |hop| Hop {
                    to: hop.peer,
                    time: tiers.before(hop.level) + hop.distance(),
                })
            }
            Trees::Aligned => {
                let (to, time) = Groups::new(size, owner).next(at);
                Hop { to, time }
            }
        }
    }

    /// All times are below this.
    fn end(&self) -> u32 {
        match &self.trees {
            Trees::Racks(tiers) => tiers.before(tiers.top() + 1) + 1,
            _ => self.size() + 1,
        }
    }

    /// The place of this participant in the tree of an owner. The way down is the way up backwards.
    fn place(&mut self, owner: u32) -> Place {
        if let Some(place) = &self.places[owner as usize] {
            return place.clone();
        }
        let end = self.end();
        let link = |peer, time| Link { peer, up: time, down: 2 * end - time };
        let hop = |at: u32| self.next(at, owner);
        let parent = (self.at != owner).then(|| hop(self.at)).map(|hop| link(hop.to, hop.time));
        let others = (0..self.size()).filter(|&at| at != owner && at != self.at);
        let children = others.map(|at| (at, hop(at))).filter(|(_, hop)| hop.to == self.at);
        let children = children.map(|(at, hop)| link(at, hop.time)).collect();
        let place = Place { parent, children };
        self.places[owner as usize] = Some(place.clone());
        place
    }

    /// Adds turns with a block, which follow each other.
    fn take(&mut self, block: u32, turns: &[Turn]) {
        for (at, &turn) in turns.iter().enumerate() {
            let next = turns.get(at + 1).filter(|_| turn.action == Action::ReduceLocal);
            self.turns.entry((turn, next.copied())).or_default().push(block..block + 1);
        }
    }

    /// The peer at a position.
    fn peer(&self, at: u32) -> u32 {
        self.order[at as usize]
    }

    fn send(&self, phase: Phase, time: u32, to: u32) -> Turn {
        Turn { time: phase.of(time), action: Action::send(self.peer(to)) }
    }

    fn copy(&self, time: u32, from: u32) -> Turn {
        Turn { time: Phase::Copy.of(time), action: Action::copy(self.peer(from)) }
    }

    fn reduce(&self, time: u32, from: u32) -> Turn {
        let action = Action::reduce(self.peer(from), from < self.at);
        Turn { time: Phase::Reduce.of(time), action }
    }

    /// The turns of a reduction that goes up the tree of an owner. The owner has the result at the
    /// end.
    fn up(&mut self, owner: u32) -> Vec<Turn> {
        let Place { parent, mut children } = self.place(owner);
        // A fixed order of additions, whichever message arrives first (SAME).
        children.sort_by_key(|link| (link.up, link.peer));
        let mut turns: Vec<Turn> =
            children.iter().map(|link| self.reduce(link.up, link.peer)).collect();
        turns.extend(parent.map(|link| self.send(Phase::SendSum, link.up, link.peer)));
        local(turns)
    }

    /// The turns of a contribution that comes down the tree of its owner.
    fn down(&mut self, owner: u32) -> Vec<Turn> {
        let Place { parent, mut children } = self.place(owner);
        children.sort_by_key(|link| (link.down, link.peer));
        let mut turns: Vec<Turn> =
            parent.iter().map(|link| self.copy(link.down, link.peer)).collect();
        turns.extend(children.iter().map(|link| self.send(Phase::SendCopy, link.down, link.peer)));
        turns
    }

    /// The turns of a contribution that goes up the tree of an owner.
    fn along(&self, from: u32, owner: u32) -> Vec<Turn> {
        let mut turns = Vec::new();
        let mut at = from;
        while at != owner {
            let hop = self.next(at, owner);
            if at == self.at {
                turns.push(self.send(Phase::SendCopy, hop.time, hop.to));
            } else if hop.to == self.at {
                turns.push(self.copy(hop.time, at));
            }
            at = hop.to;
        }
        if from == self.at { local(turns) } else { turns }
    }

    fn section(&mut self, block: u32, roles: Roles) {
        let position = |participant: u32| self.position[participant as usize];
        let mut turns = match (roles.from.map(position), roles.to.map(position)) {
            (None, Some(to)) => self.up(to),
            (Some(from), Some(to)) => self.along(from, to),
            (Some(from), None) if from == self.at => local(self.down(from)),
            (Some(from), None) => self.down(from),
            // To the first one, and back.
            (None, None) => {
                let up = self.up(0);
                up.into_iter().chain(self.down(0)).collect()
            }
        };
        if roles.publishes(self.peer(self.at)) {
            turns.push(Turn { time: END, action: Action::Publish });
        }
        self.take(block, &turns);
    }
}

/// The turns after a local reduction, which is done when it is needed.
fn local(turns: Vec<Turn>) -> Vec<Turn> {
    let time = turns.first().map_or(0, |first| Phase::Local.of(first.time / Phase::ALL));
    [Turn { time, action: Action::ReduceLocal }].into_iter().chain(turns).collect()
}

/// The schedule for a piece of these sections. Each of them is one block.
pub(crate) fn exchange(
    sections: &[Section],
    trees: Trees,
    topology: &Topology,
    me: u32,
) -> Schedule {
    let mut offset = 0;
    let blocks: Vec<Block> = sections
        .iter()
        .map(|section| {
            offset += section.count;
            Block { offset: offset - section.count, count: section.count }
        })
        .collect();
    let mut exchange = Exchange::new(trees, topology, me);
    for (block, section) in (0..).zip(sections) {
        exchange.section(block, section.roles);
    }
    let mut builder = Builder::new(blocks.len());
    // Both ends of a link order its messages by time, and there is one at each time.
    for (place, ((turn, _), ranges)) in (0..).zip(exchange.turns) {
        builder.add_ranges(place, turn.action, build::joined(ranges));
    }
    builder.finish(topology.participants(), me, blocks)
}

/// The cost of a piece along these trees, from that of an allreduce along them. An allgather is the
/// second half of an allreduce, a reducescatter the first one. The share of each participant is
/// S/M, and S/M² in an alltoall.
pub(crate) fn cost(kind: Kind, trees: &Trees, all: Shape, cluster: &Cluster) -> Shape {
    let hops = match trees {
        // For some numbers of participants no contribution needs all rounds.
        Trees::Circulant(circle) => circle.longest() / (all.hops_in + all.hops_across),
        _ => 0.5,
    };
    let half = Shape {
        hops_in: all.hops_in * hops,
        hops_across: all.hops_across * hops,
        fill: all.fill * hops,
        line: all.line / 2.0,
        uplink: all.uplink / 2.0,
        messages: all.messages / 2.0,
        reduced: 0.0,
        streamed: 0.0,
        ..all
    };
    let nodes = cluster.nodes;
    match kind {
        Kind::ReduceScatter => Shape { reduced: all.reduced, ..half },
        Kind::Alltoall => {
            // How often an element is sent, on average.
            let sends = match trees {
                Trees::Ring => nodes / 2.0,
                Trees::Circulant(circle) => circle.sends(),
                Trees::Racks(_) => {
                    let parts = cluster.above.iter().map(|above| above.parts);
                    let levels = parts.chain([cluster.largest]);
                    levels.map(|parts| (parts - 1.0) / parts).sum()
                }
                Trees::Direct | Trees::Aligned => cluster.share(),
            };
            // Data that is passed on is scattered in memory, and takes a frame for each place.
            let messages = half.messages.max(nodes - 1.0);
            let outside = (nodes - cluster.smallest) / nodes;
            let uplink = match trees {
                _ if cluster.racks <= 1.0 => 0.0,
                // Each link of a ring carries half of all pairs, including those inside a rack.
                Trees::Ring => cluster.uplink(cluster.others() / (2.0 * nodes)),
                _ => outside.max(half.uplink) / nodes,
            };
            let burst = half.burst / nodes;
            Shape { line: sends / nodes, burst, uplink, messages, blocks: nodes * nodes, ..half }
        }
        // All that the root gets or has crosses its line.
        Kind::Gather { .. } | Kind::Scatter { .. } => Shape {
            // Around a ring, data for the root comes to it hop by hop, the farthest last.
            fill: match (kind, trees) {
                (Kind::Gather { .. }, Trees::Ring) => half.hops_in + half.hops_across,
                _ => half.fill,
            },
            line: cluster.share(),
            senders: if matches!(kind, Kind::Scatter { .. }) { 1 } else { half.senders },
            uplink: cluster.uplink((nodes - cluster.largest) / nodes),
            messages: match kind {
                Kind::Gather { .. } => half.hops_in + half.hops_across,
                _ => half.messages,
            },
            ..half
        },
        _ => half,
    }
}
