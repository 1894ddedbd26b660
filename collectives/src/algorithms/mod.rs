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
//! | module | algorithms | best for |
//! |---|---|---|
//! | [`ring`] | ring, multi-ring | large pieces, few nodes |
//! | [`recursive_doubling`] | recursive-doubling | small pieces |
//! | [`double_tree`] | double-tree | many nodes |
//! | [`hierarchical`] | hierarchical | racks behind slow links |
//! | [`circulant`] | circulant, bcube, direct | many nodes; few nodes |
//! | [`pairs`] | halving-doubling, rabenseifner, swing | powers of two |
//! | [`trees`] | linear, binomial, k-nomial, chain | to or from one participant |
//! | [`grid`] | torus, blueconnect, hips, mesh | nodes in a grid, links of different rates |
//! | [`leaders`] | leader-ring | few connections between racks |
//! | [`bine`] | bine | racks that are not known |
//! | [`circulant_blocks`] | circulant-blocks | large broadcasts |
//! | [`servers`] | servers | hosts without ranks to spare |
//! | [`hub`] | parameterhub | such hosts in each rack |
//! | [`blink`] | blink | links of different rates |
//!
//! Where each block has roles of its own, as in an allgather, all participants are roots of trees:
//! [`exchange`].
//!
//! The reduction to one participant of those with a canonical order of additions
//! ([`Algorithm::is_canonical`]) is [`aligned`]. A move from one participant to another has no
//! choice: [`moved`], whatever the algorithm. Nobody can ask for [`late`](mod@late). What measures
//! links is [`probe`]. Which participants do the same is [`symmetry`](mod@symmetry). What people
//! ask for is a [`Spec`]: an algorithm with its parameters.

pub mod aligned;
pub mod bine;
pub mod blink;
pub mod circulant;
pub mod circulant_blocks;
pub mod double_tree;
pub mod exchange;
pub mod grid;
pub mod hierarchical;
pub mod hub;
pub mod late;
pub mod leaders;
pub mod moved;
pub mod pairs;
pub mod probe;
pub mod recursive_doubling;
pub mod ring;
pub mod servers;
pub mod symmetry;
pub mod trees;

mod about;
mod build;
mod colours;
mod kind;
mod name;
mod packing;
mod shape;
mod spec;
mod tiers;

pub use self::{
    about::{About, in_short},
    kind::{Kind, Roles, Section},
    name::{ALIASES, Algorithm, Parameter, Values},
    spec::{CHUNK, MAX_SPEC, Spec, SpecError},
    symmetry::{Symmetry, symmetry},
};

pub(crate) use self::shape::{Cluster, Shape};
use self::{
    build::Rooted,
    grid::Along,
    pairs::{Fold, Partners},
    servers::Wanted,
};
use crate::{
    schedule::{GRAIN, Schedule},
    topology::Topology,
};

/// Whether the servers of a topology take part in a piece of this kind by a spec.
pub fn has_servers(kind: Kind, spec: &Spec) -> bool {
    let takes_them = matches!(spec.algorithm(), Algorithm::Servers | Algorithm::Parameterhub);
    kind == Kind::Allreduce && takes_them
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
    match kind {
        Kind::Allreduce => allreduce(&spec, topology, me, count),
        Kind::Broadcast { root } => {
            let Rooted { blocks, place } = rooted(&spec, topology, root, me, count);
            build::send_down(participants, me, blocks, place)
        }
        Kind::Reduce { root } if spec.algorithm().is_canonical() => {
            aligned::reduce(topology, root, me, count)
        }
        Kind::Reduce { root } => {
            let Rooted { blocks, place } = rooted(&spec, topology, root, me, count);
            build::reduce_up(participants, me, blocks, place)
        }
        Kind::Move { from, to } => moved::moved(participants, from, to, me, count),
        Kind::Allgather
        | Kind::Gather { .. }
        | Kind::Scatter { .. }
        | Kind::ReduceScatter
        | Kind::Alltoall => {
            exchange::exchange(&kind.sections(participants, count), &spec, topology, me)
        }
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
    exchange::exchange(sections, &spec.into(), topology, me)
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

fn allreduce(spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
    let pairs = |partners, fold| pairs::allreduce(topology, partners, fold, me, count);
    let segments = spec.segments();
    match spec.algorithm() {
        Algorithm::Ring if spec.number("way") == 0 => ring::back(topology, segments, me, count),
        Algorithm::Ring => ring::around(topology, segments, me, count),
        Algorithm::MultiRing => ring::several(topology, spec.number("rings"), segments, me, count),
        Algorithm::RecursiveDoubling => recursive_doubling::allreduce(topology, me, count),
        Algorithm::DoubleTree => double_tree::allreduce(topology, segments, me, count),
        Algorithm::Hierarchical => hierarchical::allreduce(topology, me, count),
        Algorithm::Circulant => circulant::over_racks(topology, spec.number("radix"), me, count),
        Algorithm::Bcube => circulant::plain(topology, spec.number("radix"), me, count),
        Algorithm::Direct => circulant::direct(topology, me, count),
        Algorithm::HalvingDoubling => pairs(Partners::Near, Fold::Whole),
        Algorithm::Rabenseifner => pairs(Partners::Near, Fold::Halves),
        Algorithm::Swing => pairs(Partners::Swing, Fold::Whole),
        Algorithm::Bine => pairs(Partners::Bine, Fold::Whole),
        Algorithm::Linear
        | Algorithm::Binomial
        | Algorithm::KNomial
        | Algorithm::Chain
        | Algorithm::CirculantBlocks => {
            trees::there_and_back(topology, me, |root| rooted(spec, topology, root, me, count))
        }
        Algorithm::Torus | Algorithm::Blueconnect => {
            grid::allreduce(spec, Along::Ring, topology, me, count)
        }
        Algorithm::Hips => grid::allreduce(spec, along(spec), topology, me, count),
        Algorithm::Mesh => grid::allreduce(spec, Along::Line, topology, me, count),
        Algorithm::LeaderRing => leaders::allreduce(topology, me, count),
        Algorithm::Servers => servers::allreduce(topology, Wanted::of(spec), me, count),
        Algorithm::Parameterhub => hub::allreduce(topology, across(spec), me, count),
        Algorithm::Blink => blink::allreduce(topology, spec.number("trees"), me, count),
    }
}

fn along(spec: &Spec) -> Along {
    if spec.number("along") == 0 { Along::Direct } else { Along::Ring }
}

fn across(spec: &Spec) -> Along {
    if spec.number("across") == 0 { Along::Direct } else { Along::Ring }
}

/// The trees of an algorithm where all have the same root: a broadcast goes down them, and a
/// reduction to one participant up.
enum Trees {
    Chain,
    /// Two binary trees, half the data each.
    Two,
    /// From tier to tier.
    Racks,
    /// The root sends to everybody.
    Star,
    KNomial(u32),
    /// At the distances of Bine.
    Bine,
    /// One for each of so many blocks.
    CirculantBlocks(u32),
    /// Between neighbours on a grid.
    Mesh,
    /// So many at most, packed on the rates of links.
    Packed(u32),
}

fn trees_of(spec: &Spec) -> Trees {
    match spec.algorithm() {
        Algorithm::Ring | Algorithm::MultiRing | Algorithm::Chain => Trees::Chain,
        Algorithm::DoubleTree => Trees::Two,
        Algorithm::Hierarchical | Algorithm::LeaderRing | Algorithm::Parameterhub => Trees::Racks,
        Algorithm::Linear | Algorithm::Direct | Algorithm::Servers => Trees::Star,
        Algorithm::Bine => Trees::Bine,
        Algorithm::Mesh => Trees::Mesh,
        Algorithm::Blink => Trees::Packed(spec.number("trees")),
        Algorithm::CirculantBlocks => Trees::CirculantBlocks(spec.number("blocks")),
        Algorithm::KNomial => Trees::KNomial(spec.number("radix")),
        Algorithm::RecursiveDoubling
        | Algorithm::Circulant
        | Algorithm::Bcube
        | Algorithm::HalvingDoubling
        | Algorithm::Rabenseifner
        | Algorithm::Swing
        | Algorithm::Binomial
        | Algorithm::Torus
        | Algorithm::Blueconnect
        | Algorithm::Hips => Trees::KNomial(2),
    }
}

fn rooted(spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    let segments = spec.segments();
    match trees_of(spec) {
        Trees::Chain => ring::rooted(topology, segments, root, me, count),
        Trees::Two => double_tree::rooted(topology, segments, root, me, count),
        Trees::Racks => hierarchical::rooted(topology, root, me, count),
        Trees::Star => trees::linear(topology, segments, root, me, count),
        Trees::KNomial(radix) => trees::k_nomial((radix, segments), topology, root, me, count),
        Trees::Bine => bine::rooted(topology, root, me, count),
        Trees::Mesh => grid::rooted(spec, topology, root, me, count),
        Trees::Packed(most) => blink::rooted(topology, most, root, me, count),
        Trees::CirculantBlocks(blocks) => {
            circulant_blocks::rooted(topology, blocks, root, me, count)
        }
    }
}

/// What a piece costs, of a kind by a spec; nothing where a participant sends to itself.
pub(crate) fn shape(kind: Kind, spec: &Spec, topology: &Topology) -> Shape {
    let cluster = Cluster::new(topology);
    match kind {
        Kind::Allreduce => in_segments(spec, kind, allreduce_shape(spec, topology, &cluster)),
        Kind::Broadcast { root } => in_segments(spec, kind, down(spec, topology, root, &cluster)),
        Kind::Reduce { root } => in_segments(spec, kind, up(spec, topology, root, &cluster)),
        Kind::Move { from, to } if from == to => Shape { blocks: 1.0, ..Shape::default() },
        Kind::Move { from, to } => moved::shape(topology, from, to),
        Kind::Allgather
        | Kind::Gather { .. }
        | Kind::Scatter { .. }
        | Kind::ReduceScatter
        | Kind::Alltoall => exchange::shape(kind, spec, topology, &cluster),
    }
}

/// The cost with more blocks, which have a message each: what is in a hop is smaller.
fn in_segments(spec: &Spec, kind: Kind, shape: Shape) -> Shape {
    let segments = f64::from(spec.segments());
    if segments == 1.0 || spec.algorithm() == Algorithm::Servers {
        return shape;
    }
    let (blocks, messages) = match (spec.algorithm(), kind) {
        // There are as many in each tree.
        (Algorithm::DoubleTree, _) => {
            (shape.blocks.max(2.0 * segments), shape.messages * (segments / 2.0).max(1.0))
        }
        // Each sends its own, at the same time.
        (Algorithm::Linear, Kind::Reduce { .. }) => (segments, shape.messages + segments),
        _ => (shape.blocks * segments, shape.messages * segments),
    };
    Shape { blocks, messages, least_block: 4.0 * GRAIN as f64, ..shape }
}

fn allreduce_shape(spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
    match spec.algorithm() {
        Algorithm::Ring => ring::shape(cluster, 1),
        Algorithm::MultiRing => ring::shape(cluster, spec.number("rings")),
        Algorithm::RecursiveDoubling => recursive_doubling::shape(cluster),
        Algorithm::DoubleTree => double_tree::shape(cluster),
        Algorithm::Hierarchical => hierarchical::shape(cluster),
        Algorithm::Circulant => circulant::shape_over_racks(cluster, spec.number("radix")),
        Algorithm::Bcube => circulant::shape_plain(cluster, spec.number("radix")),
        Algorithm::Direct => circulant::shape_direct(cluster),
        Algorithm::HalvingDoubling => pairs::shape(cluster, Partners::Near, Fold::Whole),
        Algorithm::Rabenseifner => pairs::shape(cluster, Partners::Near, Fold::Halves),
        Algorithm::Swing => pairs::shape(cluster, Partners::Swing, Fold::Whole),
        Algorithm::Bine => pairs::shape(cluster, Partners::Bine, Fold::Whole),
        Algorithm::Linear
        | Algorithm::Binomial
        | Algorithm::KNomial
        | Algorithm::Chain
        | Algorithm::CirculantBlocks => {
            let root = topology.order()[0];
            let down = down(spec, topology, root, cluster);
            shape::there_and_back(up(spec, topology, root, cluster), down)
        }
        Algorithm::Torus | Algorithm::Blueconnect => {
            grid::shape(spec, Along::Ring, topology, cluster)
        }
        Algorithm::Hips => grid::shape(spec, along(spec), topology, cluster),
        Algorithm::Mesh => grid::shape(spec, Along::Line, topology, cluster),
        Algorithm::LeaderRing => leaders::shape(cluster),
        Algorithm::Servers => servers::shape(topology, Wanted::of(spec), cluster),
        Algorithm::Parameterhub => hub::shape(topology, across(spec), cluster),
        Algorithm::Blink => blink::shape(topology, spec.number("trees"), cluster),
    }
}

/// A broadcast.
fn down(spec: &Spec, topology: &Topology, root: u32, cluster: &Cluster) -> Shape {
    match trees_of(spec) {
        Trees::Chain => ring::down(cluster),
        Trees::Two => double_tree::down(cluster),
        Trees::Racks => hierarchical::down(cluster),
        Trees::Star => trees::linear_down(cluster),
        Trees::KNomial(radix) => trees::k_nomial_down(cluster, radix),
        Trees::Bine => bine::down(cluster),
        Trees::Mesh => grid::down(spec, topology, cluster),
        Trees::Packed(most) => blink::down(topology, root, most, cluster),
        Trees::CirculantBlocks(blocks) => circulant_blocks::down(cluster, blocks),
    }
}

/// The way of a broadcast backwards, with a reduction of every chunk at every hop. What a node has
/// to send of its own is ready from the beginning, and goes before what it passes on.
fn up(spec: &Spec, topology: &Topology, root: u32, cluster: &Cluster) -> Shape {
    if spec.algorithm().is_canonical() {
        return aligned::up(cluster);
    }
    let down = Shape { streamed: 1.0, ..down(spec, topology, root, cluster) };
    match trees_of(spec) {
        Trees::Two => Shape { line: double_tree::line_up(cluster), ..down },
        Trees::Racks => Shape { line: hierarchical::line_up(cluster), ..down },
        Trees::Star => Shape { senders: cluster.others() as u32, burst: cluster.others(), ..down },
        Trees::Chain
        | Trees::KNomial(_)
        | Trees::Bine
        | Trees::CirculantBlocks(_)
        | Trees::Mesh
        | Trees::Packed(_) => down,
    }
}
