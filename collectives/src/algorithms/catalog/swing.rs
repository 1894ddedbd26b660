//! Swing: [exchange in pairs](crate::algorithms::parts::doubling) at distances 1, 1, 3, 5, 11, 21,
//! … in turns to either side, so that on a torus the partners are nearer than at doubling distance
//! (De Sensi, Bonato, Saam & Hoefler, "Swing: Short-cutting Rings for Higher Bandwidth Allreduce",
//! NSDI 2024).

use super::prelude::*;

const PAIRS: Pairs = Pairs { partner, owned: |number, _| number, fits_racks: false };

/// At distance (1 − (−2)^(t+1)) / 3 in round t: 1, −1, 3, −5, 11, …
pub(super) fn partner(number: u32, round: u32, rounds: u32) -> u32 {
    let distance = (1 - (-2i64).pow(round + 1)) / 3;
    let distance = if number.is_multiple_of(2) { distance } else { -distance };
    (i64::from(number) + distance).rem_euclid(1 << rounds) as u32
}

pub(super) struct Swing;

impl Definition for Swing {
    fn about(&self) -> About {
        About {
            idea: "halving and doubling with partners that stay near each other on a torus",
            cost: "as halving-doubling",
            when: "nodes in a torus",
            source: "De Sensi et al., \"Swing: Short-cutting Rings for Higher Bandwidth \
                     Allreduce\", NSDI 2024",
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        doubling::allreduce(topology, &PAIRS, Fold::Whole, me, count)
    }

    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        doubling::cost(cluster, &PAIRS, Fold::Whole)
    }
}
