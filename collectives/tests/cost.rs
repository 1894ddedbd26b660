//! The closed forms of the cost model against the schedules themselves.

use gradwire_collectives::{
    Algorithm, CostModel, Kind, Schedule, Topology, cost::critical_path, generate, price, select,
};

fn all(kind: Kind, algorithm: Algorithm, topology: &Topology, count: u64) -> Vec<Schedule> {
    (0..topology.participants()).map(|me| generate(kind, algorithm, topology, me, count)).collect()
}

fn topologies() -> Vec<Topology> {
    let racks =
        |nodes: u32, size: u32| Topology { racks: (0..nodes).map(|node| node / size).collect() };
    let mut all: Vec<Topology> = [2, 3, 4, 6, 8, 16, 24, 32].map(Topology::flat).into();
    all.extend([(4, 2), (8, 4), (8, 2), (12, 4), (24, 8), (32, 8)].map(|(n, s)| racks(n, s)));
    all
}

const KINDS: [Kind; 4] = [
    Kind::Allreduce,
    Kind::Broadcast { root: 0 },
    Kind::Reduce { root: 0 },
    Kind::Move { from: 0, to: 1 },
];
const BYTES: [u64; 5] = [256, 16 << 10, 256 << 10, 4 << 20, 64 << 20];

fn simulated(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    algorithm: Algorithm,
    bytes: u64,
) -> f64 {
    let schedules = all(kind, algorithm, topology, bytes / 4);
    critical_path(model, topology, &schedules, 4).expect("schedules fit together")
}

/// A closed form is within a factor of what the schedule takes step by step.
#[test]
fn closed_forms_follow_the_schedules() {
    // Incast is what a line that serves one after the other doesn't show.
    let model = CostModel { incast_loss: 0.0, ..CostModel::default() };
    let mut worst = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            for algorithm in Algorithm::ALL {
                for bytes in BYTES {
                    let exact = simulated(&model, &topology, kind, algorithm, bytes);
                    let closed = price(&model, &topology, kind, algorithm, bytes);
                    let ratio = closed / exact;
                    if !(0.5..=2.0).contains(&ratio) {
                        let nodes = topology.participants();
                        let racks = topology.members().len();
                        worst.push(format!(
                            "{algorithm} {kind:?} {nodes} nodes {racks} racks {bytes} B: closed {closed:.2e} exact {exact:.2e} = {ratio:.2}"
                        ));
                    }
                }
            }
        }
    }
    assert!(worst.is_empty(), "{} outside:\n{}", worst.len(), worst.join("\n"));
}

/// What counts in the end: the chosen algorithm is nearly as good as the best one.
#[test]
fn choices_are_close_to_the_best() {
    let model = CostModel { incast_loss: 0.0, ..CostModel::default() };
    let mut regrets = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            for bytes in BYTES {
                let time = |algorithm| simulated(&model, &topology, kind, algorithm, bytes);
                let best = Algorithm::ALL.map(time).into_iter().fold(f64::INFINITY, f64::min);
                let choice = select(kind, &topology, bytes, None, &model);
                let regret = time(choice.algorithm) / best;
                if regret > 1.3 {
                    regrets.push(format!("{regret:.2} {kind:?} {}", choice.reason));
                }
            }
        }
    }
    assert!(regrets.is_empty(), "{} outside:\n{}", regrets.len(), regrets.join("\n"));
}

/// More bytes never cost less, and prices are the same every time.
#[test]
fn prices_grow_with_size() {
    let model = CostModel::default();
    for topology in topologies().iter().chain([&Topology::flat(1)]) {
        for kind in KINDS {
            for algorithm in Algorithm::ALL {
                let prices: Vec<f64> =
                    (0..40).map(|p| price(&model, topology, kind, algorithm, 1 << p)).collect();
                assert!(prices.iter().all(|p| p.is_finite() && *p >= 0.0));
                assert!(prices.is_sorted(), "{algorithm} over {topology:?}: {prices:?}");
                assert_eq!(prices[20], price(&model, topology, kind, algorithm, 1 << 20));
            }
        }
    }
}

/// Incast is what makes direct exchange among many lose to those with few senders.
#[test]
fn many_senders_are_avoided() {
    let model = CostModel::default();
    let choice = select(Kind::Allreduce, &Topology::flat(64), 256 << 20, None, &model);
    assert_ne!(choice.algorithm, Algorithm::Hierarchical, "{}", choice.reason);
    let few = select(Kind::Allreduce, &Topology::flat(8), 4 << 20, None, &model);
    assert_eq!(few.algorithm, Algorithm::Hierarchical, "{}", few.reason);
}
