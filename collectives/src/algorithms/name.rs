//! The algorithms by name, and what a parameter is.

use std::fmt;

use strum::VariantArray;

use crate::bytes;

/// The most factors of a parameter: as many as 4,096 nodes have.
pub(super) const FACTORS: usize = 12;

/// A parameter of an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// What it is called.
    pub name: &'static str,
    /// What it decides.
    pub about: &'static str,
    /// What it may be.
    pub values: Values,
}

/// What a parameter may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A whole number.
    Number {
        /// The smallest.
        least: u32,
        /// The largest.
        most: u32,
        /// What it is if it isn't given.
        usual: u32,
    },
    /// One of some words, the first if it isn't given.
    Word(&'static [&'static str]),
    /// Numbers of at least 2 whose product is the number of nodes, such as `4x8`; at most as many.
    /// If it isn't given, the algorithm chooses them.
    Factors(usize),
    /// A number of bytes, such as `64K`. If it isn't given, something else decides.
    Bytes {
        /// The smallest.
        least: u32,
        /// The largest.
        most: u32,
    },
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { least, most, .. } => write!(f, "a number from {least} to {most}"),
            Self::Word(words) => f.write_str(&words.join(" or ")),
            Self::Factors(2) => write!(f, "two numbers from 2 on, such as 4x8"),
            Self::Factors(most) => write!(f, "2 to {most} numbers from 2 on, such as 4x8"),
            Self::Bytes { least, most } => {
                let [least, most] = [least, most].map(|&bytes| bytes::written(bytes.into()));
                write!(f, "{least} to {most}")
            }
        }
    }
}

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
    VariantArray,
)]
#[strum(serialize_all = "kebab-case")]
pub enum Algorithm {
    /// Pipelined ring; to or from one participant along a chain.
    Ring,
    /// Exchange at doubling distance; from one participant along a binomial tree, to one along an
    /// aligned one.
    RecursiveDoubling,
    /// Two binary trees, half the data each.
    DoubleTree,
    /// Two levels over racks.
    Hierarchical,
    /// Halving and doubling around a circle, over racks; to or from one participant along a
    /// binomial tree.
    Circulant,
    /// The same without racks.
    Bcube,
    /// Everybody with everybody; to or from one participant in one message.
    Direct,
    /// Halving and doubling at doubling distance.
    HalvingDoubling,
    /// The same, and a fold where both of a pair reduce a half.
    Rabenseifner,
    /// Halving and doubling at distances for a torus.
    Swing,
    /// Several rings.
    MultiRing,
    /// All with one.
    Linear,
    /// A binomial tree.
    Binomial,
    /// A tree of any degree.
    KNomial,
    /// One after the other.
    Chain,
    /// Rings along two dimensions.
    Torus,
    /// Rings along any number of dimensions.
    Blueconnect,
    /// Direct exchange along any number of dimensions.
    Hips,
    /// A ring of one participant for each rack.
    LeaderRing,
    /// Halving and doubling at Swing's distances, in messages of one range; to or from one
    /// participant along a tree of such distances.
    Bine,
    /// A broadcast of blocks in the fewest rounds, and the same backwards.
    CirculantBlocks,
    /// Lines along two dimensions.
    Mesh,
    /// All with owners, of which some are nodes without ranks; direct where there are none.
    Servers,
    /// Owners in each rack, nodes without ranks if it has any, and one of them for all racks.
    Parameterhub,
    /// Trees that are packed on the rates of links.
    Blink,
}

/// Other names that the literature has for some of them, and why they are the same here.
pub const ALIASES: [(&str, Algorithm, &str); 7] = [
    ("rat", Algorithm::Hierarchical, "RAT's trees over any number of tiers"),
    ("plink", Algorithm::Hierarchical, "PLink's two levels, with racks from labels"),
    ("byteps", Algorithm::Servers, "BytePS's split between nodes and servers"),
    ("phub", Algorithm::Parameterhub, "short for ParameterHub"),
    ("parameter-server", Algorithm::Direct, "a parameter server on each node"),
    ("2d-torus", Algorithm::Torus, "its name in the paper"),
    ("2d-mesh", Algorithm::Mesh, "its name in the paper"),
];

/// The parameter of all algorithms that cut what follows one path.
pub(super) const SEGMENTS: Parameter = Parameter {
    name: "segments",
    about: "into how many segments at least what follows one path is cut; its size decides if 1",
    values: Values::Number { least: 1, most: 256, usual: 1 },
};

impl Algorithm {
    /// All of them.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// The one that is called so, also by another name of [`ALIASES`].
    pub fn named(name: &str) -> Option<Self> {
        let alias = ALIASES.iter().find(|(alias, ..)| *alias == name);
        name.parse().ok().or(alias.map(|&(_, algorithm, _)| algorithm))
    }

    /// The name that people read and write.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Those whose reductions add up in the canonical order. So they have the same result, bit for
    /// bit, and so have different ways to cut tensors into pieces.
    pub const CANONICAL: [Self; 3] =
        [Self::RecursiveDoubling, Self::HalvingDoubling, Self::Rabenseifner];

    /// Those of whose allreduces each node rounds each block at most once: what it contributes, or
    /// the sum of what it got. What is lost there can be kept for the next time.
    pub const ROUNDS_ONCE: [Self; 2] = [Self::Direct, Self::Hierarchical];

    /// Whether it is one of [`Self::CANONICAL`].
    pub fn is_canonical(self) -> bool {
        Self::CANONICAL.contains(&self)
    }
}
