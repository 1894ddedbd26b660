//! Why a text is not a list of rules.

use crate::algorithms::{Algorithm, Kind, SpecError};

/// The most rules (BOUND).
pub(super) const MAX_RULES: usize = 64;

/// The longest text of rules, in bytes (BOUND).
pub(super) const MAX_TEXT: usize = 4096;

/// Why a text is not a list of rules.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{reason}", place(*rule, *at))]
pub struct RulesError {
    /// The number of the rule, from 1; 0 for the whole text or a single list.
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
#[expect(missing_docs, reason = "the texts explain the fields")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RuleReason {
    /// Not a spec, or not for this number of nodes.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The collective is unknown or has no choice of algorithms.
    #[error(
        "{given:?} is not a collective with a choice of algorithms; use one of {}",
        Kind::collectives(0).map(Kind::name).join(", ")
    )]
    Collective { given: String },
    /// Not a range.
    #[error("invalid range of bytes {given:?}; use 0-64K, 64K-1M or 1M-")]
    Range { given: String },
    /// The range of an earlier rule has some of the same bytes, for the same collective.
    #[error("its range overlaps that of rule {with}")]
    Overlap { with: usize },
    /// A collective or a range without a list.
    #[error("{given:?} has no list; a rule is COLLECTIVE:RANGE=LIST")]
    NoList { given: String },
    /// Some are excluded and some are named.
    #[error("a list either names what to choose from, or with ^ what not to choose")]
    Mixed,
    /// Parameters with `^`.
    #[error("^ takes an algorithm without parameters, such as ^ring")]
    Excluded,
    /// Nothing is left to choose.
    #[error(
        "the list excludes all of {}",
        candidates.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ")
    )]
    Nothing { candidates: &'static [Algorithm] },
    /// No algorithm is left that gives the same bits in every run.
    #[error(
        "negotiation.strict allows only {} for reductions, and {} allows none of them",
        Algorithm::CANONICAL.map(Algorithm::name).join(", "),
        if *rule == 0 { "this list".to_owned() } else { format!("rule {rule}") }
    )]
    Strict { rule: usize },
    /// Too many rules, or too long.
    #[error("at most {MAX_RULES} rules in {MAX_TEXT} bytes are allowed")]
    Long,
}
