//! Parsing and printing of a rule.

use std::fmt::{self, Write};

use super::{
    error::RuleReason,
    rule::{List, Rule, candidates},
};
use crate::{
    algorithms::{Algorithm, Kind, Spec},
    bytes,
};

/// Splits a rule at its `=`, which is before any parenthesis.
pub(super) fn head_of(part: &str) -> Option<(&str, &str)> {
    let (head, list) = part.split_once('=')?;
    (!head.contains('(')).then_some((head, list))
}

/// Reads a rule, or returns the part that is wrong, and why.
pub(super) fn read_rule(part: &str, before: Option<Kind>) -> Result<Rule, (&str, RuleReason)> {
    let (head, list) = head_of(part).map_or((None, part), |(head, list)| (Some(head), list));
    let (mut collective, mut above, mut up_to) = (before, 0, u64::MAX);
    if let Some(head) = head {
        let (name, bytes) = match head.split_once(':') {
            Some((name, bytes)) => (Some(name), Some(bytes)),
            None if head.contains(|c: char| c.is_ascii_digit()) => (None, Some(head)),
            None => (Some(head), None),
        };
        if let Some(name) = name.map(str::trim) {
            let known = Kind::named(&name.to_ascii_lowercase(), 0);
            let unknown = || (name, RuleReason::Collective { given: cut(name) });
            collective = Some(known.ok_or_else(unknown)?);
        }
        if let Some(bytes) = bytes.map(str::trim) {
            let none = || (bytes, RuleReason::Range { given: cut(bytes) });
            (above, up_to) = range(bytes).ok_or_else(none)?;
        }
    }
    Ok(Rule { collective, above, up_to, list: listed(list, collective)? })
}

/// Reads a list.
fn listed(list: &str, collective: Option<Kind>) -> Result<List, (&str, RuleReason)> {
    if list.trim().eq_ignore_ascii_case("auto") {
        return Ok(List::Auto);
    }
    let (mut named, mut excluded) = (Vec::new(), Vec::new());
    for item in items(list) {
        let name = item.strip_prefix('^');
        if item.contains(':') {
            return Err((item, RuleReason::NoList { given: cut(item) }));
        }
        let spec = Spec::parse(name.unwrap_or(item)).map_err(|error| (item, error.into()))?;
        if name.is_none() {
            named.push(spec);
        } else if spec == Spec::usual(spec.algorithm()) {
            excluded.push(spec);
        } else {
            return Err((item, RuleReason::Excluded));
        }
        if !named.is_empty() && !excluded.is_empty() {
            return Err((item, RuleReason::Mixed));
        }
    }
    if excluded.is_empty() {
        return Ok(List::Named(named));
    }
    let is_excluded = |algorithm: &Algorithm| excluded.contains(&Spec::usual(*algorithm));
    let all = Kind::collectives(0).into_iter();
    let own = all.filter(|one| collective.is_none_or(|own| own == *one));
    for candidates in own.map(candidates) {
        if candidates.iter().all(is_excluded) {
            return Err((list.trim(), RuleReason::Nothing { candidates }));
        }
    }
    Ok(List::Without(excluded))
}

/// The parts of a list, which are separated by commas outside parentheses.
fn items(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    list.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
}

/// `A-B` or `A-`.
fn range(text: &str) -> Option<(u64, u64)> {
    let (above, up_to) = text.split_once('-')?;
    let above = bytes::parse(above)?;
    let up_to = if up_to.trim().is_empty() { u64::MAX } else { bytes::parse(up_to)? };
    (above < up_to).then_some((above, up_to))
}

/// Where a part of a text begins, in characters from 1.
pub(super) fn position(text: &str, part: &str) -> usize {
    let before = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    text.get(..before).map_or(1, |before| before.chars().count() + 1)
}

fn cut(text: &str) -> String {
    text.chars().take(40).collect()
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut head = self.collective.map_or("", Kind::name).to_owned();
        if (self.above, self.up_to) != (0, u64::MAX) {
            head.push_str(if head.is_empty() { "" } else { ":" });
            write!(head, "{}-", bytes::written(self.above))?;
            if self.up_to < u64::MAX {
                head.push_str(&bytes::written(self.up_to));
            }
        }
        if !head.is_empty() {
            write!(f, "{head}=")?;
        }
        let (specs, mark) = match &self.list {
            List::Auto => return f.write_str("auto"),
            List::Named(specs) => (specs, ""),
            List::Without(specs) => (specs, "^"),
        };
        let specs: Vec<String> = specs.iter().map(|spec| format!("{mark}{spec}")).collect();
        f.write_str(&specs.join(","))
    }
}
