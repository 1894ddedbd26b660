//! Frames and descriptors over a socket, from honest and from hostile peers.

use std::{
    io::{IoSlice, Read, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::Mutex,
    thread,
    time::Duration,
};

use gradwire_shm::handover::{self, HandoverError, MAX_FDS, MAX_FRAME, receive, send};
use proptest::prelude::*;
use rustix::{
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags},
    process::{Resource, Rlimit, getrlimit, setrlimit},
};

mod common;

/// Descriptors are counted per process, so the tests of this file take turns.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a test and checks that every descriptor it opened is closed again (CLEAN).
fn counted(test: impl FnOnce()) {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let before = common::open_fds();
    test();
    assert_eq!(common::open_fds(), before, "descriptors were left open");
}

fn pair() -> (UnixStream, UnixStream) {
    let (a, b) = UnixStream::pair().unwrap();
    for end in [&a, &b] {
        end.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        end.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    }
    (a, b)
}

/// Sends like a peer that violates the protocol.
fn send_raw(stream: &UnixStream, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
    let parts = [IoSlice::new(bytes)];
    assert_eq!(
        rustix::net::sendmsg(stream, &parts, &mut control, SendFlags::empty()).unwrap(),
        bytes.len()
    );
}

#[test]
fn frames_arrive_in_order_with_their_descriptors() {
    counted(|| {
        let (a, b) = pair();
        let (mut reader, writer) = std::io::pipe().unwrap();
        send(&a, b"plain", &[]).unwrap();
        send(&a, b"with two", &[writer.as_fd(), reader.as_fd()]).unwrap();
        send(&a, b"", &[]).unwrap();
        drop((a, writer));

        let frame = receive(&b).unwrap().unwrap();
        assert_eq!((frame.bytes.as_slice(), frame.fds.len()), (&b"plain"[..], 0));
        let mut frame = receive(&b).unwrap().unwrap();
        assert_eq!((frame.bytes.as_slice(), frame.fds.len()), (&b"with two"[..], 2));
        for fd in &frame.fds {
            let flags = rustix::io::fcntl_getfd(fd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
        let mut received = std::io::PipeWriter::from(frame.fds.remove(0));
        received.write_all(b"x").unwrap();
        let mut byte = [0];
        reader.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
        let frame = receive(&b).unwrap().unwrap();
        assert!(frame.bytes.is_empty());
        assert!(receive(&b).unwrap().is_none(), "the end is clean");
    });
}

#[test]
fn bytes_may_come_one_at_a_time() {
    counted(|| {
        let (a, b) = pair();
        let sender = thread::spawn(move || {
            let mut bytes = 5u32.to_le_bytes().to_vec();
            bytes.extend(b"drops");
            for byte in bytes {
                (&a).write_all(&[byte]).unwrap();
                thread::yield_now();
            }
        });
        assert_eq!(receive(&b).unwrap().unwrap().bytes, b"drops");
        sender.join().unwrap();
    });
}

#[test]
fn both_sides_refuse_frames_over_the_limit() {
    counted(|| {
        let (a, b) = pair();
        let largest = vec![7; MAX_FRAME];
        let receiver = thread::spawn(move || (receive(&b).unwrap().unwrap(), b));
        send(&a, &largest, &[]).unwrap();
        let (frame, b) = receiver.join().unwrap();
        assert_eq!(frame.bytes, largest);

        let error = send(&a, &vec![0; MAX_FRAME + 1], &[]).unwrap_err();
        assert!(error.to_string().contains("at most 1048576 bytes"), "{error}");
        (&a).write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = receive(&b).unwrap_err();
        assert!(matches!(error, HandoverError::TooLong { bytes: u32::MAX }), "{error}");
    });
}

#[test]
fn too_many_descriptors_are_refused_and_closed() {
    counted(|| {
        let (a, b) = pair();
        let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        let many = [file.as_fd(); 9];
        assert!(send(&a, b"", &many[..MAX_FDS + 1]).is_err());
        send(&a, b"", &many[..MAX_FDS]).unwrap();
        assert_eq!(receive(&b).unwrap().unwrap().fds.len(), MAX_FDS);

        send_raw(&a, &0u32.to_le_bytes(), &many);
        let error = receive(&b).unwrap_err();
        assert!(matches!(error, HandoverError::TooManyFds), "{error}");

        // Each byte of one frame brings a few descriptors.
        let (a, b) = pair();
        for byte in 0u32.to_le_bytes() {
            send_raw(&a, &[byte], &many[..3]);
        }
        let error = receive(&b).unwrap_err();
        assert!(matches!(error, HandoverError::TooManyFds), "{error}");
    });
}

#[test]
fn a_descriptor_that_cannot_be_opened_is_fine() {
    counted(|| {
        let (a, b) = pair();
        let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        send(&a, b"", &[file.as_fd(); 2]).unwrap();
        let usual = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), ..usual }).unwrap();
        let received = receive(&b);
        setrlimit(Resource::Nofile, usual).unwrap();
        let error = received.unwrap_err();
        assert!(matches!(error, HandoverError::NoDescriptor), "{error}");
    });
}

#[test]
fn a_truncated_frame_is_an_error_without_leaks() {
    counted(|| {
        let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        for bytes in [&b"\x03\0"[..], &b"\x03\0\0\0"[..], &b"\x03\0\0\0ab"[..]] {
            let (a, b) = pair();
            send_raw(&a, bytes, &[file.as_fd()]);
            drop(a);
            let error = receive(&b).unwrap_err();
            assert!(matches!(error, HandoverError::Cut { .. }), "{bytes:?}: {error}");
        }
    });
}

#[test]
fn timeouts_are_harmless_only_between_frames() {
    counted(|| {
        let (a, b) = pair();
        b.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        assert!(matches!(receive(&b).unwrap_err(), HandoverError::TimedOut));
        send(&a, b"later", &[]).unwrap();
        assert_eq!(receive(&b).unwrap().unwrap().bytes, b"later");
        (&a).write_all(&[9, 0, 0]).unwrap();
        let error = receive(&b).unwrap_err();
        assert!(matches!(error, HandoverError::Stalled { got: 3, needed: 4 }), "{error}");
    });
}

#[test]
fn a_slow_peer_holds_no_thread() {
    counted(|| {
        let (a, b) = pair();
        b.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let dripping = thread::spawn(move || {
            // Each byte arrives in time, but the frame would take an hour.
            (&a).write_all(&100_000u32.to_le_bytes()).unwrap();
            while (&a).write_all(b"x").is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let error = receive(&b).unwrap_err();
        assert!(matches!(error, HandoverError::Stalled { needed: 100_000, .. }), "{error}");
        drop(b);
        dripping.join().unwrap();
    });
}

#[test]
fn the_kernel_says_who_the_peer_is() {
    counted(|| {
        let (a, _b) = pair();
        let peer = handover::peer(&a).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Any bytes give frames or an error in the end, and nothing is left open.
    #[test]
    fn any_bytes_end(
        bytes in prop::collection::vec(prop_oneof![3 => 0..4u8, 1 => any::<u8>()], 0..200),
    ) {
        counted(|| {
            let (a, b) = pair();
            (&a).write_all(&bytes).unwrap();
            drop(a);
            let mut left = bytes.len() + 1;
            while let Ok(Some(frame)) = receive(&b) {
                left = left.checked_sub(4 + frame.bytes.len()).expect("no byte is seen twice");
            }
        });
    }
}
