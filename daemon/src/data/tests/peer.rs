//! A lane whose peer is the test itself, frame by frame.

use std::io::Write;

use super::*;
use crate::transport::frame::Header;

/// The chunk size of the node: no frame inside a block may be smaller.
const CHUNK: u64 = 16;

/// A node that waits for a broadcast of `count` elements from node 1, and the test's ends of its
/// connections with that node.
struct Waiting {
    cluster: Cluster,
    job: Job,
    peers: Vec<TcpStream>,
}

impl Waiting {
    fn new(count: u64, streams: u32) -> Self {
        let cluster = Cluster::new(2, 1, CHUNK, Duration::from_secs(10));
        let way = Way { source: Some(1), target: None };
        let job = Job::new("grad", 2, 1, count, way);
        let piece = piece(0, &[&job], 0, 2, Algorithm::Ring, &Topology::flat(2));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |number| {
            let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (stream, _) = listener.accept().unwrap();
            stream.set_nonblocking(true).unwrap();
            cluster.lanes[0][0].send(connected(NodeId(1), number, stream));
            there
        };
        let peers = (0..streams).map(connect).collect();
        cluster.lanes[0][0].send(Order::Start(piece));
        Self { cluster, job, peers }
    }

    /// Sends some elements of the broadcast.
    fn send(&self, stream: usize, elements: std::ops::Range<u64>) {
        let length = 4 * (elements.end - elements.start) as u32;
        let header =
            Header { sequence: 0, message: 0, offset: 4 * elements.start, length, epoch: 5 };
        let values = elements.flat_map(|i| value(1, i).to_le_bytes());
        let frame: Vec<u8> = header.encode().into_iter().chain(values).collect();
        (&self.peers[stream]).write_all(&frame).unwrap();
    }
}

/// The first frame may arrive last.
#[test]
fn frames_may_arrive_on_any_connection() {
    let waiting = Waiting::new(1000, 3);
    for (stream, elements) in [(2, 700..1000), (0, 100..200), (1, 200..700)] {
        waiting.send(stream, elements);
        // Without a pause, they would sometimes arrive in order.
        let early = waiting.cluster.events[0].recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "{early:?}");
    }
    waiting.send(2, 0..100);
    assert!(matches!(waiting.cluster.wait_for(0), Event::Finished));
    waiting.cluster.stop();
    let expected: Vec<f32> = (0..1000).map(|i| value(1, i)).collect();
    assert!(waiting.job.buffers[0][0].read() == expected);
}

/// ONE, TRUST: no byte is accepted twice or outside of its block, and no element partly.
#[test]
fn frames_that_do_not_fit_are_fatal() {
    let sends: [&[(usize, std::ops::Range<u64>)]; 3] =
        [&[(0, 0..50), (1, 49..60)], &[(0, 50..60), (1, 40..70)], &[(0, 60..101)]];
    for frames in sends {
        let waiting = Waiting::new(100, 2);
        for (stream, elements) in frames {
            waiting.send(*stream, elements.clone());
        }
        let Event::Failed(failure) = waiting.cluster.wait_for(0) else { panic!("{frames:?}") };
        assert_eq!(failure.kind, FailureKind::Protocol, "{failure}");
        assert!(failure.to_string().contains("not whole new elements"), "{failure}");
        waiting.cluster.stop();
    }
    for (offset, length) in [(2, 4), (4, 6), (u64::MAX - 3, 4), (1 << 40, 4)] {
        let waiting = Waiting::new(100, 1);
        let header = Header { sequence: 0, message: 0, offset, length, epoch: 5 };
        (&waiting.peers[0]).write_all(&header.encode()).unwrap();
        let Event::Failed(failure) = waiting.cluster.wait_for(0) else { panic!("{offset}") };
        assert_eq!(failure.kind, FailureKind::Protocol, "{failure}");
        waiting.cluster.stop();
    }
}

/// BOUND: each early frame takes memory besides its bytes, so there must not be millions of them.
#[test]
fn tiny_frames_are_refused() {
    let waiting = Waiting::new(100, 1);
    waiting.send(0, 0..96);
    // The end of the block may be short.
    waiting.send(0, 97..100);
    waiting.send(0, 96..97);
    let Event::Failed(failure) = waiting.cluster.wait_for(0) else { panic!("it must fail") };
    assert_eq!(failure.kind, FailureKind::Protocol, "{failure}");
    assert!(failure.to_string().contains("bytes 384+4"), "{failure}");
    waiting.cluster.stop();
}

/// The data that a peer sent before it closed its end is read to the last byte. A truncated frame
/// is a lost connection.
#[test]
fn data_is_read_before_the_end_of_a_connection() {
    let waiting = Waiting::new(100_000, 1);
    waiting.send(0, 0..100_000);
    waiting.peers[0].shutdown(std::net::Shutdown::Write).unwrap();
    assert!(matches!(waiting.cluster.wait_for(0), Event::Finished));
    waiting.cluster.stop();

    let mut waiting = Waiting::new(100, 1);
    waiting.send(0, 0..50);
    waiting.peers.clear();
    let Event::Failed(failure) = waiting.cluster.wait_for(0) else { panic!("it must fail") };
    assert_eq!(failure.kind, FailureKind::ConnectionLost, "{failure}");
    waiting.cluster.stop();
}
