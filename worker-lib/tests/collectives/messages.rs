//! Send and receive.

use std::time::Duration;

use gradwire_worker::{
    Buffer, DType, Handle, HugePages, JoinOptions, ReceiveOptions, SendOptions, Session, Tensor,
};

use crate::{ranks, ranks_with, text};

fn send(session: &Session, number: u32) -> Handle<Tensor<u32>> {
    let tensor = session.tensor(&[number], &[]).unwrap();
    session.send_async(tensor, SendOptions::to_rank(1)).unwrap()
}

/// Receives within a time limit: if the ends counted differently, this would wait forever.
fn receive(session: &Session) -> u32 {
    let handle = session.receive_async::<Tensor<u32>>(ReceiveOptions::from_rank(0)).unwrap();
    handle.wait_timeout(Duration::from_secs(20)).unwrap().as_slice()[0]
}

#[test]
fn a_message_of_any_shape_is_received() {
    ranks(3, |session| match session.rank() {
        0 => {
            let tensor = session.tensor(&[1.0f32, 2.0, 3.0], &[3, 1]).unwrap();
            for _ in 0..4 {
                session.send(&tensor, SendOptions::to_rank(2)).unwrap();
            }
            let number = session.tensor(&[5i64], &[]).unwrap();
            let number = session.send_async(number, SendOptions::to_rank(2)).unwrap();
            assert_eq!(number.wait().unwrap().as_slice(), [5]);
        }
        2 => {
            let options = || ReceiveOptions::from_rank(0);
            let check = |dims: &[usize], values: &[f32]| {
                assert_eq!((dims, values), (&[3, 1][..], &[1.0, 2.0, 3.0][..]));
            };
            let tensor: Tensor<f32> = session.receive(options()).unwrap();
            check(tensor.shape(), tensor.as_slice());
            let handle =
                session.receive_async::<Tensor<f32>>(options().expecting(&[3, 1])).unwrap();
            let tensor = handle.wait().unwrap();
            check(tensor.shape(), tensor.as_slice());
            let buffer: Buffer = session.receive(options().dtype(DType::F32)).unwrap();
            let tensor = buffer.into_tensor::<f32>().unwrap();
            check(tensor.shape(), tensor.as_slice());
            let given = session.zeros::<f32>(&[3, 1]).unwrap();
            let given = session.receive_into_async(given, options()).unwrap().wait().unwrap();
            check(given.shape(), given.as_slice());
            let mut number = session.zeros::<i64>(&[]).unwrap();
            session.receive_into(&mut number, options()).unwrap();
            assert_eq!(number.as_slice(), [5]);
        }
        _ => {}
    });
}

#[test]
fn a_message_that_does_not_fit_is_an_error() {
    ranks(2, |session| {
        if session.rank() == 0 {
            let tensor = session.tensor(&[1.0f32; 6], &[2, 3]).unwrap();
            session.send(&tensor, SendOptions::to_rank(1).tag(7)).unwrap();
            session.send(&tensor, SendOptions::to_rank(1).tag(7)).unwrap();
        } else {
            let mut given = session.tensor(&[9.0f32; 6], &[6]).unwrap();
            let options = || ReceiveOptions::from_rank(0).tag(7);
            let error = text(session.receive_into(&mut given, options()));
            assert!(error.contains("rank 0 sent a tensor of shape [2, 3]"), "{error}");
            assert_eq!(given.as_slice(), [9.0; 6]);
            assert_eq!(session.receive::<Tensor<f32>>(options()).unwrap().as_slice(), [1.0; 6]);
        }
    });
}

#[test]
fn each_tag_has_its_own_order() {
    ranks(2, |session| {
        const MESSAGES: u32 = 150; // the count wraps around earlier
        if session.rank() == 0 {
            let late = session.tensor(&[u32::MAX], &[]).unwrap();
            let late = session.send_async(late, SendOptions::to_rank(1).tag(1)).unwrap();
            for i in 0..MESSAGES {
                let tensor = session.tensor(&[i], &[]).unwrap();
                session.send(&tensor, SendOptions::to_rank(1).tag(2)).unwrap();
            }
            late.wait().unwrap();
        } else {
            for i in 0..MESSAGES {
                let options = ReceiveOptions::from_rank(0).tag(2);
                assert_eq!(session.receive::<Tensor<u32>>(options).unwrap().as_slice(), [i]);
            }
            let options = ReceiveOptions::from_rank(0).tag(1);
            assert_eq!(session.receive::<Tensor<u32>>(options).unwrap().as_slice(), [u32::MAX]);
        }
    });
}

#[test]
fn both_may_send_at_once() {
    ranks(2, |session| {
        let other = 1 - session.rank();
        let own = session.tensor(&[session.rank()], &[1]).unwrap();
        let sent = session.send_async(own, SendOptions::to_rank(other)).unwrap();
        let got: Tensor<u32> = session.receive(ReceiveOptions::from_rank(other)).unwrap();
        assert_eq!(got.as_slice(), [other]);
        sent.wait().unwrap();
    });
}

#[test]
fn a_message_too_many_is_refused_and_not_counted() {
    ranks(2, |session| {
        if session.rank() == 0 {
            let sent: Vec<_> = (0..64).map(|number| send(&session, number)).collect();
            for _ in 0..2 {
                let more = session.tensor(&[99u32], &[]).unwrap();
                let error = text(session.send_async(more, SendOptions::to_rank(1)));
                for part in ["send.0>1.tag0.#0", "64 messages ago", "wait for some of them first"] {
                    assert!(error.contains(part), "{error}");
                }
                assert!(!error.contains("different names"), "{error}");
            }
            session.barrier().unwrap();
            sent.into_iter().for_each(|handle| drop(handle.wait().unwrap()));
            send(&session, 64).wait().unwrap();
        } else {
            session.barrier().unwrap();
            let got: Vec<u32> = (0..65).map(|_| receive(&session)).collect();
            assert_eq!(got, (0..65).collect::<Vec<_>>());
        }
    });
}

#[test]
fn a_receive_without_memory_is_not_counted() {
    let settings = |_, builder: gradwire_worker::SessionBuilder| {
        builder.huge_pages(HugePages::Never).arena_max_bytes(1 << 20)
    };
    ranks_with(2, settings, |session| {
        if session.rank() == 0 {
            send(&session, 7).wait().unwrap();
        } else {
            let large = ReceiveOptions::from_rank(0).expecting(&[1 << 30]);
            let error = session.receive::<Tensor<u32>>(large).unwrap_err();
            assert!(matches!(error, gradwire_worker::GradwireError::Arena(_)), "{error}");
            assert_eq!(receive(&session), 7);
        }
    });
}

#[test]
fn a_join_forgets_messages_to_joined_ranks() {
    ranks(2, |session| {
        if session.rank() == 0 {
            // Fails once the other rank has joined, which never learns of the message.
            let error = send(&session, 1).wait().unwrap_err();
            assert!(error.failure().is_some(), "{error}");
        }
        session.join(JoinOptions::default()).unwrap();
        if session.rank() == 0 {
            send(&session, 2).wait().unwrap();
        } else {
            assert_eq!(receive(&session), 2);
        }
    });
}
