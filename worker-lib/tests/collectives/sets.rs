//! Process sets and joining.

use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, BarrierOptions, BroadcastOptions, FailureKind, JoinOptions,
    ReceiveOptions, ReduceOp, SendOptions, Tensor,
};

use crate::{ranks, text};

#[test]
fn a_set_has_its_own_names_and_operations() {
    ranks(4, |session| {
        let odd = session.add_process_set(&[3, 1]).unwrap();
        let rest = session.add_process_set_async(&[0, 2, 3]).unwrap().wait().unwrap();
        assert_eq!((odd.id(), rest.id(), odd.ranks()), (1, 2, vec![1, 3]));
        assert_eq!(session.global_process_set().ranks(), [0, 1, 2, 3]);
        let rank = session.rank();
        if odd.includes(rank) {
            assert_eq!(odd.position(), Some(rank as usize / 2));
            // The same names as in other sets, at the same time.
            let mut own = session.tensor(&[f64::from(rank)], &[]).unwrap();
            let options = || AllreduceOptions::default().op(ReduceOp::Sum).process_set(&odd);
            session.allreduce(&mut own, options()).unwrap();
            assert_eq!(own.as_slice(), [4.0]);
            let mut own = [u64::from(rank)];
            let from = BroadcastOptions::from_rank(3).process_set(&odd);
            session.broadcast_slice(&mut own, from).unwrap();
            assert_eq!(own, [3]);
            session.barrier_with(BarrierOptions::named("b").process_set(&odd)).unwrap();
            let own = session.tensor(&[rank], &[]).unwrap();
            if rank == 1 {
                session.send(&own, SendOptions::to_rank(3).process_set(&odd)).unwrap();
            } else {
                let options = ReceiveOptions::from_rank(1).process_set(&odd);
                assert_eq!(session.receive::<Tensor<u32>>(options).unwrap().as_slice(), [1]);
            }
        }
        if rest.includes(rank) {
            let own = session.tensor(&[rank], &[1]).unwrap();
            let options = AllgatherOptions::default().process_set(&rest);
            assert_eq!(session.allgather(&own, options).unwrap().tensor.as_slice(), [0, 2, 3]);
        }
        // Refused at the call; nothing is started.
        let before = session.stats().operations;
        if rank == 0 {
            let mut own = [0.0f32];
            let options = AllreduceOptions::default().process_set(&odd);
            let error = text(session.allreduce_slice(&mut own, options));
            assert!(error.contains("not a member of process set 1 (ranks 1, 3)"), "{error}");
            let options = BroadcastOptions::from_rank(1).process_set(&rest);
            let error = text(session.broadcast_slice(&mut own, options));
            assert!(error.contains("root, rank 1, is not a member of process set 2"), "{error}");
        }
        assert_eq!(session.stats().operations, before);

        let gone = odd.clone();
        session.remove_process_set(odd).unwrap();
        session.remove_process_set_async(rest).unwrap().wait().unwrap();
        let error = text(session.barrier_with(BarrierOptions::default().process_set(&gone)));
        assert!(error.contains("was removed"), "{error}");
        assert!(text(session.remove_process_set(gone)).contains("was removed"));
        assert_eq!(session.add_process_set(&[0]).unwrap().id(), 3, "numbers don't come back");
    });
}

#[test]
fn impossible_sets_are_refused_at_the_call() {
    ranks(1, |session| {
        for (ranks, wrong) in [
            (&[][..], "needs at least one rank"),
            (&[0, 1], "process set contains rank 1, but the job has only ranks 0 to 0"),
            (&[0, 0], "contains rank 0 twice"),
        ] {
            let error = text(session.add_process_set(ranks));
            assert!(error.contains(wrong), "{error}");
        }
        let all = session.global_process_set();
        let error = text(session.remove_process_set(all));
        assert!(error.contains("all ranks can't be removed"), "{error}");
        assert_eq!(session.stats().operations, 0);
    });
}

#[test]
fn ranks_without_data_join_and_others_continue() {
    ranks(3, |session| {
        let rank = session.rank();
        for epoch in 0..2 {
            // Rank r has r + 1 batches.
            for batch in 0..=rank {
                let mut own = [f64::from(rank)];
                session.allreduce_slice(&mut own, AllreduceOptions::default()).unwrap();
                // The average of the ranks that still had a batch.
                assert_eq!(own, [[1.0, 1.5, 2.0][batch as usize]], "epoch {epoch}");
                let own = session.tensor(&[rank], &[1]).unwrap();
                let gathered = session.allgather(&own, AllgatherOptions::default()).unwrap();
                assert_eq!(gathered.rows, vec![1; 3 - batch as usize]);
            }
            let last = if epoch == 0 {
                session.join(JoinOptions::default()).unwrap()
            } else {
                session.join_async(JoinOptions::default()).unwrap().wait().unwrap()
            };
            assert_eq!(last, 2);
        }
        // Unnamed operations are counted from the beginning, so the names of all ranks agree.
        session.barrier().unwrap();
    });
}

#[test]
fn a_set_can_join_by_itself() {
    ranks(3, |session| {
        let set = session.add_process_set(&[0, 2]).unwrap();
        if set.includes(session.rank()) {
            let last = session.join(JoinOptions::default().process_set(&set)).unwrap();
            assert!(set.includes(last));
        }
        session.barrier().unwrap();
    });
}

#[test]
fn disagreement_is_reported_to_all() {
    ranks(2, |session| {
        let ranks: &[u32] = if session.rank() == 0 { &[0] } else { &[1] };
        let error = session.add_process_set(ranks).unwrap_err();
        assert_eq!(error.failure().unwrap().kind, FailureKind::Disagreement);
        assert_eq!(session.add_process_set(&[0, 1]).unwrap().id(), 1);
    });
}
