//! Whole collectives between real lanes. The orders of a coordinator for random requests go through
//! the registry, the queue, the builder of pieces and the lanes of several nodes in one process.
//! Each rank's results are compared with the definition of the collective.

mod reference;

use std::{
    collections::BTreeMap,
    sync::{
        OnceLock,
        mpsc::{Receiver, Sender, channel},
    },
    time::Duration,
};

use gradwire_collectives::algorithms::Algorithm;
use gradwire_proto::{
    Agreed, Collective, DType, NodeId, ProcessSetId, Rank, ReduceOp, Request, Shape, TensorName,
    convert::TensorRef, pb,
};
use proptest::prelude::*;

use self::reference::{Bytes, Case, KINDS, Taker, encode, requests, value};
use super::*;
use crate::{
    control::registry::Registry,
    data::{
        feedback::Feedback,
        order::{Disconnected, LaneConfig, LaneEvents},
        piece::Piece,
        pool::Pool,
        tests::{connect, stop},
    },
    model::{
        agreement::OutputShapes,
        members::Members,
        operation::Instruction,
        tensor::{LocalTensor, TensorKey, pair},
        world::tests::world,
    },
    transport::{line::Line, paths::Paths},
};

#[derive(Debug)]
enum Event {
    /// The tensors that ended with this piece.
    Finished(Vec<TensorKey>),
    Failed(Failure),
}

#[derive(Debug)]
struct Events(Sender<Event>);

impl LaneEvents for Events {
    fn ordered(&self, _: &Piece) {}
    fn begun(&self, _: &Piece) {}
    fn finished(&self, piece: &Piece, _: Option<Instant>) {
        let last = piece.tensors.iter().filter(|(tensor, elements)| tensor.published(*elements));
        let _ = self.0.send(Event::Finished(last.map(|(tensor, _)| tensor.key.clone()).collect()));
    }
    fn measured(&self, _: Sequence, _: Duration) {}
    fn failed(&self, failure: Failure) {
        let _ = self.0.send(Event::Failed(failure));
    }
    fn moved(&self, _: NodeId, _: u64, _: u64) {}
    fn disconnected(&self, _: Disconnected) {}
}

/// One node: all parts between the coordinator's stream and the workers' sockets.
struct TestNode {
    world: Arc<World>,
    registry: Registry,
    builder: Builder,
    pending: PendingAllocations,
    lanes: Vec<Lane>,
    events: Receiver<Event>,
}

const SET: ProcessSetId = ProcessSetId(5);

fn key() -> TensorKey {
    TensorKey { set: SET, name: TensorName::new("t").unwrap() }
}

impl TestNode {
    fn new(me: u32, slots: &[u32], lanes: u32, set: &[Rank]) -> Self {
        let world = Arc::new(world(me, slots));
        let mut registry = Registry::new(world.clone());
        let created = pb::SetCreated {
            process_set: SET.0,
            ranks: set.iter().map(|rank| rank.0).collect(),
            tensor: Some(TensorRef::Name(TensorName::new("make").unwrap()).into()),
        };
        let spec =
            |(id, algorithm): (u32, &Algorithm)| pb::Spec { id, text: algorithm.name().to_owned() };
        let specs = (1..).zip(Algorithm::ALL).map(spec).collect();
        let created = pb::Execute { sets_created: vec![created], specs, ..Default::default() };
        registry.instructions(created).unwrap();
        let everybody = Arc::new(Members::everybody(&world));
        let queue = Arc::new(TensorQueue::new(world.me().first_rank, everybody));
        let members = Members::of(&world, set.to_vec()).unwrap();
        assert!(queue.create_set(SET, Arc::new(members)));
        let (sender, events) = channel();
        let sink = Arc::new(Events(sender));
        let hosts: Arc<[String]> = slots.iter().map(|n| format!("n{n}")).collect();
        let pool = Pool::eager(0);
        let start = |index| {
            let config = LaneConfig {
                index,
                me: world.node,
                hosts: hosts.clone(),
                paths: Arc::new(Paths::new(hosts.clone(), Line::Unknown)),
                epoch: 5,
                chunk: 256,
                limit: Duration::from_secs(20),
                recovery: None,
                streaming_bytes: 1 << 10,
                pool: pool.clone(),
                tracer: Arc::default(),
            };
            Lane::start(config, sink.clone()).unwrap()
        };
        let lanes = (0..lanes).map(start).collect();
        let plans = Plans::new(&world);
        let builder = Builder {
            queue,
            plans,
            compression: world.compression,
            feedback: Feedback::new(1 << 20),
        };
        Self { world, registry, builder, pending: PendingAllocations::default(), lanes, events }
    }

    fn submit(&self, taker: &mut Taker, set: &[Rank]) {
        let request = taker.request.clone();
        let position = set.binary_search(&taker.rank).unwrap();
        let expected = request.expected(taker.rank, set.len(), position);
        let parts = 0..request.parts();
        for part in parts {
            let dtype = request.dtype_of(part);
            let elements = request.shape_of(part).elements();
            let numbers = (0..elements).map(|i| value(taker.rank, part, i) as f64);
            taker
                .inputs
                .push(Bytes::new(&numbers.flat_map(|n| encode(dtype, n)).collect::<Vec<_>>()));
            let size = expected[part].shape.as_ref().map_or(0, Shape::elements) as usize;
            taker.outputs.push(Bytes::new(&vec![0xEE; size * dtype.size()]));
        }
        let local = LocalTensor {
            local_rank: self.world.local(taker.rank).unwrap(),
            ticket: 1,
            request,
            priority: 0,
            inputs: taker.inputs.iter().map(Bytes::span).collect(),
            outputs: taker.outputs.iter().map(Bytes::span).collect(),
            allocated: OnceLock::new(),
            site: Arc::default(),
        };
        self.builder.queue.submit(key(), local);
    }

    fn send(&self, sequence: Sequence, order: Order) {
        self.lanes[sequence.0 as usize % self.lanes.len()].send(order);
    }

    /// Starts the operations that concern this node. Returns their number, and the allocations that
    /// ranks must make.
    fn execute(&mut self, execute: pb::Execute) -> (usize, Vec<AllocationRequest>) {
        let mut wanted = Vec::new();
        let instructions = self.registry.instructions(execute).unwrap();
        let operations = instructions.len();
        for instruction in instructions {
            let Instruction::Start(operation) = instruction else { panic!("{instruction:?}") };
            let (piece, more) = self.builder.build(operation).unwrap();
            let sequence = piece.sequence;
            self.pending.admit(piece, &more, |order| self.send(sequence, order));
            wanted.extend(more);
        }
        (operations, wanted)
    }

    fn set_outputs(&self, taker: &mut Taker, outputs: &OutputShapes) {
        let answer = Ticket { local_rank: self.world.local(taker.rank).unwrap(), ticket: 1 };
        assert_eq!(self.pending.asked(answer).unwrap().outputs, *outputs);
        let sizes = outputs.iter().enumerate().map(|(part, (shape, _))| {
            shape.as_ref().map_or(0, Shape::elements) as usize * taker.request.dtype_of(part).size()
        });
        taker.outputs = sizes.map(|bytes| Bytes::new(&vec![0xEE; bytes])).collect();
        let spans = taker.outputs.iter().map(Bytes::span).collect();
        self.pending.resolve(answer, spans, |sequence, order| self.send(sequence, order));
        self.lanes.iter().for_each(|lane| lane.send(Order::Allocated));
        assert!(self.pending.asked(answer).is_none());
    }

    /// Waits for `operations` operations; returns how many tensors they completed.
    fn finish(&self, operations: usize) -> usize {
        let mut completed = 0;
        for _ in 0..operations {
            let event = self.events.recv_timeout(Duration::from_secs(20));
            match event.expect("the lanes are stuck") {
                Event::Finished(keys) => completed += keys.len(),
                Event::Failed(failure) => panic!("{failure}"),
            }
        }
        completed
    }
}

/// The orders of a coordinator: every tensor is cut into ranges of at most `cut`, and two ranges of
/// one element type are fused.
fn orders(agreed: &Agreed, members: &[Rank], absent: &[Rank], cut: u64) -> pb::Execute {
    let whole = agreed.request();
    let segment = |part: u32, offset: u64, count: u64| pb::Segment {
        tensor: Some(TensorRef::Name(key().name).into()),
        part,
        offset,
        count,
        agreed: Some(agreed.into()),
    };
    let mut kinds: BTreeMap<_, Vec<pb::Segment>> = BTreeMap::new();
    for part in 0..whole.parts() {
        let flows = agreed.flows_of(members, part);
        let longest = flows.iter().map(|flow| flow.count).max().unwrap_or(0);
        let mut offset = 0;
        while offset < longest {
            let count = cut.min(longest - offset);
            let segment = segment(part as u32, offset, count);
            kinds.entry(whole.dtype_of(part)).or_default().push(segment);
            offset += count;
        }
    }
    let mut pieces: Vec<(DType, Vec<pb::Segment>)> = Vec::new();
    for (dtype, segments) in kinds {
        pieces.extend(segments.chunks(2).map(|chunk| (dtype, chunk.to_vec())));
    }
    if pieces.is_empty() {
        pieces.push((whole.dtype, vec![segment(u32::MAX, 0, 0)]));
    }
    let operation = |(sequence, (dtype, segments)): (u64, (DType, Vec<pb::Segment>))| {
        let request =
            Request { dtype, shape: Shape::default(), list: vec![], more: vec![], ..whole.clone() };
        pb::Operation {
            sequence,
            process_set: SET.0,
            request: Some((&request).into()),
            spec: sequence as u32 % Algorithm::ALL.len() as u32 + 1,
            segments,
            absent: absent.iter().map(|rank| rank.0).collect(),
            quantized: false,
            chunk_bytes: 0,
        }
    };
    pb::Execute { operations: (3..).zip(pieces).map(operation).collect(), ..Default::default() }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Every collective gives every rank the right result, for any process set and any joined
    /// ranks, on one node and on several. Every node is notified once that it is done.
    #[test]
    fn every_collective_gives_the_right_results(
        slots in prop::collection::vec(1u32..4, 1..5),
        in_set in prop::collection::vec(any::<bool>(), 12),
        is_absent in prop::collection::vec(any::<bool>(), 12),
        collective in prop::sample::select(&KINDS[..]),
        op in prop::sample::select(&[ReduceOp::Sum, ReduceOp::Max, ReduceOp::Average][..]),
        dice in prop::collection::vec(any::<u8>(), 24),
        cut in 1u64..200,
        lanes in 1u32..3,
    ) {
        let size: u32 = slots.iter().sum();
        let pick = |ranks: &[Rank], chosen: &[bool]| {
            let some: Vec<Rank> = ranks.iter().copied().filter(|r| chosen[r.0 as usize]).collect();
            if some.is_empty() { ranks[..1].to_vec() } else { some }
        };
        let all: Vec<Rank> = (0..size).map(Rank).collect();
        let set = pick(&all, &in_set);
        let works_without = matches!(
            collective,
            Collective::Allreduce | Collective::Reduce | Collective::Broadcast
                | Collective::Allgather | Collective::Gather | Collective::Barrier
        );
        let members = if works_without { pick(&set, &is_absent) } else { set.clone() };
        let takers = if collective == Collective::SendReceive {
            let mut two = vec![set[0], set[set.len() - 1]];
            two.dedup();
            two
        } else {
            members.clone()
        };
        let absent: Vec<Rank> = set.iter().copied().filter(|r| !members.contains(r)).collect();
        let requests = requests(collective, op, &takers, &dice);
        for request in &requests {
            request.validate().unwrap();
        }
        let agreed = Agreed::of(&takers, &requests.iter().collect::<Vec<_>>()).unwrap();

        let mut nodes: Vec<TestNode> = (0..slots.len() as u32)
            .map(|me| TestNode::new(me, &slots, lanes, &set))
            .collect();
        connect(&nodes.iter().map(|node| &node.lanes[..]).collect::<Vec<_>>(), 2, None);
        let home = nodes[0].world.clone();
        let node_of = |rank: Rank| home.node_of(rank).unwrap().0 as usize;
        for rank in &absent {
            let node = &nodes[node_of(*rank)];
            let answer = Ticket { local_rank: node.world.local(*rank).unwrap(), ticket: 9 };
            node.builder.queue.join(SET, answer, Request::empty(Collective::Join), 0).unwrap();
        }
        let mut case = Case { collective, op, takers: Vec::new() };
        for (rank, request) in takers.iter().zip(requests) {
            let mut taker =
                Taker { rank: *rank, request, inputs: Vec::new(), outputs: Vec::new() };
            nodes[node_of(*rank)].submit(&mut taker, &set);
            case.takers.push(taker);
        }
        let execute = orders(&agreed, &takers, &absent, cut);
        let mut started = Vec::new();
        for node in &mut nodes {
            started.push(node.execute(execute.clone()));
        }
        for (node, (_, wanted)) in nodes.iter().zip(&started) {
            for AllocationRequest { answer, outputs, .. } in wanted.iter().rev() {
                let rank = Rank(node.world.me().first_rank.0 + answer.local_rank);
                let taker = case.takers.iter_mut().find(|taker| taker.rank == rank).unwrap();
                node.set_outputs(taker, outputs);
            }
        }
        for (node, (operations, _)) in nodes.iter().zip(&started) {
            let completed = node.finish(*operations);
            let concerned = takers.iter().any(|rank| node.world.local(*rank).is_some());
            prop_assert_eq!(completed, usize::from(concerned), "reported done once");
        }
        nodes.iter().flat_map(|node| &node.lanes).for_each(stop);
        prop_assert!(pair(&case.takers[0].request).is_none() || case.takers.len() <= 2);
        case.check();
    }
}

/// Two ranks on one node that were asked to allocate the result of an allgather.
fn asked_for_room() -> TestNode {
    let set = [Rank(0), Rank(1)];
    let mut node = TestNode::new(0, &[2], 1, &set);
    let rows =
        |rows| Request::plain(Collective::Allgather, DType::F32, Shape::new(&[rows]).unwrap());
    let requests = [rows(1), rows(2)];
    for (rank, request) in set.iter().zip(&requests) {
        let mut taker =
            Taker { rank: *rank, request: request.clone(), inputs: vec![], outputs: vec![] };
        node.submit(&mut taker, &set);
    }
    let agreed = Agreed::of(&set, &requests.iter().collect::<Vec<_>>()).unwrap();
    let (_, wanted) = node.execute(orders(&agreed, &set, &[], 100));
    assert_eq!(wanted.len(), 2);
    node
}

/// WAIT: a rank that is asked to allocate and does not answer is reported, once.
#[test]
fn a_missing_allocation_is_reported() {
    let node = asked_for_room();
    let (now, limit) = (Instant::now(), Duration::from_secs(5));
    assert_eq!(node.pending.overdue(now, limit), []);
    let late = node.pending.overdue(now + limit * 2, limit);
    let late: Vec<_> =
        late.iter().map(|late| (late.answer.local_rank, late.name.as_str())).collect();
    assert_eq!(late, [(0, "t"), (1, "t")]);
    assert_eq!(node.pending.overdue(now + limit * 2, limit), []);
    node.lanes.iter().for_each(stop);
}

/// TRUST, ONE: an order that arrives twice, or for a tensor that was never submitted, is refused
/// before any byte is moved.
#[test]
fn orders_that_do_not_fit_the_past_are_refused() {
    let set = [Rank(0)];
    let mut node = TestNode::new(0, &[1], 1, &set);
    let request = Request::allreduce(DType::F32, Shape::new(&[4]).unwrap(), ReduceOp::Sum);
    let agreed = Agreed::of(&set, &[&request]).unwrap();
    let execute = orders(&agreed, &set, &[], 100);
    let order = |node: &mut TestNode| {
        let mut instructions = node.registry.instructions(execute.clone()).unwrap();
        let Some(Instruction::Start(operation)) = instructions.pop() else { panic!("an order") };
        node.builder.build(operation).map(|_| ()).map_err(|failure| failure.what)
    };
    let text = order(&mut node).unwrap_err();
    assert!(text.contains("'t' is not in flight here"), "{text}");
    let mut taker = Taker { rank: Rank(0), request, inputs: vec![], outputs: vec![] };
    node.submit(&mut taker, &set);
    assert_eq!(order(&mut node), Ok(()));
    let text = order(&mut node).unwrap_err();
    assert!(text.contains("moves more elements of 't' than exist"), "{text}");
    node.lanes.iter().for_each(stop);
}
