//! Every algorithm as a pure function from the cluster to a schedule, for each of the four routes
//! that data can take between nodes ([`Kind`]).
//!
//! All but recursive doubling and the circulant have one idea in common: each block has a tree, is
//! reduced towards the tree's root and comes back down the same way, so each element is finished by
//! one owner and copied from there (SAME). A broadcast is the way down alone and a reduction to one
//! participant the way up alone, in trees of the same kind that all have the root. What differs is
//! the choice of trees:
//!
//! | | tree of a block | best for |
//! |---|---|---|
//! | [`ring`] | a path that ends at the block's owner | large pieces, few nodes |
//! | [`double_tree`] | one of two binary trees with complementary leaves | many nodes |
//! | [`hierarchical`] | members → the rack's owner → the block's owner | racks behind slow links |
//! | [`recursive_doubling`] | (none: pairs exchange everything, at doubling distance) | small pieces |
//! | [`circulant`] | (none: everybody halves what it adds to, and doubles what it has) | many nodes |
//!
//! A move from one participant to another has no choice: [`direct`], whatever the algorithm.

pub mod circulant;
pub mod direct;
pub mod double_tree;
pub mod hierarchical;
pub mod recursive_doubling;
pub mod ring;

mod build;
mod kind;

use gradwire_proto::{WireError, pb};
use strum::VariantNames;

pub use self::kind::Kind;

use self::build::Rooted;
use crate::{schedule::Schedule, topology::Topology};

/// The algorithms, by the name of their allreduce; each has a broadcast and a reduction to
/// one participant of the same kind.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    strum::Display,
    strum::EnumString,
    strum::IntoStaticStr,
    VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Algorithm {
    /// Pipelined ring; to or from one participant along a chain.
    Ring,
    /// Exchange at doubling distance; to or from one participant along a binomial tree.
    RecursiveDoubling,
    /// Two binary trees, half the data each.
    DoubleTree,
    /// Two levels over racks.
    Hierarchical,
    /// Halving and doubling around a circle; to or from one participant along a binomial tree.
    Circulant,
}

/// A name that is none of the algorithms.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no algorithm {given:?}; use one of {}", Algorithm::VARIANTS.join(", "))]
pub struct UnknownAlgorithm {
    /// The name, cut to 80 characters.
    pub given: String,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Ring,
        Self::RecursiveDoubling,
        Self::DoubleTree,
        Self::Hierarchical,
        Self::Circulant,
    ];

    /// The name that people read and write.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The algorithm of that name; case doesn't matter, `_` stands for `-`.
    ///
    /// # Errors
    /// [`UnknownAlgorithm`], which lists the names.
    pub fn parse(name: &str) -> Result<Self, UnknownAlgorithm> {
        let plain = name.trim().to_ascii_lowercase().replace('_', "-");
        plain.parse().map_err(|_| UnknownAlgorithm { given: name.chars().take(80).collect() })
    }
}

impl From<Algorithm> for pb::Algorithm {
    fn from(algorithm: Algorithm) -> Self {
        match algorithm {
            Algorithm::Ring => Self::Ring,
            Algorithm::RecursiveDoubling => Self::RecursiveDoubling,
            Algorithm::DoubleTree => Self::DoubleTree,
            Algorithm::Hierarchical => Self::Hierarchical,
            Algorithm::Circulant => Self::Circulant,
        }
    }
}

impl TryFrom<pb::Algorithm> for Algorithm {
    type Error = WireError;

    fn try_from(wire: pb::Algorithm) -> Result<Self, WireError> {
        match wire {
            pb::Algorithm::Unspecified => {
                Err(WireError::Unknown { field: "algorithm", number: wire as i32 })
            }
            pb::Algorithm::Ring => Ok(Self::Ring),
            pb::Algorithm::RecursiveDoubling => Ok(Self::RecursiveDoubling),
            pb::Algorithm::DoubleTree => Ok(Self::DoubleTree),
            pb::Algorithm::Hierarchical => Ok(Self::Hierarchical),
            pb::Algorithm::Circulant => Ok(Self::Circulant),
        }
    }
}

/// From the number in a message (TRUST).
impl TryFrom<i32> for Algorithm {
    type Error = WireError;

    fn try_from(number: i32) -> Result<Self, WireError> {
        pb::Algorithm::try_from(number)
            .map_err(|_| WireError::Unknown { field: "algorithm", number })?
            .try_into()
    }
}

/// The schedule of participant `me` for a piece of `count` elements. Deterministic; every
/// participant that calls it with the same other arguments gets a matching schedule.
///
/// # Panics
/// If `me` or a participant that `kind` names isn't one of the topology's participants
/// ([`Kind::fits`]): both are checked where a message becomes an operation (TRUST), so this is a
/// mistake of the caller.
pub fn generate(
    kind: Kind,
    algorithm: Algorithm,
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
    if participants == 1 || count == 0 {
        return build::alone(participants, me, count, kind);
    }
    match kind {
        Kind::Allreduce => match algorithm {
            Algorithm::Ring => ring::allreduce(topology, me, count),
            Algorithm::RecursiveDoubling => recursive_doubling::allreduce(topology, me, count),
            Algorithm::DoubleTree => double_tree::allreduce(topology, me, count),
            Algorithm::Hierarchical => hierarchical::allreduce(topology, me, count),
            Algorithm::Circulant => circulant::allreduce(topology, me, count),
        },
        Kind::Broadcast { root } => {
            let Rooted { blocks, place } = rooted(algorithm, topology, root, me, count);
            build::send_down(participants, me, blocks, place)
        }
        Kind::Reduce { root } => {
            let Rooted { blocks, place } = rooted(algorithm, topology, root, me, count);
            build::reduce_up(participants, me, blocks, place)
        }
        Kind::Move { from, to } => direct::moved(participants, from, to, me, count),
    }
}

/// An algorithm's trees where all have the same root: a broadcast goes down them, a reduction up.
fn rooted(algorithm: Algorithm, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
    match algorithm {
        Algorithm::Ring => ring::rooted(topology, root, me, count),
        Algorithm::RecursiveDoubling | Algorithm::Circulant => {
            recursive_doubling::rooted(topology, root, me, count)
        }
        Algorithm::DoubleTree => double_tree::rooted(topology, root, me, count),
        Algorithm::Hierarchical => hierarchical::rooted(topology, root, me, count),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_wire_numbers_come_back() {
        for algorithm in Algorithm::ALL {
            assert_eq!(Algorithm::parse(algorithm.name()), Ok(algorithm));
            assert_eq!(Algorithm::parse(&algorithm.name().to_uppercase()), Ok(algorithm));
            assert_eq!(Algorithm::try_from(pb::Algorithm::from(algorithm) as i32), Ok(algorithm));
        }
        let error = Algorithm::parse("rign").unwrap_err().to_string();
        for algorithm in Algorithm::ALL {
            assert!(error.contains("rign") && error.contains(algorithm.name()), "{error}");
        }
    }

    /// TRUST: a number without meaning is refused by name and value.
    #[test]
    fn unknown_wire_numbers_are_refused() {
        for number in [0, 6, -1, 99] {
            let error = Algorithm::try_from(number).unwrap_err().to_string();
            assert!(error.contains("algorithm") && error.contains(&number.to_string()), "{error}");
        }
    }
}
