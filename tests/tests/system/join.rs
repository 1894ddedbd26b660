//! Ranks that run out of data. The others continue without them, and all take part again once the
//! last one has joined.

use std::sync::{Arc, Barrier};

use gradwire_proto::{Collective, DType, FailureKind, ReduceOp, Request};
use gradwire_reference::Values;
use gradwire_tests::{
    calls::{Call, failure, request, with_op},
    cluster::{Plan, run_job},
};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, BroadcastOptions, GatherOptions,
    JoinOptions, ProcessSet, ReceiveOptions, ReduceOptions, ReduceScatterOptions, ScatterOptions,
    SendOptions, Session,
};

/// Makes every call that works without joined ranks, on the ranks `there`.
fn step(session: &Session, set: &ProcessSet, name: &str, there: &[u32], root: u32) {
    use Collective::{Allgather, Allreduce, Broadcast, Gather, Reduce};
    let reduce = |op| with_op(request(Allreduce, DType::F32, &[9, 5], 0), op);
    let ops = [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product];
    let mut asked: Vec<Request> = ops.map(reduce).to_vec();
    asked.push(with_op(request(Allreduce, DType::U16, &[9, 5], 0), ReduceOp::BitAnd));
    asked.extend([Reduce, Broadcast, Gather].map(|of| request(of, DType::F64, &[9, 5], root)));
    asked.push(request(Allgather, DType::I64, &[9, 5], 0));
    asked.push(Request::barrier());
    for (index, asked) in asked.iter().enumerate() {
        let mut call = Call::same(format!("{name}.{index}"), there, asked);
        if asked.collective == Allgather {
            for (rows, asked) in (0..).zip(&mut call.requests) {
                asked.shape = asked.shape.with_rows(rows).unwrap();
            }
        }
        // With such values only the average has a rounding error.
        let call = Call { values: Values::Exact, seed: index as u64, ..call };
        call.run(session, set, session.nodes().len()).unwrap();
    }
}

/// In each of several rounds, each rank has data for a number of steps, and then joins.
fn uneven(slots: &[u32], rounds: &'static [&'static [usize]]) {
    run_job(&Plan::nodes(slots), move |session| {
        let all = session.global_process_set();
        let everybody: Vec<u32> = (0..session.size()).collect();
        for (round, steps) in rounds.iter().enumerate() {
            let most = steps.iter().max().unwrap();
            let longest = steps.iter().position(|own| own == most).unwrap() as u32;
            for number in 0..steps[session.rank() as usize] {
                let has_data = |rank: &u32| steps[*rank as usize] > number;
                let there: Vec<u32> = everybody.iter().copied().filter(has_data).collect();
                step(session, &all, &format!("{round}.{number}"), &there, longest);
            }
            let last = session.join(JoinOptions::default()).unwrap();
            assert_eq!(last, longest, "round {round}");
            // Training continues, with reused names and with unnamed calls.
            step(session, &all, &format!("{round}.0"), &everybody, 0);
            let mut one = session.tensor(&[1u32], &[1]).unwrap();
            session.allreduce(&mut one, AllreduceOptions::default().op(ReduceOp::Sum)).unwrap();
            assert_eq!(one.as_slice(), [session.size()]);
        }
    });
}

#[test]
fn ranks_with_fewer_steps_are_not_waited_for() {
    uneven(&[3], &[&[2, 4, 1], &[1, 0, 2]]);
}

/// Whole nodes run out of data, including the first node, which hosts the coordinator.
#[test]
fn whole_nodes_join() {
    uneven(&[2, 1, 2], &[&[1, 2, 0, 3, 4], &[3, 1, 2, 0, 0], &[0, 0, 1, 0, 0]]);
}

/// No rank has any data: the join is a barrier that returns the last rank.
#[test]
fn all_join_at_once() {
    let last = run_job(&Plan::nodes(&[2, 1]), |session| {
        let joined = session.join_async(JoinOptions::default()).unwrap();
        let first = joined.wait().unwrap();
        (first, session.join(JoinOptions::default()).unwrap())
    });
    assert!(last.iter().all(|both| *both == last[0] && both.0 < 3 && both.1 < 3), "{last:?}");
}

/// A rank joins in one set and continues in another.
#[test]
fn a_join_is_of_one_process_set() {
    run_job(&Plan::nodes(&[2, 2]), |session| {
        let all = session.global_process_set();
        let set = session.add_process_set(&[0, 1, 3]).unwrap();
        let join = || JoinOptions::default().process_set(&set);
        let everybody = [0, 1, 2, 3];
        if session.rank() == 3 {
            let joined = session.join_async(join()).unwrap();
            step(session, &all, "all", &everybody, 3);
            assert_eq!(joined.wait().unwrap(), 1);
        } else {
            if set.includes(session.rank()) {
                step(session, &set, "set", &[0, 1], 1);
            }
            step(session, &all, "all", &everybody, 3);
            match session.rank() {
                0 => assert_eq!(session.join(join()).unwrap(), 1),
                1 => {
                    // This is done without rank 0, which has joined already or joins soon.
                    step(session, &set, "alone", &[1], 1);
                    assert_eq!(session.join(join()).unwrap(), 1);
                }
                _ => {}
            }
        }
        if set.includes(session.rank()) {
            step(session, &set, "set", &[0, 1, 3], 3);
        }
        session.barrier().unwrap();
        session.remove_process_set(set).unwrap();
    });
}

#[test]
fn calls_that_need_a_joined_rank_fail_on_all() {
    let reported = run_job(&Plan::nodes(&[2, 1]), |session| {
        if session.rank() == 1 {
            assert_eq!(session.join(JoinOptions::default()).unwrap(), 2);
            return Vec::new();
        }
        // This can only be done without rank 1, so rank 1 has joined now.
        let mut one = session.tensor(&[2.0f32], &[1]).unwrap();
        let average = AllreduceOptions::named("first").op(ReduceOp::Average);
        session.allreduce(&mut one, average).unwrap();
        assert_eq!(one.as_slice(), [2.0]);
        let rows = || session.tensor(&[1.0f32; 6], &[6]).unwrap();
        let own = (session.rank() == 0).then(rows);
        let mut failures = vec![
            failure(session.reducescatter(&rows(), ReduceScatterOptions::default())),
            failure(session.alltoall(&rows(), AlltoallOptions::default())),
            failure(session.scatter(own.as_ref(), ScatterOptions::from_rank(0))),
            failure(session.add_process_set(&[0])),
            failure(session.broadcast(&mut rows(), BroadcastOptions::from_rank(1))),
            failure(session.reduce(&mut rows(), ReduceOptions::to_rank(1))),
            failure(session.gather(&rows(), GatherOptions::to_rank(1))),
        ];
        // The ranks can send to each other, but not to the joined rank.
        match session.rank() {
            0 => session.send(&rows(), SendOptions::to_rank(2)).unwrap(),
            _ => {
                let got: gradwire_worker::Tensor<f32> =
                    session.receive(ReceiveOptions::from_rank(0)).unwrap();
                assert_eq!(rows().as_slice(), gradwire_worker::Tensor::as_slice(&got));
            }
        }
        let sent = failure(session.send(&rows(), SendOptions::to_rank(1)));
        assert!(sent.text().contains("rank 1 has joined"), "{sent}");
        let gathered = session.allgather(&rows(), AllgatherOptions::default()).unwrap();
        assert_eq!((gathered.rows, gathered.tensor.as_slice().len()), (vec![6, 6], 12));
        let last = session.rank() == 2;
        if last {
            // This can only be done once rank 0 has joined.
            session.allreduce(&mut one, AllreduceOptions::named("last")).unwrap();
        }
        assert_eq!(session.join(JoinOptions::default()).unwrap(), 2);
        failures.drain(..).map(|failure| (failure.kind, failure.what)).collect()
    });
    assert_eq!(reported[0], reported[2]);
    let without = ["reducescatter", "alltoall", "scatter", "add-process-set"];
    for ((kind, what), collective) in reported[0].iter().zip(without) {
        let expected = format!("rank 1 has joined, but {collective} needs all ranks");
        assert!(*kind == FailureKind::Invalid && what.contains(&expected), "{what}");
    }
    for ((kind, what), collective) in reported[0][4..].iter().zip(["broadcast", "reduce", "gather"])
    {
        let expected = format!("the root 1 of this {collective} has joined");
        assert!(*kind == FailureKind::Invalid && what.contains(&expected), "{what}");
    }
}

/// A submission in a process set that the rank has joined is refused, without an effect on other
/// ranks.
#[test]
fn a_rank_that_has_joined_submits_nothing() {
    let done = Arc::new(Barrier::new(2));
    let last = run_job(&Plan::nodes(&[1, 1]), move |session| {
        if session.rank() == 0 {
            let joined = session.join_async(JoinOptions::default()).unwrap();
            let mut tensor = session.tensor(&[1i8], &[1]).unwrap();
            let error = session.allreduce(&mut tensor, AllreduceOptions::default()).unwrap_err();
            assert!(error.to_string().contains("has joined"), "{error}");
            let error = session.join(JoinOptions::default()).unwrap_err();
            assert!(error.to_string().contains("join"), "{error}");
            done.wait();
            joined.wait().unwrap()
        } else {
            done.wait();
            session.join(JoinOptions::default()).unwrap()
        }
    });
    // The last rank is the one whose join reaches the coordinator last.
    assert!(last[0] == last[1] && last[0] < 2, "{last:?}");
}
