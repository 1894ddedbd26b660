//! Every algorithm as a pure function from the cluster to a schedule, for everything that a piece
//! can achieve ([`Kind`]).
//!
//! Most have one idea in common: each block has a tree, is reduced towards the tree's root and
//! comes back down the same way, so one owner finishes each element and the others copy it (SAME).
//! They differ in the choice of trees. In the other algorithms each message is for many blocks:
//! participants halve what they still add to, and double what they have. A broadcast is the way
//! down alone and a reduction to one participant the way up alone, in trees of the same kind that
//! all have the root.
//!
//! The [`catalog`] has one file for each algorithm, and [`parts`] what several share.
//!
//! Where each block has its own roles, as in an allgather, all participants are roots of trees:
//! [`exchange`]. Algorithms with a canonical order of additions ([`Algorithm::is_canonical`])
//! reduce to one participant by [`aligned`]. A move is the same for all algorithms: [`moved`].
//! [`probe`] measures links, and [`symmetry`](mod@symmetry) finds participants that do the same.
//! Users ask for a [`Spec`]: an algorithm with its parameters.

pub mod catalog;
#[cfg(feature = "testing")]
#[path = "../../tests/schedules/late.rs"]
pub mod late;
pub mod moved;
pub mod parts;
pub mod probe;
pub mod symmetry;

mod about;
mod definition;
mod kind;
mod name;
mod spec;

pub use self::{
    about::{About, in_short},
    kind::{Kind, Roles, Section},
    name::{ALIASES, Algorithm, Parameter, Values},
    spec::{CHUNK, MAX_SPEC, Spec, SpecError},
    symmetry::Symmetry,
};

use self::parts::{
    aligned,
    build::{self, Rooted},
    exchange::{self, Trees},
    shape::{Cluster, Shape},
};
use crate::{schedule::Schedule, topology::Topology};

/// Whether the servers of a topology take part in a piece of this kind by a spec.
pub fn has_servers(kind: Kind, spec: &Spec) -> bool {
    kind == Kind::Allreduce && spec.algorithm().definition().takes_servers()
}

/// The schedule of participant `me` for a piece of `count` elements. Deterministic; every
/// participant that calls it with the same other arguments gets a matching schedule.
///
/// # Panics
/// If `me` or a participant that `kind` names isn't one of the topology's participants
/// ([`Kind::fits`]), which is checked where a message becomes an operation (TRUST), or if there are
/// servers and none take part ([`has_servers`]).
pub fn generate(
    kind: Kind,
    spec: impl Into<Spec>,
    topology: &Topology,
    me: u32,
    count: u64,
) -> Schedule {
    let participants = topology.participants();
    assert!(me < participants, "participant {me} is not one of {participants}");
    assert!(kind.fits(participants), "{kind:?} names a participant outside of {participants}");
    let spec = spec.into();
    assert!(
        topology.servers() == 0 || has_servers(kind, &spec),
        "{kind:?} by {spec} has no servers"
    );
    let is_alone = topology.servers() == 0 && (participants == 1 || count == 0);
    if let Some(roles) = kind.roles().filter(|_| is_alone) {
        return build::alone(participants, me, count, roles);
    }
    let definition = spec.algorithm().definition();
    match kind {
        Kind::Allreduce => definition.allreduce(&spec, topology, me, count),
        Kind::Broadcast { root } => {
            let Rooted { blocks, place } = definition.rooted(&spec, topology, root, me, count);
            build::send_down(participants, me, blocks, place)
        }
        Kind::Reduce { root } if spec.algorithm().is_canonical() => {
            aligned::reduce(topology, root, me, count)
        }
        Kind::Reduce { root } => {
            let Rooted { blocks, place } = definition.rooted(&spec, topology, root, me, count);
            build::reduce_up(participants, me, blocks, place)
        }
        Kind::Move { from, to } => moved::moved(participants, from, to, me, count),
        _ => by_sections(&kind.sections(participants, count), &spec, topology, me),
    }
}

/// The schedule of participant `me` for a piece in which each section has its own roles, as in an
/// allgather or alltoall: one block for each section. As [`generate`] otherwise.
///
/// # Panics
/// If `me` or a participant that a section names isn't one of the topology's participants.
pub fn generate_sections(
    sections: &[Section],
    spec: impl Into<Spec>,
    topology: &Topology,
    me: u32,
) -> Schedule {
    let participants = topology.participants();
    assert!(me < participants, "participant {me} is not one of {participants}");
    let stranger = sections.iter().find(|section| !section.roles.fits(participants));
    assert_eq!(stranger, None, "a section names a participant outside of {participants}");
    by_sections(sections, &spec.into(), topology, me)
}

fn by_sections(sections: &[Section], spec: &Spec, topology: &Topology, me: u32) -> Schedule {
    let reduces = sections.iter().any(|section| section.roles.reduces());
    exchange::exchange(sections, exchange_trees(spec, reduces, topology), topology, me)
}

/// The trees of a piece in which each block has its own roles. Algorithms with a canonical order of
/// additions keep it here, too.
fn exchange_trees(spec: &Spec, reduces: bool, topology: &Topology) -> Trees {
    match spec.algorithm() {
        algorithm if reduces && algorithm.is_canonical() => Trees::Aligned,
        algorithm => algorithm.definition().exchange(spec, topology),
    }
}

/// The cost of a piece of a kind by a spec; nothing if a participant sends to itself.
pub(crate) fn shape(kind: Kind, spec: &Spec, topology: &Topology) -> Shape {
    let cluster = Cluster::new(topology);
    let (algorithm, definition) = (spec.algorithm(), spec.algorithm().definition());
    let cost = match kind {
        Kind::Allreduce => definition.allreduce_cost(spec, topology, &cluster),
        Kind::Broadcast { root } => definition.broadcast_cost(spec, topology, root, &cluster),
        Kind::Reduce { .. } if algorithm.is_canonical() => aligned::cost(&cluster),
        Kind::Reduce { root } => definition.reduce_cost(spec, topology, root, &cluster),
        Kind::Move { from, to } if from == to => {
            return Shape { blocks: 1.0, ..Shape::default() };
        }
        Kind::Move { from, to } => return moved::shape(topology, from, to),
        _ => {
            let trees = exchange_trees(spec, kind.reduces(), topology);
            let all = match trees {
                Trees::Aligned => aligned::exchange_cost(&cluster),
                _ => definition.exchange_cost(spec, &cluster),
            };
            return exchange::cost(kind, &trees, all, &cluster);
        }
    };
    match spec.segments() {
        1 => cost,
        segments => definition.in_segments(kind, segments.into(), cost),
    }
}

/// The classes of participants that do the same by a spec, the largest first; none if they are not
/// known. Whether that [holds](Symmetry::holds) depends on the piece. Local reductions must take no
/// time, because their order differs.
pub fn symmetry(kind: Kind, spec: &Spec, topology: &Topology) -> Vec<Symmetry> {
    if kind != Kind::Allreduce || topology.participants() < 2 || topology.has_shares() {
        return Vec::new();
    }
    spec.algorithm().definition().symmetries(spec, topology)
}
