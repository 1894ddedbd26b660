//! SAME: any number of threads gives the same bits.

use gradwire_kernels::Store;
use rand::{Rng, RngExt, SeedableRng};
use rand_xoshiro::SplitMix64;

use super::*;

/// The numbers of helpers: with the lane, 1 to 32 threads.
const HELPERS: [usize; 7] = [0, 1, 2, 4, 7, 15, 31];

/// A job with these bits in each rank's tensor.
fn job(bits: &[Vec<u32>]) -> Job {
    let job = Job::new("t", 1, bits.len() as u32, bits[0].len() as u64, SUM);
    for (buffer, bits) in job.buffers[0].iter().zip(bits) {
        buffer.write(&bits.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>());
    }
    job
}

fn bits_of(job: &Job) -> Vec<Vec<u32>> {
    let bits = |buffer: &Buffer| buffer.read().into_iter().map(f32::to_bits).collect();
    job.buffers[0].iter().map(bits).collect()
}

/// Results go to `out` instead of the inputs.
fn apart(piece: &mut Piece, job: &Job, out: &Job) {
    let part = |(local, buffer): (&LocalTensor, &Buffer)| LocalTensor {
        local_rank: local.local_rank,
        ticket: 0,
        request: local.request.clone(),
        priority: 0,
        inputs: local.inputs.clone(),
        outputs: vec![buffer.span()],
        allocated: OnceLock::new(),
        site: Arc::default(),
    };
    let locals = job.tensors[0].locals().iter().zip(&out.buffers[0]).map(part).collect();
    let tensor = Arc::new(QueuedTensor::new(job.tensors[0].key.clone(), locals, Rank(0)));
    piece.segments[0].tensor = tensor;
}

/// For every type and operation, tensors of random length.
fn check(seed: u64) {
    let mut random = SplitMix64::seed_from_u64(seed);
    let pools = HELPERS.map(Pool::eager);
    let topology = Topology::flat(1);
    let pairs =
        DType::ALL.iter().flat_map(|&dtype| ReduceOp::ALL.iter().map(move |&op| (dtype, op)));
    for (dtype, op) in pairs {
        let ranks = random.random_range(1..6);
        // Whole elements of the longest type, not whole lines or pages.
        let count = random.random_range(1..1500) * 4;
        let inputs: Vec<Vec<u32>> =
            (0..ranks).map(|_| (0..count).map(|_| random.next_u32()).collect()).collect();
        let postscale = [1.0, 0.75][random.random_range(0..2)];
        let finish = Finish { dtype, op, contributors: ranks as u32, postscale };
        let is_apart = random.random();
        let run = |pool: Option<&Pool>, store| {
            let (job, out) = (job(&inputs), job(&inputs));
            let mut piece = piece(0, &[&job], 0, 1, Algorithm::Ring, &topology);
            (piece.combine, piece.finish) = (Combine { dtype, op }, finish);
            if is_apart {
                apart(&mut piece, &job, &out);
            }
            let part = |part| piece.run_alone(part, store);
            match pool {
                Some(pool) => pool.run(piece.end(), piece.end(), 1 << 14, &part),
                None => part(0..piece.end()),
            }
            [bits_of(&job), bits_of(&out)]
        };
        let expected = run(None, Store::Cached);
        for store in [Store::Cached, Store::Streaming] {
            let one = random.random_range(0..HELPERS.len());
            let found = run(Some(&pools[one]), store);
            let helpers = HELPERS[one];
            assert!(found == expected, "{op:?} of {dtype}, {helpers} helpers, {store:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, ..ProptestConfig::default() })]

    #[test]
    fn any_number_of_threads_gives_the_same_bits(seed in any::<u64>()) {
        check(seed);
    }
}

/// A lane that has stopped has finished its piece, so no helper is in a rank's memory.
#[test]
fn a_stopped_lane_has_ended_its_shares() {
    for _ in 0..5 {
        let cluster = Cluster::new(1, 1, 1 << 14, Duration::from_secs(10));
        let job = Job::new("t", 1, 3, 400_000, SUM);
        let piece = piece(0, &[&job], 0, 1, Algorithm::Ring, &Topology::flat(1));
        cluster.lanes[0][0].send(Order::Start(piece));
        cluster.stop();
        job.check();
    }
}

#[test]
fn a_panic_of_a_share_ends_the_job() {
    let cluster = Cluster::new(1, 1, 1 << 14, Duration::from_secs(10));
    let job = Job::new("t", 1, 2, 100_000, SUM);
    let mut piece = piece(0, &[&job], 0, 1, Algorithm::Ring, &Topology::flat(1));
    piece.segments[0].bytes += 4 << 14;
    cluster.lanes[0][0].send(Order::Start(piece));
    let Event::Failed(failure) = cluster.wait_for(0) else { panic!("it must fail") };
    assert_eq!(failure.kind, FailureKind::Internal);
    let text = failure.to_string();
    assert!(text.contains("panicked: a piece reaches beyond its tensor"), "{text}");
    cluster.stop();
}
