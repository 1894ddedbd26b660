//! Grids: participants have coordinates, and the dimensions reduce one after the other. Each block
//! is reduced along the first dimension to the participants with its owner's first coordinate, from
//! there along the second one, and so on; then it goes back the same way.
//!
//! No participant sends more than 2(M−1)/M of the piece, except along lines, and all blocks that
//! take a link at the same time are one message. If racks have one size, the first dimension is the
//! members of a rack. So only what is left after it crosses between racks: 2(r−1) times the piece,
//! the minimum. With any number of dimensions, the next one is the racks of a group, and so on, so
//! the same holds at every tier.

use super::{
    build::{self, Link, Place},
    shape::{Cluster, Shape},
    tiers::Tiers,
};
use crate::{
    algorithms::{
        name::{FACTORS, Parameter, Values},
        spec::Spec,
    },
    schedule::{Schedule, split},
    topology::Topology,
};

/// The parameter of a grid of two dimensions.
pub(crate) const TWO: Parameter = Parameter {
    name: "dims",
    about: "the sizes of the two dimensions, the nearest first",
    values: Values::Factors(2),
};

/// The parameter of a grid of any number of dimensions.
pub(crate) const ANY: Parameter = Parameter {
    name: "dims",
    about: "the sizes of the dimensions, the nearest first",
    values: Values::Factors(FACTORS),
};

/// How data goes along a dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Along {
    /// From neighbour to neighbour: a chain of p−1 messages each way along a dimension of p.
    Ring,
    /// From all to the owner: one message each way, with up to p−1 senders at once.
    Direct,
    /// From neighbour to neighbour, the shorter way, and never from the last to the first: at most
    /// p−1 messages each way.
    Line,
}

/// The sizes of at most `most` dimensions, the nearest first; none is 1.
fn dimensions(spec: &Spec, most: usize, topology: &Topology) -> Vec<u32> {
    let nodes = topology.participants();
    if let Some(factors) = spec.factors().filter(|_| spec.fits(nodes).is_ok()) {
        return factors.to_vec();
    }
    // The members of a rack, the racks of a group and so on, as far as they are of one size.
    let mut sizes = Tiers::new(topology).regular();
    if sizes.len() > 1 {
        let beyond = sizes.split_off(sizes.len().min(most) - 1);
        sizes.push(beyond.iter().product());
        return sizes;
    }
    // The two most equal factors; a prime number has one.
    let smaller = (1..=nodes.isqrt()).rev().find(|factor| nodes.is_multiple_of(*factor));
    let smaller = smaller.unwrap_or(1);
    [nodes / smaller, smaller].into_iter().filter(|size| *size > 1).collect()
}

/// The dimensions, and how data goes along them.
pub(crate) struct Grid {
    /// The sizes of the dimensions, the nearest first; none is 1.
    pub(crate) sizes: Vec<u32>,
    along: Along,
}

impl Grid {
    /// With the factors of a spec, or else with at most `most` dimensions that fit the racks.
    pub(crate) fn new(spec: &Spec, most: usize, along: Along, topology: &Topology) -> Self {
        Self { sizes: dimensions(spec, most, topology), along }
    }

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

    /// The place of a position in the tree of the owner's block.
    pub(crate) fn place(&self, at: u32, owner: u32, name: impl Fn(u32) -> u32) -> Place {
        let (own, root) = (self.coordinates(at), self.coordinates(owner));
        let all: u32 = self.sizes.iter().map(|size| size - 1).sum();
        let mut place = Place::default();
        let mut start = 0;
        for (dimension, &size) in self.sizes.iter().enumerate() {
            let (own, root) = (own[dimension], root[dimension]);
            // The link from a coordinate towards the owner's, seen from this or the other end.
            let link = |peer: u32, from: u32| {
                // Along a ring the farthest begin; otherwise no peer is the first for all.
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

    /// The schedule of `me` for an allreduce.
    pub(crate) fn allreduce(&self, topology: &Topology, me: u32, count: u64) -> Schedule {
        let order = topology.order();
        let at = build::position(&order, me);
        let nodes = order.len() as u32;
        let (blocks, order_of) = (split(count, nodes.into()), |_, block| block);
        build::reduce_and_return_together(nodes, me, blocks, order_of, |block| {
            self.place(at, block, |position| order[position as usize])
        })
    }

    /// How many links there are along all dimensions.
    pub(crate) fn links(&self) -> f64 {
        self.sizes.iter().map(|&size| f64::from(size) - 1.0).sum()
    }

    /// The cost of an allreduce: 2Σ(p−1)α along rings, 2dα by direct exchange in d dimensions, and
    /// 2(M−1)/M·S·β + (M−1)/M·S·γ. Along lines the busiest node sends more than that.
    pub(crate) fn cost(&self, cluster: &Cluster) -> Shape {
        let sizes = &self.sizes;
        let links = self.links();
        let share = cluster.share();
        let (hops, senders) = match self.along {
            Along::Ring | Along::Line => (links, 1),
            Along::Direct => (sizes.len() as f64, sizes.iter().max().map_or(0, |size| size - 1)),
        };
        let aligned = cluster.is_even() && f64::from(sizes[0]) == cluster.largest;
        // What the first dimension has reduced crosses between racks: by direct exchange all at
        // once; along a ring each share waits only for those of its own hops.
        let (links_across, dims_across) = match &sizes[..] {
            [inside, beyond @ ..] if aligned => {
                (links - f64::from(inside - 1), beyond.len() as f64)
            }
            _ => (cluster.racks - 1.0, 1.0),
        };
        let (across, waiting) = match self.along {
            Along::Ring | Along::Line => (links_across, links_across),
            Along::Direct => (dims_across, hops),
        };
        Shape {
            line: 2.0 * share,
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
}
