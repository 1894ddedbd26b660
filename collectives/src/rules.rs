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
//! - The collective is `allreduce`, `broadcast` or `reduce`. A rule without one is for that of the
//!   rule before it, the first rule for all of them.
//! - The range is in bytes of a piece, as it travels: `A-B` is more than A and up to B, `A-` more
//!   than A, and `0-` begins with 0. Without a range a rule is for all sizes.
//! - The list is of specs to choose from, or of algorithms with `^` that are not to be chosen, or
//!   `auto`. A list without anything before it is for everything.
//!
//! [Strict](Rules::strict) rules allow only algorithms with the canonical order of additions where
//! something is reduced.

use std::fmt::{self, Write};

use crate::algorithms::{Algorithm, Kind, Spec, SpecError};

/// What is chosen from where no rule says otherwise. The first four have been compared with
/// measured times. The linear one is for small pieces to or from one participant.
const CANDIDATES: [Algorithm; 5] = [
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::DoubleTree,
    Algorithm::Hierarchical,
    Algorithm::Linear,
];

/// The most rules (BOUND).
const MAX_RULES: usize = 64;

/// The longest text of rules, in bytes (BOUND).
const MAX_TEXT: usize = 4096;

/// A collective that has a choice of algorithms; a move from one participant to another has none.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, strum::Display, strum::EnumString, strum::VariantNames,
)]
#[strum(serialize_all = "kebab-case")]
enum Chosen {
    Allreduce,
    Broadcast,
    Reduce,
}

impl Chosen {
    fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Allreduce => Some(Self::Allreduce),
            Kind::Broadcast { .. } => Some(Self::Broadcast),
            Kind::Reduce { .. } => Some(Self::Reduce),
            Kind::Move { .. } => None,
        }
    }
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    /// All of them, if it names none.
    collective: Option<Chosen>,
    /// Not included, but for 0.
    above: u64,
    /// Included.
    up_to: u64,
    list: List,
}

/// The list of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
enum List {
    /// Everything that is chosen from without a rule.
    Auto,
    /// These.
    Named(Vec<Spec>),
    /// Everything but these.
    Without(Vec<Spec>),
}

impl Rule {
    fn is_for(&self, collective: Chosen, bytes: u64) -> bool {
        self.collective.is_none_or(|own| own == collective)
            && (bytes > self.above || self.above == 0)
            && bytes <= self.up_to
    }

    fn overlaps(&self, other: &Self) -> bool {
        let same = match (self.collective, other.collective) {
            (Some(own), Some(theirs)) => own == theirs,
            _ => true,
        };
        same && self.above < other.up_to && other.above < self.up_to
    }
}

/// Which specs are allowed for which collective and size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    rules: Vec<Rule>,
    usual: Vec<Spec>,
    is_strict: bool,
}

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
    if rule == 0 { String::new() } else { format!("rule {rule}, character {at}: ") }
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
    /// Some are excluded and some are named.
    #[error("a list either names what to choose from, or with ^ what not to choose")]
    Mixed,
    /// Parameters with `^`.
    #[error("^ takes an algorithm without parameters, such as ^ring")]
    Excluded,
    /// Nothing is left to choose.
    #[error("nothing is left of {}", CANDIDATES.map(Algorithm::name).join(", "))]
    Nothing,
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

impl Default for Rules {
    fn default() -> Self {
        let usual = CANDIDATES.map(Spec::usual).to_vec();
        Self { rules: Vec::new(), usual, is_strict: false }
    }
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
            let rule = rule(part, collective, &all.usual).map_err(wrong)?;
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
    /// [`RulesError`] names the first one that can't, without its place in the text.
    pub fn fits(&self, nodes: u32) -> Result<(), RulesError> {
        let named = |rule: &Rule| match &rule.list {
            List::Named(specs) => specs.clone(),
            List::Auto | List::Without(_) => Vec::new(),
        };
        let mut specs = self.rules.iter().flat_map(named);
        let refused = |error: SpecError| RulesError { rule: 0, at: 1, reason: error.into() };
        specs.try_for_each(|spec| spec.fits(nodes)).map_err(refused)
    }

    /// The same rules, but where something is reduced only algorithms with the canonical order of
    /// additions are allowed ([`Algorithm::CANONICAL`]): of those that a list names, or all of them
    /// but those that it excludes.
    ///
    /// # Errors
    /// [`RulesError`] names the first rule that allows none of them.
    pub fn strict(self) -> Result<Self, RulesError> {
        let strict = Self { is_strict: true, ..self };
        let reductions = [Chosen::Allreduce, Chosen::Reduce].map(Some);
        for (number, rule) in (1..).zip(&strict.rules) {
            let reduces = rule.collective.is_none() || reductions.contains(&rule.collective);
            if reduces && strict.listed(rule, true).is_empty() {
                let rule = if strict.is_plain() { 0 } else { number };
                return Err(RulesError { rule: 0, at: 1, reason: RuleReason::Strict { rule } });
            }
        }
        Ok(strict)
    }

    /// What a rule lists, for pieces that are reduced or only moved.
    fn listed(&self, rule: &Rule, reduces: bool) -> Vec<Spec> {
        let mut specs = match &rule.list {
            List::Named(specs) => specs.clone(),
            List::Auto | List::Without(_) => self.usual(reduces),
        };
        if let List::Without(excluded) = &rule.list {
            specs.retain(|spec| !excluded.contains(spec));
        }
        if self.is_strict && reduces {
            specs.retain(|spec| spec.algorithm().is_canonical());
        }
        specs
    }

    /// What is chosen from without a rule.
    fn usual(&self, reduces: bool) -> Vec<Spec> {
        if self.is_strict && reduces {
            Algorithm::CANONICAL.map(Spec::usual).to_vec()
        } else {
            self.usual.clone()
        }
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
                specs.first().filter(|only| only.fits(nodes).is_ok()).copied()
            }
            _ => None,
        }
    }

    /// What a rule allows for a kind among so many nodes, and the rule's number, which is 0 for one
    /// list that is for everything. What does not fit the nodes is left out: they may be a part of
    /// those that the rule is for. If nothing fits, or without a rule, all candidates are allowed.
    pub fn allowed(&self, kind: Kind, rule: usize, nodes: u32) -> (usize, Vec<Spec>) {
        let reduces = matches!(kind, Kind::Allreduce | Kind::Reduce { .. });
        let given = rule.checked_sub(1).and_then(|at| self.rules.get(at));
        let mut fitting = given.map_or_else(Vec::new, |rule| self.listed(rule, reduces));
        fitting.retain(|spec| spec.fits(nodes).is_ok());
        if fitting.is_empty() {
            return (0, self.usual(reduces));
        }
        (if self.is_plain() { 0 } else { rule }, fitting)
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

/// What comes before the `=` of a rule, which is before any parenthesis.
fn head_of(part: &str) -> Option<(&str, &str)> {
    let (head, list) = part.split_once('=')?;
    (!head.contains('(')).then_some((head, list))
}

/// A rule, or where it is wrong and why.
fn rule<'a>(
    part: &'a str,
    before: Option<Chosen>,
    usual: &[Spec],
) -> Result<Rule, (&'a str, RuleReason)> {
    let (head, list) = head_of(part).map_or((None, part), |(head, list)| (Some(head), list));
    let (mut collective, mut above, mut up_to) = (before, 0, u64::MAX);
    if let Some(head) = head {
        let (name, bytes) = match head.split_once(':') {
            Some((name, bytes)) => (Some(name), Some(bytes)),
            None if head.contains(|c: char| c.is_ascii_digit()) => (None, Some(head)),
            None => (Some(head), None),
        };
        if let Some(name) = name.map(str::trim) {
            let known = name.to_ascii_lowercase().parse();
            let unknown = |_| (name, RuleReason::Collective { given: cut(name) });
            collective = Some(known.map_err(unknown)?);
        }
        if let Some(bytes) = bytes.map(str::trim) {
            let none = || (bytes, RuleReason::Range { given: cut(bytes) });
            (above, up_to) = range(bytes).ok_or_else(none)?;
        }
    }
    Ok(Rule { collective, above, up_to, list: listed(list, usual)? })
}

/// A list.
fn listed<'a>(list: &'a str, usual: &[Spec]) -> Result<List, (&'a str, RuleReason)> {
    if list.trim().eq_ignore_ascii_case("auto") {
        return Ok(List::Auto);
    }
    let (mut named, mut excluded) = (Vec::new(), Vec::new());
    for item in items(list) {
        let name = item.strip_prefix('^');
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
        Ok(List::Named(named))
    } else if usual.iter().all(|spec| excluded.contains(spec)) {
        Err((list.trim(), RuleReason::Nothing))
    } else {
        Ok(List::Without(excluded))
    }
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
    let above = size(above)?;
    let up_to = if up_to.trim().is_empty() { u64::MAX } else { size(up_to)? };
    (above < up_to).then_some((above, up_to))
}

/// A number of bytes: `65536`, `64K` or `64KiB`.
fn size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        _ => return None,
    };
    let is_number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    is_number.then(|| digits.parse::<u64>().ok()?.checked_mul(1 << shift)).flatten()
}

/// Where a part of a text begins, in characters from 1.
fn position(text: &str, part: &str) -> usize {
    let before = (part.as_ptr() as usize).saturating_sub(text.as_ptr() as usize);
    text.get(..before).map_or(1, |before| before.chars().count() + 1)
}

fn cut(text: &str) -> String {
    text.chars().take(40).collect()
}

impl fmt::Display for Rules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.rules.is_empty() {
            return f.write_str("auto");
        }
        for (at, rule) in self.rules.iter().enumerate() {
            f.write_str(if at == 0 { "" } else { "; " })?;
            let mut head = rule.collective.map(|own| own.to_string()).unwrap_or_default();
            if (rule.above, rule.up_to) != (0, u64::MAX) {
                head.push_str(if head.is_empty() { "" } else { ":" });
                write!(head, "{}-", written(rule.above))?;
                if rule.up_to < u64::MAX {
                    head.push_str(&written(rule.up_to));
                }
            }
            if !head.is_empty() {
                write!(f, "{head}=")?;
            }
            let (specs, mark) = match &rule.list {
                List::Auto => {
                    f.write_str("auto")?;
                    continue;
                }
                List::Named(specs) => (specs, ""),
                List::Without(specs) => (specs, "^"),
            };
            let specs: Vec<String> = specs.iter().map(|spec| format!("{mark}{spec}")).collect();
            f.write_str(&specs.join(","))?;
        }
        Ok(())
    }
}

/// Exact, in the largest unit that divides the number.
fn written(bytes: u64) -> String {
    let shift =
        [30, 20, 10].into_iter().find(|&shift| bytes != 0 && bytes.is_multiple_of(1 << shift));
    match shift {
        Some(30) => format!("{}G", bytes >> 30),
        Some(20) => format!("{}M", bytes >> 20),
        Some(_) => format!("{}K", bytes >> 10),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BROADCAST: Kind = Kind::Broadcast { root: 0 };

    fn parsed(text: &str) -> String {
        match Rules::parse(text) {
            Ok(rules) => rules.to_string(),
            Err(error) => format!("error: {error}"),
        }
    }

    fn names(text: &str, kind: Kind, bytes: u64) -> (usize, String) {
        let rules = Rules::parse(text).unwrap();
        named(&rules, kind, bytes)
    }

    fn named(rules: &Rules, kind: Kind, bytes: u64) -> (usize, String) {
        let (rule, specs) = rules.allowed(kind, rules.rule_for(kind, bytes), 8);
        (rule, specs.iter().map(Spec::to_string).collect::<Vec<_>>().join(","))
    }

    #[test]
    fn what_is_printed_is_read_again() {
        for (text, printed) in [
            ("auto", "auto"),
            (" AUTO ", "auto"),
            ("Ring", "ring"),
            ("hips(along=ring,dims=2x4)", "hips(along=ring,dims=2x4)"),
            ("ring , circulant( radix = 4 )", "ring,circulant(radix=4)"),
            (
                "allreduce:0-64K=recursive_doubling; 64K-=^ring,^linear",
                "allreduce:0-64K=recursive-doubling; \
                 allreduce:64K-=^ring,^linear",
            ),
            ("0-1000=linear;1000-1GiB=auto", "0-1000=linear; 1000-1G=auto"),
            ("^halving_doubling", "^halving-doubling"),
            ("Broadcast = chain; allreduce:1M- = ring", "broadcast=chain; allreduce:1M-=ring"),
        ] {
            assert_eq!(parsed(text), printed, "{text}");
            assert_eq!(parsed(printed), printed);
            assert_eq!(Rules::parse(text), Rules::parse(printed), "{text}");
        }
    }

    #[test]
    fn a_rule_is_for_its_collective_and_its_range() {
        let text = "allreduce:0-64K=ring; 64K-1M=^ring,^linear; broadcast=chain";
        let usual = "ring,recursive-doubling,double-tree,hierarchical,linear";
        let some = "recursive-doubling,double-tree,hierarchical";
        for (kind, bytes, rule, specs) in [
            (Kind::Allreduce, 0, 1, "ring"),
            (Kind::Allreduce, 65_536, 1, "ring"),
            (Kind::Allreduce, 65_537, 2, some),
            (Kind::Allreduce, 1 << 20, 2, some),
            (Kind::Allreduce, (1 << 20) + 1, 0, usual),
            (BROADCAST, 65_536, 3, "chain"),
            (Kind::Reduce { root: 0 }, 65_536, 0, usual),
            (Kind::Move { from: 0, to: 1 }, 65_536, 0, usual),
        ] {
            assert_eq!(names(text, kind, bytes), (rule, specs.to_owned()), "{kind:?} {bytes}");
        }
        assert_eq!(names("chain", Kind::Reduce { root: 1 }, 5), (0, "chain".to_owned()));
        assert_eq!(names("0-9=chain; 9-=ring", BROADCAST, 10), (2, "ring".to_owned()));
    }

    /// A process set may have another number of nodes than the rules are for.
    #[test]
    fn what_does_not_fit_is_left_out() {
        let rules = Rules::parse("allreduce=torus(dims=2x4),ring; broadcast=torus(dims=2x4)");
        let rules = rules.unwrap();
        assert_eq!(rules.fits(8), Ok(()));
        let error = rules.fits(6).unwrap_err().to_string();
        assert_eq!(error, "torus(dims=2x4) is for 8 nodes, and there are 6");
        assert_eq!(rules.allowed(Kind::Allreduce, 1, 6), (1, vec![Algorithm::Ring.into()]));
        let of = |nodes| rules.allowed(BROADCAST, 2, nodes).0;
        assert_eq!((of(6), of(8)), (0, 2));
        assert_eq!(
            (rules.forced(1, 8), rules.forced(2, 6), rules.forced(0, 8)),
            (None, None, None)
        );
        assert_eq!(rules.forced(2, 8).unwrap().to_string(), "torus(dims=2x4)");
    }

    /// SAME: where something is reduced, only the canonical order of additions.
    #[test]
    fn strict_rules_allow_one_order_of_additions() {
        let canonical = "recursive-doubling,halving-doubling,rabenseifner";
        let usual = "ring,recursive-doubling,double-tree,hierarchical,linear";
        let reduce = Kind::Reduce { root: 1 };
        for (text, kind, rule, specs) in [
            ("auto", Kind::Allreduce, 0, canonical),
            ("auto", reduce, 0, canonical),
            ("auto", BROADCAST, 0, usual),
            ("^ring", Kind::Allreduce, 0, canonical),
            ("^recursive-doubling", reduce, 0, "halving-doubling,rabenseifner"),
            ("64K-=auto; 0-64K=^rabenseifner", reduce, 2, "recursive-doubling,halving-doubling"),
            (usual, Kind::Allreduce, 0, "recursive-doubling"),
            ("^ring", BROADCAST, 0, "recursive-doubling,double-tree,hierarchical,linear"),
            ("ring,rabenseifner", reduce, 0, "rabenseifner"),
            ("ring,rabenseifner", BROADCAST, 0, "ring,rabenseifner"),
            ("broadcast=chain", BROADCAST, 1, "chain"),
            ("broadcast=chain", Kind::Allreduce, 0, canonical),
            ("0-9=halving-doubling; 9-=auto", Kind::Allreduce, 2, canonical),
        ] {
            let rules = Rules::parse(text).unwrap().strict().unwrap();
            assert_eq!(named(&rules, kind, 4096), (rule, specs.to_owned()), "{text}, {kind:?}");
        }
        let only = "negotiation.strict allows only recursive-doubling, halving-doubling, \
                    rabenseifner for reductions, and ";
        for (text, what) in [
            ("ring", "this list allows none of them"),
            (
                "^recursive-doubling,^halving-doubling,^rabenseifner",
                "this list allows none of them",
            ),
            ("allreduce=ring", "rule 1 allows none of them"),
            ("broadcast=chain; reduce:0-9=auto; reduce:9-=chain", "rule 3 allows none of them"),
        ] {
            let error = Rules::parse(text).unwrap().strict().unwrap_err();
            assert_eq!(error.to_string(), format!("{only}{what}"), "{text}");
        }
    }

    /// TRUST: a mistake is named with its rule, its place and what is accepted.
    #[test]
    fn a_mistake_is_named_with_its_place() {
        for (text, said) in [
            ("rng", "there is no algorithm \"rng\"; use one of ring, recursive-doubling"),
            ("", "there is no algorithm \"\""),
            ("allreduce:0-64K=rng", "rule 1, character 17: there is no algorithm \"rng\""),
            (
                "ring; broadcast=chain; 5-=",
                "rule 2, character 7: its range overlaps that of rule 1",
            ),
            ("broadcast=chain;", "rule 2, character 17: there is no algorithm \"\""),
            ("allgather=ring", "rule 1, character 1: \"allgather\" is no collective"),
            ("allreduce:0-64Q=ring", "rule 1, character 11: \"0-64Q\" is no range of bytes"),
            ("64K=ring", "\"64K\" is no range of bytes; use 0-64K, 64K-1M or 1M-"),
            ("allreduce:=ring", "\"\" is no range"),
            ("9-9=ring", "is no range"),
            ("0-99999999999999999999=ring", "is no range"),
            ("99999999999G-=ring", "is no range"),
            ("0=ring", "\"0\" is no range"),
            ("0-9=ring; 8-=ring", "rule 2, character 11: its range overlaps that of rule 1"),
            ("allreduce=ring; 8-=ring", "its range overlaps that of rule 1"),
            ("broadcast=ring,^chain", "character 16: a list either names"),
            ("^ring(way=around)", "^ takes an algorithm without parameters"),
            ("^ring,^recursive-doubling,^double-tree,^hierarchical,^linear", "nothing is left of"),
            ("allreduce=circulant(radix=1)", "radix is a number from 2 to"),
            ("allreduce=ring,auto", "there is no algorithm \"auto\""),
            ("é=ring", "rule 1, character 1: \"é\" is no collective"),
            ("(=)", "there is no algorithm"),
        ] {
            let error = parsed(text);
            assert!(error.starts_with("error: ") && error.contains(said), "{text}: {error}");
        }
        // As printed, each rule names its collective.
        let specs = "recursive-doubling,double-tree,hierarchical,linear";
        let many: Vec<String> =
            (0..MAX_RULES).map(|at| format!("{at}-{}={specs}", at + 1)).collect();
        let many = format!("allreduce:{}", many.join(";"));
        assert!(many.len() < MAX_TEXT);
        for long in ["ring;".repeat(MAX_RULES), "x".repeat(MAX_TEXT + 1), many] {
            assert!(parsed(&long).contains("at most 64 rules"));
        }
        let name = "x".repeat(MAX_TEXT - 8);
        for long in [name.clone(), format!("{name}=ring"), format!("{name}:0-=5")] {
            assert!(parsed(&long).len() < 1000);
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_is_too_strange(text in "[a-z0-9:;=,^()é -]{0,60}") {
            if let Ok(rules) = Rules::parse(&text) {
                proptest::prop_assert_eq!(Rules::parse(&rules.to_string()), Ok(rules));
            }
        }
    }
}
