//! Compares the closed forms of the cost model with simulated schedules.

use std::sync::Arc;

use gradwire_collectives::{
    Algorithm, Choice, CostModel, Kind, LinkCost, Pipeline, Rules, Spec, Topology, price,
    price_in_pipeline, select,
};
use gradwire_simulator::{
    Setup,
    config::{Control, Processor, Transport},
    job::{Content, InOrder, Operation},
    network::{Network, TierLinks},
    run,
};
use rayon::prelude::*;

/// Every algorithm with its default parameters, and some with others.
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

/// The choice without rules.
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
    // Racks of `size` hosts, and groups of two racks.
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
/// pieces of which all have a share.
fn bytes_for(kind: Kind, topology: &Topology) -> impl Iterator<Item = u64> {
    let sections = kind.sections(topology.participants(), 1 << 20).len() as u64;
    BYTES.into_iter().filter(move |&bytes| bytes / 4 >= sections)
}

/// The network of a cost model.
fn setup(model: &CostModel, topology: &Topology) -> Setup {
    let CostModel { in_rack, cross_rack, reduce_per_byte, per_message, chunk, .. } = *model;
    let (links, rate) = (1, 1.0 / cross_rack.per_byte);
    let latency = cross_rack.latency - in_rack.latency;
    let tier = TierLinks { links, rate, is_share: true, latency };
    let mut network = Network::even(topology.clone(), 1.0 / in_rack.per_byte, in_rack.latency);
    network.tiers = vec![tier; topology.tiers().len()];
    // In the model, crossing two tiers takes as long as crossing one.
    network.tiers.iter_mut().skip(1).for_each(|tier| tier.latency = 0.0);
    let processor =
        Processor { reduce: reduce_per_byte, frame: per_message, ..Processor::default() };
    let transport = Transport { chunk, lanes: 1, header: 0, ..Transport::default() };
    Setup { transport, processor, ..Setup::new(network) }
}

/// Seconds of a pipeline.
fn simulated(
    model: &CostModel,
    topology: &Topology,
    kind: Kind,
    spec: Spec,
    bytes: u64,
    pipeline: Pipeline,
) -> f64 {
    let hosts = (0..topology.participants()).collect();
    let content = Content::Kind(kind, bytes / 4);
    let operation = Arc::new(Operation { content, spec, element: 4, hosts });
    let operations = vec![operation; pipeline.pieces as usize];
    let control = Control { credit: pipeline.in_flight, ..Control::default() };
    let outcome = run(&setup(model, topology), &mut InOrder::new(operations, control));
    assert_eq!(outcome.standstill, None, "{spec} {kind:?}");
    outcome.seconds
}

fn alone(model: &CostModel, topology: &Topology, kind: Kind, spec: Spec, bytes: u64) -> f64 {
    simulated(model, topology, kind, spec, bytes, Pipeline::ALONE)
}

/// The simulator has no loss where several hosts send to one.
fn without_incast() -> CostModel {
    CostModel { burst_loss: 0.0, incast_loss: 0.0, ..CostModel::default() }
}

/// The model for pieces of `bytes`, with chunks large enough to limit their number.
fn for_pieces(bytes: u64) -> CostModel {
    let model = without_incast();
    CostModel { chunk: model.chunk.max(bytes / 64), ..model }
}

/// The part of prices that may be off by more than a factor of 2.
const RARE: f64 = 0.01;

/// Compares each price with the simulation: few may be off by more than a factor of 2, and none by
/// more than 3.
fn compare(all: &[(Topology, Kind, Spec, u64)]) {
    let compare = |(topology, kind, spec, bytes): &(Topology, Kind, Spec, u64)| {
        let model = for_pieces(*bytes);
        let exact = alone(&model, topology, *kind, *spec, *bytes);
        let closed = price(&model, topology, *kind, *spec, *bytes);
        let ratio = closed / exact;
        let (nodes, servers) = (topology.contributors(), topology.servers());
        let racks = topology.members().len();
        (!(0.5..=2.0).contains(&ratio)).then(|| {
            let text = format!(
                "{spec} {kind:?} {nodes} nodes {servers} servers {racks} racks {bytes} B: closed \
                 {closed:.2e} simulated {exact:.2e} = {ratio:.2}"
            );
            (ratio, text)
        })
    };
    let outside: Vec<(f64, String)> = all.par_iter().filter_map(compare).collect();
    let is_bound = |ratio: &f64| (1.0 / 3.0..=3.0).contains(ratio);
    let texts: Vec<&str> = outside.iter().map(|(_, text)| &text[..]).collect();
    let (few, texts) = (outside.len() as f64 <= RARE * all.len() as f64, texts.join("\n"));
    let are_bound = outside.iter().all(|(ratio, _)| is_bound(ratio));
    assert!(few && are_bound, "{} of {} outside:\n{texts}", outside.len(), all.len());
}

/// A closed form is within a factor of the schedule's time.
#[test]
fn closed_forms_follow_the_schedules() {
    let mut all = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            for bytes in bytes_for(kind, &topology) {
                let spec = |spec| (topology.clone(), kind, spec, bytes);
                all.extend(specs().into_iter().map(spec));
            }
        }
    }
    compare(&all);
}

/// The chosen algorithm is nearly as good as the best one, except for one choice in 50.
#[test]
fn choices_are_close_to_the_best() {
    let mut all = Vec::new();
    for topology in topologies() {
        for kind in KINDS {
            all.extend(bytes_for(kind, &topology).map(|bytes| (topology.clone(), kind, bytes)));
        }
    }
    let regret = |(topology, kind, bytes): &(Topology, Kind, u64)| {
        let model = for_pieces(*bytes);
        let time = |spec| alone(&model, topology, *kind, spec, *bytes);
        let best = specs().into_iter().map(time).fold(f64::INFINITY, f64::min);
        let choice = choose(&model, topology, *kind, *bytes, Pipeline::ALONE);
        let regret = time(choice.spec) / best;
        (regret > 1.3).then(|| (regret, format!("{regret:.2} {kind:?} {}", choice.reason)))
    };
    let (regrets, reasons): (Vec<f64>, Vec<String>) = all.par_iter().filter_map(regret).unzip();
    let are_bound = regrets.iter().all(|regret| *regret <= 1.6);
    let (outside, count) = (regrets.len(), all.len());
    assert!(
        are_bound && 50 * outside <= count,
        "{outside} of {count} outside:\n{}",
        reasons.join("\n")
    );
}

/// More bytes never cost less, and prices are reproducible.
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

/// Incast makes direct exchange among many hosts lose to algorithms with few senders.
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

const PIPELINES: [Pipeline; 3] = [
    Pipeline { pieces: 4, in_flight: 4 },
    Pipeline { pieces: 16, in_flight: 2 },
    Pipeline { pieces: 16, in_flight: 8 },
];

/// Consecutive pieces cost what they do in the schedules.
#[test]
fn rows_follow_the_schedules() {
    let model = without_incast();
    let mut worst = Vec::new();
    for topology in [2, 3, 4, 8].map(Topology::flat) {
        for (pipeline, bytes) in PIPELINES
            .into_iter()
            .flat_map(|pipeline| [4 << 10, 256 << 10, 4 << 20].map(|b| (pipeline, b)))
        {
            let time = |spec| {
                let kind = Kind::Allreduce;
                let all = simulated(&model, &topology, kind, spec, bytes, pipeline);
                all / f64::from(pipeline.pieces)
            };
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
            if regret > 1.35 {
                worst.push(format!("regret {regret:.2} {pipeline:?} {}", choice.reason));
            }
        }
    }
    assert!(worst.is_empty(), "{} outside:\n{}", worst.len(), worst.join("\n"));
}

/// The same for servers beside 2 to 16 nodes, also in racks.
#[test]
fn closed_forms_follow_the_schedules_of_servers() {
    let flat = |nodes: u32, servers: u32| Topology::flat(nodes + servers).with_servers(servers);
    let mut all = Vec::new();
    for nodes in [2, 3, 4, 8, 16] {
        all.extend([1, nodes / 2, nodes, 2 * nodes].map(|servers| flat(nodes, servers)));
    }
    for (nodes, servers) in [(8u32, 2u32), (8, 4)] {
        let racks = (0..nodes).map(|node| node / 4).chain((0..servers).map(|one| one % 2));
        all.push(Topology::from_racks(racks.collect()).with_servers(servers));
    }
    let spec = Spec::usual(Algorithm::Servers);
    let of =
        |topology: Topology| BYTES.map(|bytes| (topology.clone(), Kind::Allreduce, spec, bytes));
    compare(&all.into_iter().flat_map(of).collect::<Vec<_>>());
}

/// With as many servers as nodes, lines carry two thirds of the ring's traffic. With one server for
/// eight nodes, a single piece is faster without it.
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

/// If messages overflow the queue of a line, an algorithm with fewer senders is chosen.
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
        assert_eq!(longer(algorithm, 64 << 20), 0.0, "no host has two senders");
    }
    let chosen = |model| {
        let choice = choose(model, &flat, Kind::Allreduce, 4 << 20, Pipeline::ALONE);
        (choice.spec.algorithm(), choice.reason)
    };
    assert_eq!(chosen(&usual).0, Algorithm::Hierarchical);
    assert_ne!(chosen(&model).0, Algorithm::Hierarchical, "{}", chosen(&model).1);
}

/// The fewer connections cross, the more of them share a path, but never more than all.
#[test]
fn few_connections_collide_between_racks() {
    let topology = Topology::from_racks((0..32).map(|node| node / 8).collect());
    let longer = |paths, connections, algorithm: Algorithm| {
        // Slow enough for the uplinks to be the bottleneck.
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

/// The others wait for the slowest line, unless it has less to do.
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
