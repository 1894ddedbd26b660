//! The closed forms of the cost model against the schedules themselves.

use gradwire_collectives::{
    Action, Algorithm, Block, Choice, CostModel, Kind, LinkCost, Pipeline, Rules, Schedule, Spec,
    Topology, cost::critical_path, generate, price, price_in_pipeline, select,
};

fn all(kind: Kind, algorithm: Spec, topology: &Topology, count: u64) -> Vec<Schedule> {
    (0..topology.participants()).map(|me| generate(kind, algorithm, topology, me, count)).collect()
}

/// Every algorithm with its usual parameters, and some with others.
fn specs() -> Vec<Spec> {
    let others = [
        "ring(way=around)",
        "circulant(radix=4)",
        "bcube(radix=3)",
        "hips(along=ring)",
        "circulant-blocks(blocks=4)",
        "ring(segments=4)",
        "chain(segments=8)",
        "k-nomial(segments=8)",
        "linear(segments=4)",
        "double-tree(segments=40)",
    ];
    let others = others.iter().map(|text| Spec::parse(text).unwrap());
    Algorithm::ALL.iter().map(|algorithm| Spec::usual(*algorithm)).chain(others).collect()
}

/// What is chosen without rules.
fn choose(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    bytes: u64,
    pipeline: Pipeline,
) -> Choice {
    let (_, allowed) = Rules::default().allowed(kind, 0, topology);
    select(kind, topology, bytes, pipeline, (0, &allowed), model)
}

fn topologies() -> Vec<Topology> {
    let racks =
        |nodes: u32, size: u32| Topology::from_racks((0..nodes).map(|node| node / size).collect());
    let mut all: Vec<Topology> = [2, 3, 4, 6, 8, 16, 24, 32].map(Topology::flat).into();
    all.extend([(4, 2), (8, 4), (8, 2), (12, 4), (24, 8), (32, 8)].map(|(n, s)| racks(n, s)));
    // Racks of so many, and groups of two of them.
    let tiers = |nodes: u32, size: u32| {
        let tiers = [size, 2 * size].map(|size| (0..nodes).map(|node| node / size).collect());
        Topology::from_tiers(tiers.into()).unwrap()
    };
    all.extend([(8, 2), (16, 4)].map(|(nodes, size)| tiers(nodes, size)));
    all
}

const KINDS: [Kind; 9] = [
    Kind::Allreduce,
    Kind::Broadcast { root: 0 },
    Kind::Reduce { root: 0 },
    Kind::Move { from: 0, to: 1 },
    Kind::Allgather,
    Kind::Gather { root: 0 },
    Kind::Scatter { root: 0 },
    Kind::ReduceScatter,
    Kind::Alltoall,
];
const BYTES: [u64; 5] = [256, 16 << 10, 256 << 10, 4 << 20, 64 << 20];

/// The sizes to compare. An exchange has one block for each section: the sizes are those of single
/// pieces of which all have a share. Between racks it is left out: its sends are all ready at once,
/// and the path books uplinks in the order of the list, whole messages at a time.
fn bytes_for(kind: Kind, topology: &Topology) -> impl Iterator<Item = u64> {
    let sections = kind.sections(topology.participants(), 1 << 20).len() as u64;
    let (is_exchange, racks) = (kind.roles().is_none(), topology.members().len());
    let most = match (is_exchange, racks) {
        (false, _) => u64::MAX,
        (true, 1) => 4 << 20,
        (true, _) => 0,
    };
    BYTES.into_iter().filter(move |&bytes| bytes / 4 >= sections && bytes <= most)
}

fn simulated(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    algorithm: Spec,
    bytes: u64,
) -> f64 {
    let schedules = all(kind, algorithm, topology, bytes / 4);
    critical_path(model, topology, &schedules, 4).expect("schedules fit together")
}

/// Incast is what a line that serves one after the other doesn't show.
fn without_incast() -> CostModel {
    CostModel { burst_loss: 0.0, incast_loss: 0.0, ..CostModel::default() }
}

/// A closed form is within a factor of what the schedule takes step by step.
#[test]
fn closed_forms_follow_the_schedules() {
    let model = without_incast();
    let mut worst = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            for algorithm in specs() {
                for bytes in bytes_for(kind, &topology) {
                    let exact = simulated(&model, &topology, kind, algorithm, bytes);
                    let closed = price(&model, &topology, kind, algorithm, bytes);
                    let ratio = closed / exact;
                    if !(0.5..=2.0).contains(&ratio) {
                        let nodes = topology.participants();
                        let racks = topology.members().len();
                        worst.push(format!(
                            "{algorithm} {kind:?} {nodes} nodes {racks} racks {bytes} B: closed \
                             {closed:.2e} exact {exact:.2e} = {ratio:.2}"
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
    let model = without_incast();
    let mut regrets = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            for bytes in bytes_for(kind, &topology) {
                let time = |algorithm| simulated(&model, &topology, kind, algorithm, bytes);
                let best = specs().into_iter().map(time).fold(f64::INFINITY, f64::min);
                let choice = choose(&model, &topology, kind, bytes, Pipeline::ALONE);
                let regret = time(choice.spec) / best;
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
            for algorithm in specs() {
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
    let choose = |nodes, bytes| {
        choose(&model, &Topology::flat(nodes), Kind::Allreduce, bytes, Pipeline::ALONE)
    };
    let choice = choose(64, 256 << 20);
    assert_ne!(choice.spec.algorithm(), Algorithm::Hierarchical, "{}", choice.reason);
    let few = choose(8, 4 << 20);
    assert_eq!(few.spec.algorithm(), Algorithm::Hierarchical, "{}", few.reason);
}

/// The schedules of the pieces of a pipeline as one: the n-th begins on a node when it is done with
/// the one `in_flight` before.
fn in_pipeline(schedule: &Schedule, pipeline: Pipeline) -> Schedule {
    let count: u64 = schedule.blocks.iter().map(|block| block.count).sum();
    let blocks = schedule.blocks.len() as u32;
    let messages = |way: fn(&Action) -> Option<(u32, u32)>, with: u32| {
        let all = schedule.steps.iter().filter_map(|step| way(&step.action));
        all.filter(|(peer, _)| *peer == with).count() as u32
    };
    let mut all_blocks = Vec::new();
    let mut all = Schedule {
        servers: schedule.servers,
        ..Schedule::empty(schedule.participants, schedule.me)
    };
    // Of each piece, its steps.
    let mut pieces: Vec<std::ops::Range<u32>> = Vec::new();
    for piece in 0..pipeline.pieces {
        let first = all.steps.len() as u32;
        let moved =
            |block: &Block| Block { offset: block.offset + u64::from(piece) * count, ..*block };
        all_blocks.extend(schedule.blocks.iter().map(moved));
        for step in &schedule.steps {
            let mut action = step.action;
            match &mut action {
                Action::ReduceLocal | Action::Publish => {}
                Action::Send { peer, message } => {
                    *message += piece * messages(Action::sends_to, *peer);
                }
                Action::RecvReduce { peer, message, .. } | Action::RecvCopy { peer, message } => {
                    *message += piece * messages(Action::receives_from, *peer);
                }
            }
            let moved = |range: &std::ops::Range<u32>| {
                range.start + piece * blocks..range.end + piece * blocks
            };
            let ranges = step.ranges.iter().map(moved);
            let mut after: Vec<u32> = step.after.iter().map(|earlier| first + earlier).collect();
            if after.is_empty() && piece >= pipeline.in_flight {
                after.extend(pieces[(piece - pipeline.in_flight) as usize].clone());
            }
            all.steps.push(action, ranges, after);
        }
        pieces.push(first..all.steps.len() as u32);
    }
    all.blocks = all_blocks.into();
    all
}

const PIPELINES: [Pipeline; 3] = [
    Pipeline { pieces: 4, in_flight: 4 },
    Pipeline { pieces: 16, in_flight: 2 },
    Pipeline { pieces: 16, in_flight: 8 },
];

/// Seconds for each of them.
fn simulated_in_pipeline(
    model: &CostModel,
    topology: &Topology,
    algorithm: Spec,
    bytes: u64,
    pipeline: Pipeline,
) -> f64 {
    let schedules: Vec<Schedule> = all(Kind::Allreduce, algorithm, topology, bytes / 4)
        .iter()
        .map(|schedule| in_pipeline(schedule, pipeline))
        .collect();
    let together = critical_path(model, topology, &schedules, 4).expect("schedules fit together");
    together / f64::from(pipeline.pieces)
}

/// Pieces that follow each other cost what they do in the schedules, one after the other.
#[test]
fn rows_follow_the_schedules() {
    let model = without_incast();
    let mut worst = Vec::new();
    for topology in [2, 3, 4, 8].map(Topology::flat) {
        for (pipeline, bytes) in PIPELINES
            .into_iter()
            .flat_map(|pipeline| [4 << 10, 256 << 10, 4 << 20].map(|b| (pipeline, b)))
        {
            let time =
                |algorithm| simulated_in_pipeline(&model, &topology, algorithm, bytes, pipeline);
            for algorithm in specs() {
                let exact = time(algorithm);
                let closed = price_in_pipeline(
                    &model,
                    &topology,
                    Kind::Allreduce,
                    algorithm,
                    bytes,
                    pipeline,
                );
                let ratio = closed / exact;
                if !(0.5..=2.0).contains(&ratio) {
                    let nodes = topology.participants();
                    worst.push(format!(
                        "{algorithm} {nodes} nodes {bytes} B {pipeline:?}: closed {closed:.2e} \
                         exact {exact:.2e} = {ratio:.2}"
                    ));
                }
            }
            let choice = choose(&model, &topology, Kind::Allreduce, bytes, pipeline);
            let best = specs().into_iter().map(time).fold(f64::INFINITY, f64::min);
            let regret = time(choice.spec) / best;
            if regret > 1.3 {
                worst.push(format!("regret {regret:.2} {pipeline:?} {}", choice.reason));
            }
        }
    }
    assert!(worst.is_empty(), "{} outside:\n{}", worst.len(), worst.join("\n"));
}

/// Of servers beside 2 to 16 nodes, also in racks: the closed form is within a factor of what the
/// schedule takes step by step.
#[test]
fn closed_forms_follow_the_schedules_of_servers() {
    let model = without_incast();
    let flat = |nodes: u32, servers: u32| Topology::flat(nodes + servers).with_servers(servers);
    let mut all = Vec::new();
    for nodes in [2, 3, 4, 8, 16] {
        all.extend([1, nodes / 2, nodes, 2 * nodes].map(|servers| flat(nodes, servers)));
    }
    for (nodes, servers) in [(8u32, 2u32), (8, 4)] {
        let racks = (0..nodes).map(|node| node / 4).chain((0..servers).map(|one| one % 2));
        all.push(Topology::from_racks(racks.collect()).with_servers(servers));
    }
    for topology in all {
        for bytes in BYTES {
            let spec = Spec::usual(Algorithm::Servers);
            let exact = simulated(&model, &topology, Kind::Allreduce, spec, bytes);
            let closed = price(&model, &topology, Kind::Allreduce, spec, bytes);
            let ratio = closed / exact;
            let (nodes, servers) = (topology.contributors(), topology.servers());
            let racks = topology.members().len();
            assert!(
                (0.5..=2.0).contains(&ratio),
                "{nodes} nodes {servers} servers {racks} racks {bytes} B: closed {closed:.2e} \
                 exact {exact:.2e} = {ratio:.2}"
            );
        }
    }
}

/// With as many servers as nodes the lines carry two thirds of the ring's traffic, and with one
/// server for eight nodes a piece by itself is better off without it.
#[test]
fn servers_are_chosen_where_they_help() {
    let model = CostModel::default();
    let with = |nodes: u32, servers: u32| Topology::flat(nodes + servers).with_servers(servers);
    let chosen = |topology: &Topology, pieces: u32| {
        let pipeline = Pipeline { pieces, in_flight: pieces.min(8) };
        choose(&model, topology, Kind::Allreduce, 4 << 20, pipeline).spec.algorithm()
    };
    assert_eq!(chosen(&with(4, 4), 16), Algorithm::Servers);
    assert_ne!(chosen(&with(8, 1), 1), Algorithm::Servers);
    assert_ne!(chosen(&with(2, 2), 16), Algorithm::Servers);
    let broadcast = Kind::Broadcast { root: 0 };
    let choice = choose(&model, &with(4, 4), broadcast, 4 << 20, Pipeline::ALONE);
    assert!(choice.others.iter().all(|(spec, _)| spec.algorithm() != Algorithm::Servers));
}

/// What does not fit into the queue of a line is sent by fewer at once.
#[test]
fn queues_that_overflow_are_avoided() {
    let usual = CostModel::default();
    let model = CostModel { queue: 512 << 10, overflow: 20e-3, ..usual };
    let flat = Topology::flat(8);
    let longer = |algorithm: Algorithm, bytes| {
        let price = |model| price(model, &flat, Kind::Allreduce, algorithm, bytes);
        price(&model) - price(&usual)
    };
    for algorithm in [Algorithm::Direct, Algorithm::Hierarchical] {
        assert_eq!(longer(algorithm, 256 << 10), 0.0);
        assert!((longer(algorithm, 4 << 20) / model.overflow - 1.0).abs() < 1e-6);
    }
    for algorithm in [Algorithm::Ring, Algorithm::RecursiveDoubling, Algorithm::HalvingDoubling] {
        assert_eq!(longer(algorithm, 64 << 20), 0.0, "nobody has two senders");
    }
    let chosen = |model| {
        let choice = choose(model, &flat, Kind::Allreduce, 4 << 20, Pipeline::ALONE);
        (choice.spec.algorithm(), choice.reason)
    };
    assert_eq!(chosen(&usual).0, Algorithm::Hierarchical);
    assert_ne!(chosen(&model).0, Algorithm::Hierarchical, "{}", chosen(&model).1);
}

/// The fewer connections cross, the more of them share a path, and never more than all.
#[test]
fn few_connections_collide_on_the_paths_between_racks() {
    let topology = Topology::from_racks((0..32).map(|node| node / 8).collect());
    let longer = |paths, connections, algorithm: Algorithm| {
        // So slow that the uplinks are what takes longest.
        let cross_rack = LinkCost { latency: 60e-6, per_byte: 8.0 / 0.5e9 };
        let model = |paths| CostModel { paths, connections, cross_rack, ..CostModel::default() };
        let price = |model| price(&model, &topology, Kind::Allreduce, algorithm, 64 << 20);
        price(model(paths)) / price(model(1))
    };
    assert_eq!(longer(1, 2, Algorithm::Ring), 1.0);
    assert!(longer(8, 2, Algorithm::Ring) > longer(8, 2, Algorithm::Hierarchical));
    assert!(longer(8, 2, Algorithm::Hierarchical) > longer(8, 16, Algorithm::Hierarchical));
    assert!(longer(8, 1, Algorithm::Ring) <= 8.0 && longer(8, 64, Algorithm::Ring) >= 1.0);
}

/// The slowest line is what the others wait for, unless it has less to do.
#[test]
fn slow_lines_take_as_long_as_they_do() {
    let model = without_incast();
    let lines = |mbit: &[u32]| Topology::flat(4).with_lines(mbit);
    let price = |topology: &Topology, algorithm: Algorithm| {
        price(&model, topology, Kind::Allreduce, algorithm, 256 << 20)
    };
    let (equal, slow) = (lines(&[1000; 4]), lines(&[1000, 1000, 250, 1000]));
    for algorithm in [Algorithm::Ring, Algorithm::Direct, Algorithm::Binomial] {
        let ratio = price(&slow, algorithm) / price(&equal, algorithm);
        assert!((3.0..=4.01).contains(&ratio), "{algorithm}: {ratio}");
    }
    assert!(price(&slow, Algorithm::Servers) < price(&slow, Algorithm::Ring));
}
