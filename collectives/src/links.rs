//! The rates of lines, uplinks and links between participants, for algorithms that distribute load
//! by them (`blink`). All nodes of a job have the same ones (SAME): the coordinator sends them.

use std::{
    cmp::Ordering,
    hash::{Hash, Hasher},
    sync::Arc,
};

/// The fastest line, in Mbit/s, so that sums of products of rates stay exact (BOUND).
pub const MAX_LINE_MBIT: u32 = 10_000_000;

/// The most participants whose links have rates of their own (BOUND).
pub const MAX_LINKED: u32 = 128;

/// Rates in Mbit/s, the same in both directions. They are shared, and cheap to clone and to
/// compare with themselves.
#[derive(Debug, Clone)]
pub struct Links(Arc<Rates>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Rates {
    lines: Vec<u32>,
    uplink: u32,
    pairs: Vec<u32>,
}

impl Links {
    /// The rate of each participant's line; each one's share of its rack's uplink, or 0 if that is
    /// no limit; and the rate of each pair, or 0 if only their lines are a limit: first of those
    /// with participant 0, then of the others with participant 1, and so on. No pairs at all: their
    /// lines are the only limit. `None` if there are too many participants, a number of pairs that
    /// is not theirs, or a line without a rate (TRUST).
    pub fn new(mut lines: Vec<u32>, uplink: u32, mut pairs: Vec<u32>) -> Option<Self> {
        let many = lines.len();
        let fits = many <= MAX_LINKED as usize
            && (pairs.is_empty() || pairs.len() == many * many.saturating_sub(1) / 2)
            && lines.iter().all(|&rate| rate > 0);
        lines.iter_mut().chain(&mut pairs).for_each(|rate| *rate = (*rate).min(MAX_LINE_MBIT));
        let uplink = uplink.min(MAX_LINE_MBIT);
        fits.then(|| Self(Arc::new(Rates { lines, uplink, pairs })))
    }

    /// How many participants there are.
    pub fn participants(&self) -> u32 {
        self.0.lines.len() as u32
    }

    /// The rate of each line.
    pub fn lines(&self) -> &[u32] {
        &self.0.lines
    }

    /// Each participant's share of its rack's uplink; 0 if that is no limit.
    pub fn uplink(&self) -> u32 {
        self.0.uplink
    }

    /// The rate of each pair in the order of [`Links::new`]; empty if only lines are a limit.
    pub fn pairs(&self) -> &[u32] {
        &self.0.pairs
    }

    /// The rate of a pair; 0 if only their lines are a limit.
    ///
    /// # Panics
    /// If it is no pair of participants.
    pub fn pair(&self, a: u32, b: u32) -> u32 {
        let Rates { lines, pairs, .. } = &*self.0;
        if pairs.is_empty() { 0 } else { pairs[place(lines.len(), a.min(b), a.max(b))] }
    }

    /// The rates of some of the participants, in this order.
    pub(crate) fn part(&self, participants: &[u32]) -> Self {
        if participants.iter().copied().eq(0..self.participants()) {
            return self.clone();
        }
        let lines = participants.iter().map(|&one| self.0.lines[one as usize]).collect();
        let pairs = || {
            let all = (0..).zip(participants);
            let after = |(at, &a): (usize, &u32)| {
                participants[at + 1..].iter().map(move |&b| self.pair(a, b))
            };
            all.flat_map(after).collect()
        };
        let pairs = if self.0.pairs.is_empty() { Vec::new() } else { pairs() };
        Self(Arc::new(Rates { lines, uplink: self.0.uplink, pairs }))
    }
}

/// The place of a pair, the smaller one first.
fn place(many: usize, a: u32, b: u32) -> usize {
    let (a, b) = (a as usize, b as usize);
    a * (2 * many - a - 1) / 2 + (b - a - 1)
}

impl Ord for Links {
    fn cmp(&self, other: &Self) -> Ordering {
        if Arc::ptr_eq(&self.0, &other.0) { Ordering::Equal } else { self.0.cmp(&other.0) }
    }
}

impl PartialOrd for Links {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Links {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Links {}

impl Hash for Links {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_keep_their_rates_in_every_part() {
        let pairs: Vec<u32> = (1..=10).collect();
        let links = Links::new(vec![5; 5], 3, pairs.clone()).unwrap();
        let mut rates = Vec::new();
        for a in 0..5 {
            rates.extend((a + 1..5).map(|b| links.pair(b, a)));
        }
        assert_eq!(rates, pairs);
        let part = links.part(&[4, 1, 3]);
        assert_eq!(part.pairs(), [links.pair(4, 1), links.pair(4, 3), links.pair(1, 3)]);
        assert_eq!((part.participants(), part.uplink()), (3, 3));
        assert_eq!(links.part(&[0, 1, 2, 3, 4]), links);
        assert_eq!(Links::new(vec![7; 2], 0, Vec::new()).unwrap().pair(0, 1), 0);
    }

    /// TRUST: what arrives may be anything.
    #[test]
    fn rates_that_say_nothing_are_refused() {
        assert_eq!(Links::new(vec![1, 0], 0, vec![1]), None);
        assert_eq!(Links::new(vec![1; 3], 0, vec![1]), None);
        assert_eq!(Links::new(vec![1; MAX_LINKED as usize + 1], 0, Vec::new()), None);
        assert!(Links::new(Vec::new(), 0, Vec::new()).is_some());
        let fast = Links::new(vec![u32::MAX; 2], u32::MAX, vec![u32::MAX]).unwrap();
        assert_eq!([fast.lines()[0], fast.uplink(), fast.pair(0, 1)], [MAX_LINE_MBIT; 3]);
    }
}
