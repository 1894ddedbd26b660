//! f32 that is sent as bf16, over real lanes: all ranks receive identical bits, and the error is
//! within the bound of the roundings.

use super::*;

/// Numbers that are not sums of few powers of two, of both signs and several magnitudes.
pub(super) fn number(rank: u32, i: u64) -> f32 {
    let mixed = (u64::from(rank) << 32 | i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let part = (mixed >> 40) as f32 / (1 << 24) as f32 - 0.5;
    part * [1.0, 100.0, 1e-3][(mixed % 3) as usize]
}

/// The same piece with bf16 as its wire type.
fn shortened(piece: Piece, way: Way, at: u32, algorithm: Algorithm, topology: &Topology) -> Piece {
    let count = piece.bytes / 4;
    let schedule = algorithms::generate(way.kind(1), algorithm, topology, at, count);
    Piece { wire: Wire::Partial(Form::Bf16), plan: Arc::new(Plan::new(&schedule, 2)), ..piece }
}

/// The largest error. A contribution is rounded whenever a sum with it is sent, by at most each
/// node, and at its end. `magnitude` is the sum of the absolute values.
fn bound(nodes: u32, ranks: u32, magnitude: f64) -> f64 {
    let (short, long) = (f64::from(nodes) * 2f64.powi(-8), f64::from(ranks + 1) * 2f64.powi(-24));
    (short + long).exp_m1() * magnitude + f64::from(f32::MIN_POSITIVE)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn bf16_results_are_within_bounds(
        nodes in 2u32..8,
        locals in 1u32..4,
        streams in 1u32..4,
        chunk in prop_oneof![Just(64u64), Just(4096), Just(1 << 18)],
        counts in prop::collection::vec(1u64..60_000, 1..5),
        algorithm in prop::sample::select(Algorithm::ALL),
        root in prop::option::of(0u32..8),
        racks in prop::collection::vec(prop::sample::select(RACKS), 7),
        scaled in any::<bool>(),
        buffer in prop::sample::select(&[None, Some(32 << 10)][..]),
    ) {
        let topology = Topology::from_labels(&racks[..nodes as usize]);
        let target = root.map(|node| node % nodes * locals);
        let way = Way { source: None, target };
        let by_node = Way { source: None, target: target.map(|rank| rank / locals) };
        let prescale = if scaled { 0.75 } else { 1.0 };
        let cluster = Cluster::new(nodes, 1, chunk, Duration::from_secs(10));
        cluster.connect(streams, buffer);
        let jobs: Vec<Job> =
            counts.iter().map(|&count| Job::new("t", nodes, locals, count, way)).collect();
        for job in &jobs {
            for (rank, buffer) in (0..).zip(job.buffers.iter().flatten()) {
                buffer.write(&(0..job.count).map(|i| number(rank, i)).collect::<Vec<_>>());
            }
        }
        for node in 0..nodes {
            for (index, jobs) in jobs.chunks(2).enumerate() {
                let jobs: Vec<&Job> = jobs.iter().collect();
                let piece = piece(index as u64, &jobs, node, nodes, algorithm, &topology);
                let piece = shortened(piece, by_node, node, algorithm, &topology);
                cluster.lanes[node as usize][0].send(Order::Start(Piece { prescale, ..piece }));
            }
        }
        for node in 0..nodes as usize {
            for _ in jobs.chunks(2) {
                let event = cluster.wait_for(node);
                prop_assert!(matches!(event, Event::Finished), "{event:?}");
            }
        }
        cluster.stop();
        let ranks = nodes * locals;
        for job in &jobs {
            let results: Vec<Vec<f32>> = job.buffers.iter().flatten().map(Buffer::read).collect();
            let first = &results[target.unwrap_or(0) as usize];
            for (i, &got) in (0..).zip(first) {
                let parts = (0..ranks).map(|rank| prescale * f64::from(number(rank, i)));
                let right: f64 = parts.clone().sum();
                let error = (f64::from(got) - right).abs();
                let bound = bound(nodes, ranks, parts.map(f64::abs).sum());
                prop_assert!(error <= bound, "{got}: {error:e} from {right}, more than {bound:e}");
                prop_assert_eq!(got.to_bits() & 0xffff, 0, "{} did not travel as bf16", got);
            }
            for (rank, result) in (0..).zip(&results) {
                let same = result.iter().zip(first).all(|(a, b)| a.to_bits() == b.to_bits());
                if target.is_none_or(|target| target == rank) {
                    prop_assert!(same, "rank {rank} has other bits");
                } else {
                    // INPUT: a rank without a result still has its input.
                    prop_assert!((0..).zip(result).all(|(i, &value)| value == number(rank, i)));
                }
            }
        }
    }
}

/// A sum of several peers' parts is rounded once, not after each part: so one large part does not
/// absorb the small ones.
#[test]
fn sums_are_rounded_only_when_they_are_sent() {
    let cluster = Cluster::new(4, 1, 4096, Duration::from_secs(10));
    cluster.connect(1, None);
    let topology = Topology::flat(4);
    let job = Job::new("t", 4, 1, 4096, SUM);
    // 256 + 1 + 1 + 1 is 259 in f32, and 260 in bf16. Rounded after each part, it would stay 256.
    for (rank, buffer) in job.buffers.iter().flatten().enumerate() {
        let owner = |i: usize| i / 1024;
        let values = (0..4096).map(|i| if owner(i) == rank { 256.0 } else { 1.0 });
        buffer.write(&values.collect::<Vec<f32>>());
    }
    for node in 0..4 {
        let piece = piece(0, &[&job], node, 4, Algorithm::Hierarchical, &topology);
        let piece = shortened(piece, SUM, node, Algorithm::Hierarchical, &topology);
        assert!(piece.plan.keeps_sums());
        cluster.lanes[node as usize][0].send(Order::Start(piece));
    }
    for node in 0..4 {
        let event = cluster.wait_for(node);
        assert!(matches!(event, Event::Finished), "{event:?}");
    }
    cluster.stop();
    for buffer in job.buffers.iter().flatten() {
        assert!(buffer.read().iter().all(|&value| value == 260.0));
    }
}
