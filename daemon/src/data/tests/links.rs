//! Links that are slow, silent, delayed or broken, and lanes that wait for each other over them.

use std::{
    io::{Read, Write},
    thread::{self, sleep},
};

use super::*;
use crate::transport::frame::{HEADER_BYTES, Header, Totals};

const LIMIT: Duration = Duration::from_millis(800);

/// Both ends of a connection: the first for a lane, the second for the test.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (stream, _) = listener.accept().unwrap();
    stream.set_nonblocking(true).unwrap();
    (stream, there)
}

/// Breaks a connection: the other end gets a reset.
fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
}

/// Node `me` of two, which waits for a broadcast of 100 elements from the test as the other node.
struct Waiting {
    cluster: Cluster,
    job: Job,
    me: u32,
}

impl Waiting {
    fn new(me: u32) -> Self {
        let cluster = Cluster::new(2, 1, 1 << 16, LIMIT);
        let job = Job::new("grad", 2, 1, 100, Way { source: Some(1 - me), target: None });
        Self { cluster, job, me }
    }

    fn send(&self, order: Order) {
        self.cluster.lanes[self.me as usize][0].send(order);
    }

    fn connect(&self, attempt: u32, theirs: Option<Totals>) -> TcpStream {
        let (stream, there) = connection();
        let peer = NodeId(1 - self.me);
        let one = Connected { peer, number: 0, stream, window: None, attempt, theirs };
        self.send(Order::Connected(one));
        there
    }

    fn start(&self) {
        let topology = Topology::flat(2);
        let piece = piece(0, &[&self.job], self.me, 2, Algorithm::Ring, &topology);
        self.send(Order::Start(piece));
    }

    /// A frame with the whole broadcast.
    fn frame(&self) -> Vec<u8> {
        let header = Header { sequence: 0, message: 0, offset: 0, length: 400, epoch: 5 };
        let values = (0..100).flat_map(|i| value(1 - self.me, i).to_le_bytes());
        header.encode().into_iter().chain(values).collect()
    }

    fn next(&self) -> Event {
        self.cluster.wait_for(self.me as usize)
    }

    fn fails(&self) -> Failure {
        match self.next() {
            Event::Failed(failure) => failure,
            other => panic!("it must fail: {other:?}"),
        }
    }

    fn finishes(self) {
        let event = self.next();
        assert!(matches!(event, Event::Finished), "{event:?}");
        self.cluster.stop();
        let expected: Vec<f32> = (0..100).map(|i| value(1 - self.me, i)).collect();
        assert!(self.job.buffers[self.me as usize][0].read() == expected);
    }
}

/// WAIT: the limit is for a link without activity, not for a piece.
#[test]
fn a_piece_takes_as_long_as_its_line_does() {
    let waiting = Waiting::new(0);
    let mut there = waiting.connect(1, None);
    waiting.start();
    for part in waiting.frame().chunks(40) {
        there.write_all(part).unwrap();
        sleep(LIMIT / 4);
    }
    waiting.finishes();
}

#[test]
fn a_stalled_line_names_the_peers_host() {
    let waiting = Waiting::new(0);
    let mut there = waiting.connect(1, None);
    waiting.start();
    there.write_all(&waiting.frame()[..100]).unwrap();
    let failure = waiting.fails();
    assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::ConnectionLost, "n1"));
    let what = "no data has moved for 800 ms: nothing gets through between n1 and n0";
    assert_eq!(failure.what, what);
    waiting.cluster.stop();
}

/// Data that the peer's system has not acknowledged has not moved, even if our own system accepted
/// it.
#[test]
fn a_peer_that_receives_nothing_is_reported() {
    let cluster = Cluster::new(2, 1, 1 << 16, LIMIT);
    let job = Job::new("grad", 2, 1, 5_000_000, Way { source: Some(0), target: None });
    let (stream, _there) = connection();
    cluster.lanes[0][0].send(connected(NodeId(1), 0, stream));
    let piece = piece(0, &[&job], 0, 2, Algorithm::Ring, &Topology::flat(2));
    cluster.lanes[0][0].send(Order::Start(piece));
    let Event::Failed(failure) = cluster.wait_for(0) else { panic!("it must fail") };
    assert_eq!(failure.host, "n1", "{failure}");
    cluster.stop();
}

/// TELL: one of three nodes is silent; the others wait for it and for each other.
#[test]
fn all_nodes_name_the_silent_one() {
    // Most of the time is spent waiting.
    thread::scope(|scope| {
        for silent in 0..3 {
            scope.spawn(move || {
                Algorithm::ALL.iter().for_each(|algorithm| silent_node_is_named(silent, *algorithm))
            });
        }
    });
}

fn silent_node_is_named(silent: u32, algorithm: Algorithm) {
    let cluster = Cluster::new(3, 1, 1 << 16, LIMIT);
    cluster.connect(1, None);
    let job = Job::new("grad", 3, 1, 300_000, SUM);
    let others = (0..3).filter(|node| *node != silent);
    for node in others.clone() {
        let piece = piece(0, &[&job], node, 3, algorithm, &Topology::flat(3));
        cluster.lanes[node as usize][0].send(Order::Start(piece));
    }
    for node in others {
        let Event::Failed(failure) = cluster.wait_for(node as usize) else { panic!() };
        let named = failure.host.as_str();
        assert_eq!(named, format!("n{silent}"), "{algorithm:?}, node {node}: {failure}");
    }
    cluster.stop();
}

/// A connection that broke between two frames is reported, and the next one takes over.
#[test]
fn a_connection_replaces_a_broken_one() {
    for (me, started) in [(0, false), (0, true), (1, true)] {
        let waiting = Waiting::new(me);
        let there = waiting.connect(1, None);
        if started {
            waiting.start();
        }
        reset(there);
        let Event::Disconnected(broken) = waiting.next() else { panic!("node {me}") };
        assert_eq!((broken.peer, broken.lane, broken.number), (NodeId(1 - me), 0, 0));
        assert_eq!((broken.totals, broken.is_closed), (Totals::default(), false));
        let theirs = (me == 1).then(Totals::default);
        let mut there = waiting.connect(2, theirs);
        if !started {
            waiting.start();
        }
        there.write_all(&waiting.frame()).unwrap();
        waiting.finishes();
    }
}

/// The accepting side may notice the break only when the connection is replaced.
#[test]
fn data_before_a_replacement_counts() {
    let waiting = Waiting::new(1);
    waiting.start();
    let mut first = waiting.connect(1, None);
    let frame = waiting.frame();
    first.write_all(&frame).unwrap();
    let totals = Totals { written: frame.len() as u64, read: 0 };
    let _second = waiting.connect(2, Some(totals));
    waiting.finishes();
}

/// Bytes in flight are lost. The side that compares the counts reports that immediately.
#[test]
fn a_connection_that_lost_bytes_is_not_replaced() {
    for (written, read) in [(432, 0), (0, 32)] {
        let waiting = Waiting::new(1);
        let there = waiting.connect(1, None);
        waiting.start();
        reset(there);
        assert!(matches!(waiting.next(), Event::Disconnected(_)));
        let began = Instant::now();
        let _there = waiting.connect(2, Some(Totals { written, read }));
        let failure = waiting.fails();
        assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::ConnectionLost, "n0"));
        assert!(failure.what.contains("bytes were lost"), "{failure} {:?}", began.elapsed());
        waiting.cluster.stop();
    }
}

#[test]
fn a_connection_broken_within_a_frame_is_fatal() {
    let waiting = Waiting::new(0);
    let mut there = waiting.connect(1, None);
    waiting.start();
    there.write_all(&waiting.frame()[..200]).unwrap();
    sleep(Duration::from_millis(50));
    reset(there);
    let failure = waiting.fails();
    assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::ConnectionLost, "n1"));
    waiting.cluster.stop();
}

/// A waiting node sends notices to those that may wait for it.
#[test]
fn notices_are_sent_only_while_a_piece_waits() {
    let waiting = Waiting::new(0);
    let mut there = waiting.connect(1, None);
    there.set_read_timeout(Some(LIMIT / 2)).unwrap();
    let mut notice = [0; HEADER_BYTES];
    assert!(there.read_exact(&mut notice).is_err(), "{notice:?}");
    waiting.start();
    there.read_exact(&mut notice).unwrap();
    assert_eq!(notice[..8], [b'G', b'W', 2, 1, 1, 0, 0, 0]);
    there.write_all(&waiting.frame()).unwrap();
    waiting.finishes();
}

/// TELL: orders for a lane are not dropped silently.
#[test]
fn a_panic_is_reported_as_an_internal_failure() {
    let waiting = Waiting::new(0);
    waiting.send(Order::Panic);
    waiting.start();
    let failure = waiting.fails();
    assert_eq!((failure.kind, failure.host.as_str()), (FailureKind::Internal, "n0"));
    assert!(failure.what.contains("a data thread of gradwired has panicked: it was asked to"));
    waiting.cluster.stop();
}
