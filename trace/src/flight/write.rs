//! The daemon's side of a recording. Nothing here waits, allocates or makes a system call.

use std::{
    ops::Range,
    sync::atomic::{
        AtomicU64,
        Ordering::{Acquire, Relaxed, Release},
    },
};

use super::{
    layout::{
        EVENTS, KEPT, MAGIC, MAX_DIMS, MAX_FAILURE, Outcome, RANK_WORDS, RANKS, SLOT, event,
        fitting, header, operation, rank, room, words,
    },
    read::Operation,
};

/// Numbers that are not known yet.
const UNKNOWN: u64 = u64::MAX;

/// An operation that a rank has submitted. The numbers of its kinds are those of the wire.
#[derive(Debug, Clone, Copy)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Submitted<'a> {
    /// The rank's number for it, not 0.
    pub ticket: u64,
    pub name: &'a str,
    /// Where the program has called it; empty if it is not known.
    pub site: &'a str,
    pub collective: u8,
    pub dtype: u8,
    pub reduce_op: u8,
    pub process_set: u32,
    pub root: u32,
    /// The receiver of a message; otherwise 0.
    pub receiver: u64,
    /// The size of the rank's contribution.
    pub bytes: u64,
    pub tensors: u16,
    /// The shape of the first tensor.
    pub dims: &'a [u64],
}

/// The recording of a node, in memory that may be shared. Cheap to make.
#[derive(Debug, Clone, Copy)]
pub struct Flight<'a>(&'a [AtomicU64]);

impl<'a> Flight<'a> {
    /// Begins a recording in memory of zeros, with [`words()`](super::words) for `ranks`.
    pub fn begin(memory: &'a [AtomicU64], ranks: u32, job: &str, host: &str, order: u32) -> Self {
        debug_assert_eq!(memory.len(), words(ranks as usize));
        let flight = Self(memory);
        flight.set(header::RANKS, ranks.into());
        flight.set(header::NODE, order.into());
        flight.set(header::ERROR, UNKNOWN);
        flight.set(header::PID, std::process::id().into());
        let (unix_ns, at_ns) = crate::time::beside(unix_ns);
        flight.set(header::UNIX, unix_ns);
        flight.set(header::UNIX_AT, at_ns);
        flight.text(header::JOB, job);
        flight.text(header::HOST, host);
        memory[0].store(MAGIC, Release);
        flight
    }

    /// The recording that has begun in this memory.
    pub fn of(memory: &'a [AtomicU64]) -> Self {
        Self(memory)
    }

    fn set(&self, word: usize, value: u64) {
        self.0[word].store(value, Release);
    }

    fn text(&self, place: Range<usize>, text: &str) {
        put(&self.0[place], text);
    }

    /// The world has formed.
    pub fn formed(&self, first_rank: u32, ranks: u32, nodes: u32, epoch: u64, node: u32) {
        self.set(header::FIRST_RANK, first_rank.into());
        self.set(header::NODE, node.into());
        self.set(header::SIZE, ranks.into());
        self.set(header::EPOCH, epoch);
        self.set(header::NODES, nodes.into());
    }

    /// How a time becomes one of the coordinator's clock, as far as it is known now.
    pub fn clock(&self, to_common_ns: i64, error_ns: u64) {
        self.set(header::TO_COMMON, to_common_ns.cast_unsigned());
        self.set(header::ERROR, error_ns);
    }

    /// The memory is about to be saved.
    pub fn saved(&self, at_ns: u64) {
        self.set(header::SAVED, at_ns);
    }

    /// The job has ended with this failure, as JSON. If it is longer than
    /// [`MAX_FAILURE`](super::MAX_FAILURE), nothing is recorded.
    pub fn failed(&self, at_ns: u64, failure: &str) {
        self.set(header::FAILED, at_ns);
        if failure.len() <= MAX_FAILURE {
            self.text(header::FAILURE, failure);
        }
    }

    /// A process set was created. A set that does not fit is left out. Called by one thread.
    pub fn add_set(&self, set: u32, ranks: &[u32]) {
        let table = &self.0[header::SETS];
        let mut at = 0;
        while at < table.len() {
            let count = (table[at].load(Relaxed) >> 32) as usize;
            if count == 0 {
                break;
            }
            at += 1 + count.div_ceil(2);
        }
        let end = at + 1 + ranks.len().div_ceil(2);
        let Some(free) = table.get(at..end).filter(|_| !ranks.is_empty()) else { return };
        for (word, pair) in free[1..].iter().zip(ranks.chunks(2)) {
            let second = pair.get(1).copied().unwrap_or_default();
            word.store(u64::from(pair[0]) | u64::from(second) << 32, Release);
        }
        free[0].store(u64::from(set) | (ranks.len() as u64) << 32, Release);
    }

    /// Records an event: the first line of its text, up to a limit. Any thread may do that. The
    /// level is 0 for an error and grows with less important events.
    pub fn event(&self, at_ns: u64, level: u8, text: &str) {
        let number = self.0[header::EVENTS].fetch_add(1, Relaxed);
        let first = EVENTS + (number % KEPT as u64) as usize * SLOT;
        let slot = &self.0[first..first + SLOT];
        slot[0].store(0, Relaxed);
        slot[event::AT].store(at_ns, Release);
        slot[event::LEVEL].store(level.into(), Release);
        let line = text.lines().next().unwrap_or_default();
        let fits = line.floor_char_boundary(room(event::TEXT.len()));
        put(&slot[event::TEXT], &line[..fits]);
        slot[0].store(number + 1, Release);
    }

    fn rank(&self, local_rank: u32) -> Option<&'a [AtomicU64]> {
        let first = RANKS.checked_add((local_rank as usize).checked_mul(RANK_WORDS)?)?;
        self.0.get(first..first + RANK_WORDS)
    }

    /// A process has attached as this rank.
    pub fn attached(&self, local_rank: u32, pid: u32, at_ns: u64) {
        let Some(memory) = self.rank(local_rank) else { return };
        memory[rank::PID].store(pid.into(), Release);
        memory[rank::ATTACHED].store(at_ns, Release);
    }

    /// A rank has left, or its connection has ended.
    pub fn gone(&self, local_rank: u32, at_ns: u64) {
        if let Some(memory) = self.rank(local_rank) {
            memory[rank::GONE].store(at_ns, Release);
        }
    }

    /// A rank has submitted an operation. Called by one thread for each rank.
    pub fn submitted(&self, local_rank: u32, at_ns: u64, it: &Submitted<'_>) {
        let Some(memory) = self.rank(local_rank).filter(|_| it.ticket != 0) else { return };
        let number = memory[rank::COUNT].fetch_add(1, Relaxed) + 1;
        let slot = slot(memory, it.ticket);
        let dims = &it.dims[..it.dims.len().min(MAX_DIMS)];
        let kinds = [it.collective, it.dtype, it.reduce_op, 0, dims.len() as u8, 0];
        let [low, high] = it.tensors.to_le_bytes();
        let [a, b, c, d, e, f] = kinds;
        let put_word = |word: usize, value: u64| slot[word].store(value, Release);
        slot[operation::TICKET].store(0, Relaxed);
        put_word(operation::SUBMITTED, at_ns);
        for word in operation::ANNOUNCED..=operation::SEQUENCE {
            put_word(word, 0);
        }
        put_word(operation::BYTES, it.bytes);
        put_word(operation::KINDS, u64::from_le_bytes([a, b, c, d, e, f, low, high]));
        put_word(operation::SET, u64::from(it.process_set) | u64::from(it.root) << 32);
        put_word(operation::NUMBER, number);
        put_word(operation::PEER, it.receiver);
        for (word, dim) in slot[operation::DIMS..].iter().zip(dims) {
            word.store(*dim, Release);
        }
        put(&slot[operation::NAME], it.name);
        put(&slot[operation::SITE], it.site);
        put_word(operation::TICKET, it.ticket);
    }

    /// The slot of an operation that is still kept.
    fn known(&self, local_rank: u32, ticket: u64) -> Option<&'a [AtomicU64]> {
        let slot = slot(self.rank(local_rank)?, ticket);
        (ticket != 0 && slot[operation::TICKET].load(Acquire) == ticket).then_some(slot)
    }

    /// Notes a time, unless it is noted already.
    fn note(&self, local_rank: u32, ticket: u64, word: usize, at_ns: u64) -> bool {
        let slot = self.known(local_rank, ticket).filter(|slot| slot[word].load(Relaxed) == 0);
        slot.inspect(|slot| slot[word].store(at_ns, Release)).is_some()
    }

    /// All local ranks had submitted the tensor of this operation.
    pub fn announced(&self, local_rank: u32, ticket: u64, at_ns: u64) {
        self.note(local_rank, ticket, operation::ANNOUNCED, at_ns);
    }

    /// The first order for it has arrived. `sequence` is its place in the order of the job, if it
    /// has one.
    pub fn ordered(&self, local_rank: u32, ticket: u64, at_ns: u64, sequence: Option<u64>) {
        if self.note(local_rank, ticket, operation::ORDERED, at_ns)
            && let Some(slot) = self.known(local_rank, ticket)
        {
            let word = sequence.map_or(0, |sequence| sequence.wrapping_add(1));
            slot[operation::SEQUENCE].store(word, Release);
        }
    }

    /// The first byte of it has moved.
    pub fn begun(&self, local_rank: u32, ticket: u64, at_ns: u64) {
        self.note(local_rank, ticket, operation::BEGUN, at_ns);
    }

    /// It has ended.
    pub fn ended(&self, local_rank: u32, ticket: u64, at_ns: u64, outcome: Outcome) {
        let Some(slot) = self.known(local_rank, ticket) else { return };
        slot[operation::KINDS].fetch_or(u64::from(outcome as u8) << 24, Relaxed);
        self.note(local_rank, ticket, operation::ENDED, at_ns);
    }

    /// An operation that is still kept.
    pub fn operation(&self, local_rank: u32, ticket: u64) -> Option<Operation> {
        copied(self.known(local_rank, ticket)?)
    }

    /// The last operations of a rank, the newest first.
    pub fn last(&self, local_rank: u32, count: usize) -> Vec<Operation> {
        let Some(memory) = self.rank(local_rank) else { return Vec::new() };
        let mut slots: Vec<&[AtomicU64]> = memory[SLOT..].chunks_exact(SLOT).collect();
        slots.sort_by_key(|slot| std::cmp::Reverse(slot[operation::NUMBER].load(Relaxed)));
        slots.into_iter().take(count).filter_map(copied).collect()
    }

    /// How many operations a rank has submitted.
    pub fn count(&self, local_rank: u32) -> u64 {
        self.rank(local_rank).map_or(0, |memory| memory[rank::COUNT].load(Relaxed))
    }
}

fn slot(rank: &[AtomicU64], ticket: u64) -> &[AtomicU64] {
    let first = SLOT + (ticket % KEPT as u64) as usize * SLOT;
    &rank[first..first + SLOT]
}

/// An operation, if its slot did not change meanwhile.
fn copied(slot: &[AtomicU64]) -> Option<Operation> {
    let words: [u64; SLOT] = std::array::from_fn(|word| slot[word].load(Acquire));
    let is_same = slot[operation::TICKET].load(Relaxed) == words[operation::TICKET];
    Operation::of(&words).filter(|_| is_same)
}

fn put(place: &[AtomicU64], text: &str) {
    let text = fitting(text, room(place.len())).as_bytes();
    place[0].store(text.len() as u64, Release);
    let (whole, rest) = text.as_chunks::<8>();
    for (word, bytes) in place[1..].iter().zip(whole) {
        word.store(u64::from_le_bytes(*bytes), Release);
    }
    if !rest.is_empty() {
        let mut padded = [0; 8];
        padded[..rest.len()].copy_from_slice(rest);
        place[1 + whole.len()].store(u64::from_le_bytes(padded), Release);
    }
}

fn unix_ns() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
}
