//! What people want to know of an algorithm before they ask for it: `gradwire algorithms` prints
//! it, and docs/algorithms.md has the same tables.

use super::name::{Algorithm, Values};
use crate::bytes;

/// What an algorithm does, what it costs, what it is for, and who published it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct About {
    /// What it does, in a sentence.
    pub idea: &'static str,
    /// The cost of an allreduce. M nodes, S bytes, α for a message, β for a byte sent, γ for a byte
    /// reduced ((M−1)/M·S·γ unless something else is said), r racks of w nodes.
    pub cost: &'static str,
    /// What it is for.
    pub when: &'static str,
    /// Where it was published.
    pub source: &'static str,
}

impl About {
    /// Who published it, where and when, without titles.
    pub fn paper(&self) -> String {
        let parts = self.source.split('"').step_by(2).map(|part| part.trim_matches([',', ' ']));
        parts.collect::<Vec<_>>().join(", ").replace(", ;", ";")
    }
}

impl Algorithm {
    /// What people want to know of it.
    pub fn about(self) -> About {
        let (idea, cost, when, source) = match self {
            Self::Ring => (
                "each block travels once around and is reduced on the way; its result travels back",
                "2(M−1)(α + S/M·β)",
                "large pieces that follow each other, few nodes",
                "Patarasuk & Yuan, \"Bandwidth optimal all-reduce algorithms for clusters of \
                 workstations\", 2009",
            ),
            Self::RecursiveDoubling => (
                "pairs at distance 1, 2, 4, … exchange and add all they have",
                "⌊log₂ M⌋(α + S·β + S·γ); 2(α + S·β) + S·γ more if M is not a power of two",
                "small pieces",
                THAKUR,
            ),
            Self::DoubleTree => (
                "two binary trees carry half of the data each; a leaf of one is inside the other",
                "≤ 4⌈log₂ M⌉α + 2S·β",
                "many nodes, middle sizes, few connections",
                "Sanders, Speck & Träff, \"Two-tree algorithms for full bandwidth broadcast, \
                 reduction and scan\", 2009",
            ),
            Self::Hierarchical => (
                "each node owns a block; it is reduced inside racks first, then between them, tier \
                 by tier",
                "2(l+1)α + 2(M−1)/M·S·β; 2α in one rack",
                "racks behind slow links; few nodes",
                "Wan et al., \"RAT – Resilient Allreduce Tree for Distributed Machine Learning\", \
                 APNet 2020",
            ),
            Self::Circulant => (
                "reduces to shares in rounds over circular distances, and doubles what is done",
                "2⌈log_k M⌉α + 2(M−1)/M·S·β",
                "many nodes, any number of them",
                TRAEFF,
            ),
            Self::Bcube => (
                "the circulant's rounds without a thought of racks",
                "2⌈log_k M⌉α + 2(M−1)/M·S·β",
                "to compare",
                TRAEFF,
            ),
            Self::Direct => (
                "each node sends every other one its block, and gets its result back",
                "2α + 2(M−1)/M·S·β, M−1 senders at once",
                "up to about 16 nodes",
                TRAEFF,
            ),
            Self::HalvingDoubling => (
                "pairs halve what they still add to, the nearest last, and double what is done",
                "2⌊log₂ M⌋α + 2(M−1)/M·S·β; 2(α + S·β) + S·γ more if M is not a power of two",
                "powers of two",
                THAKUR,
            ),
            Self::Rabenseifner => (
                "halving and doubling; where a pair is folded, both of it reduce a half",
                "as halving-doubling; 3α + 2S·β + S/2·γ more if M is not a power of two",
                "other numbers, slow reductions",
                "Rabenseifner, \"Optimization of Collective Reduction Operations\", 2004",
            ),
            Self::Swing => (
                "halving and doubling with partners that stay near each other on a torus",
                "as halving-doubling",
                "nodes in a torus",
                "De Sensi et al., \"Swing: Short-cutting Rings for Higher Bandwidth Allreduce\", \
                 NSDI 2024",
            ),
            Self::MultiRing => (
                "several rings of different orders, each for a part of the blocks",
                "as ring",
                "many paths in the network",
                "Patarasuk & Yuan, 2009; NVIDIA's NCCL has rings of this kind",
            ),
            Self::Linear => (
                "one node gets everything, reduces it, and sends the result to all",
                "2(M−1)(α + S·β) + (M−1)S·γ, sent by one node",
                "small broadcasts and reductions to one; to compare",
                CHAN,
            ),
            Self::Binomial => (
                "a binomial tree up, and down again",
                "2⌈log₂ M⌉(α + S·β + S·γ)",
                "to compare",
                CHAN,
            ),
            Self::KNomial => (
                "a tree in which each node sends to k−1 others in a round",
                "2⌈log_k M⌉(k−1)(α + S·β)",
                "small pieces, high latency",
                THAKUR,
            ),
            Self::Chain => (
                "one after the other, in order of the racks, and back",
                "2(M−1)α + 2S·β",
                "large broadcasts",
                CHAN,
            ),
            Self::Torus => (
                "rings along the rows of a grid, then along its columns, and back",
                "2(A+B−2)α + 2(M−1)/M·S·β",
                "nodes in a grid",
                "Mikami et al., \"Massively Distributed SGD\", 2018 (arXiv:1811.05233)",
            ),
            Self::Blueconnect => (
                "rings along each dimension of a grid, the fastest first",
                "2Σ(p−1)α + 2(M−1)/M·S·β",
                "links of several rates",
                "Cho et al., \"BlueConnect: Decomposing All-Reduce for Deep Learning on \
                 Heterogeneous Network Hierarchy\", MLSys 2019",
            ),
            Self::Hips => (
                "direct exchange along each dimension of a grid",
                "2α for each dimension + 2(M−1)/M·S·β",
                "nodes in a grid",
                "Geng et al., \"HiPS: Hierarchical Parameter Synchronization in Large-Scale \
                 Distributed Machine Learning\", NetAI 2018",
            ),
            Self::LeaderRing => (
                "a leader of each rack collects, a ring joins the leaders, and they hand out",
                "2rα + 2(w−1 + (r−1)/r)S·β",
                "few connections between racks",
                "Jia et al., \"Highly Scalable Deep Learning Training System with \
                 Mixed-Precision\", 2018 (arXiv:1807.11205)",
            ),
            Self::Bine => (
                "halving and doubling, or a tree, at distances 1, 1, 3, 5, 11, … to either side",
                "as halving-doubling",
                "racks that are not known",
                "De Sensi et al., \"Bine Trees: Enhancing Collective Operations by Optimizing \
                 Communication Locality\", SC 2025",
            ),
            Self::CirculantBlocks => (
                "sends n blocks from one to all in the fewest rounds; before that, backwards",
                "2(n−1+⌈log₂ M⌉)(α + S/n·β), n blocks",
                "large broadcasts, any number of nodes",
                "Träff, \"Optimal Broadcast Schedules in Logarithmic Time\", 2024 \
                 (arXiv:2407.18004)",
            ),
            Self::Mesh => (
                "along the rows of a grid from both ends towards each owner, then along its \
                 columns",
                "2(A+B−2)α + 2(1+1/A)·S·β",
                "nodes with links to their neighbours only",
                "Barnett et al., \"Global Combine Algorithms for 2-D Meshes with Wormhole \
                 Routing\", 1995",
            ),
            Self::Servers => (
                "nodes without ranks own blocks and reduce them, so many that all are equally busy",
                "2α + 2n(n−1)/(n²+kn−2k)·S·β for k servers and n = M other nodes; k ≥ n: 2α + S·β",
                "hosts to spare, lines of different rates",
                "Jiang et al., \"A Unified Architecture for Accelerating Distributed DNN Training \
                 in Heterogeneous GPU/CPU Clusters\", OSDI 2020",
            ),
            Self::Parameterhub => (
                "the servers of each rack, or else its nodes, own shares; one rack's owner of each \
                 adds up those of all racks",
                "4α + max(1, (w+2(r−1)/r)/k)·S·β for k servers in each rack of w others; 2rα with \
                 across=ring",
                "hosts to spare in each rack, slow links between racks",
                "Luo et al., \"Parameter Hub: a Rack-Scale Parameter Server for Distributed Deep \
                 Neural Network Training\", SoCC 2018",
            ),
            Self::Blink => (
                "spanning trees, packed such that no line, uplink or link is busy for longer than \
                 it has to be",
                "2hα + T, h links to the farthest and T for the busiest link",
                "links of different rates",
                "Wang et al., \"Blink: Fast and Generic Collectives for Distributed ML\", MLSys \
                 2020",
            ),
        };
        About { idea, cost, when, source }
    }
}

const THAKUR: &str = "Thakur, Rabenseifner & Gropp, \"Optimization of Collective Communication \
                      Operations in MPICH\", 2005";
const TRAEFF: &str = "Träff, \"Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms\", \
                      2024 (arXiv:2410.14234); Bruck et al., 1997";
const CHAN: &str = "Chan et al., \"Collective communication: theory, practice, and experience\", \
                    2007";

/// A parameter's possible values and its usual one, in few words: `radix=2 (2–64)`.
pub fn in_short(name: &str, values: Values) -> String {
    match values {
        Values::Number { least, most, usual } => format!("{name}={usual} ({least}–{most})"),
        Values::Word(words) => format!("{name}={}", words.join(" or ")),
        Values::Factors(2) => format!("{name}=AxB"),
        Values::Factors(most) => format!("{name}=AxBx… (2–{most})"),
        Values::Bytes { least, most } => {
            let [least, most] = [least, most].map(|bytes| bytes::written(bytes.into()));
            format!("{name}=BYTES ({least}–{most})")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn papers_are_named_in_short() {
        let of = |algorithm: Algorithm| algorithm.about().paper();
        assert_eq!(of(Algorithm::Swing), "De Sensi et al., NSDI 2024");
        assert_eq!(of(Algorithm::Circulant), "Träff, 2024 (arXiv:2410.14234); Bruck et al., 1997");
        for &algorithm in Algorithm::ALL {
            let paper = of(algorithm);
            let has_year = paper.chars().any(|c| c.is_ascii_digit());
            assert!(has_year && !paper.contains(['"', '\n']) && paper.len() < 90, "{paper}");
        }
    }
}
