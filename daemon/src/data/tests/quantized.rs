//! f32 that is sent in eight bits, over real lanes: all ranks receive identical bits, the error is
//! within its bound, and the next rounds compensate for it.

use std::ops::RangeInclusive;

use gradwire_kernels::Quantized;
use gradwire_proto::compression::{GROUP, GROUP_BYTES};

use super::{short::number, *};
use crate::data::feedback::Feedback;

/// The same piece, quantized. Its tensors have memory for errors.
fn quantized(
    piece: Piece,
    format: Quantized,
    (at, algorithm): (u32, Algorithm),
    topology: &Topology,
    feedback: &Feedback,
) -> Piece {
    let groups = (piece.bytes / 4).div_ceil(GROUP as u64);
    let schedule = algorithms::generate(Kind::Allreduce, algorithm, topology, at, groups);
    let segments = piece.segments.into_iter().map(|segment| {
        let (key, elements) = (&segment.tensor.key, segment.bytes / 4);
        let errors = feedback.of(key, segment.part, elements, Instant::now());
        PieceSegment { errors: errors.map(|errors| (errors, 0)), ..segment }
    });
    Piece {
        segments: segments.collect(),
        wire: Wire::Quantized(format),
        plan: Arc::new(Plan::new(&schedule, GROUP_BYTES as u64)),
        ..piece
    }
}

/// The largest error of one rounding, where the sums of absolute values are up to `most`.
fn step(format: Quantized, most: f64) -> f64 {
    match format {
        Quantized::Int8 => most / 254.0 * 1.001,
        Quantized::Fp8 => most / 16.0,
    }
}

/// The rounds in which the same numbers are added.
const ROUNDS: RangeInclusive<u64> = 1..=5;

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn quantized_results_are_within_bounds(
        nodes in 2u32..8,
        locals in 1u32..4,
        streams in 1u32..4,
        chunk in prop_oneof![Just(64u64), Just(4096), Just(1 << 18)],
        counts in prop::collection::vec(1u64..20_000, 1..4),
        algorithm in prop::sample::select(&Algorithm::ROUNDS_ONCE[..]),
        format in prop::sample::select(&[Quantized::Int8, Quantized::Fp8][..]),
        racks in prop::collection::vec(prop::sample::select(RACKS), 7),
        prescale in prop::sample::select(&[1.0, 0.75][..]),
        room in prop::sample::select(&[0, 1 << 16, 1 << 30][..]),
    ) {
        let topology = Topology::from_labels(&racks[..nodes as usize]);
        let cluster = Cluster::new(nodes, 1, chunk, Duration::from_secs(10));
        cluster.connect(streams, None);
        let names: Vec<String> = (0..counts.len()).map(|at| format!("t{at}")).collect();
        let jobs: Vec<Job> = counts
            .iter()
            .zip(&names)
            .map(|(&count, name)| Job::new(name, nodes, locals, count, SUM))
            .collect();
        let ranks = nodes * locals;
        let number = |rank: u32, i: u64| prescale * f64::from(number(rank, i));
        let parts = |i: u64| (0..ranks).map(move |rank| number(rank, i));
        let longest = counts.iter().copied().max().unwrap();
        let most = (0..longest).map(|i| parts(i).map(f64::abs).sum()).fold(0.0, f64::max);
        // Each node rounds when it sends, and the owner when it publishes. With the last error, a
        // group may be larger by one rounding.
        let bound = f64::from(nodes + 1) * 1.1 * step(format, most);
        let feedback: Vec<Feedback> = (0..nodes).map(|_| Feedback::new(room)).collect();
        let mut sums: Vec<Vec<f64>> =
            counts.iter().map(|&count| vec![0.0; count as usize]).collect();
        for round in ROUNDS {
            for job in &jobs {
                for (rank, buffer) in (0..).zip(job.buffers.iter().flatten()) {
                    let numbers = (0..job.count).map(|i| short::number(rank, i));
                    buffer.write(&numbers.collect::<Vec<_>>());
                }
            }
            for node in 0..nodes {
                let jobs: Vec<&Job> = jobs.iter().collect();
                let piece = piece(round, &jobs, node, nodes, algorithm, &topology);
                let feedback = &feedback[node as usize];
                let piece = quantized(piece, format, (node, algorithm), &topology, feedback);
                cluster.lanes[node as usize][0].send(Order::Start(Piece { prescale, ..piece }));
            }
            for node in 0..nodes as usize {
                let event = cluster.wait_for(node);
                prop_assert!(matches!(event, Event::Finished), "{event:?}");
            }
            for (job, sums) in jobs.iter().zip(&mut sums) {
                let mut results = job.buffers.iter().flatten().map(Buffer::read);
                let first = results.next().unwrap();
                for (i, (&got, sum)) in (0..).zip(first.iter().zip(sums)) {
                    *sum += f64::from(got);
                    let error = (f64::from(got) - parts(i).sum::<f64>()).abs();
                    prop_assert!(error <= 2.0 * bound, "round {round}: {got} is {error:e} wrong");
                }
                for (rank, result) in (1..).zip(results) {
                    let same = result.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits());
                    prop_assert!(same, "rank {rank} has other bits");
                }
            }
        }
        cluster.stop();
        if room < 1 << 30 {
            return Ok(());
        }
        // In the end only the error of the last round is missing.
        let rounds = *ROUNDS.end() as f64;
        for (i, sum) in sums.iter().flat_map(|sums| (0..).zip(sums)) {
            let error = (sum - rounds * parts(i).sum::<f64>()).abs();
            prop_assert!(error <= bound * 1.01, "{sum} after {rounds} rounds is {error:e} wrong");
        }
    }
}
