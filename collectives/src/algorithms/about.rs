//! The summary of an algorithm: `gradwire algorithms` prints it, and docs/algorithms.md has a
//! table of parameters, costs and uses.

use super::name::Values;
use crate::bytes;

/// What an algorithm does, what it costs, what it is for, and where it was published.
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
    /// The source without titles: authors, venue and year.
    pub fn paper(&self) -> String {
        let parts = self.source.split('"').step_by(2).map(|part| part.trim_matches([',', ' ']));
        parts.collect::<Vec<_>>().join(", ").replace(", ;", ";")
    }
}

// The sources of several algorithms.
pub(super) const THAKUR: &str = "Thakur, Rabenseifner & Gropp, \"Optimization of Collective \
                                 Communication Operations in MPICH\", 2005";
pub(super) const TRAEFF: &str = "Träff, \"Optimal, Non-pipelined Reduce-scatter and Allreduce \
                                 Algorithms\", 2024 (arXiv:2410.14234); Bruck et al., 1997";
pub(super) const CHAN: &str = "Chan et al., \"Collective communication: theory, practice, and \
                               experience\", 2007";

/// A parameter with its default and its possible values: `radix=2 (2–64)`.
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
    use crate::algorithms::Algorithm;

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
