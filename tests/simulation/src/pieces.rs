//! Carries out operations with real schedules, whole messages at a time. What a message contains is
//! read from the piece when it is written to a connection, as in a daemon. So its bytes are kept
//! before a step writes over them, and before the piece ends ([`Sent::keep`]).
//!
//! [`Sent::keep`]: gradwire_daemon::transport::sent::Sent::keep

use std::sync::Arc;

use gradwire_collectives::{Action, Algorithm, Kind, Schedule, Topology, generate};
use gradwire_coordinator::model::command::{Operation, Segment};
use gradwire_daemon::transport::{frame::Header, sent::Chunk};
use gradwire_proto::{NodeId, ReduceOp};

use crate::{
    coordinator::FromNode,
    daemon::{Daemon, Key},
    lines::Line,
    plants::Plant,
    world::{Pid, World},
};

/// The bytes of an element.
pub(crate) const ELEMENT: u64 = 8;
/// The most bytes of a chunk.
const CHUNK: u64 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waits,
    /// The number of chunks of a message that were not written yet.
    Sends(u32),
    Done,
}

/// A range of a tensor in a piece.
#[derive(Debug)]
struct Range {
    key: Key,
    offset: usize,
    count: usize,
}

#[derive(Debug)]
pub(crate) struct Piece {
    number: u64,
    /// The nodes that take part.
    nodes: Vec<NodeId>,
    schedule: Arc<Schedule>,
    steps: Vec<State>,
    reduction: ReduceOp,
    ranges: Vec<Range>,
    /// The elements of all ranges.
    work: Vec<u64>,
}

fn combine(reduction: ReduceOp, one: u64, other: u64) -> u64 {
    match reduction {
        ReduceOp::Min => one.min(other),
        ReduceOp::Max => one.max(other),
        _ => one.wrapping_add(other),
    }
}

impl Piece {
    /// The elements of a step, in the order of its message.
    fn elements(&self, step: usize) -> impl Iterator<Item = usize> + '_ {
        self.schedule.steps.at(step).blocks().flat_map(|block| {
            let block = self.schedule.blocks[block as usize];
            block.offset as usize..(block.offset + block.count) as usize
        })
    }

    /// The bytes of a chunk from one of them on, as they are now.
    pub(crate) fn payload(&self, chunk: &Chunk, from: u64) -> Vec<u8> {
        let all = self.elements(chunk.step as usize).flat_map(|at| self.work[at].to_le_bytes());
        let Header { offset, length, .. } = chunk.header;
        all.skip((offset + from) as usize).take((u64::from(length) - from) as usize).collect()
    }

    /// A chunk was written to its end.
    pub(crate) fn sent(&mut self, chunk: &Chunk) {
        let state = &mut self.steps[chunk.step as usize];
        *state = match *state {
            State::Sends(left) if left > 1 => State::Sends(left - 1),
            _ => State::Done,
        };
    }

    fn is_ready(&self, step: usize) -> bool {
        let after = self.schedule.steps.at(step).after;
        self.steps[step] == State::Waits
            && after.iter().all(|before| self.steps[*before as usize] == State::Done)
    }
}

impl Daemon {
    /// Begins an operation.
    pub(crate) fn start(&mut self, world: &mut World, operation: Operation) {
        let number = operation.sequence.0;
        world.check.starts(self.epoch, self.pid, number, &operation);
        let members = self.sets.get(&operation.set).cloned().unwrap_or_default();
        let mut nodes: Vec<NodeId> = members.iter().map(|rank| self.node_of(*rank)).collect();
        nodes.dedup();
        let Some(me) = nodes.iter().position(|node| *node == self.node) else { return };
        let range = |segment: &Segment| Range {
            key: self.key(operation.set, &segment.tensor),
            offset: segment.offset as usize,
            count: segment.count as usize,
        };
        let ranges: Vec<Range> = operation.segments.iter().map(range).collect();
        let count: usize = ranges.iter().map(|range| range.count).sum();
        let topology = Topology::flat(nodes.len() as u32);
        let schedule =
            generate(Kind::Allreduce, Algorithm::Ring, &topology, me as u32, count as u64);
        let piece = Piece {
            number,
            nodes,
            steps: vec![State::Waits; schedule.steps.len()],
            schedule: Arc::new(schedule),
            reduction: operation.request.reduce_op,
            ranges,
            work: vec![0; count],
        };
        self.pieces.insert(number, piece);
        self.advance(world, number);
    }

    /// Reduces the local contributions to some elements of a piece, in the order of the ranks.
    fn reduce(&self, world: &World, piece: &mut Piece, elements: &[usize]) {
        let mut begin = 0;
        for Range { key, offset, count } in &piece.ranges {
            let tensor = self.tensors.get(key);
            let submitted = tensor.into_iter().flat_map(|tensor| tensor.submitted.values());
            let mut is_first = true;
            for (pid, _) in submitted {
                let Some(buffer) = world.memory.get(&(self.pid, *pid, key.clone())) else {
                    continue;
                };
                for &at in elements.iter().filter(|at| (begin..begin + count).contains(*at)) {
                    let own = buffer.data[at - begin + offset];
                    let before = piece.work[at];
                    piece.work[at] =
                        if is_first { own } else { combine(piece.reduction, before, own) };
                }
                is_first = false;
            }
            begin += count;
        }
    }

    /// Does what a piece may do now.
    pub(crate) fn advance(&mut self, world: &mut World, number: u64) {
        let Some(mut piece) = self.pieces.remove(&number) else { return };
        let mut is_moving = true;
        while is_moving {
            is_moving = false;
            for step in 0..piece.steps.len() {
                if piece.is_ready(step) && self.step(world, &mut piece, step) {
                    is_moving = true;
                }
            }
        }
        let is_published = |step: usize| piece.schedule.steps.at(step).action == Action::Publish;
        let rest = (0..piece.steps.len()).filter(|step| piece.steps[*step] != State::Done);
        if rest.clone().all(is_published) {
            self.finish(world, piece);
        } else {
            self.pieces.insert(number, piece);
        }
        self.pump_all(world);
    }

    /// Takes a step that waits for nothing more. Returns false if it must wait for data.
    fn step(&mut self, world: &mut World, piece: &mut Piece, step: usize) -> bool {
        let action = piece.schedule.steps.at(step).action;
        match action {
            Action::ReduceLocal => {
                let elements: Vec<usize> = piece.elements(step).collect();
                self.reduce(world, piece, &elements);
            }
            Action::Send { peer, message } => {
                let bytes = piece.elements(step).count() as u64 * ELEMENT;
                let peer = piece.nodes[peer as usize];
                let chunks = (0..bytes).step_by(CHUNK as usize).map(|offset| Chunk {
                    header: Header {
                        sequence: piece.number,
                        message,
                        offset,
                        length: (bytes - offset).min(CHUNK) as u32,
                        epoch: self.epoch as u32,
                    },
                    step: step as u32,
                });
                let line = self.lines.entry(peer.0).or_insert_with(Line::new);
                let before = line.waiting.len();
                line.waiting.extend(chunks);
                let count = (line.waiting.len() - before) as u32;
                piece.steps[step] = if count > 0 { State::Sends(count) } else { State::Done };
                return true;
            }
            Action::RecvReduce { peer, message, .. } | Action::RecvCopy { peer, message } => {
                let elements: Vec<usize> = piece.elements(step).collect();
                let peer = piece.nodes[peer as usize];
                let place = (piece.number, peer.0, message);
                let here = self.early.get(&place).map_or(0, Vec::len);
                if here < elements.len() * ELEMENT as usize {
                    return false;
                }
                self.keep(world, piece, Some(step));
                let bytes = self.early.remove(&place).unwrap_or_default();
                for (at, bytes) in elements.into_iter().zip(bytes.chunks(ELEMENT as usize)) {
                    let value = u64::from_le_bytes(bytes.try_into().expect("a whole element"));
                    let old = piece.work[at];
                    let is_copy = matches!(action, Action::RecvCopy { .. });
                    piece.work[at] =
                        if is_copy { value } else { combine(piece.reduction, old, value) };
                }
            }
            // Once the piece is complete (INPUT).
            Action::Publish if !world.has(Plant::PartialResult) => return false,
            Action::Publish => {
                let elements: Vec<usize> = piece.elements(step).collect();
                self.publish(world, piece, &elements, false);
            }
        }
        piece.steps[step] = State::Done;
        true
    }

    /// Keeps what peers may lack of a piece, before a step writes over it, or all of it.
    fn keep(&mut self, world: &World, piece: &Piece, step: Option<usize>) {
        if world.has(Plant::Overwritten) {
            return;
        }
        let steps = &piece.schedule.steps;
        let which = |chunk: &Chunk| {
            let overlaps = |step| steps.at(chunk.step as usize).shares_blocks(&steps.at(step));
            chunk.header.sequence == piece.number && step.is_none_or(overlaps)
        };
        for line in self.lines.values_mut() {
            if line.sent.has(which) {
                line.look(world, self.pid);
                line.sent.keep(which, |chunk, from| piece.payload(chunk, from));
            }
        }
    }

    /// Writes elements of the result to the local ranks.
    fn publish(&self, world: &mut World, piece: &Piece, elements: &[usize], is_complete: bool) {
        let mut begin = 0;
        for Range { key, offset, count } in &piece.ranges {
            let pids: Vec<Pid> = self
                .tensors
                .get(key)
                .into_iter()
                .flat_map(|tensor| tensor.submitted.values().map(|(pid, _)| *pid))
                .collect();
            for pid in pids {
                let Some(buffer) = world.memory.get_mut(&(self.pid, pid, key.clone())) else {
                    continue;
                };
                for &at in elements.iter().filter(|at| (begin..begin + count).contains(*at)) {
                    buffer.data[at - begin + offset] = piece.work[at];
                    buffer.written[at - begin + offset] |= is_complete;
                }
            }
            begin += count;
        }
    }

    fn finish(&mut self, world: &mut World, mut piece: Piece) {
        let all: Vec<usize> = (0..piece.work.len()).collect();
        self.publish(world, &piece, &all, true);
        self.keep(world, &piece, None);
        // Its memory belongs to others now.
        piece.work.iter_mut().for_each(|element| *element = !*element);
        let number = piece.number;
        for Range { key, count, .. } in &piece.ranges {
            let Some(tensor) = self.tensors.get_mut(key) else { continue };
            tensor.covered += *count as u64;
            let wanted = tensor.submitted.values().next().map(|(_, request)| request);
            let wanted = wanted.map_or(0, |request| request.shape.elements());
            if tensor.covered >= wanted {
                self.complete(world, key, Ok(None));
            }
        }
        if world.has(Plant::Overwritten) {
            self.gone.insert(number, piece);
        }
        self.tell_coordinator(world, FromNode::Done(number));
    }

    /// The bytes of a chunk that is sent.
    pub(crate) fn payload(&self, chunk: &Chunk, from: u64) -> Vec<u8> {
        let number = chunk.header.sequence;
        let piece = self.pieces.get(&number).or_else(|| self.gone.get(&number));
        piece.expect("a piece keeps what it has sent").payload(chunk, from)
    }
}
