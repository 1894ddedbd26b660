//! Calls that consist of several operations: objects, sparse allreduce, Adasum.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::ReduceOp;
use gradwire_reference::{Dice, adasum};
use gradwire_tests::cluster::{Plan, run_job};
use gradwire_worker::{
    AdasumOptions, AllgatherOptions, BroadcastOptions, Element, Session, SparseOptions, SparseRows,
    half::{bf16, f16},
};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Thing {
    Nothing,
    Rank { number: u32, name: String },
    Many(BTreeMap<String, Vec<Option<f64>>>),
}

fn thing(rank: u32, round: u32) -> Thing {
    match (rank + round) % 3 {
        0 => Thing::Nothing,
        1 => Thing::Rank { number: rank, name: "é".repeat(rank as usize * 1000) },
        _ => {
            let values = (0..rank * 500).map(|i| (i % 3 > 0).then(|| f64::from(i) / 3.0)).collect();
            Thing::Many(BTreeMap::from([(format!("{rank}"), values), (String::new(), vec![])]))
        }
    }
}

#[test]
fn objects_are_broadcast_and_gathered() {
    run_job(&Plan::nodes(&[2, 2]), |session| {
        let everybody = 0..session.size();
        for round in 0..6 {
            let root = round % session.size();
            let own = (session.rank() == root).then(|| thing(root, round));
            let got = session.broadcast_object(own.as_ref(), BroadcastOptions::from_rank(root));
            assert_eq!(got.unwrap(), thing(root, round));
            let own = thing(session.rank(), round);
            let all = session.allgather_object(&own, AllgatherOptions::default()).unwrap();
            let right: Vec<Thing> = everybody.clone().map(|rank| thing(rank, round)).collect();
            assert_eq!(all, right);
        }
        let set = session.add_process_set(&[1, 3]).unwrap();
        if set.includes(session.rank()) {
            // Several at once, in a process set.
            let options =
                |n: u32| AllgatherOptions::default().name(format!("{n}")).process_set(&set);
            let start =
                |n| session.allgather_object_async(&(session.rank(), n), options(n)).unwrap();
            let handles: Vec<_> = (0..5).map(|n| (n, start(n))).collect();
            for (n, handle) in handles.into_iter().rev() {
                assert_eq!(handle.wait().unwrap(), [(1, n), (3, n)]);
            }
        }
    });
}

/// Random rows of a rank with small whole numbers. An index may occur several times.
fn some_rows(rank: u32, rows: usize, cols: usize, count: usize, seed: u64) -> SparseRows<f32> {
    let mut dice = Dice::of(&[seed, rank.into()]);
    let indices = (0..count).map(|_| dice.below(rows as u64) as usize).collect();
    let values = (0..count * cols).map(|_| dice.below(9) as f32 - 4.0).collect();
    SparseRows { rows, cols, indices, values }
}

#[test]
fn sparse_rows_are_sent_in_the_smaller_form() {
    // Rows, columns, by how many rows the ranks differ, and whether the dense tensor is smaller.
    let cases = [(10_000, 8, 20, false), (64, 4, 100, true), (5, 3, 0, false), (1, 1, 7, true)];
    run_job(&Plan::nodes(&[2, 1]), move |session| {
        for (index, (rows, cols, count, dense)) in cases.into_iter().enumerate() {
            for (op, of) in [(ReduceOp::Sum, 1.0), (ReduceOp::Average, 3.0)] {
                let seed = index as u64;
                // Rank 0 has one row, and each next rank has `count` more. With 0, no rank has
                // rows.
                let of_rank = |rank: u32| {
                    let count = if count == 0 { 0 } else { 1 + count * rank as usize };
                    some_rows(rank, rows, cols, count, seed)
                };
                let got = session
                    .sparse_allreduce(&of_rank(session.rank()), SparseOptions::default().op(op))
                    .unwrap();
                let mut right = vec![0.0; rows * cols];
                let mut there = BTreeSet::new();
                for own in (0..session.size()).map(of_rank) {
                    for (row, values) in own.indices.iter().zip(own.values.chunks(cols)) {
                        there.insert(*row);
                        let all = &mut right[row * cols..][..cols];
                        all.iter_mut().zip(values).for_each(|(all, value)| *all += value);
                    }
                }
                assert_eq!(got.dense, dense, "case {index}");
                assert!(got.rows.indices.is_sorted_by(|a, b| a < b), "{:?}", got.rows.indices);
                if !dense {
                    assert!(got.rows.indices.iter().copied().eq(there), "case {index}");
                }
                let mut found = vec![0.0; right.len()];
                for (row, values) in got.rows.indices.iter().zip(got.rows.values.chunks(cols)) {
                    found[row * cols..][..cols].copy_from_slice(values);
                }
                let near = |(found, sum): (&f32, &f32)| (found - sum / of).abs() <= 1e-5;
                assert!(found.iter().zip(&right).all(near), "case {index}, {op}");
            }
        }
        let stats = session.stats();
        assert_eq!((stats.sparse_rows, stats.sparse_dense), (4, 4));
    });
}

/// Vectors with a common part, and one of zeros.
fn gradient(rank: u32, elements: usize) -> Vec<f64> {
    let mut dice = Dice::of(&[5, rank.into()]);
    let own = |i: usize, dice: &mut Dice| {
        (i % 5) as f64 / 4.0 + (dice.below(1024) as f64 - 512.0) / 1024.0
    };
    if rank == 3 { vec![0.0; elements] } else { (0..elements).map(|i| own(i, &mut dice)).collect() }
}

/// Compares Adasum of one type with the formula in f64, within the type's precision.
fn check<T: Element>(
    session: &Session,
    elements: usize,
    precision: f64,
    to: impl Fn(f64) -> T,
    back: impl Fn(T) -> f64,
) -> Vec<u8> {
    // The contributions of all ranks, as represented in the type.
    let held = |rank| gradient(rank, elements).into_iter().map(|value| back(to(value)));
    let own: Vec<T> = held(session.rank()).map(&to).collect();
    let mut tensor = session.tensor(&own, &[elements]).unwrap();
    session.adasum(&mut tensor, AdasumOptions::default()).unwrap();
    let right = adasum((0..session.size()).map(|rank| held(rank).collect()).collect());
    for (i, (got, right)) in tensor.as_slice().iter().zip(&right).enumerate() {
        let far = (back(*got) - right).abs();
        assert!(far <= precision * (1.0 + right.abs()), "{}, {i}: {got:?}, {right}", T::DTYPE);
    }
    tensor.into_buffer().bytes().to_vec()
}

fn adasum_on(slots: &[u32]) {
    let results = run_job(&Plan::nodes(slots), |session| {
        let mut bits = Vec::new();
        // Fewer elements than ranks, an odd number, several pieces.
        for elements in [0, 1, 3, 1001, 70_000] {
            bits.push(check(session, elements, 1e-6, |v| v as f32, f64::from));
            bits.push(check(session, elements, 1e-12, |v| v, |v| v));
        }
        bits.push(check(session, 777, 4e-3, f16::from_f64, f16::to_f64));
        bits.push(check(session, 777, 3e-2, bf16::from_f64, bf16::to_f64));
        bits
    });
    // SAME
    assert!(results.iter().all(|bits| *bits == results[0]));
}

#[test]
fn adasum_is_its_formula_on_two_ranks() {
    adasum_on(&[2]);
    adasum_on(&[1, 1]);
}

#[test]
fn adasum_is_its_formula_on_three_ranks() {
    adasum_on(&[3]);
    adasum_on(&[2, 1]);
}

#[test]
fn adasum_is_its_formula_on_four_and_five_ranks() {
    adasum_on(&[4]);
    adasum_on(&[2, 2]);
    adasum_on(&[5]);
    adasum_on(&[2, 3]);
}

/// Several at once, in a different order on each rank.
#[test]
fn composites_do_not_wait_for_each_other() {
    run_job(&Plan::nodes(&[2, 1]), |session| {
        let mut order: Vec<u32> = (0..12).collect();
        Dice::of(&[11, session.rank().into()]).shuffle(&mut order);
        let start = |n: u32| {
            let tensor = session.tensor(&[f64::from(n), 0.0], &[2]).unwrap();
            session
                .adasum_async(tensor, AdasumOptions::default().name(format!("layer.{n}")))
                .unwrap()
        };
        let handles: Vec<_> = order.into_iter().map(|n| (n, start(n))).collect();
        for (n, handle) in handles {
            // All ranks contribute the same vector, which is the result.
            assert_eq!(handle.wait().unwrap().as_slice(), [f64::from(n), 0.0]);
        }
    });
}
