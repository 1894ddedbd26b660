//! The epochs of an elastic job, as its daemons live them: each daemon is for one epoch and for the
//! training processes in it.

use std::{
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    thread,
    time::Duration,
};

use gradwire_proto::{
    Failure, FailureKind, Rank,
    pb::{self, daemon_message::Message as Reply, worker_message::Message as ToDaemon},
};
use gradwire_services::launch::{Notice, ProcessEnd, ServiceReport};
use gradwire_tests::{
    epochs::{DaemonProcess, ElasticJob},
    raw::{Attaching, RawWorker, Stranger},
};
use rustix::process::Signal;

/// The failure that a worker receives.
fn aborted(worker: &RawWorker) -> Failure {
    match worker.receive().unwrap() {
        Some((Reply::Aborted(failure), _)) => failure.into(),
        other => panic!("expected Aborted, got {other:?}"),
    }
}

/// The daemon asks a process to come again later, and closes the connection.
fn is_sent_away(socket: &Stranger) {
    let answer = socket.receive().unwrap();
    assert!(matches!(answer, Some((Reply::Later(_), _))), "{answer:?}");
    socket.wait_for_end().unwrap();
}

/// All workers leave, and the epoch ends well.
fn leave(workers: &[RawWorker], daemons: &mut [DaemonProcess]) {
    for RawWorker { socket, .. } in workers {
        socket.say(ToDaemon::Detach(pb::Detach {}), &[]).unwrap();
        assert!(matches!(socket.receive().unwrap(), Some((Reply::Detached(_), _))));
    }
    for daemon in daemons {
        assert!(daemon.ended().unwrap().success());
    }
}

#[test]
fn workers_attach_by_their_numbers() {
    let job = ElasticJob::new();
    let mut daemons = job.start(3, &[&[7, 3], &[5]]).unwrap();
    let mut workers = Vec::new();
    // In any order.
    for (host, number, rank, local_rank) in [(1, 5, 2, 0), (0, 3, 1, 1), (0, 7, 0, 0)] {
        let asking = job.ask(host, number).unwrap();
        assert_eq!(asking.challenge.epoch, 3);
        let (worker, at) = asking.finish().unwrap();
        assert_eq!((at.rank, at.local_rank, at.size, at.epoch), (rank, local_rank, 3, 3));
        workers.push(worker);
    }
    leave(&workers, &mut daemons);
}

#[test]
fn only_workers_of_the_epoch_attach() {
    let job = ElasticJob::new();
    let mut daemons = job.start(2, &[&[4, 6]]).unwrap();
    for other in [0, 5, u32::MAX] {
        is_sent_away(&job.ask(0, other).unwrap().socket);
    }
    type Change = fn(&mut pb::Attach);
    let refused: [(Change, &str); 3] = [
        (|_| (), "the worker has no number in it; see GRADWIRE_ELASTIC and GRADWIRE_WORKER"),
        (|attach| (attach.worker, attach.proof) = (Some(4), vec![7]), "the worker's secret"),
        (|attach| (attach.worker, attach.job) = (Some(4), "x".into()), "not \"x\""),
    ];
    for (change, why) in refused {
        let asking = Attaching::begin(&job.socket(0), job.identity(), change).unwrap();
        let text = asking.socket.refusal().unwrap();
        assert!(text.contains(why), "{text}");
    }
    let four = job.attach(0, 4).unwrap().0;
    // It can't be there twice. Once it has left, it is too early for the next epoch.
    is_sent_away(&job.ask(0, 4).unwrap().socket);
    let six = job.attach(0, 6).unwrap().0;
    four.socket.say(ToDaemon::Detach(pb::Detach {}), &[]).unwrap();
    assert!(matches!(four.receive().unwrap(), Some((Reply::Detached(_), _))));
    is_sent_away(&job.ask(0, 4).unwrap().socket);
    leave(&[six], &mut daemons);
}

/// TELL: the daemon ends at once, although a worker is still there.
#[test]
fn an_epoch_follows_a_lost_worker() {
    let job = ElasticJob::new();
    let mut epochs = job.start(1, &[&[0, 1]]).unwrap();
    let (survivor, lost) = (job.attach(0, 0).unwrap().0, job.attach(0, 1).unwrap().0);
    lost.socket.hang_up();
    let failure = aborted(&survivor);
    assert_eq!((failure.kind, failure.rank), (FailureKind::WorkerLost, Some(Rank(1))));
    assert!(failure.is_recoverable());
    assert!(!epochs[0].ended().unwrap().success());
    survivor.socket.wait_for_end().unwrap();
    // The socket is free at once. The survivor has another rank, or the same.
    let mut daemons = job.start(2, &[&[2, 0]]).unwrap();
    is_sent_away(&job.ask(0, 1).unwrap().socket);
    let (survivor, place) = {
        let asking = (job.ask(0, 0).unwrap(), job.ask(0, 2).unwrap());
        let (survivor, place) = asking.0.finish().unwrap();
        (vec![survivor, asking.1.finish().unwrap().0], place)
    };
    assert_eq!((place.rank, place.epoch), (1, 2));
    leave(&survivor, &mut daemons);
}

#[test]
fn an_epoch_follows_a_killed_daemon() {
    let job = ElasticJob::new();
    let mut epochs = job.start(1, &[&[0], &[1]]).unwrap();
    let workers = [job.attach(0, 0).unwrap().0, job.attach(1, 1).unwrap().0];
    epochs[0].signal(Signal::KILL).unwrap();
    // The coordinator is gone, too.
    assert!(aborted(&workers[1]).is_recoverable());
    for daemon in &mut epochs {
        daemon.ended().unwrap();
    }
    let mut daemons = job.start(2, &[&[0], &[1]]).unwrap();
    let workers = [job.attach(0, 0).unwrap().0, job.attach(1, 1).unwrap().0];
    leave(&workers, &mut daemons);
}

#[test]
fn a_successor_has_the_same_fixed_ports() {
    let free = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    let mut job = ElasticJob::new();
    job.variables.push(("GRADWIRE_COORDINATOR__LISTEN", free()));
    let hosts: [&[u32]; 2] = [&[0], &[1]];
    for epoch in 1..4 {
        let mut daemons = job.start(epoch, &hosts).unwrap();
        let workers = [job.attach(0, 0).unwrap().0, job.attach(1, 1).unwrap().0];
        daemons[0].signal(Signal::KILL).unwrap();
        // Its connections are still there when its successor begins.
        daemons[0].ended().unwrap();
        assert!(aborted(&workers[1]).is_recoverable());
        daemons[1].ended().unwrap();
    }
}

#[test]
fn a_daemon_waits_for_its_predecessor() {
    let job = ElasticJob::new();
    let name = job.socket(0);
    let address = SocketAddr::from_abstract_name(name.trim_start_matches('@')).unwrap();
    let predecessor = UnixListener::bind_addr(&address).unwrap();
    let ends = thread::spawn(move || {
        thread::sleep(Duration::from_millis(300));
        drop(predecessor);
    });
    let mut daemons = job.start(1, &[&[0]]).unwrap();
    ends.join().unwrap();
    leave(&[job.attach(0, 0).unwrap().0], &mut daemons);
}

#[test]
fn a_terminated_daemon_is_a_lost_node() {
    let job = ElasticJob::new();
    let mut daemons = job.start(1, &[&[0], &[1]]).unwrap();
    let workers = [job.attach(0, 0).unwrap().0, job.attach(1, 1).unwrap().0];
    daemons[1].signal(Signal::TERM).unwrap();
    for worker in &workers {
        let failure = aborted(worker);
        assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::NodeLost, "node-1"));
    }
    for daemon in &mut daemons {
        daemon.ended().unwrap();
    }
}

#[test]
fn a_host_that_stops_is_not_a_loss() {
    let job = ElasticJob::new();
    let mut daemons = job.start(1, &[&[0], &[1]]).unwrap();
    let worker = job.attach(0, 0).unwrap().0;
    let why = "the launcher was asked to".into();
    daemons[1].notify(&Notice::Stopping { why, alone: false }).unwrap();
    let failure = aborted(&worker);
    assert_eq!(failure.kind, FailureKind::Cancelled, "{failure}");
    assert!(!failure.is_recoverable());
}

#[test]
fn a_host_that_shuts_down_is_a_loss() {
    let job = ElasticJob::new();
    let mut daemons = job.start(1, &[&[0], &[1]]).unwrap();
    let worker = job.attach(0, 0).unwrap().0;
    let why = "the agent of this host received SIGTERM".into();
    daemons[1].notify(&Notice::Stopping { why, alone: true }).unwrap();
    let failure = aborted(&worker);
    assert_eq!(failure.kind, FailureKind::NodeLost, "{failure}");
    assert!(failure.what.contains("received SIGTERM") && failure.is_recoverable(), "{failure}");
}

#[test]
fn a_loss_while_forming_sends_workers_away() {
    let mut job = ElasticJob::new();
    // On a busy machine the second daemon may end before it has joined.
    job.variables.push(("GRADWIRE_LAUNCH__START_TIMEOUT_MS", "20000".to_owned()));
    let hosts: [&[u32]; 3] = [&[0], &[1], &[2]];
    let mut first = job.daemon(4, &hosts, 0, None).unwrap();
    let waiting = job.ask(0, 0).unwrap();
    let second = job.daemon(4, &hosts, 1, first.grpc).unwrap();
    let beside = job.ask(1, 1).unwrap();
    second.signal(Signal::TERM).unwrap();
    is_sent_away(&beside.socket);
    is_sent_away(&waiting.socket);
    assert!(!first.ended().unwrap().success());
}

#[test]
fn a_daemon_of_another_epoch_is_refused() {
    let job = ElasticJob::new();
    let hosts: [&[u32]; 2] = [&[0], &[1]];
    let first = job.daemon(5, &hosts, 0, None).unwrap();
    let mut late = job.daemon(4, &hosts, 1, first.grpc).unwrap();
    let ServiceReport::Failed { failure } = late.report().unwrap() else { panic!("it serves") };
    let text = failure.to_string();
    let why = "node 'node-1' belongs to epoch 4, but this coordinator serves epoch 5";
    assert!(text.contains(why) && !failure.is_recoverable(), "{text}");
    assert!(!late.ended().unwrap().success());
    // The right one is still welcome.
    let right = job.daemon(5, &hosts, 1, first.grpc).unwrap();
    let workers = [job.attach(0, 0).unwrap().0, job.attach(1, 1).unwrap().0];
    leave(&workers, &mut [first, right]);
}

#[test]
fn workers_learn_of_a_wanted_change() {
    let job = ElasticJob::new();
    let mut daemons = job.start(1, &[&[8, 9]]).unwrap();
    let early = job.attach(0, 8).unwrap().0;
    // A worker that attaches at the same time may be notified twice.
    let learns = |worker: &RawWorker, added, removed| loop {
        match worker.receive().unwrap() {
            Some((Reply::Changed(change), _)) => {
                if change == (pb::MembershipChanged { added, removed }) {
                    break;
                }
            }
            other => panic!("expected MembershipChanged, got {other:?}"),
        }
    };
    daemons[0].notify(&Notice::Changed { added: true, removed: false }).unwrap();
    learns(&early, true, false);
    let late = job.attach(0, 9).unwrap().0;
    learns(&late, true, false);
    daemons[0].notify(&Notice::Changed { added: false, removed: true }).unwrap();
    [&early, &late].into_iter().for_each(|worker| learns(worker, true, true));
    leave(&[early, late], &mut daemons);
}

#[test]
fn notices_name_workers_by_their_numbers() {
    let job = ElasticJob::new();
    let mut daemons = job.start(1, &[&[8, 1]]).unwrap();
    let (survivor, lost) = (job.attach(0, 1).unwrap().0, job.attach(0, 8).unwrap().0);
    let killed = ProcessEnd::Signal(9);
    // Rank 1 is worker 1. Worker 0 is not in this epoch.
    daemons[0].notify(&Notice::Ended { rank: Rank(0), end: killed }).unwrap();
    daemons[0].notify(&Notice::Started { rank: Rank(8), pid: std::process::id() }).unwrap();
    daemons[0].notify(&Notice::Ended { rank: Rank(8), end: killed }).unwrap();
    let failure = aborted(&survivor);
    assert_eq!(failure.rank, Some(Rank(0)), "{failure}");
    assert!(failure.what.contains("was killed by SIGKILL"), "{failure}");
    drop(lost);
}
