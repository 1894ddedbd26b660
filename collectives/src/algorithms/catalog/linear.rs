//! Linear: one node gets everything, reduces it, and sends the result to all (Chan et al., 2007).
//!
//! Two messages one after the other, but the root sends and receives M−1 times the piece: it suits
//! few nodes, and serves as a baseline.

use super::{direct, prelude::*};

pub(super) struct Linear;

impl Definition for Linear {
    fn about(&self) -> About {
        About {
            idea: "one node gets everything, reduces it, and sends the result to all",
            cost: "2(M−1)(α + S·β) + (M−1)S·γ, sent by one node",
            when: "small broadcasts and reductions to one; comparison",
            source: CHAN,
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[SEGMENTS]
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&direct::Direct)
    }

    fn in_segments(&self, kind: Kind, segments: f64, cost: Shape) -> Shape {
        match kind {
            // Each sends its own, at the same time.
            Kind::Reduce { .. } => cost.in_blocks(segments, cost.messages + segments),
            _ => cost.in_blocks(cost.blocks * segments, cost.messages * segments),
        }
    }
}
