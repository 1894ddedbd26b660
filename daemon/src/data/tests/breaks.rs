//! Connections that break at any byte and are made again: the lanes continue with the same bits.

use std::{
    collections::HashMap,
    io::{self, ErrorKind, Read, Write},
    net::SocketAddr,
    process::Command,
    thread::sleep,
};

use socket2::{Domain, Socket, Type};

use super::*;
use crate::transport::frame::{HEADER_BYTES, Header, Totals, encode_read};

const LIMIT: Duration = Duration::from_secs(10);

/// Node `me` of two, and the test as the other node, which breaks the connection.
struct Broken {
    cluster: Cluster,
    job: Job,
    me: u32,
    /// What the test has sent and read.
    totals: Totals,
    received: Vec<u8>,
    attempt: u32,
}

impl Broken {
    /// The other node broadcasts 200 elements.
    fn new(me: u32, recovery: Duration) -> Self {
        Self::of(me, 1 - me, 200, recovery)
    }

    fn of(me: u32, source: u32, count: u64, recovery: Duration) -> Self {
        let cluster = Cluster::recovering(2, 1, 64, LIMIT, Some(recovery));
        let job = Job::new("grad", 2, 1, count, Way { source: Some(source), target: None });
        let piece = piece(0, &[&job], me, 2, Algorithm::Ring, &Topology::flat(2));
        cluster.lanes[me as usize][0].send(Order::Start(piece));
        Self { cluster, job, me, totals: Totals::default(), received: Vec::new(), attempt: 0 }
    }

    fn next(&self) -> Event {
        self.cluster.wait_for(self.me as usize)
    }

    /// Makes the connection. `lost` are the lane's counts, if it has lost one before.
    fn connect(&mut self, lost: Option<Totals>) -> TcpStream {
        self.connect_with(lost, None)
    }

    /// The same with a receive buffer of this size.
    fn connect_with(&mut self, lost: Option<Totals>, buffer: Option<usize>) -> TcpStream {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let there = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        buffer.into_iter().for_each(|bytes| there.set_recv_buffer_size(bytes).unwrap());
        there.connect(&listener.local_addr().unwrap().into()).unwrap();
        let mut there = TcpStream::from(there);
        let (stream, _) = listener.accept().unwrap();
        SockRef::from(&stream).set_send_buffer_size(1 << 20).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.attempt += 1;
        let dials = self.me == 0;
        let theirs = (!dials).then_some(self.totals);
        let (peer, attempt) = (NodeId(1 - self.me), self.attempt);
        let one = Connected { peer, number: 0, stream, window: None, attempt, theirs };
        self.cluster.lanes[self.me as usize][0].send(Order::Connected(one));
        if dials && lost.is_some_and(|lost| lost.written > 0) {
            there.write_all(&encode_read(self.totals.read, 5)).unwrap();
        }
        if !dials && self.totals.written > 0 {
            let mut count = [0; HEADER_BYTES];
            there.read_exact(&mut count).unwrap();
            // All that was sent before the break has arrived.
            assert_eq!(count, encode_read(self.totals.written, 5));
        }
        there
    }

    /// Reads what has arrived, and then breaks the connection. Returns the counts of the lane.
    fn reset(&mut self, mut there: TcpStream) -> Totals {
        // What the lane's system has acknowledged, the lane reads.
        while gradwire_net::unacknowledged(&there).unwrap() > 0 {
            sleep(Duration::from_millis(1));
        }
        there.set_nonblocking(true).unwrap();
        assert!(self.read(&mut there).is_none());
        SockRef::from(&there).set_linger(Some(Duration::ZERO)).unwrap();
        drop(there);
        let Event::Disconnected(broken) = self.next() else { panic!("it must be reported") };
        assert_eq!((broken.is_closed, broken.is_needed), (false, true));
        assert_eq!(broken.totals.read, self.totals.written);
        broken.totals
    }

    /// Reads what has arrived. Returns why the connection has ended, if it has.
    fn read(&mut self, there: &mut TcpStream) -> Option<io::Error> {
        let mut bytes = [0; 4096];
        loop {
            match there.read(&mut bytes) {
                Ok(0) => return None,
                Ok(read) => self.receives(&bytes[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(error) => return Some(error),
            }
        }
    }

    fn receives(&mut self, bytes: &[u8]) {
        self.totals.read += bytes.len() as u64;
        self.received.extend(bytes);
    }

    fn finishes(&self) {
        let event = self.next();
        assert!(matches!(event, Event::Finished), "{event:?}");
        self.cluster.stop();
        self.job.check_on(self.me);
    }
}

impl Job {
    /// A broadcast has reached this rank.
    fn check_on(&self, rank: u32) {
        let source = self.way.source.unwrap();
        let expected: Vec<f32> = (0..self.count).map(|i| value(source, i)).collect();
        assert!(self.buffers[rank as usize][0].read() == expected);
    }
}

/// The frames of a broadcast of 200 elements: one of 100, and two of 50.
fn frames(source: u32) -> Vec<u8> {
    let frame = |from: u64, to: u64| {
        let length = 4 * (to - from) as u32;
        let header = Header { sequence: 0, message: 0, offset: 4 * from, length, epoch: 5 };
        let values = (from..to).flat_map(move |i| value(source, i).to_le_bytes());
        header.encode().into_iter().chain(values)
    };
    frame(0, 100).chain(frame(100, 150)).chain(frame(150, 200)).collect()
}

/// A receiver continues at each byte around the borders of frames, and in the middle.
#[test]
fn a_receiver_continues_at_any_byte() {
    let first = HEADER_BYTES + 400;
    let borders = [0, HEADER_BYTES, first, first + HEADER_BYTES, 2 * first - 200 + HEADER_BYTES];
    let around = borders.iter().flat_map(|&at| at.saturating_sub(2)..=at + 2);
    for (cut, me) in around.chain([200, 700]).flat_map(|cut| [(cut, 0), (cut, 1)]) {
        println!("cut after {cut} bytes, node {me}");
        let mut broken = Broken::new(me, LIMIT);
        let all = frames(1 - me);
        let mut there = broken.connect(None);
        there.write_all(&all[..cut]).unwrap();
        broken.totals.written = cut as u64;
        let lost = broken.reset(there);
        let mut there = broken.connect(Some(lost));
        there.write_all(&all[cut..]).unwrap();
        broken.finishes();
    }
}

/// A sender whose piece has ended, so that its memory has other contents, sends what was lost.
#[test]
fn a_sender_sends_again_after_its_piece() {
    const COUNT: u64 = 50_000;
    for me in [0, 1] {
        let mut broken = Broken::of(me, me, COUNT, LIMIT);
        // The peer's system has room for a small part.
        let mut there = broken.connect_with(None, Some(4096));
        assert!(matches!(broken.next(), Event::Finished), "all is in the socket");
        broken.job.buffers[me as usize][0].write(&[7.0; COUNT as usize]);
        let mut some = [0; 10_000];
        there.read_exact(&mut some).unwrap();
        broken.receives(&some);
        if !kill([there.local_addr().unwrap(), there.peer_addr().unwrap()]) {
            println!("skipped: connections can't be broken here");
            return;
        }
        let end = broken.read(&mut there);
        assert_eq!(end.map(|end| end.kind()), Some(ErrorKind::ConnectionAborted));
        let Event::Disconnected(lost) = broken.next() else { panic!("it must be reported") };
        assert!(!lost.is_needed);
        let all = COUNT * 4 + COUNT * 4 / 64 * HEADER_BYTES as u64;
        assert!(broken.totals.read < all, "nothing was lost");
        let mut there = broken.connect(Some(lost.totals));
        let mut rest = vec![0; (all - broken.totals.read) as usize];
        there.read_exact(&mut rest).unwrap();
        broken.receives(&rest);
        broken.cluster.stop();
        let values = (0..COUNT).flat_map(|i| value(me, i).to_le_bytes());
        let frames = broken.received.chunks(HEADER_BYTES + 64);
        assert!(frames.flat_map(|frame| &frame[HEADER_BYTES..]).copied().eq(values));
    }
}

#[test]
fn a_connection_that_does_not_return_is_fatal() {
    for me in [0, 1] {
        let mut broken = Broken::new(me, Duration::from_millis(200));
        let mut there = broken.connect(None);
        there.write_all(&frames(1 - me)[..100]).unwrap();
        broken.totals.written = 100;
        broken.reset(there);
        let Event::Failed(failure) = broken.next() else { panic!("it must fail") };
        assert_eq!(failure.kind, FailureKind::ConnectionLost);
        assert_eq!(failure.host, format!("n{}", 1 - me));
        // Its addresses follow, unless it was reset before it was used.
        let what =
            "Connection reset by peer (os error 104), and it was not made again within 200 ms";
        assert!(failure.what.contains(what), "{failure}");
        broken.cluster.stop();
    }
}

/// TRUST: counts that can't be right are refused, by either side.
#[test]
fn counts_that_are_wrong_are_fatal() {
    for (me, written, read) in [(1, 99, 0), (1, 100, u64::MAX), (0, 100, u64::MAX)] {
        let mut broken = Broken::new(me, LIMIT);
        let mut there = broken.connect(None);
        there.write_all(&frames(1 - me)[..100]).unwrap();
        broken.totals.written = 100;
        let lost = broken.reset(there);
        if me == 0 && lost.written == 0 {
            // Nothing was sent that could be counted.
            continue;
        }
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        let theirs = (me == 1).then_some(Totals { written, read });
        let peer = NodeId(1 - me);
        let one = Connected { peer, number: 0, stream, window: None, attempt: 2, theirs };
        broken.cluster.lanes[me as usize][0].send(Order::Connected(one));
        if me == 0 {
            there.write_all(&encode_read(read, 5)).unwrap();
        }
        let Event::Failed(failure) = broken.next() else { panic!("it must fail") };
        assert_eq!(failure.kind, FailureKind::ConnectionLost, "{failure}");
        assert!(failure.what.contains("bytes were lost"), "{failure}");
        broken.cluster.stop();
    }
}

/// Connections between lanes, which are made again when they break.
struct Mesh<'a> {
    cluster: &'a Cluster,
    listener: TcpListener,
    /// The dialler's and the acceptor's address of each connection, by these nodes and its number.
    addresses: HashMap<(u32, u32, u32), [SocketAddr; 2]>,
    attempts: u32,
}

impl Mesh<'_> {
    fn connect(&mut self, (a, b, number): (u32, u32, u32), theirs: Totals) {
        let there = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        let (here, _) = self.listener.accept().unwrap();
        let addresses = [here.peer_addr().unwrap(), here.local_addr().unwrap()];
        self.addresses.insert((a, b, number), addresses);
        self.attempts += 1;
        for (node, peer, stream, theirs) in [(b, a, here, Some(theirs)), (a, b, there, None)] {
            stream.set_nonblocking(true).unwrap();
            stream.set_nodelay(true).unwrap();
            SockRef::from(&stream).set_send_buffer_size(64 << 10).unwrap();
            SockRef::from(&stream).set_recv_buffer_size(64 << 10).unwrap();
            let (peer, attempt) = (NodeId(peer), self.attempts);
            let one = Connected { peer, number, stream, window: None, attempt, theirs };
            self.cluster.lanes[node as usize][0].send(Order::Connected(one));
        }
    }

    /// Waits until a node has finished a piece. Other nodes' connections are made again.
    fn finish(&mut self, nodes: u32, pieces: usize, mut breaks: impl FnMut(&Self)) {
        let mut left = vec![pieces; nodes as usize];
        let began = Instant::now();
        while left.iter().any(|left| *left > 0) {
            assert!(began.elapsed() < Duration::from_secs(60), "the lanes are stuck: {left:?}");
            for node in 0..nodes {
                match self.cluster.events[node as usize].recv_timeout(Duration::from_millis(1)) {
                    Ok(Event::Finished) => left[node as usize] -= 1,
                    Ok(Event::Disconnected(lost)) if node < lost.peer.0 => {
                        self.connect((node, lost.peer.0, lost.number), lost.totals);
                    }
                    Ok(Event::Failed(failure)) => panic!("node {node}: {failure}"),
                    _ => {}
                }
            }
            breaks(self);
        }
    }
}

/// Breaks the connection from its end at `own`, if this is possible here. One port is not enough:
/// the system may give it to a connection of another test with another peer.
fn kill([own, peer]: [SocketAddr; 2]) -> bool {
    let [own, peer] = [own.to_string(), peer.to_string()];
    let words = ["-H", "-K", "-tn", "state", "established", "src", &own, "dst", &peer];
    let output = Command::new("ss").args(words).output();
    output.is_ok_and(|output| output.stdout.contains(&b'\n'))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Every algorithm gives the right sums while the connections are reset again and again, at
    /// either end.
    #[test]
    fn resets_at_any_time_change_no_bit(
        nodes in 2u32..5,
        streams in 1u32..3,
        chunk in prop_oneof![Just(4096u64), Just(1 << 16)],
        counts in prop::collection::vec(1u64..400_000, 1..5),
        algorithm in prop_oneof![
            1 => Just(Algorithm::RecursiveDoubling),
            2 => prop::sample::select(Algorithm::ALL),
        ],
        dice in prop::collection::vec(any::<u32>(), 64),
    ) {
        let cluster = Cluster::recovering(nodes, 1, chunk, LIMIT, Some(LIMIT));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut mesh = Mesh { cluster: &cluster, listener, addresses: HashMap::new(), attempts: 0 };
        for (a, b) in (0..nodes).flat_map(|b| (0..b).map(move |a| (a, b))) {
            (0..streams).for_each(|number| mesh.connect((a, b, number), Totals::default()));
        }
        let topology = Topology::flat(nodes);
        let jobs: Vec<Job> =
            counts.iter().map(|&count| Job::new("t", nodes, 1, count, SUM)).collect();
        for node in 0..nodes {
            for (sequence, job) in (0..).zip(&jobs) {
                let piece = piece(sequence, &[job], node, nodes, algorithm, &topology);
                cluster.lanes[node as usize][0].send(Order::Start(piece));
            }
        }
        let (mut dice, mut broken) = (dice.iter(), 0);
        mesh.finish(nodes, jobs.len(), |mesh| {
            let Some(dice) = dice.next() else { return };
            let mut connections: Vec<_> = mesh.addresses.iter().collect();
            connections.sort();
            let (_, &[dialler, acceptor]) = connections[*dice as usize % connections.len()];
            let is_dialler = *dice >> 31 == 0;
            let ends = if is_dialler { [dialler, acceptor] } else { [acceptor, dialler] };
            broken += usize::from(kill(ends));
        });
        println!("{algorithm:?}, {nodes} nodes: {broken} resets");
        cluster.stop();
        jobs.iter().for_each(Job::check);
    }
}
