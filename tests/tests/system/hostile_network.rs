//! A connection to a daemon's data port that is not from a daemon of this job is closed, without an
//! effect on the job. A daemon that does not belong to the job is refused with a reason (TRUST,
//! BOUND).

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use gradwire_daemon::{
    Ending,
    transport::handshake::{self, Admission, Attempt, ConnectionId, HandshakeError, Identity},
};
use gradwire_proto::{Epoch, FailureKind, JobId, NodeId, ReduceOp, Secret, auth::NONCE_BYTES};
use gradwire_reference::Dice;
use gradwire_tests::cluster::{Cluster, PATIENCE, Plan, Ranks};
use gradwire_worker::{AllreduceOptions, GradwireError, Session};

/// Calls allreduce until rank 0 is asked to stop, and `done` after each; returns their number.
fn work(session: &Session, stop: &AtomicBool, done: impl Fn(usize)) -> usize {
    for round in 1.. {
        // The decision to stop is part of the reduced data, so that all ranks stop together.
        let stop = session.rank() == 0 && stop.load(Relaxed);
        let mut values = vec![round as f64; 20_000];
        values[0] = f64::from(u8::from(stop));
        let options = AllreduceOptions::named("w").op(ReduceOp::Sum);
        session.allreduce_slice(&mut values, options).unwrap();
        assert!(values[1..].iter().all(|v| *v == (round * session.size() as usize) as f64));
        if values[0] != 0.0 {
            return round;
        }
        done(round);
    }
    unreachable!("the loop has no end")
}

/// A job of two nodes that works while others connect to its data ports.
struct Working {
    cluster: Cluster,
    ranks: Ranks<usize>,
    stop: Arc<AtomicBool>,
}

impl Working {
    fn start() -> Self {
        let plan = Plan::nodes(&[1, 1]).set("data.connect_timeout_ms=1000");
        let cluster = Cluster::start(&plan).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let reported = stop.clone();
        let (sender, begun) = mpsc::channel();
        let ranks = cluster.start_ranks(0..2, move |session| {
            let lanes = 2;
            work(session, &reported, |round| {
                if round == lanes {
                    sender.send(()).unwrap();
                }
            })
        });
        // Every lane has carried data, so the nodes are connected.
        for _ in 0..2 {
            begun.recv_timeout(PATIENCE).unwrap();
        }
        Self { cluster, ranks, stop }
    }

    /// Ends the job, and checks that it was not disturbed.
    fn finish(self) {
        self.stop.store(true, Relaxed);
        let rounds = self.ranks.join().unwrap();
        assert!(rounds[0] > 0 && rounds[0] == rounds[1]);
        for ending in self.cluster.finish().unwrap() {
            assert_eq!(ending, Ending::Finished);
        }
    }

    fn ports(&self) -> [SocketAddr; 2] {
        [0, 1].map(|order: usize| self.cluster.daemons[order].data_address)
    }
}

fn knock(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// The bytes that the daemon sends until it closes the connection.
fn rest(mut stream: &TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Ok(_) => all,
        Err(error) if error.kind() == ErrorKind::ConnectionReset => all,
        Err(error) => panic!("the daemon did not close the connection: {error}"),
    }
}

/// The first message of a daemon that connects, as documented in `gradwire_daemon`'s handshake.
fn hello(cluster: &Cluster, from: u32, to: u32, lane: u32) -> Vec<u8> {
    let mut job = [0; JobId::MAX_BYTES];
    job[..cluster.job().as_str().len()].copy_from_slice(cluster.job().as_str().as_bytes());
    [
        &b"GRADWIRE"[..],
        &3u32.to_le_bytes(),
        &1u64.to_le_bytes(),
        &from.to_le_bytes(),
        &to.to_le_bytes(),
        &lane.to_le_bytes(),
        &2u32.to_le_bytes(),
        &[0; 20],
        &job,
        &[7; NONCE_BYTES],
    ]
    .concat()
}

#[test]
fn invalid_input_is_refused() {
    let job = Working::start();
    for port in job.ports() {
        let mut nonsense =
            vec![b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".repeat(8), vec![0; 136], vec![0xff; 9999]];
        for seed in 0..10 {
            let mut dice = Dice::of(&[seed]);
            nonsense.push((0..136 + dice.below(5000)).map(|_| dice.roll() as u8).collect());
        }
        // A valid hello with one changed field, and one that is cut.
        let good = hello(&job.cluster, 0, 1, 0);
        // The attempt is left out, because any number is valid there.
        for at in (0..36).chain(56..104).step_by(4) {
            let mut bytes = good.clone();
            bytes[at] ^= 0x40;
            nonsense.push(bytes);
        }
        for bytes in nonsense {
            let mut stream = knock(port);
            let _ = stream.write_all(&bytes);
            assert_eq!(rest(&stream), b"", "an answer to {:?}", &bytes[..40]);
        }
        let mut cut = knock(port);
        cut.write_all(&good[..100]).unwrap();
        cut.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(rest(&cut), b"");
    }
    job.finish();
}

/// WAIT: a handshake has one deadline, however slowly its bytes arrive.
#[test]
fn a_slow_handshake_is_given_up() {
    let job = Working::start();
    let good = hello(&job.cluster, 0, 1, 0);
    let mut stream = knock(job.ports()[1]);
    let slow = stream.try_clone().unwrap();
    let slow = thread::spawn(move || rest(&slow));
    for byte in good {
        if stream.write_all(&[byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(slow.join().unwrap(), b"");
    job.finish();
}

#[test]
fn peers_without_the_secret_are_refused() {
    let job = Working::start();
    let port = job.ports()[1];
    // A whole handshake with a wrong proof. The daemon's last byte says that the secrets differ.
    let mut stream = knock(port);
    stream.write_all(&hello(&job.cluster, 0, 1, 1)).unwrap();
    let mut challenge = [0; 64];
    stream.read_exact(&mut challenge).unwrap();
    stream.write_all(&[9; 32]).unwrap();
    assert_eq!(rest(&stream), [Admission::Secret as u8]);

    // The same with the daemon's own code.
    let dial = |secret: Secret, job: JobId, epoch| {
        let me = Identity { job, secret, epoch: Epoch(epoch), node: NodeId(0), nodes: 2, lanes: 2 };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let mut stream = tokio::net::TcpStream::connect(port).await.unwrap();
            let id = ConnectionId { peer: NodeId(1), number: 0 };
            let dialled = handshake::dial(&mut stream, &me, id, Attempt::default());
            tokio::time::timeout(PATIENCE, dialled).await.unwrap()
        })
    };
    let (secret, name) = (|| job.cluster.secret().clone(), || job.cluster.job().clone());
    // The dialling side does not accept the daemon's proof either.
    let wrong = dial(Secret::generate(), name(), 1);
    assert!(matches!(wrong, Err(HandshakeError::Secret)), "{wrong:?}");
    for other in [dial(secret(), JobId::new("other").unwrap(), 1), dial(secret(), name(), 2)] {
        assert!(matches!(other, Err(HandshakeError::Io(_))), "{other:?}");
    }
    // Even a peer that knows the secret can't replace an open connection.
    let taken = dial(secret(), name(), 1);
    let refused = matches!(taken, Err(HandshakeError::Refused(Admission::Taken)));
    assert!(refused, "{taken:?}");
    job.finish();
}

/// BOUND: there is room for 64 handshakes at once.
#[test]
fn silent_connections_are_closed() {
    let job = Working::start();
    let silent: Vec<TcpStream> =
        job.ports().iter().flat_map(|port| (0..70).map(|_| knock(*port))).collect();
    for stream in silent {
        assert_eq!(rest(&stream), b"");
    }
    job.finish();
}

/// The same before the nodes have connected to each other.
#[test]
fn silent_connections_do_not_keep_a_peer_out() {
    let cluster = Cluster::start(&Plan::nodes(&[1, 1])).unwrap();
    let silent: Vec<TcpStream> = cluster
        .daemons
        .iter()
        .flat_map(|daemon| (0..70).map(|_| knock(daemon.data_address)))
        .collect();
    let stop = AtomicBool::new(true);
    assert_eq!(cluster.ranks(move |session| work(session, &stop, drop)).unwrap(), [1, 1]);
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Finished);
    }
    drop(silent);
}

/// A peer that knows the secret is a daemon of the job. Its input is checked nevertheless.
#[test]
fn invalid_input_of_a_peer_ends_the_job() {
    let plan = Plan::nodes(&[1, 1]).set("probe.enabled=false");
    let cluster = Cluster::start(&plan).unwrap();
    let secret = cluster.secret().clone();
    let port = cluster.daemons[1].data_address;
    let failures = cluster
        .ranks(move |session| {
            // A barrier moves no data, so without a probe the nodes have not connected yet.
            session.barrier().unwrap();
            if session.rank() == 0 {
                let me = Identity {
                    job: session.job().clone(),
                    secret: secret.clone(),
                    epoch: Epoch(session.epoch()),
                    node: NodeId(0),
                    nodes: 2,
                    lanes: 2,
                };
                let runtime =
                    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    use tokio::io::AsyncWriteExt;
                    let mut stream = tokio::net::TcpStream::connect(port).await.unwrap();
                    let id = ConnectionId { peer: NodeId(1), number: 0 };
                    handshake::dial(&mut stream, &me, id, Attempt::default()).await.unwrap();
                    stream.write_all(&[0x55; 64]).await.unwrap();
                });
            }
            loop {
                if let Err(error) = session.barrier() {
                    let GradwireError::Failed(failure) = error else { panic!("{error}") };
                    return failure;
                }
            }
        })
        .unwrap();
    for failure in &failures {
        assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::Protocol, "node-0"));
        assert!(failure.what.contains("a frame begins with [55, 55, 55, 55]"), "{failure}");
    }
    for ending in cluster.finish().unwrap() {
        assert_eq!(ending, Ending::Failed(failures[0].clone()));
    }
}

/// A daemon that can't belong to the job is refused. Its worker gets the reason, and the job
/// continues.
#[test]
fn a_daemon_of_another_job_is_refused() {
    let job = Working::start();
    let secret = Secret::generate();
    let cases = [
        ("GRADWIRE_SECRET", secret.to_hex(), "secret"),
        ("GRADWIRE_JOB", "another".to_owned(), "another"),
    ];
    for (variable, value, expected) in cases {
        let socket = format!("@gradwire-{}-stray-{variable}", job.cluster.job());
        let changes = [(variable, value), ("GRADWIRE_SOCKET", socket.clone())];
        let (secret, name) = match variable {
            "GRADWIRE_SECRET" => (secret.clone(), job.cluster.job().clone()),
            _ => (job.cluster.secret().clone(), JobId::new("another").unwrap()),
        };
        // The daemon ends when it is refused. A worker that connects later finds none.
        let attempts = (0..20).map(|_| {
            let stray = job.cluster.daemon(1, &changes).unwrap();
            let builder = Session::builder(name.clone(), secret.clone(), &socket, 0);
            let worker = builder.start_timeout(PATIENCE).attach();
            (job.cluster.ended(stray).unwrap(), worker)
        });
        let in_time =
            |(_, worker): &(_, Result<_, _>)| !matches!(worker, Err(GradwireError::Connect { .. }));
        let (ending, worker) = attempts.into_iter().find(in_time).expect("a worker in time");
        let Ending::Failed(failure) = ending else { panic!("a stray daemon was admitted") };
        assert_eq!(failure.kind, FailureKind::Invalid, "{failure}");
        assert!(failure.what.contains("the coordinator at 127.0.0.1:"), "{failure}");
        assert!(failure.what.contains("refused") && failure.what.contains(expected), "{failure}");
        let reported = worker.unwrap_err();
        let GradwireError::Refused(reported) = reported else { panic!("{reported}") };
        assert_eq!(reported, failure);
    }
    job.finish();
}
