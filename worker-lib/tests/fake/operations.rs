//! The fake daemon's operations: it waits for all members, agrees with `gradwire_proto::Agreed`,
//! asks for memory for results of unexpected size, and copies or adds up each flow.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::Shutdown,
    os::unix::fs::FileExt,
    sync::atomic::Ordering::SeqCst,
    thread,
    time::Duration,
};

use gradwire_proto::{
    Agreed, Collective, DType, Failure, FailureKind, Rank, ReduceOp,
    pb::{self, daemon_message::Message},
};
use gradwire_shm::control::{Completion, Origin, Place, RingError, Submission, SubmissionReader};

use super::{Peer, World, say};

/// Process set and name.
type Key = (u32, String);

/// One round of a name: the submission of each rank.
type Round = BTreeMap<u32, Submission>;

/// An operation that waits for memory for its results.
struct Roomless {
    round: Round,
    agreed: Agreed,
    asked: BTreeSet<u32>,
}

pub(super) struct FakeState {
    sets: BTreeMap<u32, Vec<u32>>,
    next_set: u32,
    waiting: BTreeMap<Key, Round>,
    roomless: Vec<Roomless>,
    /// The joined ranks of each set, in the order of joining.
    joined: BTreeMap<u32, Vec<u32>>,
}

impl FakeState {
    pub(super) fn new(size: u32) -> Self {
        let sets = BTreeMap::from([(0, (0..size).collect())]);
        let (waiting, roomless, joined) = Default::default();
        Self { sets, next_set: 1, waiting, roomless, joined }
    }

    fn joined_in(&self, set: u32) -> &[u32] {
        self.joined.get(&set).map_or(&[], Vec::as_slice)
    }

    /// The ranks that must submit this.
    fn expected(&self, submission: &Submission) -> Vec<u32> {
        let request = &submission.request;
        let mut ranks = match request.collective {
            Collective::SendReceive => vec![request.root.0, request.list[0] as u32],
            _ => self.sets[&submission.process_set].clone(),
        };
        if request.collective != Collective::Join {
            ranks.retain(|rank| !self.joined_in(submission.process_set).contains(rank));
        }
        ranks
    }

    fn is_complete(&self, key: &Key) -> bool {
        self.waiting.get(key).and_then(|round| Some((round, round.values().next()?))).is_some_and(
            |(round, first)| self.expected(first).iter().all(|rank| round.contains_key(rank)),
        )
    }
}

/// The submission of a rank under a name, if it has not been answered.
pub(super) fn waiting(world: &World, rank: u32, name: &str) -> Option<Submission> {
    let state = world.state.lock().unwrap();
    state.waiting.get(&(0, name.to_owned()))?.get(&rank).cloned()
}

/// Reads all submissions; false if the daemon must die.
pub(super) fn read_all(world: &World, rank: u32, reader: &mut SubmissionReader) -> bool {
    while let Some(submission) = reader.pop().unwrap() {
        let name = submission.name.as_str().to_owned();
        if name.starts_with("die") {
            return false;
        }
        if name.starts_with("deaf") {
            world.peers.lock().unwrap()[&rank].stream.shutdown(Shutdown::Read).unwrap();
            world.is_deaf.store(true, SeqCst);
        }
        let stops = name.starts_with("freeze") || name.starts_with("deaf");
        while stops && !world.stop.load(SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        let mut state = world.state.lock().unwrap();
        let set = submission.process_set;
        // The preparation of an operation of several parts has the origin `Count`.
        let prepares = ["/counts", "/shapes", "/size"].iter().any(|ending| name.ends_with(ending));
        assert_eq!(prepares, submission.origin == Origin::Count, "{name}");
        if submission.request.collective == Collective::Join {
            state.joined.entry(set).or_default().push(rank);
        }
        let own = (set, name.clone());
        // A join may complete operations of others.
        let others = submission.request.collective == Collective::Join || name == "release";
        state.waiting.entry(own.clone()).or_default().insert(rank, submission);
        let mut keys = vec![own];
        if others {
            keys = state.waiting.keys().filter(|key| key.0 == set).cloned().collect();
        }
        for key in keys {
            let held = key.1.starts_with("hold") && name != "release";
            if !held && state.is_complete(&key) {
                let round = state.waiting.remove(&key).unwrap();
                answer(world, &mut state, &key.1, round);
            }
        }
    }
    true
}

fn fail(world: &World, round: &Round, failure: &Failure) {
    let peers = world.peers.lock().unwrap();
    for (rank, submission) in round {
        let tickets = vec![submission.ticket];
        let failed = pb::TensorFailed { tickets, failure: Some(failure.clone().into()) };
        peers[rank].writer.answered();
        say(&peers[rank].stream, Message::TensorFailed(failed), None);
    }
}

fn complete(world: &World, round: &Round, aux: u64) {
    let peers = world.peers.lock().unwrap();
    for (rank, submission) in round {
        let ticket = submission.ticket;
        match peers[rank].writer.push(Completion { ticket, aux }) {
            Err(RingError::CompletionsFull) => {
                say(&peers[rank].stream, Message::Completed(pb::Completed { ticket, aux }), None);
            }
            pushed => pushed.unwrap(),
        }
    }
}

fn answer(world: &World, state: &mut FakeState, name: &str, round: Round) {
    if name.starts_with("fail") {
        let failure = Failure::new(FailureKind::Disagreement, "the shapes differ").tensor(name);
        return fail(world, &round, &failure);
    }
    if name.starts_with("abort") {
        let failure = Failure::new(FailureKind::WorkerLost, "the process was killed")
            .rank(Rank(7))
            .host("n7");
        for peer in world.peers.lock().unwrap().values() {
            say(&peer.stream, Message::Aborted(failure.clone().into()), None);
        }
        return;
    }
    let first = round.values().next().unwrap();
    let (set, request) = (first.process_set, first.request.clone());
    if round.values().any(|other| other.request.common() != request.common()) {
        let failure = Failure::new(FailureKind::Disagreement, "the ranks disagree").tensor(name);
        return fail(world, &round, &failure);
    }
    match request.collective {
        Collective::Join => {
            let last = state.joined.remove(&set).unwrap().pop().unwrap();
            return complete(world, &round, u64::from(last));
        }
        Collective::AddProcessSet => {
            let id = state.next_set;
            state.next_set += 1;
            state.sets.insert(id, request.list.iter().map(|&rank| rank as u32).collect());
            return complete(world, &round, u64::from(id));
        }
        Collective::RemoveProcessSet => {
            state.sets.remove(&(request.list[0] as u32));
            return complete(world, &round, 0);
        }
        _ => {}
    }
    let members: Vec<Rank> = round.keys().map(|&rank| Rank(rank)).collect();
    let requests: Vec<_> = round.values().map(|submission| &submission.request).collect();
    let agreed = match Agreed::of(&members, &requests) {
        Ok(agreed) => agreed,
        Err(error) => {
            let failure = Failure::new(FailureKind::Invalid, error.to_string()).tensor(name);
            return fail(world, &round, &failure);
        }
    };
    let size = match request.collective {
        Collective::SendReceive => 2,
        _ => state.sets[&set].len(),
    };
    let mut asked = BTreeSet::new();
    for (rank, submission) in &round {
        if agreed.is_expected(&members, size, Rank(*rank), &submission.request) {
            continue;
        }
        asked.insert(*rank);
        let shapes = agreed.outputs(&members, Rank(*rank));
        let outputs = shapes.iter().enumerate().map(|(part, shape)| pb::Output {
            shape: shape.as_ref().map_or(vec![0], |shape| shape.dims().to_vec()),
            rows: agreed.received(&members, Rank(*rank), part),
        });
        let allocate = pb::Allocate { ticket: submission.ticket, outputs: outputs.collect() };
        say(&world.peers.lock().unwrap()[rank].stream, Message::Allocate(allocate), None);
    }
    if asked.is_empty() {
        execute(world, &round, &agreed);
    } else {
        state.roomless.push(Roomless { round, agreed, asked });
    }
}

/// A worker has allocated memory.
pub(super) fn allocated(world: &World, rank: u32, allocated: pb::Allocated) {
    let mut state = world.state.lock().unwrap();
    let at = state
        .roomless
        .iter()
        .position(|waits| {
            waits.asked.contains(&rank)
                && waits.round.get(&rank).is_some_and(|s| s.ticket == allocated.ticket)
        })
        .expect("nobody asked for this memory");
    let waits = &mut state.roomless[at];
    let places = allocated.places.iter();
    let outputs = places.map(|place| Place { segment: place.segment, offset: place.offset });
    waits.round.get_mut(&rank).unwrap().outputs = outputs.collect();
    waits.asked.remove(&rank);
    if waits.asked.is_empty() {
        let Roomless { round, agreed, .. } = state.roomless.remove(at);
        execute(world, &round, &agreed);
    }
}

fn read(peer: &Peer, place: Place, offset: u64, bytes: u64) -> Vec<u8> {
    let mut read = vec![0; bytes as usize];
    if !read.is_empty() {
        let segments = peer.segments.lock().unwrap();
        segments[&place.segment].read_exact_at(&mut read, place.offset + offset).unwrap();
    }
    read
}

/// Runs all flows. Results are written once all inputs are read (INPUT).
fn execute(world: &World, round: &Round, agreed: &Agreed) {
    let members: Vec<Rank> = round.keys().map(|&rank| Rank(rank)).collect();
    let peers = world.peers.lock().unwrap();
    let mut writes = Vec::new();
    for flow in agreed.flows(&members) {
        let part = flow.part as usize;
        let dtype = agreed.request().dtype_of(part);
        let size = dtype.size() as u64;
        let input = |rank: u32| {
            let place = round[&rank].inputs[part];
            read(&peers[&rank], place, flow.source_offset * size, flow.count * size)
        };
        let bytes = match flow.source {
            Some(rank) => input(rank.0),
            None => {
                let inputs: Vec<_> = round.keys().map(|&rank| input(rank)).collect();
                reduce(dtype, agreed.request().reduce_op, &inputs)
            }
        };
        for rank in flow.target.map_or_else(|| members.clone(), |rank| vec![rank]) {
            let place = round[&rank.0].outputs[part];
            writes.push((rank.0, place, flow.target_offset * size, bytes.clone()));
        }
    }
    for (rank, place, offset, bytes) in writes.iter().filter(|write| !write.3.is_empty()) {
        let segments = peers[rank].segments.lock().unwrap();
        segments[&place.segment].write_all_at(bytes, place.offset + offset).unwrap();
    }
    drop(peers);
    let last = world.last_answer.lock().unwrap().take();
    let is_last = |(name, _): &(String, Vec<u32>)| round.values().all(|s| s.name.as_str() == name);
    let Some((_, ranks)) = last.filter(is_last) else { return complete(world, round, 0) };
    let heard: Round = round.clone().into_iter().filter(|(rank, _)| ranks.contains(rank)).collect();
    complete(world, &heard, 0);
    for peer in world.peers.lock().unwrap().values() {
        let _ = peer.stream.shutdown(Shutdown::Both);
    }
}

fn reduce(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    macro_rules! add {
        ($t:ty) => {{
            let mut total = vec![<$t>::default(); inputs[0].len() / size_of::<$t>()];
            for input in inputs {
                for (sum, bytes) in total.iter_mut().zip(input.chunks_exact(size_of::<$t>())) {
                    *sum += <$t>::from_le_bytes(bytes.try_into().unwrap());
                }
            }
            if op == ReduceOp::Average {
                total.iter_mut().for_each(|sum| *sum /= inputs.len() as $t);
            }
            total.iter().flat_map(|n| n.to_le_bytes()).collect()
        }};
    }
    if (op, dtype) == (ReduceOp::Min, DType::U8) {
        let least = |at: usize| inputs.iter().map(|input| input[at]).min().unwrap();
        return (0..inputs[0].len()).map(least).collect();
    }
    assert!(matches!(op, ReduceOp::Sum | ReduceOp::Average), "the fake daemon can't do {op}");
    match dtype {
        DType::F32 => add!(f32),
        DType::F64 => add!(f64),
        DType::I64 => add!(i64),
        DType::U64 => add!(u64),
        other => panic!("the fake daemon can't add {other}"),
    }
}
