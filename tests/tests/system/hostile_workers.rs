//! A connection to a daemon's socket that is not from a worker of this job is refused, with a
//! reason if the peer can read one. It does not delay the job's workers (TRUST, BOUND).

use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use gradwire_daemon::Ending;
use gradwire_proto::{
    DType, PROTOCOL, ReduceOp, Request, Shape, VERSION, auth,
    pb::{self, worker_message::Message as ToDaemon},
};
use gradwire_reference::Dice;
use gradwire_shm::{
    control::{CONTROL_BYTES, Place, Submission, WorkerControl},
    handover::{MAX_FDS, MAX_FRAME},
    segment::{HugePages, Segment},
};
use gradwire_tests::{
    cluster::{Cluster, Plan, Ranks},
    raw::{RawWorker, Stranger, attach, submission},
};
use gradwire_worker::AllreduceOptions;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// A job of one node with two ranks; the first has attached and waits for the second.
fn half_a_job() -> (Cluster, Ranks<()>) {
    let cluster = Cluster::start(&Plan::nodes(&[2])).unwrap();
    let first = cluster.start_ranks([0], sum_of_two).attached();
    (cluster, first)
}

fn sum_of_two(session: &gradwire_worker::Session) {
    let mut tensor = [session.rank() + 1].map(f64::from);
    session.allreduce_slice(&mut tensor, AllreduceOptions::named("w").op(ReduceOp::Sum)).unwrap();
    assert_eq!(tensor, [3.0]);
}

/// Attaches the second rank, and checks that both leave in good order.
fn whole_job(cluster: Cluster, first: Ranks<()>) {
    cluster.start_ranks([1], sum_of_two).join().unwrap();
    first.join().unwrap();
    assert_eq!(cluster.finish().unwrap(), [Ending::Finished]);
}

/// The daemon's refusal of a worker whose attach message `spoil` changed.
fn refusal(
    cluster: &Cluster,
    local_rank: u32,
    spoil: impl FnOnce(&mut pb::Attach),
    fds: &[BorrowedFd<'_>],
) -> String {
    let stranger = Stranger::connect(&cluster.socket(0)).unwrap();
    let challenge = stranger.challenge().unwrap();
    stranger.say(attach(cluster, local_rank, &challenge, spoil), fds).unwrap();
    stranger.refusal().unwrap()
}

fn page() -> OwnedFd {
    WorkerControl::create("gradwire-test-page", 1).unwrap().1
}

#[test]
fn wrong_workers_are_refused_with_a_reason() {
    let (cluster, first) = half_a_job();
    let job = cluster.job().to_string();
    let again = format!("process {} has attached as local rank 0 already", std::process::id());
    let protocols = format!("this daemon is {VERSION} (protocol {PROTOCOL})");
    type Spoil = fn(&mut pb::Attach);
    let cases: [(u32, Spoil, &[&str]); 7] = [
        (1, |a| a.proof = auth::nonce().to_vec(), &["the worker's secret is not that of this job"]),
        (
            1,
            |a| a.proof = vec![7],
            &["the worker's secret is not that of this job", "GRADWIRE_SECRET"],
        ),
        (1, |a| a.job = "another".into(), &[&job, "not \"another\"", "GRADWIRE_JOB"]),
        (
            1,
            |a| (a.protocol, a.version) = (99, "9.8.7".into()),
            &["the worker is Gradwire 9.8.7 (protocol 99)", &protocols, "install the same release"],
        ),
        (2, |_| (), &["local rank 2 does not exist: this node has 2 slots", "GRADWIRE_LOCAL_RANK"]),
        (u32::MAX, |_| (), &["local rank 4294967295 does not exist"]),
        (0, |_| (), &[&again]),
    ];
    for (local_rank, spoil, expected) in cases {
        let text = refusal(&cluster, local_rank, spoil, &[page().as_fd()]);
        for expected in expected {
            assert!(text.contains(expected), "{expected:?} is not in: {text}");
        }
    }
    let stranger = Stranger::connect(&cluster.socket(0)).unwrap();
    stranger.challenge().unwrap();
    stranger.say(ToDaemon::Detach(pb::Detach {}), &[]).unwrap();
    assert!(stranger.refusal().unwrap().contains("the first message must be Attach"));
    whole_job(cluster, first);
}

/// A proof can't be used again, because each challenge is different.
#[test]
fn a_proof_is_valid_once() {
    let (cluster, first) = half_a_job();
    let overheard = Stranger::connect(&cluster.socket(0)).unwrap().challenge().unwrap();
    let ToDaemon::Attach(old) = attach(&cluster, 1, &overheard, |_| ()) else {
        unreachable!("attach makes an Attach")
    };
    let text = refusal(&cluster, 1, move |a| a.proof = old.proof, &[page().as_fd()]);
    assert!(text.contains("the worker's secret is not that of this job"), "{text}");
    whole_job(cluster, first);
}

#[test]
fn memory_without_a_control_page_is_refused() {
    let (cluster, first) = half_a_job();
    let refused = |fds: &[BorrowedFd<'_>]| refusal(&cluster, 1, |_| (), fds);
    let expect = |text: String, expected: &str| {
        assert!(text.contains(expected), "{expected:?} is not in: {text}");
    };
    expect(refused(&[]), "Attach came with 0 descriptors, not 1");
    expect(refused(&[page().as_fd(), page().as_fd()]), "Attach came with 2 descriptors, not 1");
    let null = File::open("/dev/null").unwrap();
    expect(refused(&[null.as_fd()]), "it has no seals");
    let unsealed =
        memfd_create("gradwire-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&unsealed, CONTROL_BYTES).unwrap();
    expect(refused(&[unsealed.as_fd()]), "not memory sealed against shrinking and growing");
    let sealed = |bytes| Segment::create("gradwire-test", bytes, HugePages::Never).unwrap().1;
    expect(refused(&[sealed(4096).as_fd()]), "this one has 4096");
    expect(refused(&[sealed(CONTROL_BYTES).as_fd()]), "not a control page");
    // More descriptors than a frame may carry: the connection ends, and all of them are closed.
    let stranger = Stranger::connect(&cluster.socket(0)).unwrap();
    let challenge = stranger.challenge().unwrap();
    let many: Vec<File> = (0..2 * MAX_FDS).map(|_| null.try_clone().unwrap()).collect();
    let many: Vec<BorrowedFd<'_>> = many.iter().map(AsFd::as_fd).collect();
    stranger.say_with_many(attach(&cluster, 1, &challenge, |_| ()), &many).unwrap();
    stranger.wait_for_end().unwrap();
    whole_job(cluster, first);
}

#[test]
fn invalid_messages_end_only_their_connection() {
    let (cluster, first) = half_a_job();
    let too_long = ((MAX_FRAME + 1) as u32).to_le_bytes();
    let mut nonsense: Vec<Vec<u8>> = vec![
        too_long.to_vec(),
        u32::MAX.to_le_bytes().to_vec(),
        // A frame that is cut, one without bytes, and one that is not a message.
        [&100u32.to_le_bytes()[..], &[7; 10]].concat(),
        0u32.to_le_bytes().to_vec(),
        [&8u32.to_le_bytes()[..], &[0xff; 8]].concat(),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
        vec![3],
        vec![],
    ];
    for seed in 0..20 {
        let mut dice = Dice::of(&[seed]);
        let length = dice.below(3000) as usize;
        let mut bytes: Vec<u8> = (0..length).map(|_| dice.roll() as u8).collect();
        if seed % 2 == 0 && length > 4 {
            // The beginning of a valid frame, with random content.
            bytes[..4].copy_from_slice(&(length as u32 - 4).to_le_bytes());
        }
        nonsense.push(bytes);
    }
    for bytes in nonsense {
        let stranger = Stranger::connect(&cluster.socket(0)).unwrap();
        stranger.challenge().unwrap();
        // The daemon may close the connection before the last byte.
        let _ = stranger.send(&bytes);
        stranger.hang_up();
        stranger.wait_for_end().unwrap();
    }
    whole_job(cluster, first);
}

/// BOUND: there is room for 64 connections that have not attached yet.
#[test]
fn silent_connections_do_not_keep_a_worker_out() {
    let (cluster, first) = half_a_job();
    let silent: Vec<Stranger> =
        (0..70).map(|_| Stranger::connect(&cluster.socket(0)).unwrap()).collect();
    whole_job(cluster, first);
    // WAIT: none of them is kept for ever.
    for stranger in silent {
        stranger.wait_for_end().unwrap();
    }
}

/// The doorbell is one file for both sides, with the same flags. A worker that clears them may
/// block itself, but not the thread that serves all ranks (WAIT).
#[test]
fn a_blocking_doorbell_delays_nothing_else() {
    let cluster = Cluster::start(&Plan::nodes(&[2, 1])).unwrap();
    let others = cluster.start_ranks([1, 2], |session| {
        for step in 0..20 {
            let mut tensor = [f64::from(session.rank())];
            let options = AllreduceOptions::named(format!("w.{step}")).op(ReduceOp::Sum);
            session.allreduce_slice(&mut tensor, options).unwrap();
            assert_eq!(tensor, [3.0]);
        }
    });
    let mut raw = RawWorker::attach(&cluster, 0).unwrap();
    raw.add_segment(4096).unwrap();
    raw.make_doorbell_block().unwrap();
    for step in 0..20 {
        raw.ring().unwrap();
        let request = Request::allreduce(DType::F64, Shape::new(&[1]).unwrap(), ReduceOp::Sum);
        let name = format!("w.{step}");
        let zero = raw.add_segment(4096).unwrap();
        let place = Place { segment: zero, offset: 0 };
        let asked = submission(step, &name, request);
        raw.submit(&Submission { inputs: vec![place], outputs: vec![place], ..asked }).unwrap();
        raw.completed().unwrap();
    }
    others.join().unwrap();
}
