//! The operation manager: turns what the coordinator ordered into pieces that lanes can run.
//!
//! It looks the tensors up in the queue, the schedule up among those it has generated before, and
//! hands the piece to its lane. It decides nothing that another node has to decide too: that is
//! the coordinator's (SAME).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Instant,
};

use gradwire_collectives::{
    algorithms::{self, Algorithm, Kind},
    kernels::{Combine, Finish},
    schedule::Schedule,
    topology::Topology,
};
use gradwire_proto::{Collective, Failure, FailureKind, NodeId, Sequence};

use crate::{
    executor::{
        lane::{Lane, Order},
        piece::{Piece, PieceSegment},
        plan::Plan,
    },
    negotiate::{Operation, World},
    queue::TensorQueue,
    transport::mesh::Mesh,
};

/// Schedules kept for reuse (BOUND). A training step needs a few: one per size of piece.
const PLANS: usize = 256;

/// What a schedule depends on besides the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct PlanKey {
    kind: Kind,
    algorithm: Algorithm,
    count: u64,
    element: u64,
}

/// Starts operations.
#[derive(Debug)]
pub(crate) struct OperationManager {
    world: Arc<World>,
    queue: Arc<TensorQueue>,
    lanes: Arc<[Lane]>,
    mesh: Arc<Mesh>,
    topology: Topology,
    nodes: Arc<[NodeId]>,
    alone: Arc<[NodeId]>,
    plans: Mutex<HashMap<PlanKey, Arc<Plan>>>,
    idle: Arc<Plan>,
}

fn protocol(sequence: Sequence, what: impl std::fmt::Display) -> Failure {
    let what = format!("the coordinator ordered operation {sequence}, but {what}");
    Failure::new(FailureKind::Protocol, what)
}

impl OperationManager {
    pub(crate) fn new(
        world: Arc<World>,
        queue: Arc<TensorQueue>,
        lanes: Arc<[Lane]>,
        mesh: Arc<Mesh>,
    ) -> Self {
        let racks: Vec<&str> = world.nodes.iter().map(|n| n.rack.as_str()).collect();
        let topology = Topology::from_labels(&racks);
        let nodes = (0..world.nodes.len() as u32).map(NodeId).collect();
        let alone = Arc::from([world.node]);
        let empty = Schedule { participants: 1, me: 0, blocks: Vec::new(), steps: Vec::new() };
        let idle = Arc::new(Plan::new(&empty, 1));
        let plans = Mutex::new(HashMap::new());
        Self { world, queue, lanes, mesh, topology, nodes, alone, plans, idle }
    }

    /// Starts an operation.
    ///
    /// # Errors
    /// A [`Failure`] when the order does not fit what was announced: the coordinator and this
    /// node disagree on the past, which nothing can mend.
    pub(crate) fn start(&self, operation: Operation) -> Result<(), Failure> {
        let sequence = operation.sequence;
        let request = &operation.request;
        let element = request.dtype.size() as u64;
        let mut segments = Vec::with_capacity(operation.segments.len());
        let mut start = 0;
        for segment in operation.segments {
            let name = &segment.tensor.name;
            let tensor = self
                .queue
                .announced(&segment.tensor)
                .ok_or_else(|| protocol(sequence, format!("'{name}' is not in flight here")))?;
            let end = segment.offset.checked_add(segment.count);
            let fits = request.fuses_with(tensor.request())
                && end.is_some_and(|end| end <= tensor.request().shape.elements());
            if !fits {
                return Err(protocol(sequence, format!("it is not what was asked of '{name}'")));
            }
            let bytes = segment.count * element;
            segments.push(PieceSegment { tensor, offset: segment.offset * element, start, bytes });
            start += bytes;
        }
        let moves = start > 0 && request.collective != Collective::Barrier;
        let across = moves && self.world.nodes.len() > 1;
        let (plan, nodes) = if across {
            let kind = self.kind(&operation.request, sequence)?;
            let key =
                PlanKey { kind, algorithm: operation.algorithm, count: start / element, element };
            (self.plan(key), self.nodes.clone())
        } else {
            (self.idle.clone(), self.alone.clone())
        };
        for &peer in &plan.peers {
            self.mesh.need(nodes[peer as usize]);
        }
        let reduce_op = request.reduce_op;
        let piece = Piece {
            sequence,
            combine: Combine { dtype: request.dtype, op: reduce_op },
            prescale: request.prescale,
            finish: Finish {
                dtype: request.dtype,
                op: reduce_op,
                contributors: match request.collective {
                    Collective::Allreduce => self.world.size(),
                    _ => 1,
                },
                postscale: request.postscale,
            },
            segments,
            bytes: start,
            plan,
            nodes,
            ordered: Instant::now(),
        };
        let lane = sequence.0 % self.lanes.len() as u64;
        self.lanes[lane as usize].tell(Order::Start(piece));
        Ok(())
    }

    fn kind(&self, request: &gradwire_proto::Request, sequence: Sequence) -> Result<Kind, Failure> {
        if request.collective != Collective::Broadcast {
            return Ok(Kind::Allreduce);
        }
        let root = self.world.node_of(request.root);
        let root =
            root.ok_or_else(|| protocol(sequence, format!("rank {} is nowhere", request.root)))?;
        Ok(Kind::Broadcast { root: root.0 })
    }

    fn plan(&self, key: PlanKey) -> Arc<Plan> {
        let mut plans = self.plans.lock().expect("no panic while it is held");
        if let Some(plan) = plans.get(&key) {
            return plan.clone();
        }
        let me = self.world.node.0;
        let PlanKey { kind, algorithm, count, element } = key;
        let schedule = algorithms::generate(kind, algorithm, &self.topology, me, count);
        let plan = Arc::new(Plan::new(&schedule, element));
        if plans.len() >= PLANS {
            // A training step repeats itself: whoever comes here has changing shapes, for which
            // no choice of victim is right.
            plans.clear();
        }
        plans.insert(key, plan.clone());
        plan
    }
}
