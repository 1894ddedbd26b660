//! The rates of lines, uplinks and links between participants, for algorithms that distribute load
//! by them (`blink`). All nodes of a job have the same ones (SAME): the coordinator sends them.

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

/// The fastest line, in Mbit/s, so that sums of products of rates stay exact (BOUND).
pub const MAX_LINE_MBIT: u32 = 10_000_000;

/// The most participants whose links have rates of their own (BOUND).
pub const MAX_LINKED: u32 = 128;

/// Measured rates that differ by less than this factor count as equal. Trees that followed noise
/// would be many, each with its own messages.
const NOISE: f64 = 1.5;

/// Rates in Mbit/s, the same in both directions. They are shared, so clones are cheap to make and
/// to compare.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Links(Arc<Rates>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Rates {
    lines: Vec<u32>,
    uplink: u32,
    pairs: Vec<u32>,
}

impl Links {
    /// The rate of each participant's line; the share that each has of its rack's uplink, or 0 if
    /// the uplink is not a limit; and the rate of each pair, or 0 if only its lines are a limit:
    /// first the pairs with participant 0, then the others with participant 1, and so on. Empty
    /// `pairs`: lines are the only limit. `None` if there are too many participants, a wrong number
    /// of pairs, or a line without a rate (TRUST).
    pub fn new(mut lines: Vec<u32>, uplink: u32, mut pairs: Vec<u32>) -> Option<Self> {
        let many = lines.len();
        let fits = many <= MAX_LINKED as usize
            && (pairs.is_empty() || pairs.len() == many * many.saturating_sub(1) / 2)
            && lines.iter().all(|&rate| rate > 0);
        lines.iter_mut().chain(&mut pairs).for_each(|rate| *rate = (*rate).min(MAX_LINE_MBIT));
        let uplink = uplink.min(MAX_LINE_MBIT);
        fits.then(|| Self(Arc::new(Rates { lines, uplink, pairs })))
    }

    /// Combines reported and measured rates: those of lines in Mbit/s as the participants report
    /// them, or 0; the usual rate of a line, the share of an uplink, and the rates of measured
    /// links, in bytes per second. A measured rate near the usual one counts as usual. A line
    /// without a report is as fast as the fastest of its links, and a link is a limit only if it is
    /// clearly slower than both of its lines. `None` for more than [`MAX_LINKED`] participants.
    pub fn known(
        mut lines: Vec<u32>,
        usual: f64,
        uplink: f64,
        measured: &BTreeMap<(u32, u32), f64>,
    ) -> Option<Self> {
        let usual = mbit(usual);
        let known = |rate: f64| {
            let rate = mbit(rate);
            let is_usual = !is_slower(rate, usual) && !is_slower(usual, rate);
            if is_usual { usual } else { rate }
        };
        let links: BTreeMap<(u32, u32), u32> =
            measured.iter().map(|(&(a, b), &rate)| ((a.min(b), a.max(b)), known(rate))).collect();
        for (node, line) in (0..).zip(&mut lines).filter(|(_, line)| **line == 0) {
            let own = links.iter().filter(|&(&(a, b), _)| a == node || b == node);
            *line = own.map(|(_, &rate)| rate).max().unwrap_or(usual);
        }
        let limit = |a: usize, b: usize| {
            let rate = links.get(&(a as u32, b as u32)).copied();
            rate.filter(|&rate| is_slower(rate, lines[a].min(lines[b]))).unwrap_or(0)
        };
        let nodes = lines.len();
        let pairs = (0..nodes).flat_map(|a| (a + 1..nodes).map(move |b| (a, b)));
        let mut pairs: Vec<u32> = pairs.map(|(a, b)| limit(a, b)).collect();
        if pairs.iter().all(|&rate| rate == 0) {
            pairs.clear();
        }
        Self::new(lines, mbit(uplink), pairs)
    }

    /// How many participants there are.
    pub fn participants(&self) -> u32 {
        self.0.lines.len() as u32
    }

    /// The rate of each line.
    pub fn lines(&self) -> &[u32] {
        &self.0.lines
    }

    /// Each participant's share of its rack's uplink; 0 if the uplink is not a limit.
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
    /// If `a` and `b` are not two participants.
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

/// Bytes per second in Mbit/s, at least 1.
fn mbit(bytes_per_second: f64) -> u32 {
    (bytes_per_second * 8e-6).round().clamp(1.0, f64::from(MAX_LINE_MBIT)) as u32
}

/// Whether a rate is less than another one by more than noise.
fn is_slower(rate: u32, other: u32) -> bool {
    f64::from(rate) * NOISE < f64::from(other)
}

/// The place of a pair among all pairs; `a` is the smaller number.
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

    #[test]
    fn reported_and_measured_rates_are_combined() {
        let known = |lines: &[u32], measured: &[((u32, u32), f64)]| {
            let measured = measured.iter().copied().collect();
            Links::known(lines.to_vec(), 3125e6, 1e9, &measured)
        };
        let unmeasured = known(&[0, 10_000, 0], &[]).unwrap();
        assert_eq!(unmeasured, Links::new(vec![25_000, 10_000, 25_000], 8000, vec![]).unwrap());
        // The rates of lines follow from their links. No link is slower than both of its lines.
        let measured = [((0, 1), 125e6), ((2, 1), 250e6)];
        let slow = known(&[0, 40_000, 0], &measured).unwrap();
        assert_eq!(slow, Links::new(vec![1000, 40_000, 2000], 8000, vec![]).unwrap());
        // One link is slow; only its lines limit the pair that was not measured.
        let measured = [((0, 1), 3e9), ((1, 2), 250e6), ((0, 3), 3e9), ((2, 3), 3e9)];
        let slow = known(&[0; 4], &measured).unwrap();
        assert_eq!(slow, Links::new(vec![25_000; 4], 8000, vec![0, 0, 0, 2000, 0, 0]).unwrap());
        assert_eq!(known(&[0; 129], &[]), None, "BOUND");
    }

    /// Probes of equal links differ by a quarter and more.
    #[test]
    fn noise_is_not_a_difference() {
        let rates = [119e6, 97e6, 83e6, 112e6, 85e6, 101e6];
        let pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)];
        let measured = pairs.into_iter().zip(rates).collect();
        let equal = Links::new(vec![953; 4], 953, vec![]).unwrap();
        for said in [0, 953] {
            let links = Links::known(vec![said; 4], 119.1e6, 119.1e6, &measured).unwrap();
            assert_eq!(links, equal, "{said}");
        }
        // Interfaces that report more than links achieve.
        let links = Links::known(vec![10_000; 4], 119.1e6, 119.1e6, &measured).unwrap();
        assert_eq!(links.pairs(), [953; 6]);
    }

    /// TRUST: what arrives may be anything.
    #[test]
    fn invalid_rates_are_refused() {
        assert_eq!(Links::new(vec![1, 0], 0, vec![1]), None);
        assert_eq!(Links::new(vec![1; 3], 0, vec![1]), None);
        assert_eq!(Links::new(vec![1; MAX_LINKED as usize + 1], 0, Vec::new()), None);
        assert!(Links::new(Vec::new(), 0, Vec::new()).is_some());
        let fast = Links::new(vec![u32::MAX; 2], u32::MAX, vec![u32::MAX]).unwrap();
        assert_eq!([fast.lines()[0], fast.uplink(), fast.pair(0, 1)], [MAX_LINE_MBIT; 3]);
    }
}
