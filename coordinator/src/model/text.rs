//! Formats ranks, names and times for messages.

use std::time::Duration;

use gradwire_proto::{ProcessSetId, Rank};

use super::process_set::ProcessSet;

/// The longest list of ranks in a text, in characters.
const MAX_RANKS: usize = 160;

/// `rank 3` or `ranks 0-2,5`.
pub(crate) fn named_ranks(all: &[Rank]) -> String {
    let noun = if all.len() == 1 { "rank" } else { "ranks" };
    format!("{noun} {}", Rank::list(all.iter().copied()))
}

/// `process set 3 (ranks 0-1,4)`.
pub(crate) fn set(id: ProcessSetId, set: &ProcessSet) -> String {
    format!("process set {id} ({})", excerpt(&named_ranks(set.members()), MAX_RANKS))
}

/// At most `most` names in quotes, and how many more there are.
pub(crate) fn some_names<'a>(names: impl IntoIterator<Item = &'a str>, most: usize) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names.by_ref().take(most).map(|name| format!("'{name}'")).collect();
    match names.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// `3.2 s`.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// `1 tensor`, `2 tensors`.
pub(crate) fn count(number: usize, noun: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// At most `most` characters of a text.
pub(crate) fn excerpt(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// The index of the first character in which two texts differ; `None` if they are equal.
pub(crate) fn difference(one: &str, two: &str) -> Option<usize> {
    (one != two).then(|| one.chars().zip(two.chars()).take_while(|(a, b)| a == b).count())
}

/// At most `most` characters of a text around the character with the index `at`.
pub(crate) fn excerpt_around(text: &str, at: usize, most: usize) -> String {
    let all = text.chars().count();
    if at < most {
        return excerpt(text, most);
    }
    let from = (at - most / 4).min(all.saturating_sub(most));
    let shown: String = text.chars().skip(from).collect();
    let before = if from > 0 { "…" } else { "" };
    format!("{before}{}", excerpt(&shown, most))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_grouped_and_names_are_cut() {
        let all = |numbers: &[u32]| Rank::list(numbers.iter().copied().map(Rank));
        assert_eq!(all(&[]), "");
        assert_eq!(all(&[7]), "7");
        assert_eq!(all(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(all(&[u32::MAX]), "4294967295");
        assert_eq!(named_ranks(&[Rank(1), Rank(2)]), "ranks 1-2");
        assert_eq!(some_names(["a", "b"], 3), "'a', 'b'");
        assert_eq!(some_names(["a", "b", "c", "d", "e"], 3), "'a', 'b', 'c' and 2 more");
        assert_eq!(excerpt("äöü", 2), "äö…");
        assert_eq!(count(1, "node"), "1 node");
    }

    #[test]
    fn excerpts_show_the_difference() {
        assert_eq!(difference("abc", "abc"), None);
        assert_eq!(difference("äbc", "äbd"), Some(2));
        assert_eq!(difference("ab", "abc"), Some(2), "where one ends");
        let text = "0123456789abcdef";
        assert_eq!(excerpt_around(text, 3, 4), "0123…");
        assert_eq!(excerpt_around(text, 8, 4), "…789a…");
        assert_eq!(excerpt_around(text, 15, 4), "…cdef");
        assert_eq!(excerpt_around(text, 16, 4), "…cdef", "the end of the shorter one");
        assert_eq!(excerpt_around(text, 15, 16), text);
        assert_eq!(excerpt_around("ab", 9, 4), "ab");
    }
}
