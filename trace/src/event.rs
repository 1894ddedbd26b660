//! The contents of a record, and its form on the wire.

use crate::ring::WORDS;

/// The bytes of an event on the wire.
pub const BYTES: usize = 8 * WORDS;

/// The kind of an event. The numbers are those of the wire and never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Kind {
    /// A rank has submitted something. `subject` is the ticket.
    Submit = 1,
    /// A thread of a rank has waited. `subject` is the ticket.
    Wait = 2,
    /// A rank has finished a step. `subject` is the number of the step, from 1 on.
    Step = 3,
    /// A daemon has read a submission. `subject` is the ticket, `other` the rank, and it has a
    /// name.
    Read = 4,
    /// All local ranks have submitted a tensor; the duration is how long that took. It has a name.
    Gather = 5,
    /// An order for a tensor has arrived; the duration is the time since it was announced.
    /// `subject` is the operation, `other` a rank that takes part, and `bytes` its ticket. It has a
    /// name.
    Order = 6,
    /// An operation has waited for its lane. `subject` is the operation.
    Queue = 7,
    /// A lane has reduced. `subject` is the operation.
    Reduce = 8,
    /// A lane has sent. `subject` is the operation, `other` the peer.
    Send = 9,
    /// A lane has received. `subject` is the operation, `other` the peer.
    Receive = 10,
    /// A lane has written a result for the local ranks. `subject` is the operation.
    Publish = 11,
    /// An operation is done on this node; the duration is the time since its order. `subject` is
    /// the operation.
    Piece = 12,
    /// A rank can read that its submission is done. `subject` is the ticket, `other` the rank.
    Complete = 13,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 13] = [
        Self::Submit,
        Self::Wait,
        Self::Step,
        Self::Read,
        Self::Gather,
        Self::Order,
        Self::Queue,
        Self::Reduce,
        Self::Send,
        Self::Receive,
        Self::Publish,
        Self::Piece,
        Self::Complete,
    ];

    /// The kind with this number.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    /// Whether a rank records it itself.
    pub fn is_of_rank(self) -> bool {
        matches!(self, Self::Submit | Self::Wait | Self::Step)
    }
}

/// An event. The meaning of its fields depends on the kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// What.
    pub kind: Kind,
    /// When it began, in nanoseconds of the monotonic clock.
    pub at_ns: u64,
    /// How long it took.
    pub duration_ns: u64,
    /// An operation, a ticket or a step.
    pub subject: u64,
    /// A rank, a node, or the number of a thread of a rank; less than 2²⁴.
    pub other: u32,
    /// The number of a tensor's name; 0 for none.
    pub name: u32,
    /// How many bytes were moved, or a ticket.
    pub bytes: u64,
}

impl Event {
    /// An event with a subject and no duration.
    pub fn new(kind: Kind, at_ns: u64, subject: u64) -> Self {
        Self { kind, at_ns, duration_ns: 0, subject, other: 0, name: 0, bytes: 0 }
    }

    /// The record of this event.
    pub fn encode(&self) -> [u64; WORDS] {
        let Self { kind, at_ns, duration_ns, subject, other, name, bytes } = *self;
        let other = u64::from(other & 0xff_ffff);
        let tags = (kind as u64) << 56 | other << 32 | u64::from(name);
        [at_ns, duration_ns, subject, bytes, tags]
    }

    /// The event of a record; `None` if the record is invalid (TRUST).
    pub fn decode(record: [u64; WORDS]) -> Option<Self> {
        let [at_ns, duration_ns, subject, bytes, tags] = record;
        let kind = Kind::of((tags >> 56) as u8)?;
        let (other, name) = ((tags >> 32) as u32 & 0xff_ffff, tags as u32);
        Some(Self { kind, at_ns, duration_ns, subject, other, name, bytes })
    }

    /// Appends the event in its wire form: [`BYTES`], the words of its record in little-endian
    /// order.
    pub fn write(&self, out: &mut Vec<u8>) {
        for word in self.encode() {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// Reads events in their wire form. Invalid ones are left out (TRUST).
    pub fn read(bytes: &[u8]) -> impl Iterator<Item = Self> + '_ {
        let (records, _) = bytes.as_chunks::<BYTES>();
        records.iter().filter_map(|record| {
            let (words, _) = record.as_chunks::<8>();
            Self::decode(std::array::from_fn(|word| u64::from_le_bytes(words[word])))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_can_be_decoded_again() {
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number + 1);
            let event = Event {
                kind,
                at_ns: u64::MAX,
                duration_ns: 7,
                subject: 1 << 40,
                other: 0xff_ffff,
                name: u32::MAX,
                bytes: 3,
            };
            assert_eq!(Event::decode(event.encode()), Some(event));
        }
        assert_eq!(Event::decode([0; WORDS]), None, "TRUST");
        assert_eq!(Event::decode([u64::MAX; WORDS]), None, "TRUST");
    }

    #[test]
    fn events_can_be_written_and_read() {
        let events: Vec<Event> = (0..Kind::ALL.len())
            .map(|number| Event { other: 3, ..Event::new(Kind::ALL[number], 1 << number, 7) })
            .collect();
        let mut bytes = Vec::new();
        for event in &events {
            event.write(&mut bytes);
            // An invalid kind.
            bytes.extend([0xff; BYTES]);
        }
        assert_eq!(bytes.len(), events.len() * 2 * BYTES);
        bytes.extend([1; BYTES - 1]);
        assert_eq!(Event::read(&bytes).collect::<Vec<_>>(), events, "TRUST");
        assert_eq!(Event::read(&[]).count(), 0);
    }
}
