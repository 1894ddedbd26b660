//! Rules: which algorithms are allowed for which collective and size, as people write them.
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
//!   `reducescatter` or `alltoall`. A rule without one is for that of the rule before it, the first
//!   rule for all of them.
//! - The range is in bytes of a piece, as it travels: `A-B` is more than A and up to B, `A-` more
//!   than A, and `0-` begins with 0. Without a range a rule is for all sizes.
//! - The list is of specs to choose from, or of algorithms with `^` that are not to be chosen, or
//!   `auto`. A list without anything before it is for everything.
//!
//! [Strict](Rules::strict) rules allow only algorithms with the canonical order of additions where
//! something is reduced, and [quantized](Rules::quantized) ones only those that round each block
//! once on each node.

#[cfg(test)]
mod tests;

mod error;
mod rule;
mod text;

use std::fmt;

pub use self::error::{RuleReason, RulesError};
use self::{
    error::{MAX_RULES, MAX_TEXT},
    rule::{Chosen, List, Only, Rule},
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
        // What is printed is sent to other processes, and may be longer than what was given.
        if all.to_string().len() > MAX_TEXT { Err(long()) } else { Ok(all) }
    }

    /// Whether all specs can run among so many nodes.
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

    /// The same rules, but where something is reduced only algorithms with the canonical order of
    /// additions are allowed ([`Algorithm::CANONICAL`]): of those that a list names, or all of them
    /// but those that it excludes.
    ///
    /// # Errors
    /// [`RulesError`] names the first rule that allows none of them.
    pub fn strict(self) -> Result<Self, RulesError> {
        let strict = Self { only: Some(Only::Canonical), ..self };
        for (number, rule) in (1..).zip(&strict.rules) {
            let collective = rule.collective.unwrap_or(Chosen::Allreduce);
            if collective.reduces() && strict.listed(rule, collective, false).is_empty() {
                let rule = if strict.is_plain() { 0 } else { number };
                return Err(RulesError { rule: 0, at: 1, reason: RuleReason::Strict { rule } });
            }
        }
        Ok(strict)
    }

    /// The same rules for pieces that are quantized: only algorithms are allowed that round each
    /// block once on each node ([`Algorithm::ROUNDS_ONCE`]). A rule that allows none of them allows
    /// all of them.
    #[must_use]
    pub fn quantized(self) -> Self {
        Self { only: Some(Only::RoundsOnce), ..self }
    }

    /// Whether one list for everything names none of those algorithms.
    pub fn excludes_quantized(&self) -> bool {
        let quantized = self.clone().quantized();
        let listed = |rule: &Rule| quantized.listed(rule, Chosen::Allreduce, false);
        self.is_plain() && self.rules.iter().any(|only| listed(only).is_empty())
    }

    /// What a rule lists for a collective, with or without servers.
    fn listed(&self, rule: &Rule, collective: Chosen, shares: bool) -> Vec<Spec> {
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

    /// What is chosen from without a rule. `shares`: whether it matters who owns how much.
    fn usual(&self, collective: Chosen, shares: bool) -> Vec<Spec> {
        let (all, servers) = match self.only.and_then(|only| only.of(collective)) {
            Some(only) => (only, None),
            None => {
                let servers = shares && collective == Chosen::Allreduce;
                (collective.candidates(), servers.then_some(Algorithm::Servers))
            }
        };
        all.iter().copied().chain(servers).map(Spec::usual).collect()
    }

    /// The number of the rule for a piece of so many bytes, from 1; 0 if there is none.
    pub fn rule_for(&self, kind: Kind, bytes: u64) -> usize {
        let is_for = |collective| {
            let at = self.rules.iter().position(|rule| rule.is_for(collective, bytes))?;
            Some(at + 1)
        };
        Chosen::of(kind).and_then(is_for).unwrap_or(0)
    }

    /// The only spec that a rule allows among so many nodes, if it is one.
    pub fn forced(&self, rule: usize, nodes: u32) -> Option<Spec> {
        match &self.rules.get(rule.checked_sub(1)?)?.list {
            List::Named(specs) if specs.len() == 1 => {
                let is_possible = |only: &&Spec| only.fits(nodes).is_ok() && self.takes(only);
                specs.first().filter(is_possible).copied()
            }
            _ => None,
        }
    }

    /// Whether quantized pieces could take it, if these are such rules.
    fn takes(&self, spec: &Spec) -> bool {
        self.only != Some(Only::RoundsOnce) || Algorithm::ROUNDS_ONCE.contains(&spec.algorithm())
    }

    /// What a rule allows for a kind among these nodes, and the rule's number, which is 0 for one
    /// list that is for everything. What does not fit the nodes is left out: they may be a part of
    /// those that the rule is for. If nothing fits, or without a rule, all candidates are allowed.
    pub fn allowed(&self, kind: Kind, rule: usize, topology: &Topology) -> (usize, Vec<Spec>) {
        // A move has no choice: any will do.
        let collective = Chosen::of(kind).unwrap_or(Chosen::Broadcast);
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

    /// Whether there is anything to choose among so many nodes: it is not one spec for everything.
    pub fn is_choice(&self, nodes: u32) -> bool {
        !self.is_plain() || self.forced(1, nodes).is_none()
    }

    /// Whether it is one list for everything.
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
