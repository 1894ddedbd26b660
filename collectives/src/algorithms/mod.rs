//! Every algorithm as a pure function from the cluster to a schedule, for everything that a piece
//! can achieve ([`Kind`]).
//!
//! Most have one idea in common: each block has a tree, is reduced towards the tree's root and
//! comes back down the same way, so each element is finished by one owner and copied from there
//! (SAME). What differs is the choice of trees. In the others each message is for many blocks:
//! participants halve what they still add to, and double what they have. A broadcast is the way
//! down alone and a reduction to one participant the way up alone, in trees of the same kind that
//! all have the root.
//!
//! The [`catalog`] has one file for each algorithm, and [`parts`] has what several are made of.
//!
//! Where each block has roles of its own, as in an allgather, all participants are roots of trees:
//! [`exchange`]. The reduction to one participant of those with a canonical order
//! of additions ([`Algorithm::is_canonical`]) is [`aligned`]. A move from one
//! participant to another has no choice: [`moved`], whatever the algorithm. Nobody can ask for
//! [`late`](mod@late). What measures links is [`probe`]. Which participants do the same is
//! [`symmetry`](mod@symmetry). What people ask for is a [`Spec`]: an algorithm with its parameters.

pub mod catalog;
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
/// ([`Kind::fits`]): both are checked where a message becomes an operation (TRUST), so this is a
/// mistake of the caller. So are servers where none take part ([`has_servers`]).
pub fn generate(
    kind: Kind,
    spec: impl Into<Spec>,
    topology: &Topology,
    me: u32,
    count: u64,
) -> Schedule {
    let participants = topology.participants();
    assert!(me < participants, "participant {me} is not one of {participants}");
    assert!(
        kind.fits(participants),
        "{kind:?} names one that is not of {participants} participants"
    );
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
        Kind::Allgather
        | Kind::Gather { .. }
        | Kind::Scatter { .. }
        | Kind::ReduceScatter
        | Kind::Alltoall => by_sections(&kind.sections(participants, count), &spec, topology, me),
    }
}

/// The schedule of participant `me` for a piece of which each section has roles of its own, as of
/// an allgather or alltoall: one block for each section. As [`generate`] otherwise.
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
    assert_eq!(stranger, None, "a section names one that is not of {participants} participants");
    by_sections(sections, &spec.into(), topology, me)
}

fn by_sections(sections: &[Section], spec: &Spec, topology: &Topology, me: u32) -> Schedule {
    let reduces = sections.iter().any(|section| section.roles.reduces());
    exchange::exchange(sections, exchange_trees(spec, reduces, topology), topology, me)
}

/// The schedule of participant `me` for an allreduce to which participant `late` comes late: see
/// [`late`](mod@late). No spec leads to it.
///
/// # Panics
/// If `me` or `late` isn't one of the topology's participants.
#[doc(hidden)]
pub fn generate_late(topology: &Topology, late: u32, me: u32, count: u64) -> Schedule {
    let participants = topology.participants();
    assert!(me.max(late) < participants, "{me} or {late} is not one of {participants}");
    if participants == 1 || count == 0 {
        return build::alone(participants, me, count, Roles::default());
    }
    late::allreduce(topology, late, me, count)
}

/// The trees of a piece in which each block has roles of its own. By algorithms with a canonical
/// order of additions, what is reduced has the same order as in all their other reductions.
fn exchange_trees(spec: &Spec, reduces: bool, topology: &Topology) -> Trees {
    match spec.algorithm() {
        algorithm if reduces && algorithm.is_canonical() => Trees::Aligned,
        algorithm => algorithm.definition().exchange(spec, topology),
    }
}

/// What a piece costs, of a kind by a spec; nothing where a participant sends to itself.
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
        Kind::Allgather
        | Kind::Gather { .. }
        | Kind::Scatter { .. }
        | Kind::ReduceScatter
        | Kind::Alltoall => {
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

/// Which participants do the same by a spec, the largest classes first; none if that is not known
/// of any. It depends on the piece whether that [holds](Symmetry::holds). Also, to reduce what the
/// ranks of a node contribute must take no time: in which order that is done differs.
pub fn symmetry(kind: Kind, spec: &Spec, topology: &Topology) -> Vec<Symmetry> {
    if kind != Kind::Allreduce || topology.participants() < 2 || topology.has_shares() {
        return Vec::new();
    }
    spec.algorithm().definition().symmetries(spec, topology)
}
