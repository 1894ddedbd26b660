//! `data.compression = int8` and `fp8`: sums of large f32 tensors between nodes use a quarter of
//! the bytes. The error is within its bound, all ranks receive the same bits (SAME), lost parts are
//! added in later steps, and nothing else is quantized.

use gradwire_collectives::Algorithm;
use gradwire_proto::{Collective, DType, ReduceOp, Request};
use gradwire_tests::{
    calls::{Call, request, with_op},
    cluster::{Plan, run_job},
};
use gradwire_worker::{AllreduceOptions, MAX_HELD, Session};

use crate::compression::checked;

const FORMATS: [&str; 2] = ["int8", "fp8"];

fn plan(slots: &[u32], format: &str) -> Plan {
    // Several pieces of a tensor, on several lanes.
    let small = ["negotiation.piece_bytes=128KiB", "data.chunk_bytes=16KiB"];
    let plan = Plan::nodes(slots).set(format!("data.compression={format}"));
    small.into_iter().fold(plan, Plan::set)
}

#[test]
fn all_jobs_keep_the_bound_and_agree_on_the_bits() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let algorithms = Algorithm::ROUNDS_ONCE.map(Algorithm::name).into_iter().chain(["auto"]);
    let forms: [&[u32]; 5] = [&[1, 1], &[3, 1], &[2, 2, 1], &[1, 1, 1, 1], &[1, 3, 2, 2]];
    let formats = FORMATS.into_iter().cycle();
    for ((slots, algorithm), format) in forms.into_iter().zip(algorithms.cycle()).zip(formats) {
        let plan = plan(slots, format).set(format!("negotiation.algorithm={algorithm}"));
        let results = run_job(&plan, move |session| {
            let ranks: Vec<u32> = (0..session.size()).collect();
            let mut results = Vec::new();
            for op in [ReduceOp::Sum, ReduceOp::Average] {
                // Just enough, odd lengths, and several pieces.
                for elements in [16_384, 20_001, 200_003] {
                    let name = format!("{op}.{elements}");
                    let asked = request(Collective::Allreduce, DType::F32, &[elements], 0);
                    let asked = Request { prescale: 0.3, postscale: 1.7, ..with_op(asked, op) };
                    results
                        .push(checked(session, &Call { seed, ..Call::same(name, &ranks, &asked) }));
                }
            }
            results
        });
        for (rank, result) in results.iter().enumerate() {
            assert!(*result == results[0], "rank {rank} of {slots:?} differs (seed {seed})");
        }
    }
}

/// The numbers of a rank, which are not multiples of a scale.
fn numbers(rank: u32, count: u32) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + rank * 11) % 1009) as f32 / 1009.0 - 0.5).collect()
}

/// The sums over `rounds` rounds, and their error.
fn after(session: &Session, rounds: u32, count: u32) -> f64 {
    let size = session.size();
    let mut sums = vec![0.0; count as usize];
    for _ in 0..rounds {
        let mut tensor =
            session.tensor(&numbers(session.rank(), count), &[count as usize]).unwrap();
        let options = AllreduceOptions::named("x").op(ReduceOp::Sum);
        session.allreduce(&mut tensor, options).unwrap();
        for (sum, value) in sums.iter_mut().zip(tensor.as_slice()) {
            *sum += f64::from(*value);
        }
    }
    let all: Vec<Vec<f32>> = (0..size).map(|rank| numbers(rank, count)).collect();
    let right = |i: usize| all.iter().map(|numbers| f64::from(numbers[i])).sum::<f64>();
    let wrong = sums.iter().enumerate().map(|(i, sum)| (sum - f64::from(rounds) * right(i)).abs());
    wrong.fold(0.0, f64::max)
}

/// Error feedback: the errors of many steps do not add up, as they do without it.
#[test]
fn lost_parts_are_added_in_the_next_steps() {
    for format in FORMATS {
        let with = plan(&[2, 1, 1], format);
        let without = with.clone().set("data.feedback_max_bytes=0");
        let wrong = |plan: &Plan| {
            let wrong =
                run_job(plan, |session| (after(session, 1, 50_000), after(session, 40, 50_000)));
            wrong
                .into_iter()
                .fold((0.0, 0.0), |all: (f64, f64), (one, many)| (all.0.max(one), all.1.max(many)))
        };
        let ((one, many), (one_without, many_without)) = (wrong(&with), wrong(&without));
        assert!(one > 0.0 && one_without > 0.0, "{format}: it was not quantized");
        // Everything missing at the end was lost in the last round.
        assert!(many < 3.0 * one, "{format}: {many} after 40 rounds, {one} after one");
        assert!(many_without > 5.0 * one, "{format}: {many_without} without feedback");
    }
}

/// The lost part of a tensor is never added to another one: neither to another unnamed tensor, nor
/// to another piece of a slice, whose names are few.
#[test]
fn lost_parts_stay_with_their_tensor() {
    run_job(&plan(&[1, 1], "int8"), |session| {
        // A multiple of the largest scale is exact, unless something is added to it.
        let lossy = |i: usize| 0.1 + (i % 7) as f32;
        // Four pieces of 1 MiB, and four with their names.
        const HALF: usize = 4 << 18;
        // How many small operations are in flight at once.
        const WINDOW: u32 = 64;
        const { assert!((4096 + MAX_HELD).is_multiple_of(WINDOW)) };
        let value = |i: usize| if i < HALF { lossy(i) } else { 127.0 };
        let mut slice: Vec<f32> = (0..2 * HALF).map(value).collect();
        let options = AllreduceOptions::named("slice").op(ReduceOp::Sum);
        session.allreduce_slice(&mut slice, options).unwrap();
        assert!(slice[..HALF].iter().enumerate().any(|(i, got)| *got != 2.0 * lossy(i)));
        assert!(slice[HALF..].iter().all(|got| *got == 254.0));
        for at in 0..2 {
            // The counter of names restarts, so both have the same name.
            let value = |i: usize| if at == 0 { lossy(i) } else { 127.0 };
            let values: Vec<f32> = (0..20_000).map(value).collect();
            let mut tensor = session.tensor(&values, &[20_000]).unwrap();
            session.allreduce(&mut tensor, AllreduceOptions::default().op(ReduceOp::Sum)).unwrap();
            assert!(at == 0 || tensor.as_slice().iter().all(|got| *got == 254.0));
            for _ in 0..(4096 + MAX_HELD) / WINDOW {
                let start = |_| {
                    let small = session.tensor(&[1.0f32], &[1]).unwrap();
                    let options = AllreduceOptions::default().op(ReduceOp::Sum);
                    session.allreduce_async(small, options).unwrap()
                };
                let started: Vec<_> = (0..WINDOW).map(start).collect();
                started.into_iter().for_each(|handle| drop(handle.wait().unwrap()));
            }
        }
    });
}

/// Small tensors, other types and other reductions, and data within one node.
#[test]
fn nothing_else_is_quantized() {
    for format in FORMATS {
        run_job(&plan(&[2, 1], format), |session| {
            let ranks: Vec<u32> = (0..session.size()).collect();
            for (dtype, elements, op) in [
                (DType::F32, 16_383, ReduceOp::Sum),
                (DType::F64, 20_000, ReduceOp::Sum),
                (DType::Bf16, 40_000, ReduceOp::Average),
                (DType::I32, 20_000, ReduceOp::Sum),
                (DType::F32, 20_000, ReduceOp::Max),
            ] {
                let asked = request(Collective::Allreduce, dtype, &[elements], 0);
                let name = format!("{dtype}.{op}");
                checked(session, &Call::same(name, &ranks, &with_op(asked, op)));
            }
            let broadcast = request(Collective::Broadcast, DType::F32, &[20_000], 0);
            checked(session, &Call::same("broadcast", &ranks, &broadcast));
            let here = session.add_process_set(&[0, 1]).unwrap();
            if session.rank() < 2 {
                let third = |rank: u32| 1.0 / (3.0 + rank as f32);
                let mut tensor =
                    session.tensor(&[third(session.rank()); 20_000], &[20_000]).unwrap();
                let options = AllreduceOptions::named("here").op(ReduceOp::Sum).process_set(&here);
                session.allreduce(&mut tensor, options).unwrap();
                assert!(tensor.as_slice().iter().all(|sum| *sum == third(0) + third(1)));
            }
        });
    }
}

/// Large and small tensors, and tensors of several types, in one request and in flight together.
#[test]
fn tensors_in_groups_keep_their_wire_formats() {
    run_job(&plan(&[1, 2], "int8"), |session| {
        let handles: Vec<_> = (0..30)
            .map(|at: u32| {
                let count = if at.is_multiple_of(3) { 17_000 + at } else { 100 + at };
                let name = format!("t{at}");
                let tensor =
                    session.tensor(&numbers(session.rank(), count), &[count as usize]).unwrap();
                (
                    count,
                    session
                        .allreduce_async(tensor, AllreduceOptions::named(&name).op(ReduceOp::Sum))
                        .unwrap(),
                )
            })
            .collect();
        for (count, handle) in handles {
            let tensor = handle.wait().unwrap();
            let all: Vec<Vec<f32>> = (0..3).map(|rank| numbers(rank, count)).collect();
            for (i, got) in tensor.as_slice().iter().enumerate() {
                let right: f32 = all.iter().map(|numbers| numbers[i]).sum();
                let bound = if count >= 16_384 { 0.03 } else { 1e-6 };
                assert!((got - right).abs() <= bound, "{count}, {i}: {got}, not {right}");
            }
        }
    });
}
