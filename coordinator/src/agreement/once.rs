//! Names that were used once and then lost their ids.
//!
//! A program may use a new name in every step, such as `loss_17`. An id for it costs memory in the
//! coordinator and in every daemon, and is never used again. So the ids of names that have been
//! used only once are few ([`MAX_NEW`]), and the oldest of them is evicted for the next one. What
//! is kept of the name is a hash: if the name comes again, it gets an id that lasts. So a model
//! with more tensors than [`MAX_NEW`] has all of its ids from the third step on.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    hash::{DefaultHasher, Hash, Hasher},
};

use gradwire_proto::{ProcessSetId, TensorName};

use crate::model::text;

/// The most ids of names that were used only once (BOUND).
pub(super) const MAX_NEW: usize = 4096;

/// The most names of which a hash is kept (BOUND).
const MAX_SEEN: usize = 1 << 16;

/// The most patterns of names that are counted (BOUND).
const MAX_PATTERNS: usize = 64;

/// A pattern is reported after this many names that did not come again.
const REPORTED: usize = 8192;

/// The longest pattern in the report, in characters.
const MAX_PATTERN: usize = 128;

/// The names that have lost their ids after a single use.
#[derive(Debug, Default)]
pub(super) struct UsedOnce {
    seen: BTreeSet<u64>,
    /// The same hashes, oldest first.
    order: VecDeque<u64>,
    /// How many names of a pattern did not come again; `None` if one did.
    patterns: BTreeMap<String, Option<usize>>,
    is_reported: bool,
}

fn hash(set: ProcessSetId, name: &TensorName) -> u64 {
    let mut hasher = DefaultHasher::new();
    (set, name.as_str()).hash(&mut hasher);
    hasher.finish()
}

/// The name with `{n}` for each number in it.
fn pattern(name: &str) -> String {
    let mut pattern = String::with_capacity(name.len());
    let mut in_number = false;
    for character in name.chars() {
        if !character.is_ascii_digit() {
            pattern.push(character);
        } else if !in_number {
            pattern.push_str("{n}");
        }
        in_number = character.is_ascii_digit();
    }
    text::excerpt(&pattern, MAX_PATTERN)
}

impl UsedOnce {
    /// Notes that a name has lost its id after a single use. Returns a warning, once, if many names
    /// of one pattern have, and none of them came again.
    pub(super) fn add(&mut self, set: ProcessSetId, name: &TensorName) -> Option<String> {
        let hash = hash(set, name);
        if self.seen.insert(hash) {
            self.order.push_back(hash);
        }
        if self.order.len() > MAX_SEEN
            && let Some(oldest) = self.order.pop_front()
        {
            self.seen.remove(&oldest);
        }
        let pattern = pattern(name.as_str());
        if !self.patterns.contains_key(&pattern) && self.patterns.len() >= MAX_PATTERNS {
            return None;
        }
        let count = self.patterns.entry(pattern.clone()).or_insert(Some(0)).as_mut()?;
        *count += 1;
        if *count < REPORTED || std::mem::replace(&mut self.is_reported, true) {
            return None;
        }
        Some(format!(
            "{count} tensors with names like '{pattern}' were used only once; use the same names \
             in every step, because a new name is sent and compared in full"
        ))
    }

    /// Whether this name had an id before. Then the names of its pattern do come again.
    pub(super) fn comes_again(&mut self, set: ProcessSetId, name: &TensorName) -> bool {
        let has_come = self.seen.contains(&hash(set, name));
        if has_come && let Some(count) = self.patterns.get_mut(&pattern(name.as_str())) {
            *count = None;
        }
        has_come
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> TensorName {
        TensorName::new(text).unwrap()
    }

    #[test]
    fn numbers_in_names_make_a_pattern() {
        for (given, expected) in
            [("loss_17", "loss_{n}"), ("7", "{n}"), ("w", "w"), ("a1.b22c", "a{n}.b{n}c")]
        {
            assert_eq!(pattern(given), expected);
        }
    }

    #[test]
    fn names_that_never_repeat_are_reported_once() {
        let mut once = UsedOnce::default();
        let set = ProcessSetId::GLOBAL;
        let mut warnings = Vec::new();
        for number in 0..3 * MAX_SEEN {
            warnings.extend(once.add(set, &name(&format!("loss_{number}"))));
            warnings.extend(once.add(set, &name(&format!("acc_{number}"))));
            assert!(once.seen.len() <= MAX_SEEN && once.order.len() <= MAX_SEEN, "BOUND");
        }
        let [warning] = &warnings[..] else { panic!("{warnings:?}") };
        assert!(warning.starts_with("8192 tensors with names like 'loss_{n}'"), "{warning}");
        for number in 0..3 * MAX_PATTERNS {
            once.add(set, &name(&"x".repeat(number + 1)));
        }
        assert_eq!(once.patterns.len(), MAX_PATTERNS, "BOUND");
    }

    #[test]
    fn names_that_come_again_are_not_reported() {
        let mut once = UsedOnce::default();
        let set = ProcessSetId(3);
        once.add(set, &name("layer_0"));
        assert!(!once.comes_again(ProcessSetId::GLOBAL, &name("layer_0")));
        assert!(!once.comes_again(set, &name("layer_1")));
        assert!(once.comes_again(set, &name("layer_0")));
        let warnings =
            (0..2 * REPORTED).filter_map(|n| once.add(set, &name(&format!("layer_{n}"))));
        assert_eq!(warnings.count(), 0);
    }
}
