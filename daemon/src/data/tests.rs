//! Real lanes over real sockets: several nodes in one process, each with its own lanes and workers'
//! segments, run the same pieces. Only the control plane is left out.

mod breaks;
mod inputs;
mod interpreted;
mod links;
mod peer;
mod pool;
mod probes;
mod quantized;
mod short;

use std::{
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, OnceLock,
        mpsc::{Receiver, Sender, channel},
    },
    time::{Duration, Instant},
};

use gradwire_collectives::{
    algorithms::{self, Algorithm, Kind, Spec},
    execution::Plan,
    topology::Topology,
};
use gradwire_kernels::{Combine, Finish, Form};
use gradwire_proto::{
    DType, Failure, FailureKind, NodeId, ProcessSetId, Rank, ReduceOp, Request, Sequence, Shape,
    TensorName,
};
use gradwire_shm::{
    control::Place,
    segment::{HugePages, Segment},
};
use proptest::prelude::*;
use socket2::SockRef;

use super::{
    lane::Lane,
    order::{Connected, Disconnected, LaneConfig, LaneEvents, Order},
    piece::{Piece, PieceSegment, Purpose, Wire},
    pool::Pool,
};
use crate::{
    model::{
        memory::WorkerMemory,
        tensor::{LocalTensor, QueuedTensor, TensorKey},
    },
    transport::{line::Line, paths::Paths},
};

#[derive(Debug)]
enum Event {
    Finished,
    Failed(Failure),
    Disconnected(Disconnected),
    Measured(Sequence, Duration),
}

#[derive(Debug)]
struct Events(Sender<Event>);

impl LaneEvents for Events {
    fn ordered(&self, _: &Piece) {}
    fn begun(&self, _: &Piece) {}
    fn finished(&self, _: &Piece, _: Option<Instant>) {
        let _ = self.0.send(Event::Finished);
    }
    fn measured(&self, sequence: Sequence, time: Duration) {
        let _ = self.0.send(Event::Measured(sequence, time));
    }
    fn failed(&self, failure: Failure) {
        let _ = self.0.send(Event::Failed(failure));
    }
    fn moved(&self, _: NodeId, _: u64, _: u64) {}
    fn disconnected(&self, connection: Disconnected) {
        let _ = self.0.send(Event::Disconnected(connection));
    }
}

/// The bytes of one tensor on one rank, in a segment of its own.
struct Buffer {
    memory: WorkerMemory,
    bytes: u64,
}

impl Buffer {
    fn new(values: &[f32]) -> Self {
        let bytes = values.len() as u64 * 4;
        let (segment, _fd) = Segment::create("test", bytes.max(4096), HugePages::Never).unwrap();
        let memory = WorkerMemory::default();
        memory.add(0, segment);
        let buffer = Self { memory, bytes };
        buffer.write(values);
        buffer
    }

    fn span(&self) -> crate::model::memory::Span {
        self.memory.resolve(Place { segment: 0, offset: 0 }, self.bytes, 4).unwrap()
    }

    fn write(&self, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let finish = identity();
        crate::model::memory::publish(
            &finish,
            &bytes,
            &[(&self.span(), 0)],
            gradwire_kernels::Store::Cached,
        );
    }

    fn read(&self) -> Vec<f32> {
        let mut bytes = vec![0; self.bytes as usize];
        let combine = Combine { dtype: DType::F32, op: ReduceOp::Sum };
        crate::model::memory::reduce(combine, 1.0, &mut bytes, &[(&self.span(), 0)], None);
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

fn identity() -> Finish {
    Finish { dtype: DType::F32, op: ReduceOp::Sum, contributors: 1, postscale: 1.0 }
}

/// The first connection with its number.
pub(crate) fn connected(peer: NodeId, number: u32, stream: TcpStream) -> Order {
    let first = Connected { peer, number, stream, window: None, attempt: 1, theirs: None };
    Order::Connected(first)
}

/// Connects the lanes of all nodes, each `streams` times. `buffer` is the size of the socket
/// buffers in bytes, if it should be small.
pub(crate) fn connect(nodes: &[&[Lane]], streams: u32, buffer: Option<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    for (lane, number) in (0..nodes[0].len()).flat_map(|l| (0..streams).map(move |n| (l, n))) {
        for a in 0..nodes.len() {
            for b in a + 1..nodes.len() {
                let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
                let (here, _) = listener.accept().unwrap();
                for (node, peer, stream) in [(a, b, there), (b, a, here)] {
                    stream.set_nonblocking(true).unwrap();
                    stream.set_nodelay(true).unwrap();
                    if let Some(bytes) = buffer {
                        SockRef::from(&stream).set_send_buffer_size(bytes).unwrap();
                        SockRef::from(&stream).set_recv_buffer_size(bytes).unwrap();
                    }
                    let peer = NodeId(peer as u32);
                    nodes[node][lane].send(connected(peer, number, stream));
                }
            }
        }
    }
}

/// Stops a lane and waits for its end.
pub(crate) fn stop(lane: &Lane) {
    while !lane.try_stop() {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Helpers of each node. Every piece of several pages is cut for them.
const HELPERS: usize = 1;

struct Cluster {
    lanes: Vec<Vec<Lane>>,
    events: Vec<Receiver<Event>>,
}

impl Cluster {
    fn new(nodes: u32, lanes: u32, chunk: u64, limit: Duration) -> Self {
        Self::recovering(nodes, lanes, chunk, limit, None)
    }

    /// Its connections may be missing for `recovery`.
    fn recovering(
        nodes: u32,
        lanes: u32,
        chunk: u64,
        limit: Duration,
        recovery: Option<Duration>,
    ) -> Self {
        let hosts: Arc<[String]> = (0..nodes).map(|n| format!("n{n}")).collect();
        let (mut all, mut events) = (Vec::new(), Vec::new());
        for me in (0..nodes).map(NodeId) {
            let (sender, receiver) = channel();
            let sink = Arc::new(Events(sender));
            let pool = Pool::eager(HELPERS);
            let start = |index| {
                let config = LaneConfig {
                    index,
                    me,
                    hosts: hosts.clone(),
                    paths: Arc::new(Paths::new(hosts.clone(), Line::Unknown)),
                    epoch: 5,
                    chunk,
                    limit,
                    recovery,
                    streaming_bytes: 1 << 16,
                    pool: pool.clone(),
                    tracer: Arc::default(),
                };
                Lane::start(config, sink.clone()).unwrap()
            };
            all.push((0..lanes).map(start).collect::<Vec<_>>());
            events.push(receiver);
        }
        Self { lanes: all, events }
    }

    fn connect(&self, streams: u32, buffer: Option<usize>) {
        connect(&self.lanes.iter().map(|lanes| &lanes[..]).collect::<Vec<_>>(), streams, buffer);
    }

    fn wait_for(&self, node: usize) -> Event {
        self.events[node].recv_timeout(Duration::from_secs(20)).expect("the lanes are stuck")
    }

    fn stop(&self) {
        self.lanes.iter().flatten().for_each(stop);
    }
}

/// The ranks between which a tensor moves; `None`: all.
#[derive(Debug, Clone, Copy)]
struct Way {
    source: Option<u32>,
    target: Option<u32>,
}

const SUM: Way = Way { source: None, target: None };

impl Way {
    fn kind(self, locals: u32) -> Kind {
        let node = |rank: u32| rank / locals;
        match (self.source.map(node), self.target.map(node)) {
            (None, None) => Kind::Allreduce,
            (Some(root), None) => Kind::Broadcast { root },
            (None, Some(root)) => Kind::Reduce { root },
            (Some(from), Some(to)) => Kind::Move { from, to },
        }
    }

    /// The nodes that take part.
    fn nodes(self, locals: u32, nodes: u32) -> Vec<u32> {
        match self.kind(locals) {
            Kind::Move { from, to } if from == to => vec![from],
            Kind::Move { from, to } => vec![from.min(to), from.max(to)],
            _ => (0..nodes).collect(),
        }
    }
}

/// A tensor on every rank, and the way that it moves.
struct Job {
    buffers: Vec<Vec<Buffer>>,
    tensors: Vec<Arc<QueuedTensor>>,
    way: Way,
    locals: u32,
    count: u64,
}

/// Small integers, so that every order of summation gives the same bits.
fn value(rank: u32, i: u64) -> f32 {
    ((i * 7 + u64::from(rank) * 3) % 64) as f32 - 20.0
}

impl Job {
    fn new(name: &str, nodes: u32, locals: u32, count: u64, way: Way) -> Self {
        let shape = Shape::new(&[count]).unwrap();
        let request = Request::allreduce(DType::F32, shape, ReduceOp::Sum);
        let key = TensorKey { set: ProcessSetId::GLOBAL, name: TensorName::new(name).unwrap() };
        let (mut buffers, mut tensors) = (Vec::new(), Vec::new());
        for node in 0..nodes {
            let first = node * locals;
            let mine: Vec<Buffer> = (first..first + locals)
                .map(|rank| Buffer::new(&(0..count).map(|i| value(rank, i)).collect::<Vec<_>>()))
                .collect();
            let parts = mine.iter().enumerate().map(|(local_rank, buffer)| LocalTensor {
                local_rank: local_rank as u32,
                ticket: 0,
                request: request.clone(),
                priority: 0,
                inputs: vec![buffer.span()],
                outputs: vec![buffer.span()],
                allocated: OnceLock::new(),
                site: Arc::default(),
            });
            let tensor = QueuedTensor::new(key.clone(), parts.collect(), Rank(first));
            tensors.push(Arc::new(tensor));
            buffers.push(mine);
        }
        Self { buffers, tensors, way, locals, count }
    }

    fn check(&self) {
        let ranks = self.buffers.len() as u32 * self.locals;
        for (rank, buffer) in (0..).zip(self.buffers.iter().flatten()) {
            let is_target = self.way.target.is_none_or(|target| target == rank);
            let expected: Vec<f32> = (0..self.count)
                .map(|i| match self.way.source {
                    // INPUT: a rank without a result still has its input.
                    _ if !is_target => value(rank, i),
                    None => (0..ranks).map(|rank| value(rank, i)).sum(),
                    Some(source) => value(source, i),
                })
                .collect();
            assert!(buffer.read() == expected, "rank {rank} of {:?}", self.way);
        }
    }
}

/// Labels of racks to choose from: some are in groups.
const RACKS: &[&str] = &["", "a", "a/1", "a/2", "b/1", "b/2"];

/// The piece of `node` with whole tensors that all move the same way.
fn piece(
    sequence: u64,
    jobs: &[&Job],
    node: u32,
    nodes: u32,
    spec: impl Into<Spec>,
    topology: &Topology,
) -> Piece {
    let count = jobs.iter().map(|job| job.count).sum();
    let (way, locals) = (jobs[0].way, jobs[0].locals);
    let participants = way.nodes(locals, nodes);
    let at = |node: u32| participants.binary_search(&node).unwrap() as u32;
    let kind = match way.kind(locals) {
        Kind::Move { from, to } => Kind::Move { from: at(from), to: at(to) },
        other => other,
    };
    let topology = topology.part(participants.iter().copied());
    let schedule = algorithms::generate(kind, spec, &topology, at(node), count);
    let mut start = 0;
    let segments = jobs
        .iter()
        .map(|job| {
            let bytes = job.count * 4;
            let tensor = job.tensors[node as usize].clone();
            let segment = PieceSegment {
                part: 0,
                sources: tensor.at(way.source.map(Rank)),
                targets: tensor.at(way.target.map(Rank)),
                source_offset: 0,
                target_offset: 0,
                tensor,
                start,
                bytes,
                errors: None,
            };
            start += bytes;
            segment
        })
        .collect();
    Piece {
        purpose: Purpose::Ranks,
        sequence: Sequence(sequence),
        combine: Combine { dtype: DType::F32, op: ReduceOp::Sum },
        prescale: 1.0,
        finish: identity(),
        wire: Wire::Ranks,
        tensors: jobs.iter().map(|job| (job.tensors[node as usize].clone(), job.count)).collect(),
        segments,
        bytes: start,
        plan: Arc::new(Plan::new(&schedule, 4)),
        nodes: participants.into_iter().map(NodeId).collect(),
        ordered: Instant::now(),
        moved: None,
        chunk: None,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Pieces of several tensors, started on the nodes at different times, give the right results.
    #[test]
    fn every_algorithm_moves_real_bytes(
        nodes in 1u32..8,
        locals in 1u32..4,
        lanes in 1u32..3,
        streams in 1u32..4,
        chunk in prop_oneof![Just(64u64), Just(4096), Just(1 << 18)],
        counts in prop::collection::vec(1u64..100_000, 1..6),
        algorithm in prop::sample::select(Algorithm::ALL),
        source in prop::option::of(0u32..16),
        target in prop::option::of(0u32..16),
        racks in prop::collection::vec(prop::sample::select(RACKS), 7),
        late in any::<bool>(),
        recovers in any::<bool>(),
        buffer in prop::sample::select(&[None, Some(32 << 10)][..]),
    ) {
        let topology = Topology::from_labels(&racks[..nodes as usize]);
        let rank = |end: Option<u32>| end.map(|rank| rank % (nodes * locals));
        let way = Way { source: rank(source), target: rank(target) };
        let limit = Duration::from_secs(10);
        let cluster = Cluster::recovering(nodes, lanes, chunk, limit, recovers.then_some(limit));
        let jobs: Vec<Job> = counts
            .iter()
            .map(|&count| Job::new("t", nodes, locals, count, way))
            .collect();
        if !late {
            cluster.connect(streams, buffer);
        }
        let participants = way.nodes(locals, nodes);
        // Two tensors per piece where there are two. The last node starts last.
        for &node in &participants {
            for (index, jobs) in jobs.chunks(2).enumerate() {
                let jobs: Vec<&Job> = jobs.iter().collect();
                let piece = piece(index as u64, &jobs, node, nodes, algorithm, &topology);
                let lane = index % lanes as usize;
                cluster.lanes[node as usize][lane].send(Order::Start(piece));
            }
        }
        if late {
            cluster.connect(streams, buffer);
        }
        for node in participants {
            for _ in jobs.chunks(2) {
                let event = cluster.wait_for(node as usize);
                prop_assert!(matches!(event, Event::Finished), "{event:?}");
            }
        }
        cluster.stop();
        jobs.iter().for_each(Job::check);
    }
}

/// A schedule for a late node works: no node has a result before the late one starts, and then all
/// have it.
#[test]
fn a_late_node_is_waited_for() {
    for (nodes, late) in (2..=5).flat_map(|nodes| (0..nodes).map(move |late| (nodes, late))) {
        let cluster = Cluster::new(nodes, 1, 4096, Duration::from_secs(10));
        cluster.connect(1, None);
        let topology = Topology::flat(nodes);
        let job = Job::new("t", nodes, 2, 30_000, SUM);
        let start = |node: u32| {
            let schedule = algorithms::late::generate(&topology, late, node, job.count);
            let plan = Arc::new(Plan::new(&schedule, 4));
            let piece = piece(0, &[&job], node, nodes, Algorithm::Direct, &topology);
            cluster.lanes[node as usize][0].send(Order::Start(Piece { plan, ..piece }));
        };
        (0..nodes).filter(|&node| node != late).for_each(start);
        for events in &cluster.events {
            let early = events.recv_timeout(Duration::from_millis(5));
            assert!(early.is_err(), "{early:?}");
        }
        start(late);
        for node in 0..nodes {
            let event = cluster.wait_for(node as usize);
            assert!(matches!(event, Event::Finished), "{event:?}");
        }
        cluster.stop();
        job.check();
    }
}

/// A piece without memory for its result still runs to its end. Neither peers nor later pieces wait
/// for it, and its lane does not count it as late. It is published once there is memory.
#[test]
fn a_piece_without_memory_delays_nothing() {
    let limit = Duration::from_millis(300);
    let cluster = Cluster::new(2, 1, 4096, limit);
    cluster.connect(2, None);
    let topology = Topology::flat(2);
    let jobs = [0, 1].map(|i| Job::new(&i.to_string(), 2, 1, 5000, Way { source: Some(0), ..SUM }));
    let piece =
        |job: usize, node| piece(job as u64, &[&jobs[job]], node, 2, Algorithm::Ring, &topology);
    let pending = &jobs[0].tensors[1];
    pending.expect_allocations(1);
    for node in [1, 0] {
        for job in [0, 1] {
            cluster.lanes[node as usize][0].send(Order::Start(piece(job, node)));
        }
    }
    for node in [0, 0, 1] {
        assert!(matches!(cluster.wait_for(node), Event::Finished));
    }
    let early = cluster.events[1].recv_timeout(3 * limit);
    assert!(early.is_err(), "{early:?}");
    let before: Vec<f32> = (0..5000).map(|i| value(1, i)).collect();
    assert!(jobs[0].buffers[1][0].read() == before, "INPUT");
    pending.set_outputs(0, vec![jobs[0].buffers[1][0].span()]);
    cluster.lanes[1][0].send(Order::Allocated);
    assert!(matches!(cluster.wait_for(1), Event::Finished));
    cluster.stop();
    jobs.iter().for_each(Job::check);
}

#[test]
fn a_peer_that_never_connects_is_named() {
    let cluster = Cluster::new(2, 1, 4096, Duration::from_millis(300));
    let job = Job::new("grad", 2, 1, 100, SUM);
    let topology = Topology::flat(2);
    let piece = piece(0, &[&job], 0, 2, Algorithm::Ring, &topology);
    cluster.lanes[0][0].send(Order::Start(piece));
    let Event::Failed(failure) = cluster.wait_for(0) else { panic!("it must fail") };
    assert_eq!(failure.kind, FailureKind::ConnectionLost);
    let text = failure.to_string();
    assert!(text.contains("host n1, tensor 'grad'") && text.contains("no connection"), "{text}");
    // INPUT: an aborted piece has not changed the rank's tensor.
    assert_eq!(job.buffers[0][0].read()[..3], [-20.0, -13.0, -6.0]);
    cluster.stop();
}

#[test]
fn invalid_data_and_a_closed_connection_differ() {
    for (bytes, kind, text) in [
        (&b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"[..], FailureKind::Protocol, "invalid data"),
        (&[][..], FailureKind::ConnectionLost, "the data connection with this host failed"),
    ] {
        let cluster = Cluster::new(2, 1, 4096, Duration::from_secs(10));
        let job = Job::new("grad", 2, 1, 100, SUM);
        let topology = Topology::flat(2);
        let piece = piece(0, &[&job], 0, 2, Algorithm::Ring, &topology);
        cluster.lanes[0][0].send(Order::Start(piece));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        cluster.lanes[0][0].send(connected(NodeId(1), 0, stream));
        std::io::Write::write_all(&mut there, bytes).unwrap();
        if bytes.is_empty() {
            // Not dropped: that would reset the connection if data has arrived by then.
            there.shutdown(Shutdown::Write).unwrap();
        }
        let Event::Failed(failure) = cluster.wait_for(0) else { panic!("it must fail") };
        assert_eq!(failure.kind, kind, "{failure}");
        assert!(failure.to_string().contains(text), "{failure}");
        cluster.stop();
    }
}
