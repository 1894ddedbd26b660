//! Process sets over several epochs.

use super::*;

#[test]
fn process_sets_come_back_with_their_members() {
    let daemon = FakeDaemon::elastic(&[4, 5, 6]);
    let mut ranks = on_each(attach(&daemon, &[4, 5, 6]), |_, session| {
        let pair = session.add_process_set(&[0, 1]).unwrap();
        let gone = session.add_process_set(&[1, 2]).unwrap();
        let removed = session.add_process_set(&[0, 2]).unwrap();
        session.remove_process_set(removed).unwrap();
        assert_eq!((pair.id(), pair.ranks(), gone.id()), (1, vec![0, 1], 2));
        (session, pair, gone)
    });
    drop(ranks.pop());
    on_each(ranks.iter().collect(), |_, (session, ..)| until_lost(session));
    // The others have new ranks: there is a newcomer before them.
    let new = daemon.worker(9);
    let daemon = daemon.succeed(&[9, 5, 4]);
    let new = thread::spawn(move || new.attach().unwrap());
    let ranks = on_each(ranks, |at, (session, pair, gone)| {
        assert!(rejoin(&session).unwrap().newcomers);
        assert_eq!(session.rank(), 2 - at as u32);
        assert_eq!((pair.ranks(), pair.position()), (vec![1, 2], Some(1 - at)));
        assert!(pair.includes(2) && !pair.includes(0) && pair.id() != 0);
        let mut own = session.tensor(&[1.0f32 + at as f32], &[1]).unwrap();
        assert_eq!(sum(&session, &mut own, Some(&pair)), 3.0);
        let error = session.allreduce(&mut own, named("x").process_set(&gone)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("process set 2 (ranks 1, 2) does not exist any more"), "{text}");
        assert!(text.contains("worker 6, one of its members, is lost"), "{text}");
        (session, pair)
    });
    let new = new.join().unwrap();
    assert_eq!(new.global_process_set().ranks(), [0, 1, 2]);
    // The newcomer has no value for the set, but knows it in the next epoch all the same.
    let daemon = daemon.succeed(&[4, 9, 5]);
    thread::scope(|scope| {
        let new = scope.spawn(|| {
            until_lost(&new);
            rejoin(&new).unwrap();
            new.shutdown().unwrap();
        });
        on_each(ranks, |at, (session, pair)| {
            until_lost(&session);
            rejoin(&session).unwrap();
            assert_eq!((pair.ranks(), pair.position()), (vec![0, 2], Some(at)));
            let mut own = session.tensor(&[1.0f32 + at as f32], &[1]).unwrap();
            assert_eq!(sum(&session, &mut own, Some(&pair)), 3.0);
            session.shutdown().unwrap();
        });
        new.join().unwrap();
    });
    drop(daemon);
}
