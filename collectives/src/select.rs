//! Which algorithm a piece gets: the cheapest by the cost model, or the one the user wants.
//!
//! The choice comes with its reason, to be logged when it changes and shown in status. It depends
//! on nothing but the arguments, so it can be cached per size class.

use crate::{
    algorithms::{Algorithm, Kind, Spec},
    cost::{CostModel, Pipeline, price_in_pipeline},
    topology::Topology,
};

/// What is chosen from. The first four have been compared with measured times. The linear one is
/// for small pieces to or from one participant.
const CANDIDATES: [Algorithm; 5] = [
    Algorithm::Ring,
    Algorithm::RecursiveDoubling,
    Algorithm::DoubleTree,
    Algorithm::Hierarchical,
    Algorithm::Linear,
];

/// A decision and why it was made.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// What to run.
    pub spec: Spec,
    /// Seconds that the model predicts; per piece of a pipeline.
    pub predicted_seconds: f64,
    /// Why, with the figures of the candidates.
    pub reason: String,
}

/// Chooses the algorithm for a piece of `bytes`, one of a pipeline. `forced` is taken as it is;
/// what is no candidate runs only then. Of equal prices the ring's wins, and then recursive
/// doubling's.
///
/// # Panics
/// As [`price`](crate::price).
pub fn select(
    kind: Kind,
    topology: &Topology,
    bytes: u64,
    pipeline: Pipeline,
    forced: Option<Spec>,
    model: &CostModel,
) -> Choice {
    let priced =
        |spec: Spec| (spec, price_in_pipeline(model, topology, kind, spec, bytes, pipeline));
    if let Some(spec) = forced {
        let (_, predicted_seconds) = priced(spec);
        let reason = format!("{spec} is forced; {}", of(predicted_seconds, bytes));
        return Choice { spec, predicted_seconds, reason };
    }
    let mut candidates = CANDIDATES.map(|algorithm| priced(algorithm.into()));
    let no_choice = match kind {
        _ if topology.participants() <= 1 => Some("one node has nothing to exchange".to_owned()),
        Kind::Move { .. } => {
            let (_, seconds) = candidates[0];
            Some(format!("a move has one way to go; {}", of(seconds, bytes)))
        }
        _ => None,
    };
    if let Some(reason) = no_choice {
        let (spec, predicted_seconds) = candidates[0];
        return Choice { spec, predicted_seconds, reason };
    }
    // Stable, so of equal ones the first stays first.
    candidates.sort_by(|a, b| a.1.total_cmp(&b.1));
    let (spec, predicted_seconds) = candidates[0];
    let others: Vec<String> = candidates[1..]
        .iter()
        .map(|(spec, seconds)| format!("{spec} {}", time(*seconds)))
        .collect();
    let reason = format!(
        "{spec} is the cheapest on {} nodes in {}: {} ({})",
        topology.participants(),
        racks(topology.members().len()),
        of(predicted_seconds, bytes),
        others.join(", "),
    );
    Choice { spec, predicted_seconds, reason }
}

fn racks(count: usize) -> String {
    if count == 1 { "1 rack".to_owned() } else { format!("{count} racks") }
}

fn of(seconds: f64, bytes: u64) -> String {
    format!("{} predicted for {bytes} bytes", time(seconds))
}

fn time(seconds: f64) -> String {
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

    fn chosen(topology: &Topology, bytes: u64) -> Algorithm {
        chosen_in(Pipeline::ALONE, topology, bytes)
    }

    fn chosen_in(pipeline: Pipeline, topology: &Topology, bytes: u64) -> Algorithm {
        select(Kind::Allreduce, topology, bytes, pipeline, None, &CostModel::default())
            .spec
            .algorithm()
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

    /// What was measured: four nodes, 16 and 64 MiB in pieces of 4 MiB, eight of them under way.
    #[test]
    fn pipelines_use_the_ring() {
        let four = Topology::flat(4);
        for pieces in [4, 16] {
            let pipeline = Pipeline { pieces, in_flight: 8.min(pieces) };
            assert_eq!(chosen_in(pipeline, &four, 4 << 20), Algorithm::Ring);
        }
        // Nothing hides the latency of a piece by itself, and little that of small ones.
        assert_eq!(chosen(&four, 2 << 20), Algorithm::Hierarchical);
        let pipeline = Pipeline { pieces: 9, in_flight: 8 };
        for bytes in [4, 4 << 10, 64 << 10] {
            assert_ne!(chosen_in(pipeline, &four, bytes), Algorithm::Ring, "{bytes} bytes");
        }
    }

    #[test]
    fn racks_behind_slow_links_are_crossed_once() {
        let topology = Topology { racks: (0..32).map(|node| node / 8).collect() };
        assert_eq!(chosen(&topology, 16 << 20), Algorithm::Hierarchical);
    }

    #[test]
    fn the_reason_names_the_choice_and_its_rivals() {
        let (topology, model) = (Topology::flat(8), CostModel::default());
        let choice = select(Kind::Allreduce, &topology, 4096, Pipeline::ALONE, None, &model);
        for algorithm in CANDIDATES {
            assert!(choice.reason.contains(algorithm.name()), "{}", choice.reason);
        }
        assert!(choice.reason.contains("8 nodes in 1 rack"), "{}", choice.reason);
        let forced = Some(Algorithm::Ring.into());
        let choice = select(Kind::Allreduce, &topology, 4096, Pipeline::ALONE, forced, &model);
        assert_eq!(choice.spec, Algorithm::Ring.into());
        assert!(choice.reason.contains("forced"), "{}", choice.reason);
        let alone = select(Kind::Allreduce, &Topology::flat(1), 9, Pipeline::ALONE, None, &model);
        assert!(alone.reason.contains("one node"), "{}", alone.reason);
        let moved = Kind::Move { from: 1, to: 2 };
        let moved = select(moved, &topology, 4096, Pipeline::ALONE, None, &model);
        assert!(moved.reason.contains("one way to go"), "{}", moved.reason);
    }
}
