//! The choice of an algorithm for a piece: the cheapest allowed one by the cost model.
//!
//! The choice comes with its reason, to be logged when it changes and shown in status. It depends
//! on nothing but the arguments, so it can be cached per size class.

use crate::{
    algorithms::{Kind, Spec},
    cost::{CostModel, Pipeline, price_in_pipeline},
    topology::Topology,
};

/// A decision and why it was made.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What to run.
    pub spec: Spec,
    /// Seconds that the model predicts; per piece of a pipeline.
    pub predicted_seconds: f64,
    /// The other candidates and their seconds, cheapest first.
    pub others: Vec<(Spec, f64)>,
    /// Why, with the figures of the candidates.
    pub reason: String,
}

impl Choice {
    /// The next best and its seconds, if there was a choice.
    pub fn runner_up(&self) -> Option<(Spec, f64)> {
        self.others.first().copied()
    }
}

/// Chooses among `allowed` for a piece of `bytes` in a pipeline. If prices are equal, the first one
/// wins. `rule` is the number of the rule that allows them, or 0.
///
/// # Panics
/// If `allowed` is empty, and as [`price`](crate::price).
pub fn select(
    kind: Kind,
    topology: &Topology,
    bytes: u64,
    pipeline: Pipeline,
    (rule, allowed): (usize, &[Spec]),
    model: &CostModel,
) -> Choice {
    let price = |spec| price_in_pipeline(model, topology, kind, spec, bytes, pipeline);
    let mut candidates: Vec<(Spec, f64)> =
        allowed.iter().map(|&spec| (spec, price(spec))).collect();
    let no_choice = match kind {
        _ if topology.contributors() <= 1 => Some("one node has nothing to exchange".to_owned()),
        Kind::Move { .. } => {
            let (_, seconds) = candidates[0];
            Some(format!("a move has one way to go; {}", of(seconds, bytes)))
        }
        _ if candidates.len() == 1 => {
            let (spec, seconds) = candidates[0];
            Some(format!("{spec} is forced{}; {}", by(rule), of(seconds, bytes)))
        }
        _ => None,
    };
    if let Some(reason) = no_choice {
        let (spec, predicted_seconds) = candidates[0];
        return Choice { spec, predicted_seconds, others: Vec::new(), reason };
    }
    // Stable, so of equal ones the first stays first.
    candidates.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (spec, predicted_seconds) = candidates.remove(0);
    let others: Vec<String> =
        candidates.iter().map(|(spec, seconds)| format!("{spec} {}", time(*seconds))).collect();
    let reason = format!(
        "{spec} is the cheapest{} on {} nodes in {}: {} ({})",
        by(rule),
        topology.contributors(),
        place(topology),
        of(predicted_seconds, bytes),
        others.join(", "),
    );
    Choice { spec, predicted_seconds, others: candidates, reason }
}

fn by(rule: usize) -> String {
    if rule == 0 { String::new() } else { format!(" by rule {rule}") }
}

fn place(topology: &Topology) -> String {
    let count = topology.members().len();
    let racks = if count == 1 { "1 rack".to_owned() } else { format!("{count} racks") };
    let tiers = match topology.tiers().len() {
        1 => racks,
        tiers => format!("{racks} and {tiers} tiers"),
    };
    let lines = if topology.has_equal_lines() { "" } else { ", lines of different rates" };
    match topology.servers() {
        0 => format!("{tiers}{lines}"),
        1 => format!("{tiers} with 1 server{lines}"),
        servers => format!("{tiers} with {servers} servers{lines}"),
    }
}

fn of(seconds: f64, bytes: u64) -> String {
    format!("{} predicted for {bytes} bytes", time(seconds))
}

/// A time in the unit that suits it.
pub fn time(seconds: f64) -> String {
    if seconds < 1e-3 {
        format!("{:.0} µs", seconds * 1e6)
    } else if seconds < 1.0 {
        format!("{:.2} ms", seconds * 1e3)
    } else {
        format!("{seconds:.2} s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{algorithms::Algorithm, rules::Rules};

    fn select_by(
        rules: &Rules,
        kind: Kind,
        topology: &Topology,
        bytes: u64,
        pipeline: Pipeline,
    ) -> Choice {
        let rule = rules.rule_for(kind, bytes);
        let (rule, allowed) = rules.allowed(kind, rule, topology);
        select(kind, topology, bytes, pipeline, (rule, &allowed), &CostModel::default())
    }

    fn chosen(topology: &Topology, bytes: u64) -> Algorithm {
        chosen_in(Pipeline::ALONE, topology, bytes)
    }

    fn chosen_in(pipeline: Pipeline, topology: &Topology, bytes: u64) -> Algorithm {
        select_by(&Rules::default(), Kind::Allreduce, topology, bytes, pipeline).spec.algorithm()
    }

    #[test]
    fn small_pieces_double_and_large_ones_share() {
        for nodes in [4, 8, 16, 64] {
            let topology = Topology::flat(nodes);
            assert_ne!(chosen(&topology, 1 << 10), Algorithm::Ring, "{nodes} nodes");
            assert_ne!(chosen(&topology, 64 << 20), Algorithm::RecursiveDoubling, "{nodes} nodes");
        }
        assert_eq!(chosen(&Topology::flat(64), 1 << 10), Algorithm::RecursiveDoubling);
    }

    /// As measured with four nodes: 16 and 64 MiB in pieces of 4 MiB, eight of them in flight.
    #[test]
    fn pipelines_use_the_ring() {
        let four = Topology::flat(4);
        for pieces in [4, 16] {
            let pipeline = Pipeline { pieces, in_flight: 8.min(pieces) };
            assert_eq!(chosen_in(pipeline, &four, 4 << 20), Algorithm::Ring);
        }
        // Nothing hides the latency of a single piece, and little hides that of small ones.
        assert_eq!(chosen(&four, 2 << 20), Algorithm::Hierarchical);
        let pipeline = Pipeline { pieces: 9, in_flight: 8 };
        for bytes in [4, 4 << 10, 64 << 10] {
            assert_ne!(chosen_in(pipeline, &four, bytes), Algorithm::Ring, "{bytes} bytes");
        }
    }

    #[test]
    fn racks_behind_slow_links_are_crossed_once() {
        let topology = Topology::from_racks((0..32).map(|node| node / 8).collect());
        assert_eq!(chosen(&topology, 16 << 20), Algorithm::Hierarchical);
    }

    #[test]
    fn the_reason_names_the_choice_and_its_rivals() {
        let (topology, rules) = (Topology::flat(8), Rules::default());
        let choose = |rules: &Rules, kind, topology: &Topology| {
            select_by(rules, kind, topology, 4096, Pipeline::ALONE)
        };
        let choice = choose(&rules, Kind::Allreduce, &topology);
        let (_, candidates) = rules.allowed(Kind::Allreduce, 0, &topology);
        for spec in candidates {
            assert!(choice.reason.contains(&spec.to_string()), "{}", choice.reason);
        }
        assert!(choice.reason.contains("cheapest on 8 nodes in 1 rack"), "{}", choice.reason);
        let forced = choose(&Rules::parse("ring").unwrap(), Kind::Allreduce, &topology);
        assert_eq!(forced.spec, Algorithm::Ring.into());
        assert!(forced.reason.contains("ring is forced;"), "{}", forced.reason);
        let some = Rules::parse("broadcast=chain; allreduce=ring,linear").unwrap();
        let some = choose(&some, Kind::Allreduce, &topology);
        assert!(some.reason.contains("the cheapest by rule 2 on 8 nodes"), "{}", some.reason);
        assert!(!some.reason.contains("double-tree"), "{}", some.reason);
        let alone = choose(&rules, Kind::Allreduce, &Topology::flat(1));
        assert!(alone.reason.contains("one node"), "{}", alone.reason);
        let moved = choose(&rules, Kind::Move { from: 1, to: 2 }, &topology);
        assert!(moved.reason.contains("one way to go"), "{}", moved.reason);
    }
}
