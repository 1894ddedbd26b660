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

use std::fmt::{self, Write};

use crate::{
    algorithms::{Algorithm, Kind, Spec, SpecError},
    bytes,
    topology::Topology,
};

/// What is chosen from where no rule says otherwise. They have been compared with measured times.
/// The linear one is for small pieces to or from one participant.
const CANDIDATES: [Algorithm; 6] = [
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::DoubleTree,
    Algorithm::Hierarchical,
    Algorithm::Circulant,
    Algorithm::Linear,
];

/// The same for collectives of which each block has roles of its own, where most algorithms have
/// the trees of one of these.
const EXCHANGES: [Algorithm; 4] =
    [Algorithm::Direct, Algorithm::Circulant, Algorithm::Hierarchical, Algorithm::Ring];

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
    Allgather,
    Gather,
    Scatter,
    Reducescatter,
    Alltoall,
}

impl Chosen {
    const ALL: [Self; 8] = [
        Self::Allreduce,
        Self::Broadcast,
        Self::Reduce,
        Self::Allgather,
        Self::Gather,
        Self::Scatter,
        Self::Reducescatter,
        Self::Alltoall,
    ];

    fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Allreduce => Some(Self::Allreduce),
            Kind::Broadcast { .. } => Some(Self::Broadcast),
            Kind::Reduce { .. } => Some(Self::Reduce),
            Kind::Allgather => Some(Self::Allgather),
            Kind::Gather { .. } => Some(Self::Gather),
            Kind::Scatter { .. } => Some(Self::Scatter),
            Kind::ReduceScatter => Some(Self::Reducescatter),
            Kind::Alltoall => Some(Self::Alltoall),
            Kind::Move { .. } => None,
        }
    }

    /// What is chosen from where no rule says otherwise.
    fn candidates(self) -> &'static [Algorithm] {
        match self {
            Self::Allreduce | Self::Broadcast | Self::Reduce => &CANDIDATES,
            Self::Allgather
            | Self::Gather
            | Self::Scatter
            | Self::Reducescatter
            | Self::Alltoall => &EXCHANGES,
        }
    }

    fn reduces(self) -> bool {
        matches!(self, Self::Allreduce | Self::Reduce | Self::Reducescatter)
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
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    only: Option<Only>,
}

/// What only some algorithms can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Only {
    /// Additions in the canonical order.
    Canonical,
    /// Allreduces that round each block once on each node.
    RoundsOnce,
}

impl Only {
    /// The algorithms, if it concerns the collective.
    fn of(self, collective: Chosen) -> Option<&'static [Algorithm]> {
        match self {
            Self::Canonical => collective.reduces().then_some(&Algorithm::CANONICAL),
            Self::RoundsOnce => {
                (collective == Chosen::Allreduce).then_some(&Algorithm::ROUNDS_ONCE)
            }
        }
    }
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
            let rule = rule(part, collective).map_err(wrong)?;
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

/// What comes before the `=` of a rule, which is before any parenthesis.
fn head_of(part: &str) -> Option<(&str, &str)> {
    let (head, list) = part.split_once('=')?;
    (!head.contains('(')).then_some((head, list))
}

/// A rule, or where it is wrong and why.
fn rule(part: &str, before: Option<Chosen>) -> Result<Rule, (&str, RuleReason)> {
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
    Ok(Rule { collective, above, up_to, list: listed(list, collective)? })
}

/// A list.
fn listed(list: &str, collective: Option<Chosen>) -> Result<List, (&str, RuleReason)> {
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
    let all = Chosen::ALL.into_iter().filter(|one| collective.is_none_or(|own| own == *one));
    for candidates in all.map(Chosen::candidates) {
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
                write!(head, "{}-", bytes::written(rule.above))?;
                if rule.up_to < u64::MAX {
                    head.push_str(&bytes::written(rule.up_to));
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
