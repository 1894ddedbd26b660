//! Jobs of any form and any tensors, submitted in another order on every rank: the results are
//! those of the plain reference, with identical bits on all ranks (SAME).
//!
//! A failing job is printed and made smaller; the same jobs come again with the printed
//! `PROPTEST_RNG_SEED`, more of them with `PROPTEST_CASES`.

use gradwire_daemon::Ending;
use gradwire_proto::{Collective, DType, Rank, ReduceOp, Request, Shape};
use gradwire_tests::{
    cluster::{Cluster, Plan},
    reference::{self, Dice},
};
use gradwire_worker::{AllreduceOptions, BroadcastOptions, Session};
use proptest::{
    prelude::*,
    sample::select,
    test_runner::{RngSeed, TestRunner},
};

const CASES: u32 = 25;
const STEPS: u64 = 2;
/// The largest tensor, in bytes: many of the smallest pieces.
const MOST_BYTES: u64 = 640 << 10;

#[derive(Debug, Clone)]
struct Tensor {
    request: Request,
    priority: i32,
    wild: bool,
}

#[derive(Debug, Clone)]
struct Job {
    plan: Plan,
    tensors: Vec<Tensor>,
    seed: u64,
}

fn count(dtype: DType) -> impl Strategy<Value = u64> {
    let size = dtype.size() as u64;
    let piece = (64 << 10) / size;
    prop_oneof![
        1 => Just(0),
        2 => Just(1),
        4 => (1..2000u64).prop_map(|half| 2 * half + 1),
        1 => piece - 1..=piece + 1,
        2 => 2 * piece..MOST_BYTES / size,
    ]
}

/// The same elements as one dimension or two.
fn shape(count: u64, flat: bool) -> Shape {
    let dims = if flat || !count.is_multiple_of(2) { vec![count] } else { vec![2, count / 2] };
    Shape::new(&dims).unwrap()
}

fn tensor(ranks: u32) -> impl Strategy<Value = Tensor> {
    let kind = (select(DType::ALL), select(ReduceOp::ALL), any::<bool>());
    let kind = kind.prop_flat_map(|(dtype, op, flat)| (Just((dtype, op, flat)), count(dtype)));
    let scales = (select(&[1.0, 0.5, -2.0, 1.0 / 3.0]), select(&[1.0, 1.0 / 3.0, -1.5]));
    // Every fifth one is a broadcast.
    (kind, scales, -3..4i32, (0..5 * ranks), any::<bool>()).prop_map(
        move |(((dtype, op, flat), count), (prescale, postscale), priority, root, wild)| {
            let shape = shape(count, flat);
            let mut request = Request::allreduce(dtype, shape.clone(), op);
            if root < ranks {
                request = Request::broadcast(dtype, shape, Rank(root));
            } else if dtype.is_float() {
                // Factors of a product multiply up, out of a small float's range.
                let prescale = if op == ReduceOp::Product { 1.0 } else { prescale };
                request = Request { prescale, postscale, ..request };
            }
            Tensor { request, priority, wild }
        },
    )
}

fn plan() -> impl Strategy<Value = Plan> {
    let algorithm = ["auto", "ring", "recursive_doubling", "double_tree", "hierarchical"];
    let piece = [64 << 10, (64 << 10) + 8, 100_000, 256 << 10, 1 << 20, 4 << 20];
    (
        prop::collection::vec((1..=3u32, select(vec!["a", "b", ""])), 1..=4),
        select(algorithm.to_vec()),
        select(piece.to_vec()),
        1..=8u32,
        1..=3u32,
        select(vec![4 << 10, 64 << 10, 256 << 10]),
    )
        .prop_map(|(nodes, algorithm, piece, credit, lanes, chunk)| {
            let (slots, racks): (Vec<u32>, Vec<&str>) = nodes.into_iter().unzip();
            let mut plan = Plan::nodes(&slots)
                .set(format!("negotiation.algorithm={algorithm}"))
                .set(format!("negotiation.piece_bytes={piece}"))
                .set(format!("negotiation.credit_pieces={credit}"))
                .set(format!("data.lanes={lanes}"))
                .set(format!("data.chunk_bytes={}", chunk.min(piece)));
            if racks.iter().all(|rack| !rack.is_empty()) || algorithm == "hierarchical" {
                plan = plan.racks(&racks);
            }
            plan
        })
}

fn job() -> impl Strategy<Value = Job> {
    (plan(), any::<u64>()).prop_flat_map(|(plan, seed)| {
        let ranks = plan.slots.iter().sum();
        let tensors = prop::collection::vec(tensor(ranks), 1..=12);
        tensors.prop_map(move |tensors| Job { plan: plan.clone(), tensors, seed })
    })
}

impl Job {
    fn name(&self, index: usize) -> String {
        format!("tensor.{index}")
    }

    /// What a rank contributes.
    fn input(&self, step: u64, index: usize, rank: u32, bytes: &mut [u8]) {
        let Tensor { request, wild, .. } = &self.tensors[index];
        let mut dice = Dice::of(&[self.seed, step, index as u64, rank.into()]);
        reference::fill(request.dtype, request.reduce_op, *wild, &mut dice, bytes);
    }

    /// One rank's part: all tensors of a step at once, submitted and awaited in orders of its own.
    fn run(&self, session: &Session) -> Vec<Vec<u8>> {
        let mut results = Vec::new();
        let mut dice = Dice::of(&[self.seed, u64::MAX, session.rank().into()]);
        for step in 0..STEPS {
            let mut order: Vec<usize> = (0..self.tensors.len()).collect();
            dice.shuffle(&mut order);
            let mut handles: Vec<_> =
                order.into_iter().map(|index| (index, self.submit(session, step, index))).collect();
            dice.shuffle(&mut handles);
            let mut outputs: Vec<Vec<u8>> = vec![Vec::new(); handles.len()];
            for (index, handle) in handles {
                outputs[index] = handle.wait().unwrap().bytes().to_vec();
            }
            results.extend(outputs);
        }
        results
    }

    fn submit(
        &self,
        session: &Session,
        step: u64,
        index: usize,
    ) -> gradwire_worker::Handle<gradwire_worker::Buffer> {
        let Tensor { request, priority, .. } = &self.tensors[index];
        let mut buffer = session.buffer(request.dtype, request.shape.clone()).unwrap();
        self.input(step, index, session.rank(), buffer.bytes_mut());
        let name = self.name(index);
        let started = if request.collective == Collective::Broadcast {
            let options = BroadcastOptions::from_rank(request.root.0).name(name);
            session.broadcast_async(buffer, options.priority(*priority))
        } else {
            let options = AllreduceOptions::named(name).op(request.reduce_op).priority(*priority);
            let options = options.prescale(request.prescale).postscale(request.postscale);
            session.allreduce_async(buffer, options)
        };
        started.unwrap()
    }

    /// Compares what the ranks got, by rank and then by step and tensor.
    fn check(&self, results: &[Vec<Vec<u8>>]) -> Result<(), String> {
        for (at, result) in results[0].iter().enumerate() {
            let (step, index) = ((at / self.tensors.len()) as u64, at % self.tensors.len());
            let request = &self.tensors[index].request;
            let inputs = (0..results.len() as u32).map(|rank| {
                let mut bytes = vec![0; request.bytes() as usize];
                self.input(step, index, rank, &mut bytes);
                bytes
            });
            let inputs: Vec<Vec<u8>> = inputs.collect();
            let right = match request.collective {
                Collective::Broadcast if *result == inputs[request.root.0 as usize] => Ok(()),
                Collective::Broadcast => Err("these are not the root's bytes".to_owned()),
                _ => reference::check_allreduce(request, &inputs, result),
            };
            right.map_err(|why| format!("step {step}, {}: {why}", self.name(index)))?;
            // SAME: not one bit differs.
            if let Some(rank) = results.iter().position(|all| all[at] != *result) {
                let name = self.name(index);
                return Err(format!("step {step}, {name}: rank {rank} has other bits than rank 0"));
            }
        }
        Ok(())
    }
}

#[test]
fn any_job_gives_the_results_of_the_reference() {
    let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = CASES;
    }
    // Each attempt at a smaller job is a whole job.
    config.max_shrink_iters = 40;
    if config.rng_seed == RngSeed::Random {
        let clock = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
        config.rng_seed = RngSeed::Fixed(clock.as_nanos() as u64);
    }
    if let RngSeed::Fixed(seed) = config.rng_seed {
        println!("PROPTEST_RNG_SEED={seed}");
    }
    let run = |job: Job| {
        let cluster = Cluster::start(&job.plan).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let program = job.clone();
        let results = cluster
            .ranks(move |session| program.run(session))
            .map_err(|e| TestCaseError::fail(e.to_string()))?;
        job.check(&results).map_err(TestCaseError::fail)?;
        let endings = cluster.finish().map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert!(endings.iter().all(|ending| *ending == Ending::Finished), "{endings:?}");
        Ok(())
    };
    TestRunner::new(config).run(&job(), run).unwrap();
}
