//! SAME: lanes over sockets give bit for bit the same results as the interpreter of schedules in
//! memory, on all ranks and for every algorithm.

#[path = "../../../../collectives/tests/schedules/interpret.rs"]
mod interpret;

use gradwire_collectives::Schedule;
use rand::{RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

use super::*;

/// Every algorithm with its usual parameters, and some with others.
fn specs() -> Vec<Spec> {
    let others = [
        "ring(way=around)",
        "ring(segments=3)",
        "multi-ring(rings=3)",
        "circulant(radix=3)",
        "bcube(radix=4)",
        "k-nomial(radix=3)",
        "circulant-blocks(blocks=5)",
        "double-tree(segments=20)",
        "hips(along=ring)",
        "servers(segments=3)",
        "parameterhub(across=ring)",
        "blink(trees=3)",
    ];
    let others = others.iter().map(|text| Spec::parse(text).unwrap());
    Algorithm::ALL.iter().map(|&algorithm| Spec::usual(algorithm)).chain(others).collect()
}

/// Numbers of very different magnitudes, so that each order of additions gives different bits.
fn numbers(count: u64, random: &mut SplitMix64) -> Vec<f32> {
    let one = |_| {
        let size = 2f32.powi(random.random_range(-12..12));
        size * (random.random_range(0..1 << 24) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(one).collect()
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// The interpreter's result for each node; `inputs` are those of all ranks.
fn interpreted(
    kind: Kind,
    spec: Spec,
    topology: &Topology,
    inputs: &[Vec<Vec<u8>>],
    seed: u64,
) -> Vec<Vec<u8>> {
    let count = inputs.iter().flatten().next().map_or(0, |input| input.len() as u64 / 4);
    let make = |me| algorithms::generate(kind, spec, topology, me, count);
    let schedules: Vec<Schedule> = (0..topology.participants()).map(make).collect();
    let data = interpret::Data {
        combine: Combine { dtype: DType::F32, op: ReduceOp::Sum },
        prescale: 1.0,
        finish: identity(),
        contributions: inputs,
    };
    let sections = kind.sections(topology.participants(), count);
    interpret::run(&schedules, &sections, &data, seed).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]

    #[test]
    fn lanes_give_the_bits_of_the_interpreter(
        spec in prop::sample::select(specs()),
        nodes in 2u32..8,
        servers in 0u32..3,
        locals in 1u32..4,
        streams in 1u32..3,
        chunk in prop_oneof![Just(64u64), Just(4096), Just(1 << 18)],
        counts in prop::collection::vec(1u64..20_000, 1..3),
        (source, target) in prop_oneof![
            2 => Just((None, None)),
            1 => (0u32..16).prop_map(|rank| (Some(rank), None)),
            1 => (0u32..16).prop_map(|rank| (None, Some(rank))),
        ],
        racks in prop::collection::vec(prop::sample::select(RACKS), 9),
        seed in any::<u64>(),
    ) {
        let rank = |end: Option<u32>| end.map(|rank| rank % (nodes * locals));
        let way = Way { source: rank(source), target: rank(target) };
        let kind = way.kind(locals);
        let servers = if algorithms::has_servers(kind, &spec) { servers } else { 0 };
        let all = nodes + servers;
        let topology = Topology::from_labels(&racks[..all as usize]).with_servers(servers);
        let mut random = SplitMix64::seed_from_u64(seed);
        let jobs: Vec<Job> =
            counts.iter().map(|&count| Job::new("t", all, locals, count, way)).collect();
        // The input of each rank of each node for all tensors of the piece.
        let mut inputs = vec![Vec::new(); all as usize];
        for rank in 0..nodes * locals {
            let (node, local) = ((rank / locals) as usize, (rank % locals) as usize);
            let mut input = Vec::new();
            for job in &jobs {
                let own = numbers(job.count, &mut random);
                job.buffers[node][local].write(&own);
                input.extend(bytes_of(&own));
            }
            if way.source.is_none_or(|source| source == rank) {
                inputs[node].push(input);
            }
        }

        let cluster = Cluster::new(all, 1, chunk, Duration::from_secs(10));
        cluster.connect(streams, None);
        let jobs_of_piece: Vec<&Job> = jobs.iter().collect();
        for node in 0..all {
            let whole = piece(0, &jobs_of_piece, node, all, spec, &topology);
            // A server has no tensors.
            let piece = if node < nodes {
                whole
            } else {
                Piece { tensors: Vec::new(), segments: Vec::new(), ..whole }
            };
            cluster.lanes[node as usize][0].send(Order::Start(piece));
        }
        for node in 0..all {
            let event = cluster.wait_for(node as usize);
            prop_assert!(matches!(event, Event::Finished), "{event:?}");
        }
        cluster.stop();

        let wanted = interpreted(kind, spec, &topology, &inputs, seed);
        for rank in 0..nodes * locals {
            if way.target.is_some_and(|target| target != rank) {
                continue;
            }
            let (node, local) = ((rank / locals) as usize, (rank % locals) as usize);
            let got: Vec<u8> =
                jobs.iter().flat_map(|job| bytes_of(&job.buffers[node][local].read())).collect();
            prop_assert!(got == wanted[node], "{spec} {kind:?}: rank {rank}, seed {seed}");
        }
    }
}

/// Another order of additions is noticed with these numbers, so the test above can fail.
#[test]
fn another_order_gives_other_bits() {
    let mut random = SplitMix64::seed_from_u64(1);
    let inputs: Vec<_> = (0..6).map(|_| vec![bytes_of(&numbers(1000, &mut random))]).collect();
    let of = |spec: Algorithm| {
        interpreted(Kind::Allreduce, spec.into(), &Topology::flat(6), &inputs, 1).swap_remove(0)
    };
    assert_ne!(of(Algorithm::Ring), of(Algorithm::RecursiveDoubling));
}
