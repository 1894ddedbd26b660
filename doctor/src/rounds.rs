//! Which pairs of hosts measure in which round. Pure.
//!
//! The rounds are a round-robin tournament (the circle method): one host stays, the others turn
//! around it. In each round every host is in one pair, except that one rests if the number of hosts
//! is odd. Over all rounds each pair occurs once. With more than [`ALL_PAIRS`] hosts only ⌈log₂ n⌉
//! of these rounds are used, spread evenly. So each host has that many partners, and the time grows
//! with log n.

/// Up to this number of hosts, all pairs are measured.
pub const ALL_PAIRS: usize = 16;

/// The pairs of each round, the smaller number first.
pub fn rounds(hosts: usize) -> Vec<Vec<(usize, usize)>> {
    if hosts < 2 {
        return Vec::new();
    }
    // With an odd number, the host that is paired with the missing one rests.
    let even = hosts.next_multiple_of(2);
    let all = even - 1;
    let count = if hosts <= ALL_PAIRS { all } else { hosts.next_power_of_two().ilog2() as usize };
    let round = |turn: usize| {
        let seat = |i: usize| (turn + i) % all;
        let opposite = (1..even / 2).map(|i| (seat(i), seat(all - i)));
        let pairs = std::iter::once((seat(0), all)).chain(opposite);
        pairs.map(|(a, b)| (a.min(b), a.max(b))).filter(|(_, b)| *b < hosts).collect()
    };
    (0..count).map(|i| round(i * all / count)).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn each_host_has_one_pair_per_round(hosts in 0usize..200) {
            let mut seen = BTreeSet::new();
            let mut partners = vec![0; hosts];
            let rounds = rounds(hosts);
            for pairs in &rounds {
                let mut busy = BTreeSet::new();
                for &(a, b) in pairs {
                    prop_assert!(a < b && b < hosts);
                    prop_assert!(busy.insert(a) && busy.insert(b), "{a} and {b} in {pairs:?}");
                    prop_assert!(seen.insert((a, b)), "{a} and {b} twice");
                    partners[a] += 1;
                    partners[b] += 1;
                }
                prop_assert!(busy.len() + 1 >= hosts, "at most one rests");
            }
            if hosts <= ALL_PAIRS {
                prop_assert_eq!(seen.len(), hosts * hosts.saturating_sub(1) / 2);
            } else {
                let log = hosts.next_power_of_two().ilog2() as usize;
                prop_assert_eq!(rounds.len(), log);
                prop_assert!(partners.iter().all(|n| (log - 1..=log).contains(n)));
            }
        }
    }

    #[test]
    fn there_are_no_pairs_of_one() {
        assert!(rounds(0).is_empty() && rounds(1).is_empty());
        assert_eq!(rounds(2), [[(0, 1)]]);
        assert_eq!(rounds(8).len(), 7);
        assert_eq!(rounds(17).len(), 5);
    }
}
