//! Formulas whose printed form differs from the time of their schedules.

use gradwire_collectives::Kind;

use super::formulas::{
    ALPHA, BETA, GAMMA, Of, RATE, costs, milliseconds, percent, simulated, whole,
};
use crate::table::Table;

/// A formula with an error in the literature.
struct Erratum {
    what: &'static str,
    printed: &'static str,
    corrected: &'static str,
    kind: Kind,
    spec: &'static str,
    value: fn(Of) -> f64,
}

fn errata_list() -> Vec<Erratum> {
    vec![
        Erratum {
            what: "allreduce by trees",
            printed: "(a+b·l)·log p",
            corrected: "2·log p·(a+b·l), without pipelining",
            kind: Kind::Allreduce,
            spec: "binomial",
            value: |Of { s, h, .. }| whole(h, s),
        },
        Erratum {
            what: "allgather as gather and broadcast",
            printed: "a·log p + p·l·b·log p",
            corrected: "ring (p−1)(a+b·l); circulant a·⌈log p⌉ + (p−1)b·l",
            kind: Kind::Allgather,
            spec: "circulant",
            value: |Of { s, h, .. }| h * ALPHA + s * h * BETA,
        },
        Erratum {
            what: "reduce and broadcast at one root",
            printed: "2(α+S/B) + SNC",
            corrected: "2(N−1)(α+S/B) + (N−1)SC",
            kind: Kind::Allreduce,
            spec: "linear",
            value: |Of { n, s, .. }| whole(2.0, s) + s * n * GAMMA,
        },
        Erratum {
            what: "recursive halving and doubling",
            printed: "log N(2α+2S/B+SC), which is a binomial tree",
            corrected: "2·log N·α + 2S(N−1)/(NB) + SC(N−1)/N",
            kind: Kind::Allreduce,
            spec: "halving-doubling",
            value: |Of { s, h, .. }| h * (2.0 * ALPHA + s * (2.0 * BETA + GAMMA)),
        },
        Erratum {
            what: "butterfly",
            printed: "log N(α+S/B+SC)",
            corrected: "the same: this is recursive doubling",
            kind: Kind::Allreduce,
            spec: "recursive-doubling",
            value: |Of { s, h, .. }| h * (ALPHA + s * (BETA + GAMMA)),
        },
        Erratum {
            what: "ring",
            printed: "(N−1)(2α+2S/(NB)+SC/N)",
            corrected: "the same",
            kind: Kind::Allreduce,
            spec: "ring",
            value: |Of { n, s, .. }| (n - 1.0) * (2.0 * ALPHA + s / n * (2.0 * BETA + GAMMA)),
        },
        Erratum {
            what: "2D torus",
            printed: "2(m+n)α + 4S/B + 2SC",
            corrected: "2(m+n−2)α + 2S(N−1)/(NB) + SC(N−1)/N: the second phase has only S/n",
            kind: Kind::Allreduce,
            spec: "torus(dims=8x8)",
            value: |Of { s, .. }| 2.0 * 16.0 * ALPHA + s * (4.0 * BETA + 2.0 * GAMMA),
        },
    ]
}

/// The printed formulas, and how far they are from the schedules.
pub(super) fn errata() -> Table {
    let head = ["formula of", "as printed", "corrected", "printed, ms", "simulated, ms", "error"];
    let mut table = Table::new("errata", &head);
    let (hosts, bytes) = (64, 1 << 20);
    for one in errata_list() {
        let done = simulated(one.kind, one.spec, hosts, (bytes, 0), costs(false, true));
        let Some((time, _)) = done else { continue };
        let printed = (one.value)(Of::new(hosts, bytes));
        table.push([
            one.what.to_owned(),
            one.printed.to_owned(),
            one.corrected.to_owned(),
            milliseconds(printed),
            milliseconds(time),
            percent(printed / time - 1.0),
        ]);
    }
    for (what, printed, corrected, is, should) in [
        (
            "double tree, the part of the reduction (N = 64)",
            "(√(2·log N·α·S)+S)C",
            "(√(2hαBS)+S)C: the printed one adds √(s·byte) to bytes",
            (2.0 * 6.0 * ALPHA * bytes as f64).sqrt() + bytes as f64,
            (2.0 * 6.0 * ALPHA * RATE * bytes as f64).sqrt() + bytes as f64,
        ),
        (
            "slow-down of servers (w = 4, r = 2, o = 2)",
            "o(w−1)/[w(1−1/r)]",
            "o·w(1−1/r)/(w−1), as the text of its example says; simulated by `paper rat`",
            2.0 * 3.0 / (4.0 * 0.5),
            2.0 * 4.0 * 0.5 / 3.0,
        ),
        (
            "hierarchical ring, n = m = 8, equal links, without C",
            "2(m+1)α + 4S/B",
            "2(n−1)(α+S/B) to and from one leader, and its ring: 2(m−1)(α+S/(mB))",
            2.0 * 9.0 * ALPHA + 4.0 * bytes as f64 * BETA,
            whole(14.0, bytes as f64) + 14.0 * (ALPHA + bytes as f64 / 8.0 * BETA),
        ),
    ] {
        let figure =
            |value: f64| if value < 1.0 { milliseconds(value) } else { format!("{value:.2}") };
        table.push([
            what.to_owned(),
            printed.to_owned(),
            corrected.to_owned(),
            figure(is),
            format!("{} (formula)", figure(should)),
            percent(is / should - 1.0),
        ]);
    }
    table
}
