//! `data.compression = bf16`: f32 reductions between nodes use half the bytes. The error is within
//! its bound, all ranks receive the same bits (SAME), and nothing else is compressed.

use gradwire_collectives::Algorithm;
use gradwire_proto::{Collective, Compression, DType, Part, ReduceOp, Request, Shape};
use gradwire_reference::Dice;
use gradwire_tests::{
    calls::{Call, request, with_op},
    cluster::{Plan, run_job},
};
use gradwire_worker::{AllreduceOptions, Session, half::bf16};

fn plan(slots: &[u32]) -> Plan {
    // Several pieces even for small tensors, on several lanes.
    let small = ["negotiation.piece_bytes=64KiB", "data.chunk_bytes=16KiB"];
    small.into_iter().fold(Plan::nodes(slots).set("data.compression=bf16"), Plan::set)
}

fn asked(collective: Collective, dtype: DType, elements: u64, op: ReduceOp) -> Request {
    with_op(request(collective, dtype, &[elements], 0), op)
}

/// The low halves of the bits of all f32 elements, combined by or.
fn low_bits(bytes: &[u8]) -> u32 {
    let bits = bytes.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap()));
    bits.fold(0, |all, bits| all | (bits & 0xffff))
}

/// Makes a call and compares its result with the reference, which knows the error bound.
pub(super) fn checked(session: &Session, call: &Call) -> Vec<u8> {
    let all = session.global_process_set();
    let got = call.run(session, &all, session.nodes().len()).unwrap();
    got.into_iter().flatten().flat_map(|piece| piece.bytes).collect()
}

#[test]
fn all_jobs_keep_the_bound_and_agree_on_the_bits() {
    let seed = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed {seed}");
    let algorithms = Algorithm::ALL.iter().map(|known| known.name()).chain(["auto"]);
    let forms: [&[u32]; 5] = [&[1, 1], &[3, 1], &[2, 2, 1], &[1, 1, 1, 1], &[1, 3, 2, 2]];
    for (form, (slots, algorithm)) in (0..).zip(forms.into_iter().cycle().zip(algorithms)) {
        let plan = plan(slots).set(format!("negotiation.algorithm={algorithm}"));
        let results = run_job(&plan, move |session| {
            let ranks: Vec<u32> = (0..session.size()).collect();
            let mut results = Vec::new();
            for (index, op) in
                [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product]
                    .into_iter()
                    .enumerate()
            {
                let seed = Dice::of(&[seed, form, index as u64]).roll();
                // Odd lengths, fewer elements than nodes, and several pieces.
                for elements in [1, 7, 4097, 20_001] {
                    let name = format!("{op}.{elements}");
                    let scaled = Request {
                        prescale: if index % 2 == 0 { 1.0 } else { 0.3 },
                        ..asked(Collective::Allreduce, DType::F32, elements, op)
                    };
                    let call = Call { seed, ..Call::same(name, &ranks, &scaled) };
                    results.push(checked(session, &call));
                }
                for collective in [Collective::Reduce, Collective::ReduceScatter] {
                    let request = asked(collective, DType::F32, 5003, op);
                    let name = format!("{collective}.{op}");
                    checked(session, &Call { seed, ..Call::same(name, &ranks, &request) });
                }
            }
            assert_eq!(session.compression(), Compression::Bf16);
            results
        });
        for (rank, result) in results.iter().enumerate() {
            assert!(*result == results[0], "rank {rank} of {slots:?} differs (seed {seed})");
        }
        // It was sent as bf16: sums are not divided, so they are still numbers of bf16.
        let sums = &results[0][..4];
        assert_eq!(sums.iter().map(|sum| low_bits(sum)).fold(0, |all, bits| all | bits), 0);
    }
}

#[test]
fn only_reductions_of_f32_are_compressed() {
    run_job(&plan(&[2, 1]), |session| {
        let ranks: Vec<u32> = (0..session.size()).collect();
        // Moved data keeps every bit of f32; the reference compares bytes.
        for collective in [
            Collective::Broadcast,
            Collective::Allgather,
            Collective::Gather,
            Collective::Scatter,
            Collective::Alltoall,
        ] {
            let request = request(collective, DType::F32, &[3003], 0);
            checked(session, &Call::same(collective.name(), &ranks, &request));
        }
        // For other types, the reference uses the error bound of the type itself.
        for &dtype in DType::ALL {
            for op in [ReduceOp::Sum, ReduceOp::Max] {
                if dtype == DType::F32 || op.refuses(dtype).is_some() {
                    continue;
                }
                let request = asked(Collective::Allreduce, dtype, 3001, op);
                checked(session, &Call::same(format!("{dtype}.{op}"), &ranks, &request));
            }
        }
        // A group of compressed and other types, as one operation.
        let shape = Shape::new(&[2000]).unwrap();
        let more = [DType::F64, DType::F32, DType::I64];
        let more = more.map(|dtype| Part { dtype, shape: shape.clone() }).to_vec();
        let group =
            Request { more, ..asked(Collective::Allreduce, DType::F32, 3001, ReduceOp::Sum) };
        checked(session, &Call::same("group", &ranks, &group));
    });
}

/// The sum of several nodes' parts is rounded once, not after each part, even if the elements are
/// bf16 themselves: on four nodes that exchange directly, one large part does not absorb the small
/// ones.
#[test]
fn sums_of_bf16_are_rounded_once_when_sent() {
    let plan = Plan::nodes(&[1; 4]).set("data.compression=bf16");
    let results = run_job(&plan.set("negotiation.algorithm=hierarchical"), |session| {
        // Each node sums a quarter, of which it has the large part.
        let whose = |i: usize| i as u32 / 1024;
        let part = |i| if whose(i) == session.rank() { 256.0 } else { 1.0 };
        let values: Vec<bf16> = (0..4096).map(|i| bf16::from_f32(part(i))).collect();
        let mut tensor = session.tensor(&values, &[4096]).unwrap();
        session.allreduce(&mut tensor, AllreduceOptions::named("x").op(ReduceOp::Sum)).unwrap();
        tensor.as_slice().to_vec()
    });
    // 256 + 1 + 1 + 1 is 259 in f32, and 260 in bf16. Rounded after each part, it would stay 256.
    for result in results {
        assert!(result.iter().all(|sum| sum.to_f32() == 260.0), "{:?}", &result[..4]);
    }
}

/// Nothing is sent within a node: neither in a job of one node, nor in a process set on one node.
#[test]
fn one_node_rounds_nothing() {
    for slots in [&[3][..], &[2, 1]] {
        let third = |rank: u32| 1.0 / (3.0 + rank as f32);
        run_job(&plan(slots), move |session| {
            let here = session.add_process_set(&[0, 1]).unwrap();
            if session.rank() < 2 {
                let mut tensor = session.tensor(&[third(session.rank()); 999], &[999]).unwrap();
                let options = AllreduceOptions::named("x").op(ReduceOp::Sum).process_set(&here);
                session.allreduce(&mut tensor, options).unwrap();
                assert!(tensor.as_slice().iter().all(|sum| *sum == third(0) + third(1)));
            }
        });
    }
}
