//! Votes that a loss interrupts.

use super::*;

const VOTE: &str = "gradwire.vote";

#[test]
fn a_vote_is_true_only_if_all_agree() {
    let daemon = FakeDaemon::elastic(&[0, 1, 2]);
    on_each(attach(&daemon, &[0, 1, 2]), |at, session| {
        assert!(session.vote(true).unwrap());
        assert!(!session.vote(at != 1).unwrap());
        assert!(!session.vote(false).unwrap());
        assert!(session.vote(true).unwrap());
        let vote = session.vote_async(true).unwrap();
        let error = session.vote(true).unwrap_err().to_string();
        assert!(error.contains("another vote of this rank has not ended"), "{error}");
        assert!(vote.wait().unwrap() && session.vote(true).unwrap());
        session.shutdown().unwrap();
    });
}

/// All vote `yes`, only `heard` get the result, and worker 2 is lost.
fn interrupted(heard: &'static [u32], all: bool) {
    let daemon = FakeDaemon::elastic(&[0, 1, 2]);
    let sessions = attach(&daemon, &[0, 1, 2]);
    daemon.answer_last(VOTE, heard);
    let mut sessions = on_each(sessions, |at, session| {
        match session.vote(all || at == 0) {
            Ok(yes) => assert!(yes == all && heard.contains(&(at as u32))),
            Err(error) => assert!(error.is_recoverable() && !heard.contains(&(at as u32))),
        }
        until_lost(&session);
        session
    });
    drop(sessions.pop());
    let daemon = daemon.succeed(&[0, 1]);
    on_each(sessions, |at, session| {
        let rejoined = rejoin(&session).unwrap();
        let has_heard = heard.contains(&(at as u32));
        let result = all && !heard.is_empty();
        assert_eq!(rejoined.vote, (!has_heard).then_some(result), "{heard:?} {all}");
        assert!(session.vote(true).unwrap());
        session.shutdown().unwrap();
    });
    drop(daemon);
}

#[test]
fn a_loss_does_not_divide_a_vote() {
    interrupted(&[], true);
    interrupted(&[0], true);
    interrupted(&[1], true);
    interrupted(&[0], false);
    // Only the lost rank has heard it.
    let daemon = FakeDaemon::elastic(&[0, 1]);
    let sessions = attach(&daemon, &[0, 1]);
    daemon.answer_last(VOTE, &[1]);
    let mut sessions = on_each(sessions, |at, session| {
        assert_eq!(session.vote(true).is_ok(), at == 1);
        session
    });
    drop(sessions.pop());
    let daemon = daemon.succeed(&[0]);
    let session = sessions.pop().unwrap();
    assert_eq!(rejoin(&session).unwrap().vote, Some(false));
    session.shutdown().unwrap();
    drop(daemon);
}

#[test]
fn a_result_survives_an_epoch_that_does_not_form() {
    let daemon = FakeDaemon::elastic(&[0, 1, 2]);
    let sessions = attach(&daemon, &[0, 1, 2]);
    daemon.answer_last(VOTE, &[2]);
    let sessions = on_each(sessions, |at, session| {
        assert_eq!(session.vote(true).is_ok(), at == 2);
        until_lost(&session);
        session
    });
    // Epoch 2 forms only on rank 0. So the others are in epoch 3 before their call returns.
    let second = daemon.succeed(&[0, 1, 2]);
    second.answer_last("gradwire.epoch", &[0]);
    let done = Barrier::new(2);
    thread::scope(|scope| {
        let ranks = scope.spawn(|| {
            on_each(sessions, |at, session| {
                let rejoined = rejoin(&session).unwrap();
                if at == 0 {
                    assert_eq!((rejoined.epoch, rejoined.vote), (2, Some(true)));
                    until_lost(&session);
                    done.wait();
                    assert_eq!(rejoin(&session).unwrap().vote, None);
                } else {
                    assert_eq!((rejoined.epoch, rejoined.newcomers), (3, false));
                    assert_eq!(rejoined.vote, (at == 1).then_some(true));
                }
                assert!(session.vote(true).unwrap());
                session.shutdown().unwrap();
            });
        });
        done.wait();
        let third = second.succeed(&[0, 1, 2]);
        ranks.join().unwrap();
        drop(third);
    });
}
