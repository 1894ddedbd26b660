//! The algorithms by name, and their parameters.

use std::fmt;

use strum::VariantArray;

use crate::bytes;

/// The most factors of a parameter: 4,096 nodes have as many.
pub(super) const FACTORS: usize = 12;

/// A parameter of an algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// What it decides.
    pub about: &'static str,
    /// Its possible values.
    pub values: Values,
}

/// The possible values of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A whole number.
    Number {
        /// The smallest.
        least: u32,
        /// The largest.
        most: u32,
        /// The default.
        usual: u32,
    },
    /// One of several words; the first is the default.
    Word(&'static [&'static str]),
    /// Numbers of at least 2 whose product is the number of nodes, such as `4x8`; at most this
    /// many. By default the algorithm chooses them.
    Factors(usize),
    /// A number of bytes, such as `64K`. By default something else decides.
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
            Self::Factors(2) => write!(f, "two numbers of at least 2, such as 4x8"),
            Self::Factors(most) => write!(f, "2 to {most} numbers of at least 2, such as 4x8"),
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
    /// Direct exchange in racks, then between racks, and so on through all tiers.
    Hierarchical,
    /// Halving and doubling around a circle, over racks; to or from one participant along a
    /// binomial tree.
    Circulant,
    /// The same without racks.
    Bcube,
    /// All with all; to or from one participant in one message.
    Direct,
    /// Halving and doubling at doubling distance.
    HalvingDoubling,
    /// The same, with a fold in which both members of a pair reduce a half.
    Rabenseifner,
    /// Halving and doubling at distances for a torus.
    Swing,
    /// Several rings.
    MultiRing,
    /// All with one node.
    Linear,
    /// A binomial tree.
    Binomial,
    /// A tree of any degree.
    KNomial,
    /// A chain.
    Chain,
    /// Rings along two dimensions.
    Torus,
    /// Rings along any number of dimensions.
    Blueconnect,
    /// Direct exchange along any number of dimensions.
    Hips,
    /// A ring of leaders, one for each rack.
    LeaderRing,
    /// Halving and doubling at Swing's distances, in messages of one range; to or from one
    /// participant along a tree of such distances.
    Bine,
    /// A broadcast of blocks in the fewest rounds, and the same backwards.
    CirculantBlocks,
    /// Lines along two dimensions.
    Mesh,
    /// All with owners, some of which are nodes without ranks; direct if there are none.
    Servers,
    /// Owners in each rack, which are its nodes without ranks if it has any, and one for all racks.
    Parameterhub,
    /// Trees that are packed on the rates of links.
    Blink,
}

/// Other names of some algorithms in the literature, and why they are the same here.
pub const ALIASES: [(&str, Algorithm, &str); 7] = [
    ("rat", Algorithm::Hierarchical, "RAT's trees over any number of tiers"),
    ("plink", Algorithm::Hierarchical, "PLink's two levels, with racks from labels"),
    ("byteps", Algorithm::Servers, "BytePS's split between nodes and servers"),
    ("phub", Algorithm::Parameterhub, "short for ParameterHub"),
    ("parameter-server", Algorithm::Direct, "a parameter server on each node"),
    ("2d-torus", Algorithm::Torus, "its name in the paper"),
    ("2d-mesh", Algorithm::Mesh, "its name in the paper"),
];

/// The parameter of all algorithms that cut the data on one path.
pub(super) const SEGMENTS: Parameter = Parameter {
    name: "segments",
    about: "the fewest segments of the data on one path; 1 leaves their number to its size",
    values: Values::Number { least: 1, most: 256, usual: 1 },
};

impl Algorithm {
    /// All of them.
    pub const ALL: &[Self] = Self::VARIANTS;

    /// The algorithm with this name, or with this alias ([`ALIASES`]).
    pub fn named(name: &str) -> Option<Self> {
        let alias = ALIASES.iter().find(|(alias, ..)| *alias == name);
        name.parse().ok().or(alias.map(|&(_, algorithm, _)| algorithm))
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The algorithms whose reductions add up in the canonical order. They have the same result,
    /// bit for bit, however tensors are cut into pieces.
    pub const CANONICAL: [Self; 3] =
        [Self::RecursiveDoubling, Self::HalvingDoubling, Self::Rabenseifner];

    /// The algorithms in whose allreduces each node rounds each block at most once: its
    /// contribution, or the sum of what it received. The error can be kept for the next time.
    pub const ROUNDS_ONCE: [Self; 2] = [Self::Direct, Self::Hierarchical];

    /// Whether it is one of [`Self::CANONICAL`].
    pub fn is_canonical(self) -> bool {
        Self::CANONICAL.contains(&self)
    }
}
