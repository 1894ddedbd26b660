//! Who takes part in a collective, and which of them are near each other.

use std::collections::BTreeMap;

/// The participants and their racks. Inside a rack links are as fast as they get; between racks
/// they may be slower and shared.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Topology {
    /// The rack of each participant: small numbers that only have to differ where racks do.
    /// Participants without a label all have the same.
    pub racks: Vec<u32>,
}

impl Topology {
    /// `participants` in one rack.
    pub fn flat(participants: u32) -> Self {
        Self { racks: vec![0; participants as usize] }
    }

    /// From labels, one per participant, numbered in order of appearance. An empty label is a
    /// label like any other, so unlabelled participants share a rack.
    pub fn from_labels<S: AsRef<str>>(labels: &[S]) -> Self {
        let mut numbers = BTreeMap::new();
        let racks = labels
            .iter()
            .map(|label| {
                let next = numbers.len() as u32;
                *numbers.entry(label.as_ref()).or_insert(next)
            })
            .collect();
        Self { racks }
    }

    /// How many participants there are.
    pub fn participants(&self) -> u32 {
        self.racks.len() as u32
    }

    /// The members of each rack in ascending order, racks in ascending order.
    pub fn members(&self) -> Vec<Vec<u32>> {
        let mut racks: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (participant, &rack) in (0..).zip(&self.racks) {
            racks.entry(rack).or_default().push(participant);
        }
        racks.into_values().collect()
    }

    /// All participants in an order that keeps each rack together, so that a ring crosses from rack
    /// to rack as rarely as it can.
    pub fn order(&self) -> Vec<u32> {
        self.members().concat()
    }

    /// Whether two participants are in the same rack.
    pub fn same_rack(&self, a: u32, b: u32) -> bool {
        self.racks[a as usize] == self.racks[b as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_become_racks_and_racks_stay_together() {
        let topology = Topology::from_labels(&["b", "", "b", "a", ""]);
        assert_eq!(topology.racks, [0, 1, 0, 2, 1]);
        assert_eq!(topology.order(), [0, 2, 1, 4, 3]);
        assert_eq!(topology.members(), [vec![0, 2], vec![1, 4], vec![3]]);
        assert!(topology.same_rack(1, 4) && !topology.same_rack(0, 1));
    }
}
