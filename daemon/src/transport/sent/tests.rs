//! A model of both ends: whatever breaks, the peer reads the bytes that were sent first.

use proptest::prelude::*;

use super::*;

/// The memory of the piece, of which chunks are sent.
const MEMORY: u16 = 256;

#[derive(Debug, Clone)]
enum Event {
    /// A chunk with these bytes of the memory is carried, if there is room for a frame.
    Chunk(u16, u16),
    Notice,
    /// At most this many bytes are written.
    Write(u16),
    /// At most this many of the written bytes reach the peer's system.
    Deliver(u16),
    /// At most this many of these are read by the peer.
    Read(u16),
    /// The peer's system acknowledges what it has, except for at most this many bytes.
    Acknowledge(u16),
    /// These bytes of the memory change, once no chunk with them is waiting to be written.
    Change(u16, u16),
    Break,
}

fn event() -> impl Strategy<Value = Event> {
    let part = || (0..MEMORY - 40, 1u16..40);
    prop_oneof![
        3 => part().prop_map(|(at, bytes)| Event::Chunk(at, bytes)),
        1 => Just(Event::Notice),
        6 => (1u16..90).prop_map(Event::Write),
        4 => (1u16..90).prop_map(Event::Deliver),
        2 => (1u16..90).prop_map(Event::Read),
        2 => (0u16..50).prop_map(Event::Acknowledge),
        2 => part().prop_map(|(at, bytes)| Event::Change(at, bytes)),
        1 => Just(Event::Break),
    ]
}

fn overlaps(chunk: &Chunk, at: u16, bytes: u16) -> bool {
    let (from, to) = (chunk.header.offset, chunk.header.offset + u64::from(chunk.header.length));
    from < u64::from(at + bytes) && u64::from(at) < to
}

struct Model {
    sent: Sent,
    memory: Vec<u8>,
    /// The chunks that were carried and are not whole yet: their bytes may not change.
    waiting: Vec<Chunk>,
    /// What the peer must read in the end.
    expected: Vec<u8>,
    /// On the way, in the peer's system, and read by the peer.
    way: VecDeque<u8>,
    there: VecDeque<u8>,
    read: Vec<u8>,
    next: u8,
}

impl Model {
    fn new() -> Self {
        Self {
            sent: Sent::new(true),
            memory: (0..MEMORY).map(|at| at as u8).collect(),
            waiting: Vec::new(),
            expected: Vec::new(),
            way: VecDeque::new(),
            there: VecDeque::new(),
            read: Vec::new(),
            next: 0,
        }
    }

    fn carry(&mut self, chunk: Option<(u16, u16)>) {
        if !self.sent.is_free() {
            return;
        }
        self.next = self.next.wrapping_add(1);
        let (offset, length) = chunk.map_or((0, 0), |(at, bytes)| (at.into(), bytes.into()));
        let header = Header { sequence: self.next.into(), message: 0, offset, length, epoch: 5 };
        let chunk = chunk.map(|_| Chunk { header, step: 0 });
        self.expected.extend(header.encode());
        self.expected.extend(&self.memory[offset as usize..][..length as usize]);
        self.waiting.extend(chunk);
        self.sent.carry(header.encode(), chunk);
    }

    fn write(&mut self, most: u16) {
        let Some(due) = self.sent.due() else { return };
        let payload = match due.payload {
            Payload::None => &[][..],
            Payload::Kept(bytes) => bytes,
            Payload::Piece(chunk, from) => {
                let end = chunk.header.offset + u64::from(chunk.header.length);
                &self.memory[(chunk.header.offset + from) as usize..end as usize]
            }
        };
        let all = due.header.iter().chain(payload).copied();
        let before = self.way.len();
        self.way.extend(all.take(most.into()));
        if let Some(news) = self.sent.wrote((self.way.len() - before) as u64)
            && news.is_whole
        {
            let was_waiting = self.waiting.len();
            self.waiting.retain(|chunk| *chunk != news.chunk);
            assert_eq!(self.waiting.len() + 1, was_waiting, "a chunk is whole once");
        }
    }

    fn deliver(&mut self, most: usize) {
        let count = most.min(self.way.len());
        self.there.extend(self.way.drain(..count));
    }

    fn receive(&mut self, most: usize) {
        let count = most.min(self.there.len());
        self.read.extend(self.there.drain(..count));
    }

    fn acknowledge(&mut self, all_but: u16) {
        let there = self.read.len() + self.there.len();
        self.sent.has_arrived((there as u64).saturating_sub(all_but.into()));
    }

    fn break_off(&mut self) {
        self.way.clear();
        self.receive(usize::MAX);
        let (written, moved) = (self.sent.written(), self.sent.moved());
        let again = self.sent.resume(self.read.len() as u64).unwrap();
        assert_eq!(again, written - self.read.len() as u64);
        assert_eq!((self.sent.written(), self.sent.moved()), (written - again, moved));
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Chunk(at, bytes) => self.carry(Some((at, bytes))),
            Event::Notice => self.carry(None),
            Event::Write(most) => self.write(most),
            Event::Deliver(most) => self.deliver(most.into()),
            Event::Read(most) => self.receive(most.into()),
            Event::Acknowledge(all_but) => self.acknowledge(all_but),
            Event::Break => self.break_off(),
            Event::Change(at, bytes) => {
                if self.waiting.iter().any(|chunk| overlaps(chunk, at, bytes)) {
                    return;
                }
                let memory = &mut self.memory;
                let copy = |chunk: &Chunk, from: u64| {
                    let Header { offset, length, .. } = chunk.header;
                    memory[(offset + from) as usize..(offset + u64::from(length)) as usize].to_vec()
                };
                self.sent.keep(|chunk| overlaps(chunk, at, bytes), copy);
                assert!(!self.sent.has(|chunk| overlaps(chunk, at, bytes)));
                for byte in &mut memory[at.into()..(at + bytes).into()] {
                    *byte = byte.wrapping_mul(5).wrapping_add(3);
                }
            }
        }
    }

    fn finish(&mut self) {
        while self.sent.due().is_some() {
            self.write(u16::MAX);
        }
        self.deliver(usize::MAX);
        self.receive(usize::MAX);
        assert!(self.waiting.is_empty());
        assert!(self.read == self.expected, "{:?} instead of {:?}", self.read, self.expected);
        self.acknowledge(0);
        assert_eq!(self.sent.remembered(), 0, "nothing is remembered");
        assert_eq!(self.sent.written(), self.expected.len() as u64);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn breaks_at_any_byte_change_no_byte(events in prop::collection::vec(event(), 0..120)) {
        let mut model = Model::new();
        for event in events {
            model.happens(event);
        }
        model.finish();
    }
}

/// A break after every byte, with and without a change of the memory meanwhile.
#[test]
fn a_stream_continues_at_every_byte() {
    for changes in [false, true] {
        for at in 0..3 * HEADER_BYTES + 50 {
            let mut model = Model::new();
            for event in [Event::Chunk(0, 30), Event::Notice, Event::Chunk(20, 20)] {
                model.happens(event);
                model.write(u16::MAX);
            }
            model.deliver(at);
            if changes {
                model.acknowledge(0);
                model.happens(Event::Change(10, 20));
            }
            model.break_off();
            model.finish();
        }
    }
}

/// TRUST: a count that can't be right is refused.
#[test]
fn impossible_counts_are_refused() {
    let mut model = Model::new();
    model.carry(Some((0, 30)));
    model.write(u16::MAX);
    model.deliver(40);
    model.acknowledge(0);
    for read in [0, 39, 63, u64::MAX] {
        assert_eq!(model.sent.resume(read), Err(Impossible { written: 62, read }));
    }
    assert_eq!(model.sent.resume(62), Ok(0));
}

#[test]
fn frames_are_forgotten_without_recovery() {
    let mut sent = Sent::new(false);
    sent.carry([7; HEADER_BYTES], None);
    sent.wrote(10);
    assert!(sent.is_within_frame());
    assert_eq!(sent.resume(9), Err(Impossible { written: 10, read: 9 }));
    sent.wrote(22);
    assert_eq!((sent.remembered(), sent.is_within_frame(), sent.resume(32)), (0, false, Ok(0)));
}
