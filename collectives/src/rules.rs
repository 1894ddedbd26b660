//! Rules: which algorithms are allowed for which collective and size, as users write them.
//!
//! ```text
//! auto
//! circulant(radix=4)
//! allreduce:0-64K=recursive-doubling; 64K-=^ring,^linear; broadcast=chain,linear
//! ```
//!
//! Rules are separated by `;`. A rule is `COLLECTIVE:RANGE=LIST`.
//!
//! - The collective is `allreduce`, `broadcast`, `reduce`, `allgather`, `gather`, `scatter`,
//!   `reducescatter` or `alltoall`. A rule without a collective is for that of the rule before it,
//!   and the first rule for all of them.
//! - The range is in bytes of a piece on the wire: `A-B` is more than A and up to B, `A-` more than
//!   A, and `0-` begins with 0. Without a range a rule is for all sizes.
//! - The list has specs to choose from, or algorithms with `^` to exclude, or is `auto`. A list
//!   alone is for all collectives and sizes.
//!
//! For reductions, [strict](Rules::strict) rules allow only algorithms with the canonical order of
//! additions, and [quantized](Rules::quantized) rules only those that round each block once on each
//! node.

#[cfg(test)]
mod tests;

mod error;
mod rule;
mod text;

use std::fmt;

pub use self::error::{RuleReason, RulesError};
use self::{
    error::{MAX_RULES, MAX_TEXT},
    rule::{List, Only, Rule, candidates},
    text::{head_of, position, read_rule},
};
use crate::{
    algorithms::{Algorithm, Kind, Spec, SpecError},
    topology::Topology,
};

/// Which specs are allowed for which collective and size.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    only: Option<Only>,
}

impl Rules {
    /// Reads rules.
    ///
    /// # Errors
    /// [`RulesError`] says which rule is wrong, where and why, and what is accepted.
    pub fn parse(text: &str) -> Result<Self, RulesError> {
        let parts: Vec<&str> = text.split(';').collect();
        let long = || RulesError { rule: 0, at: 1, reason: RuleReason::Long };
        if parts.len() > MAX_RULES || text.len() > MAX_TEXT {
            return Err(long());
        }
        let mut all = Self::default();
        let mut collective = None;
        let is_single = parts.len() == 1 && head_of(parts[0]).is_none();
        for (number, part) in (1..).zip(parts) {
            let wrong = |(at, reason): (&str, RuleReason)| RulesError {
                rule: if is_single { 0 } else { number },
                at: position(text, at),
                reason,
            };
            let rule = read_rule(part, collective).map_err(wrong)?;
            let with = all.rules.iter().position(|earlier| earlier.overlaps(&rule));
            if let Some(with) = with {
                return Err(wrong((part.trim(), RuleReason::Overlap { with: with + 1 })));
            }
            collective = rule.collective;
            all.rules.push(rule);
        }
        if all.is_plain() && all.rules.iter().all(|only| only.list == List::Auto) {
            all.rules.clear();
        }
        // The printed rules are sent to other processes, and may be longer than the input.
        if all.to_string().len() > MAX_TEXT { Err(long()) } else { Ok(all) }
    }

    /// Whether all specs can run on this number of nodes.
    ///
    /// # Errors
    /// [`RulesError`] names the first one that can't, with its place in the rules as they are
    /// printed.
    pub fn fits(&self, nodes: u32) -> Result<(), RulesError> {
        let text = self.to_string();
        for ((number, rule), part) in (1..).zip(&self.rules).zip(text.split(';')) {
            let List::Named(specs) = &rule.list else { continue };
            for spec in specs {
                let refused = |error: SpecError| {
                    let before = part.find(&spec.to_string()).unwrap_or(0);
                    let rule = if self.is_plain() { 0 } else { number };
                    RulesError { rule, at: position(&text, &part[before..]), reason: error.into() }
                };
                spec.fits(nodes).map_err(refused)?;
            }
        }
        Ok(())
    }

    /// The same rules, which allow only algorithms with the canonical order of additions
    /// ([`Algorithm::CANONICAL`]) for reductions: those that a list names, or all that it doesn't
    /// exclude.
    ///
    /// # Errors
    /// [`RulesError`] names the first rule that allows none of them.
    pub fn strict(self) -> Result<Self, RulesError> {
        let strict = Self { only: Some(Only::Canonical), ..self };
        for (number, rule) in (1..).zip(&strict.rules) {
            let collective = rule.collective.unwrap_or(Kind::Allreduce);
            if collective.reduces() && strict.listed(rule, collective, false).is_empty() {
                let rule = if strict.is_plain() { 0 } else { number };
                return Err(RulesError { rule: 0, at: 1, reason: RuleReason::Strict { rule } });
            }
        }
        Ok(strict)
    }

    /// The same rules for quantized pieces, which allow only algorithms that round each block once
    /// on each node ([`Algorithm::ROUNDS_ONCE`]). A rule that has none of them allows all of them.
    #[must_use]
    pub fn quantized(self) -> Self {
        Self { only: Some(Only::RoundsOnce), ..self }
    }

    /// Whether the rules are a single list without any of the algorithms of [`Self::quantized`].
    pub fn excludes_quantized(&self) -> bool {
        let quantized = self.clone().quantized();
        let listed = |rule: &Rule| quantized.listed(rule, Kind::Allreduce, false);
        self.is_plain() && self.rules.iter().any(|only| listed(only).is_empty())
    }

    /// What a rule lists for a collective, with or without servers.
    fn listed(&self, rule: &Rule, collective: Kind, shares: bool) -> Vec<Spec> {
        let mut specs = match &rule.list {
            List::Named(specs) => specs.clone(),
            List::Auto | List::Without(_) => self.usual(collective, shares),
        };
        if let List::Without(excluded) = &rule.list {
            specs.retain(|spec| !excluded.contains(spec));
        }
        if let Some(only) = self.only.and_then(|only| only.of(collective)) {
            specs.retain(|spec| only.contains(&spec.algorithm()));
        }
        specs
    }

    /// The candidates without a rule. `shares`: as [`Topology::has_shares`].
    fn usual(&self, collective: Kind, shares: bool) -> Vec<Spec> {
        let (all, servers) = match self.only.and_then(|only| only.of(collective)) {
            Some(only) => (only, None),
            None => {
                let servers = shares && collective == Kind::Allreduce;
                (candidates(collective), servers.then_some(Algorithm::Servers))
            }
        };
        all.iter().copied().chain(servers).map(Spec::usual).collect()
    }

    /// The number of the rule for a piece of this size, from 1; 0 if there is none.
    pub fn rule_for(&self, kind: Kind, bytes: u64) -> usize {
        let is_for = |collective| {
            let at = self.rules.iter().position(|rule| rule.is_for(collective, bytes))?;
            Some(at + 1)
        };
        Kind::named(kind.name(), 0).and_then(is_for).unwrap_or(0)
    }

    /// The spec that a rule forces on this number of nodes, if it allows exactly one.
    pub fn forced(&self, rule: usize, nodes: u32) -> Option<Spec> {
        match &self.rules.get(rule.checked_sub(1)?)?.list {
            List::Named(specs) if specs.len() == 1 => {
                let is_possible = |only: &&Spec| only.fits(nodes).is_ok() && self.takes(only);
                specs.first().filter(is_possible).copied()
            }
            _ => None,
        }
    }

    /// Whether these rules allow the spec, if they are for quantized pieces.
    fn takes(&self, spec: &Spec) -> bool {
        self.only != Some(Only::RoundsOnce) || Algorithm::ROUNDS_ONCE.contains(&spec.algorithm())
    }

    /// The number of a rule, or 0 for a single list, and what it allows for a kind on these nodes.
    /// Specs that don't fit the nodes are left out, because the rule may be for more nodes than a
    /// process set has. If nothing fits, or without a rule, all candidates are allowed.
    pub fn allowed(&self, kind: Kind, rule: usize, topology: &Topology) -> (usize, Vec<Spec>) {
        // A move has no choice: any will do.
        let collective = Kind::named(kind.name(), 0).unwrap_or(Kind::Broadcast { root: 0 });
        let given = rule.checked_sub(1).and_then(|at| self.rules.get(at));
        let (nodes, shares) = (topology.contributors(), topology.has_shares());
        let listed = given.map(|rule| self.listed(rule, collective, shares));
        let mut fitting = listed.unwrap_or_default();
        fitting.retain(|spec| spec.fits(nodes).is_ok());
        if fitting.is_empty() {
            return (0, self.usual(collective, shares));
        }
        (if self.is_plain() { 0 } else { rule }, fitting)
    }

    /// Whether a list names this algorithm.
    pub fn names(&self, algorithm: Algorithm) -> bool {
        let has_it = |specs: &[Spec]| specs.iter().any(|spec| spec.algorithm() == algorithm);
        self.rules.iter().any(|rule| matches!(&rule.list, List::Named(specs) if has_it(specs)))
    }

    /// Whether there is a choice on this number of nodes: the rules don't force one spec for
    /// everything.
    pub fn is_choice(&self, nodes: u32) -> bool {
        !self.is_plain() || self.forced(1, nodes).is_none()
    }

    /// Whether the rules are a single list for all collectives and sizes.
    fn is_plain(&self) -> bool {
        match &self.rules[..] {
            [] => true,
            [only] => only.collective.is_none() && (only.above, only.up_to) == (0, u64::MAX),
            _ => false,
        }
    }
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rules.is_empty() {
            return f.write_str("auto");
        }
        for (at, rule) in self.rules.iter().enumerate() {
            write!(f, "{}{rule}", if at == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}
