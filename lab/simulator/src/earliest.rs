//! The minimum of many times that change often: a tournament tree. A change takes at most as many
//! comparisons as the tree has levels.

/// Times by index; infinite at first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Earliest {
    /// Node 1 is the root, node n has the children 2n and 2n + 1, and the second half are the
    /// leaves. Each node holds the earlier time of its children.
    tree: Vec<f64>,
}

impl Earliest {
    fn leaves(&self) -> usize {
        self.tree.len() / 2
    }

    /// Makes room for `times` times.
    pub(crate) fn grow(&mut self, times: usize) {
        let before = self.leaves();
        if times <= before {
            return;
        }
        let leaves = times.next_power_of_two();
        let mut tree = vec![f64::INFINITY; 2 * leaves];
        tree[leaves..leaves + before].copy_from_slice(&self.tree[before..]);
        for node in (1..leaves).rev() {
            tree[node] = tree[2 * node].min(tree[2 * node + 1]);
        }
        self.tree = tree;
    }

    /// Changes a time within the current size.
    pub(crate) fn set(&mut self, number: usize, time: f64) {
        let mut node = self.leaves() + number;
        self.tree[node] = time;
        while node > 1 {
            let earlier = self.tree[node].min(self.tree[node ^ 1]);
            node /= 2;
            if self.tree[node] == earlier {
                break;
            }
            self.tree[node] = earlier;
        }
    }

    /// The earliest time.
    pub(crate) fn first(&self) -> f64 {
        self.tree.get(1).copied().unwrap_or(f64::INFINITY)
    }

    /// The indexes of all times up to `until`, ascending.
    pub(crate) fn until(&self, until: f64, found: &mut Vec<u32>) {
        if self.first() <= until {
            self.collect(1, until, found);
        }
    }

    fn collect(&self, node: usize, until: f64, found: &mut Vec<u32>) {
        if let Some(number) = node.checked_sub(self.leaves()) {
            found.push(number as u32);
            return;
        }
        for child in [2 * node, 2 * node + 1] {
            if self.tree[child] <= until {
                self.collect(child, until, found);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_list_of_times(
            changes in prop::collection::vec((0usize..70, 0u32..20), 1..200),
            until in 0u32..20,
        ) {
            let (mut earliest, mut times) = (Earliest::default(), Vec::new());
            for (number, time) in changes {
                if number >= times.len() {
                    times.resize(number + 1, f64::INFINITY);
                    earliest.grow(times.len());
                }
                times[number] = f64::from(time);
                earliest.set(number, times[number]);
                let first = times.iter().copied().fold(f64::INFINITY, f64::min);
                prop_assert_eq!(earliest.first(), first);
            }
            let mut found = Vec::new();
            earliest.until(f64::from(until), &mut found);
            let expected = (0..).zip(&times).filter(|(_, time)| **time <= f64::from(until));
            prop_assert_eq!(found, expected.map(|(number, _)| number).collect::<Vec<u32>>());
        }
    }
}
