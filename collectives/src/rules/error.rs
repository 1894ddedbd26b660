//! Why a text is not a list of rules.

use super::rule::Chosen;
use crate::algorithms::{Algorithm, SpecError};

/// The most rules (BOUND).
pub(super) const MAX_RULES: usize = 64;

/// The longest text of rules, in bytes (BOUND).
pub(super) const MAX_TEXT: usize = 4096;

/// Why a text is not a list of rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", place(*rule, *at))]
pub struct RulesError {
    /// Which rule, from 1; 0 if the text is none at all, or a single spec.
    pub rule: usize,
    /// Where in the text, in characters from 1.
    pub at: usize,
    /// What is wrong, and what is accepted.
    pub reason: RuleReason,
}

fn place(rule: usize, at: usize) -> String {
    match (rule, at) {
        (0, 1) => String::new(),
        (0, at) => format!("character {at}: "),
        (rule, at) => format!("rule {rule}, character {at}: "),
    }
}

/// What is wrong with a rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleReason {
    /// Not a spec, or not for this number of nodes.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// There is no such collective, or it has no choice of algorithms.
    #[error(
        "{given:?} is no collective with a choice; use one of {}",
        <Chosen as strum::VariantNames>::VARIANTS.join(", ")
    )]
    Collective {
        /// The name.
        given: String,
    },
    /// Not a range.
    #[error("{given:?} is no range of bytes; use 0-64K, 64K-1M or 1M-")]
    Range {
        /// The text.
        given: String,
    },
    /// The range of an earlier rule has some of the same bytes, for the same collective.
    #[error("its range overlaps that of rule {with}")]
    Overlap {
        /// The earlier rule.
        with: usize,
    },
    /// A collective or a range, and no list.
    #[error("{given:?} has no list; a rule is COLLECTIVE:RANGE=LIST")]
    NoList {
        /// The text.
        given: String,
    },
    /// Some are excluded and some are named.
    #[error("a list either names what to choose from, or with ^ what not to choose")]
    Mixed,
    /// Parameters with `^`.
    #[error("^ takes an algorithm without parameters, such as ^ring")]
    Excluded,
    /// Nothing is left to choose.
    #[error(
        "nothing is left of {}",
        candidates.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ")
    )]
    Nothing {
        /// All that there was to choose from.
        candidates: &'static [Algorithm],
    },
    /// Nothing is left where the results have to be the same bits in every run.
    #[error(
        "negotiation.strict allows only {} for reductions, and {} allows none of them",
        Algorithm::CANONICAL.map(Algorithm::name).join(", "),
        if *rule == 0 { "this list".to_owned() } else { format!("rule {rule}") }
    )]
    Strict {
        /// The number of the rule, from 1; 0 if there is only one list.
        rule: usize,
    },
    /// Too many rules, or too long.
    #[error("at most {MAX_RULES} rules in {MAX_TEXT} bytes are possible")]
    Long,
}
