//! One rule: for which collective and sizes it is, and what it lists.

use crate::algorithms::{Algorithm, Kind, Spec};

/// The candidates without a rule. Their predicted times have been compared with measured ones.
/// Linear is for small pieces to or from one participant.
const CANDIDATES: [Algorithm; 6] = [
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::DoubleTree,
    Algorithm::Hierarchical,
    Algorithm::Circulant,
    Algorithm::Linear,
];

/// The same for collectives in which each block has its own roles. Most other algorithms have the
/// trees of one of these.
const EXCHANGES: [Algorithm; 4] =
    [Algorithm::Direct, Algorithm::Circulant, Algorithm::Hierarchical, Algorithm::Ring];

/// The candidates of a collective without a rule.
pub(super) fn candidates(collective: Kind) -> &'static [Algorithm] {
    if collective.roles().is_some() { &CANDIDATES } else { &EXCHANGES }
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    /// The collective with root 0; none for all.
    pub(super) collective: Option<Kind>,
    /// Exclusive, except for 0.
    pub(super) above: u64,
    /// Inclusive.
    pub(super) up_to: u64,
    pub(super) list: List,
}

/// The list of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum List {
    /// All candidates.
    Auto,
    /// These.
    Named(Vec<Spec>),
    /// All candidates but these.
    Without(Vec<Spec>),
}

impl Rule {
    pub(super) fn is_for(&self, collective: Kind, bytes: u64) -> bool {
        self.collective.is_none_or(|own| own == collective)
            && (bytes > self.above || self.above == 0)
            && bytes <= self.up_to
    }

    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let same = match (self.collective, other.collective) {
            (Some(own), Some(theirs)) => own == theirs,
            _ => true,
        };
        same && self.above < other.up_to && other.above < self.up_to
    }
}

/// A property that only some algorithms have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Only {
    /// Additions in the canonical order.
    Canonical,
    /// Allreduces that round each block once on each node.
    RoundsOnce,
}

impl Only {
    /// The algorithms that have it, if it matters for the collective.
    pub(super) fn of(self, collective: Kind) -> Option<&'static [Algorithm]> {
        match self {
            Self::Canonical => collective.reduces().then_some(&Algorithm::CANONICAL),
            Self::RoundsOnce => (collective == Kind::Allreduce).then_some(&Algorithm::ROUNDS_ONCE),
        }
    }
}
