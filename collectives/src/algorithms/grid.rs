//! Grids: participants have coordinates, and what one dimension has reduced goes on along the next.
//! Each block is reduced along the first dimension to those who have its owner's first coordinate,
//! from there along the second one, and so on; then it goes back the same way.
//!
//! Nobody sends more than 2(M−1)/M of the piece, but for `mesh`, and a message has all blocks that
//! take a link at a time. The first dimension is the members of a rack where racks are of one size.
//! So between racks goes what is left after it: 2(r−1) times the piece, the least there is. With
//! any number of dimensions the next ones are the racks of a group, and so on: so it is at every
//! tier.
//!
//! | | dimensions | along each |
//! |---|---|---|
//! | `torus` | two | a ring (Mikami et al., 2018, arXiv:1811.05233) |
//! | `blueconnect` | any, as factors | a ring (Cho, Finkler, Kung & Hunter, MLSys 2019) |
//! | `hips` | any, as factors | direct exchange, or a ring (Geng et al., NetAI 2018) |
//! | `mesh` | two | a line towards the owner (Barnett et al., JPDC 1995) |
//!
//! Rings have a chain of 2Σ(p−1) messages over the sizes p of the dimensions. Direct exchange has
//! one of two for each dimension, with up to p−1 senders at once. A line is a ring without the link
//! that closes it: at most 2Σ(p−1) messages, too, but only between neighbours on a mesh. All send
//! as many bytes together, but a node that is at no end of its line hands results on to both sides:
//! of A×B it sends up to 2(1 + 1/A) times the piece. A broadcast or reduction of `mesh` goes along
//! the tree of a block that the root owns.

use super::{
    build::{self, Link, Place, Rooted},
    name::{Algorithm, FACTORS},
    shape::{Cluster, Shape},
    spec::Spec,
    tiers::Tiers,
    trees,
};
use crate::{
    schedule::{Schedule, split},
    topology::Topology,
};

/// How data goes along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Along {
    /// From neighbour to neighbour.
    Ring,
    /// From everybody to the owner.
    Direct,
    /// From neighbour to neighbour, the shorter way, and never from the last to the first.
    Line,
}

/// The sizes of the dimensions, first the one that is nearest; none of them 1.
fn dimensions(spec: &Spec, topology: &Topology) -> Vec<u32> {
    let nodes = topology.participants();
    if let Some(factors) = spec.factors().filter(|_| spec.fits(nodes).is_ok()) {
        return factors.to_vec();
    }
    // The members of a rack, the racks of a group and so on, as far as they are of one size.
    let mut sizes = Tiers::new(topology).regular();
    if sizes.len() > 1 {
        let has_any = matches!(spec.algorithm(), Algorithm::Blueconnect | Algorithm::Hips);
        let beyond = sizes.split_off(if has_any { sizes.len().min(FACTORS) } else { 2 } - 1);
        sizes.push(beyond.iter().product());
        return sizes;
    }
    // The two most equal factors; a prime number has one.
    let smaller = (1..=nodes.isqrt()).rev().find(|factor| nodes.is_multiple_of(*factor));
    let smaller = smaller.unwrap_or(1);
    [nodes / smaller, smaller].into_iter().filter(|size| *size > 1).collect()
}

/// The dimensions, and how long a phase along each takes.
struct Grid {
    sizes: Vec<u32>,
    along: Along,
}

impl Grid {
    /// The coordinates of a position; the first runs fastest.
    fn coordinates(&self, mut position: u32) -> Vec<u32> {
        let of = |size: &u32| {
            let coordinate = position % size;
            position /= size;
            coordinate
        };
        self.sizes.iter().map(of).collect()
    }

    /// The position with another coordinate in one dimension.
    fn moved(&self, position: u32, dimension: usize, from: u32, to: u32) -> u32 {
        let stride: u32 = self.sizes[..dimension].iter().product();
        position + to * stride - from * stride
    }

    /// Where a position stands in the tree of the block of the owner.
    fn place(&self, at: u32, owner: u32, name: impl Fn(u32) -> u32) -> Place {
        let (own, root) = (self.coordinates(at), self.coordinates(owner));
        let all: u32 = self.sizes.iter().map(|size| size - 1).sum();
        let mut place = Place::default();
        let mut start = 0;
        for (dimension, &size) in self.sizes.iter().enumerate() {
            let (own, root) = (own[dimension], root[dimension]);
            // The link from a coordinate towards the owner's, seen from this or the other end.
            let link = |peer: u32, from: u32| {
                // Along a ring those who are farthest begin; else nobody is everybody's first.
                let turn = match self.along {
                    Along::Ring => (from + size - root - 1) % size,
                    Along::Direct => (root + size - from) % size - 1,
                    Along::Line => size - 1 - from.abs_diff(root),
                };
                let up = start + turn;
                let peer = name(self.moved(at, dimension, own, peer));
                Link { peer, up, down: 2 * all - 1 - up }
            };
            let before = (own + size - 1) % size;
            let next = (own + 1) % size;
            match self.along {
                Along::Ring if before != root => place.children.push(link(before, before)),
                Along::Direct if own == root => {
                    let others = (0..size).filter(|other| *other != root);
                    place.children.extend(others.map(|other| link(other, other)));
                }
                Along::Line => {
                    let lower = own.checked_sub(1).filter(|_| own <= root);
                    let upper = (own + 1 < size && own >= root).then_some(own + 1);
                    place.children.extend([lower, upper].into_iter().flatten().map(|c| link(c, c)));
                }
                Along::Ring | Along::Direct => {}
            }
            if own != root {
                let towards = match self.along {
                    Along::Ring => next,
                    Along::Direct => root,
                    Along::Line if own < root => own + 1,
                    Along::Line => own - 1,
                };
                place.parent = Some(link(towards, own));
                break;
            }
            start += size - 1;
        }
        place
    }
}

pub(super) fn allreduce(
    spec: &Spec,
    along: Along,
    topology: &Topology,
    me: u32,
    count: u64,
) -> Schedule {
    let order = topology.order();
    let at = build::position(&order, me);
    let nodes = order.len() as u32;
    let grid = Grid { sizes: dimensions(spec, topology), along };
    build::reduce_and_return_together(nodes, me, split(count, nodes.into()), |block| {
        grid.place(at, block, |position| order[position as usize])
    })
}

/// What the busiest node of a mesh sends, in units of the piece. Along a line of p it sends (p−1)/p
/// of what the line reduces, and hands on (p+1)/p of it, to both sides; of two, a half each time.
fn busiest_of_mesh(sizes: &[u32]) -> f64 {
    let mut left = 1.0;
    let mut sent = 0.0;
    for &size in sizes.iter().filter(|&&size| size > 1) {
        sent += if size == 2 { left } else { 2.0 * left };
        left /= f64::from(size);
    }
    sent
}

/// The cost of an allreduce: 2Σ(p−1)α along rings, 2dα by direct exchange in d dimensions, and
/// 2(M−1)/M·S·β + (M−1)/M·S·γ; along lines up to 2(1+1/A)·S·β for A×B.
pub(super) fn shape(spec: &Spec, along: Along, topology: &Topology, cluster: &Cluster) -> Shape {
    let sizes = dimensions(spec, topology);
    let links: f64 = sizes.iter().map(|&size| f64::from(size) - 1.0).sum();
    let share = cluster.share();
    let (hops, senders) = match along {
        Along::Ring | Along::Line => (links, 1),
        Along::Direct => (sizes.len() as f64, sizes.iter().max().map_or(0, |size| size - 1)),
    };
    let aligned = cluster.is_even() && f64::from(sizes[0]) == cluster.largest;
    // Between racks goes what has been reduced along the first dimension. By direct exchange that
    // is all at once; along a ring each share waits for those of its own hops only.
    let (links_across, dims_across) = match &sizes[..] {
        [inside, beyond @ ..] if aligned => (links - f64::from(inside - 1), beyond.len() as f64),
        _ => (cluster.racks - 1.0, 1.0),
    };
    let (across, waiting) = match along {
        Along::Ring | Along::Line => (links_across, links_across),
        Along::Direct => (dims_across, hops),
    };
    Shape {
        line: match along {
            Along::Line => busiest_of_mesh(&sizes),
            Along::Ring | Along::Direct => 2.0 * share,
        },
        senders,
        burst: 1.0 - 1.0 / (f64::from(senders) + 1.0),
        uplink: match cluster.racks > 1.0 {
            true if aligned => cluster.least_uplink(),
            true => 1.0,
            false => 0.0,
        },
        reduced: share,
        messages: 2.0 * links,
        blocks: f64::from(sizes[0]),
        ..cluster.hops(2.0 * hops, 2.0 * across).at_once(2.0 * waiting)
    }
}

/// The trees of a mesh.
pub(super) fn rooted(spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    let order = topology.order();
    let (at, owner) = (build::position(&order, me), build::position(&order, root));
    let grid = Grid { sizes: dimensions(spec, topology), along: Along::Line };
    Rooted::new(split(count, trees::blocks_for(count)), move |block| {
        let delayed = |link: Link| Link { up: block + link.up, down: block + link.down, ..link };
        let Place { parent, children } = grid.place(at, owner, |position| order[position as usize]);
        Place { parent: parent.map(delayed), children: children.into_iter().map(delayed).collect() }
    })
}

/// The cost of a broadcast along a mesh: up to Σ(p−1)·α + 2d·S·β, from the middle of d dimensions.
pub(super) fn down(spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
    let sizes = dimensions(spec, topology);
    let links: f64 = sizes.iter().map(|&size| f64::from(size) - 1.0).sum();
    // The first of each line has one neighbour.
    let neighbours = sizes.len() as f64;
    Shape {
        line: neighbours,
        uplink: cluster.uplink(cluster.largest.min(f64::from(sizes[0]))),
        messages: neighbours,
        ..cluster.hops(links, cluster.racks - 1.0)
    }
}
