//! The closed forms of the cost model against schedules that are run chunk by chunk ([`network`]).
//! The critical path takes whole messages: it cannot tell whether a hop waits for a chunk of the
//! one before while a line is idle.

mod network;

use gradwire_collectives::{
    Algorithm, CostModel, Kind, LinkCost, Schedule, Spec, Topology, generate, price,
};
use rand::{RngExt as _, SeedableRng};
use rand_xoshiro::SplitMix64;

/// The bytes that daemons receive, reduce and send on at once.
const CHUNK: u64 = 256 << 10;
const SEED: u64 = 1;
const CASES: u32 = 60;

/// A cluster with its costs, and the bytes of a piece.
struct Case {
    topology: Topology,
    model: CostModel,
    bytes: u64,
}

impl Case {
    /// 2 to 16 nodes, in one rack or in several with uplinks at a quarter of the rate.
    fn random(random: &mut SplitMix64, in_racks: bool) -> Self {
        let topology = if in_racks {
            let size = random.random_range(2..=4);
            let racks = random.random_range(2..=4);
            Topology::from_racks((0..racks * size).map(|node| node / size).collect())
        } else {
            Topology::flat(random.random_range(2..=16))
        };
        let gbit = [0.2, 1.0, 10.0][random.random_range(0..3)];
        let per_byte = 8.0 / (gbit * 1e9);
        let model = CostModel {
            in_rack: LinkCost { latency: 40e-6, per_byte },
            cross_rack: LinkCost { latency: 60e-6, per_byte: 4.0 * per_byte },
            // Queues never overflow here.
            burst_loss: 0.0,
            incast_loss: 0.0,
            chunk: CHUNK,
            ..CostModel::default()
        };
        // 4 KiB to 64 MiB of whole elements, uniform in the logarithm.
        let bytes = (4096.0 * f64::exp2(random.random_range(0.0..14.0))) as u64 & !3;
        Self { topology, model, bytes }
    }

    /// The error of the model's prediction, as a fraction.
    fn error(&self, kind: Kind, spec: Spec) -> f64 {
        let Self { topology, model, bytes } = self;
        let schedules: Vec<Schedule> = (0..topology.participants())
            .map(|me| generate(kind, spec, topology, me, bytes / 4))
            .collect();
        let simulated = network::simulated(model, topology, &schedules, CHUNK);
        price(model, topology, kind, spec, *bytes) / simulated - 1.0
    }
}

/// Prints the errors of an algorithm over all cases, in percent: the median, and the median and the
/// 90th percentile of absolute errors. Returns the median absolute error.
fn report(kind: Kind, spec: Spec, in_racks: bool) -> f64 {
    let mut random = SplitMix64::seed_from_u64(SEED);
    let mut errors: Vec<f64> =
        (0..CASES).map(|_| Case::random(&mut random, in_racks).error(kind, spec) * 100.0).collect();
    errors.sort_by(f64::total_cmp);
    let mut sizes: Vec<f64> = errors.iter().map(|error| error.abs()).collect();
    sizes.sort_by(f64::total_cmp);
    let at = |sorted: &[f64], part: usize| sorted[sorted.len() * part / 10];
    println!(
        "{kind:?} {spec} {}: {:+.0} %, sizes {:.0} and {:.0} %",
        if in_racks { "in racks" } else { "in one rack" },
        at(&errors, 5),
        at(&sizes, 5),
        at(&sizes, 9)
    );
    at(&sizes, 5)
}

/// An allreduce by each algorithm. The best predictions are those of algorithms that send from the
/// beginning. In racks the lines and the uplinks of some algorithms take turns, and the model has
/// the slower of both.
#[test]
fn allreduces_take_what_is_predicted() {
    println!("seed {SEED}");
    for &algorithm in Algorithm::ALL {
        let at_most = match algorithm {
            Algorithm::Ring | Algorithm::Direct | Algorithm::Torus => [6.0, 25.0],
            Algorithm::Linear | Algorithm::Binomial | Algorithm::LeaderRing => [30.0; 2],
            Algorithm::DoubleTree | Algorithm::Bcube => [20.0, 40.0],
            _ => [15.0, 30.0],
        };
        for (in_racks, at_most) in [false, true].into_iter().zip(at_most) {
            let error = report(Kind::Allreduce, algorithm.into(), in_racks);
            assert!(error <= at_most, "{algorithm:?}, in racks {in_racks}: {error:.0} %");
        }
    }
}

/// An exchange by each kind of trees. All sections have at least one element.
#[test]
fn exchanges_take_what_is_predicted() {
    println!("seed {SEED}");
    let kinds = [
        Kind::Allgather,
        Kind::ReduceScatter,
        Kind::Alltoall,
        Kind::Gather { root: 0 },
        Kind::Scatter { root: 0 },
    ];
    for kind in kinds {
        for algorithm in [
            Algorithm::Ring,
            Algorithm::Direct,
            Algorithm::Hierarchical,
            Algorithm::Circulant,
            Algorithm::HalvingDoubling,
        ] {
            let error = report(kind, algorithm.into(), false);
            assert!(error <= 25.0, "{kind:?} {algorithm:?}: {error:.0} %");
            report(kind, algorithm.into(), true);
        }
    }
}
