//! Whole jobs in one process, and the results of their ranks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use gradwire_proto::ReduceOp;
use gradwire_reference::Dice;
use gradwire_tests::cluster::{Plan, run_job as run};
use gradwire_worker::{AllreduceOptions, BroadcastOptions};

fn sum(name: impl Into<String>) -> AllreduceOptions {
    AllreduceOptions::named(name).op(ReduceOp::Sum)
}

#[test]
fn four_ranks_on_two_nodes_sum_and_broadcast() {
    let results = run(&Plan::nodes(&[2, 2]), |session| {
        let rank = session.rank() as f32;
        let mut tensor = session.tensor(&[rank, 1.0, -rank], &[3]).unwrap();
        session.allreduce(&mut tensor, sum("a")).unwrap();
        let mut parameters = [rank; 5];
        session.broadcast_slice(&mut parameters, BroadcastOptions::from_rank(2)).unwrap();
        session.barrier().unwrap();
        (tensor.as_slice().to_vec(), parameters)
    });
    for (sum, parameters) in results {
        assert_eq!(sum, [6.0, 4.0, -6.0]);
        assert_eq!(parameters, [2.0; 5]);
    }
}

#[test]
fn every_rank_knows_its_place() {
    let places = run(&Plan::nodes(&[2, 1, 3]), |session| {
        let nodes: Vec<_> = session.nodes().iter().map(|n| (n.first_rank, n.slots)).collect();
        assert_eq!(nodes, [(0, 2), (2, 1), (3, 3)]);
        let local = (session.local_rank(), session.local_size());
        let cross = (session.cross_rank(), session.cross_size());
        (session.rank(), session.size(), local, cross, session.host().to_owned())
    });
    let expected = [
        (0, (0, 2), (0, 3), "node-0"),
        (1, (1, 2), (0, 2), "node-0"),
        (2, (0, 1), (1, 3), "node-1"),
        (3, (0, 3), (2, 3), "node-2"),
        (4, (1, 3), (1, 2), "node-2"),
        (5, (2, 3), (0, 1), "node-2"),
    ];
    for (place, (rank, local, cross, host)) in places.into_iter().zip(expected) {
        assert_eq!(place, (rank, 6, local, cross, host.to_owned()));
    }
}

#[test]
fn every_rank_can_be_the_root_of_a_broadcast() {
    let results = run(&Plan::nodes(&[2, 1, 3]), |session| {
        let from = |root: u32| {
            let values = [i64::from(session.rank()) + 100, i64::MIN, -1];
            let mut tensor = session.tensor(&values, &[3]).unwrap();
            session.broadcast(&mut tensor, BroadcastOptions::from_rank(root)).unwrap();
            tensor.as_slice().to_vec()
        };
        (0..session.size()).map(from).collect::<Vec<_>>()
    });
    for result in results {
        for (root, values) in (100..).zip(result) {
            assert_eq!(values, [root, i64::MIN, -1]);
        }
    }
}

#[test]
fn a_barrier_separates_before_from_after() {
    const ROUNDS: u32 = 20;
    let come = Arc::new(AtomicU32::new(0));
    run(&Plan::nodes(&[2, 2]), move |session| {
        for round in 0..ROUNDS {
            if round % session.size() == session.rank() {
                thread::sleep(Duration::from_millis(5)); // another rank is late in every round
            }
            come.fetch_add(1, SeqCst);
            session.barrier().unwrap();
            let seen = come.load(SeqCst);
            // All ranks have reached this round. Others may have reached the next one, but not this
            // rank.
            let all = session.size() * (round + 1);
            assert!((all..all + session.size()).contains(&seen), "{seen} in round {round}");
        }
    });
}

#[test]
fn ordinary_memory_is_reduced_and_broadcast_too() {
    let results = run(&Plan::nodes(&[1, 2]), |session| {
        let mut values: Vec<f64> = (0..10_007).map(|i| f64::from(i + session.rank())).collect();
        // An odd length, not at the start of an allocation.
        session.allreduce_slice(&mut values[3..], sum("slice")).unwrap();
        let mut bytes = vec![session.rank() as u8; 777];
        session.broadcast_slice(&mut bytes[1..], BroadcastOptions::from_rank(1)).unwrap();
        let mut none: [i32; 0] = [];
        session.allreduce_slice(&mut none, sum("nothing")).unwrap();
        (values, bytes)
    });
    for (rank, (values, bytes)) in results.into_iter().enumerate() {
        for (i, value) in values.into_iter().enumerate() {
            let expected = if i < 3 { i + rank } else { 3 * i + 3 };
            assert_eq!(value, expected as f64);
        }
        assert_eq!(bytes[0], rank as u8);
        assert!(bytes[1..].iter().all(|b| *b == 1));
    }
}

/// More pieces than are in flight at once, with a shorter last piece; also two slices at once.
#[test]
fn large_slices_are_reduced_in_pieces() {
    const PIECE: usize = (1 << 20) / 4;
    fn value(i: usize, rank: u32, call: usize) -> u32 {
        (i * 31 + call) as u32 * (rank + 1)
    }
    run(&Plan::nodes(&[2, 1]), |session| {
        let values = |call, elements| -> Vec<u32> {
            (0..elements).map(|i| value(i, session.rank(), call)).collect()
        };
        let check = |call, values: Vec<u32>, kept| {
            for (i, found) in values.into_iter().enumerate() {
                let expected = if i < kept {
                    value(i, session.rank(), call)
                } else {
                    value(i, 0, call) + value(i, 1, call) + value(i, 2, call)
                };
                assert_eq!(found, expected, "element {i} of call {call}");
            }
        };
        for (call, elements) in [PIECE + 1, 4 * PIECE, 9 * PIECE + 12_345].into_iter().enumerate() {
            let mut own = values(call, elements);
            // Without a name, not at the start of an allocation.
            let options = AllreduceOptions::default().op(ReduceOp::Sum);
            session.allreduce_slice(&mut own[3..], options).unwrap();
            check(call, own, 3);
        }
        thread::scope(|scope| {
            for call in [3, 4] {
                let mut own = values(call, 6 * PIECE + call);
                scope.spawn(move || {
                    session.allreduce_slice(&mut own, sum(format!("slice {call}"))).unwrap();
                    check(call, own, 0);
                });
            }
        });
    });
}

#[test]
fn names_are_reused_for_fifty_steps() {
    run(&Plan::nodes(&[2, 2]), |session| {
        for step in 0..50i32 {
            let tensor = |value: i32, len: usize| session.tensor(&vec![value; len], &[len]);
            let mine = session.rank().cast_signed() + step;
            let weight = tensor(mine, 300).unwrap();
            let bias = tensor(-mine, 7).unwrap();
            let weight = session.allreduce_async(weight, sum("weight").priority(1)).unwrap();
            let bias = session.allreduce_async(bias, sum("bias")).unwrap();
            let all = 4 * step + 6;
            assert_eq!(bias.wait().unwrap().as_slice(), [-all; 7]);
            assert_eq!(weight.wait().unwrap().as_slice(), [all; 300]);
        }
    });
}

#[test]
fn a_name_may_be_reused_for_another_tensor() {
    run(&Plan::nodes(&[2, 1]), |session| {
        for step in 0..6usize {
            let len = [5, 5, 70_000, 1, 0, 70_000][step];
            let mut tensor = session.tensor(&vec![step as f32; len], &[len]).unwrap();
            session.allreduce(&mut tensor, sum("w").priority(step as i32 / 2)).unwrap();
            assert!(tensor.as_slice().iter().all(|value| *value == 3.0 * step as f32));
            // Another type, reduction or collective under the same name.
            let mut other = session.tensor(&[session.rank() as u8], &[]).unwrap();
            match step % 2 {
                0 => session.allreduce(&mut other, AllreduceOptions::named("w").op(ReduceOp::Max)),
                _ => session.broadcast(&mut other, BroadcastOptions::from_rank(2).name("w")),
            }
            .unwrap();
            assert_eq!(other.as_slice(), [2]);
        }
    });
}

#[test]
fn operations_need_no_names() {
    run(&Plan::nodes(&[1, 2]), |session| {
        let options = || AllreduceOptions::default().op(ReduceOp::Sum);
        for step in 0..20 {
            let tensors = [1, 2, 3].map(|value| session.tensor(&[step * value], &[1]).unwrap());
            let handles = tensors.map(|t| session.allreduce_async(t, options()).unwrap());
            let barrier = session.barrier_async().unwrap();
            let root = session.tensor(&[session.rank() as u8], &[1]).unwrap();
            let root = session.broadcast_async(root, BroadcastOptions::from_rank(1)).unwrap();
            let sums = handles.map(|handle| handle.wait().unwrap().as_slice()[0]);
            assert_eq!(sums, [3 * step, 6 * step, 9 * step]);
            assert_eq!(root.wait().unwrap().as_slice(), [1]);
            barrier.wait().unwrap();
        }
    });
}

#[test]
fn a_step_may_have_a_thousand_small_tensors() {
    run(&Plan::nodes(&[2, 2]), |session| {
        let mut order: Vec<u32> = (0..1000).collect();
        Dice::of(&[7, session.rank().into()]).shuffle(&mut order);
        let handles: Vec<_> = order
            .into_iter()
            .map(|index| {
                let values = vec![index + session.rank(); 1 + index as usize % 13];
                let values: Vec<f32> = values.into_iter().map(|value| value as f32).collect();
                let tensor = session.tensor(&values, &[values.len()]).unwrap();
                let options = sum(format!("layer.{index}")).priority(index.cast_signed() % 7);
                (index, session.allreduce_async(tensor, options).unwrap())
            })
            .collect();
        for (index, handle) in handles {
            let result = handle.wait().unwrap();
            assert_eq!(result.as_slice().len(), 1 + index as usize % 13);
            assert!(result.as_slice().iter().all(|value| *value == (4 * index + 6) as f32));
        }
    });
}

/// BOUND: the rings hold 4096 operations. Further ones wait for room, and none is lost.
#[test]
fn operations_wait_for_room_in_the_rings() {
    run(&Plan::nodes(&[1, 1]), |session| {
        let handles: Vec<_> = (0..5000)
            .map(|index| {
                // The ranks submit in opposite order. An operation starts once both have submitted
                // it.
                let index = if session.rank() == 0 { index } else { 4999 - index };
                let tensor = session.tensor(&[index], &[1]).unwrap();
                (index, session.allreduce_async(tensor, sum(format!("{index}"))).unwrap())
            })
            .collect();
        for (index, handle) in handles {
            assert_eq!(handle.wait().unwrap().as_slice(), [2 * index]);
        }
        assert_eq!(session.stats().in_flight, 0);
    });
}

#[test]
fn an_urgent_tensor_overtakes_a_large_one() {
    const LARGE: usize = (40 << 20) / 4;
    let plan = Plan::nodes(&[2, 1])
        .set("negotiation.piece_bytes=256KiB")
        .set("negotiation.credit_pieces=1");
    let overtaken = run(&plan, |session| {
        let mut large = session.zeros::<f32>(&[LARGE]).unwrap();
        let mut overtaken = 0;
        for round in 0..4 {
            for (i, value) in large.as_mut_slice().iter_mut().enumerate() {
                *value = (i % 251) as f32 + session.rank() as f32;
            }
            session.barrier().unwrap();
            let handle = session.allreduce_async(large, sum("large").priority(-1)).unwrap();
            let urgent = session.tensor(&[round as f32], &[1]).unwrap();
            let urgent = session.allreduce_async(urgent, sum("urgent").priority(1)).unwrap();
            assert_eq!(urgent.wait().unwrap().as_slice(), [3.0 * round as f32]);
            overtaken += u32::from(!handle.is_finished());
            large = handle.wait().unwrap();
            let right = |(i, value): (usize, &f32)| *value == 3.0 * (i % 251) as f32 + 3.0;
            assert!(large.as_slice().iter().enumerate().all(right));
        }
        overtaken
    });
    // The large tensor has 160 consecutive pieces. In submission order, the urgent one would come
    // after the last of them. A busy machine may delay one rank until then, but not every rank
    // every time.
    assert!(overtaken.iter().sum::<u32>() > 0, "{overtaken:?}");
}
