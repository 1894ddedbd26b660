//! The flight recording of a node: the last operations of its ranks and the last events of its
//! daemon, in memory of a fixed size that another process can read after the daemon has ended.
//!
//! - `write`: the daemon's side
//! - `read`: an image of the memory, which may be damaged (TRUST)
//!
//! # Layout, version 1
//!
//! Words of 8 bytes, little endian. One thread writes an operation when it is submitted. Others add
//! to it while it is in flight, and find it by its ticket. A slot has the number of its contents in
//! its first word, which is 0 while the slot is written: so a reader knows a slot that is not
//! whole.
//!
//! ```text
//!  word    words          what
//!  0       1              magic "GRADFLY1"
//!  1       1              ranks of the node
//!  2       1              rank of local rank 0
//!  3       1              number of the node; before the world has formed its place in the order
//!  4       1              nodes of the job; 0 before the world has formed
//!  5       1              ranks of the job
//!  6       1              epoch
//!  7       1              ns to add to a time for the coordinator's clock, signed
//!  8       1              its largest error in ns; all ones if it is not known
//!  9       2              ns since 1970, and the monotonic clock at that time
//!  11      1              process id of the daemon
//!  12      1              events so far
//!  13      1              ns of the monotonic clock when the memory was last saved; 0: never
//!  14      1              when the failure was recorded
//!  16      16             job
//!  32      32             host
//!  64      448            the failure that ended the job, as JSON; empty while there is none
//!  512     3584           process sets: number u32, ranks u32, then the ranks, two in a word
//!  4096    1024 × 64      events: number, ns, level, text
//!  69632   ranks × 65600  a rank: 64 words about it, then 1024 × 64 for operations
//!
//!  a rank:        operations so far, process id, since when it is attached in ns,
//!                 since when it has left or ended in ns
//!  an operation:  0 ticket; ns when it was 1 submitted, 2 announced, 3 ordered, 4 begun, 5 ended;
//!                 6 sequence number + 1, or 0; 7 bytes; 8 collective u8, element type u8, reduce
//!                 operation u8, outcome u8, dimensions u8, 0 u8, tensors u16; 9 process set u32,
//!                 root u32; 10 its number among those of the rank, from 1; 11 the receiver of a
//!                 message; 12 the first 8 dimensions; 20 name; 43 call site
//! ```
//!
//! A text is its length in bytes, and then the bytes. If it is too long, its end is kept.

mod read;
mod write;

pub use read::{Damaged, Image, Operation, RankImage, Recorded, World};
pub use write::{Flight, Submitted};

/// How many operations of a rank, and how many events of a daemon are kept (BOUND).
pub const KEPT: usize = 1024;

/// The most dimensions of a shape that are kept.
pub const MAX_DIMS: usize = 8;

/// Tells a recording from another file, and says its version.
const MAGIC: u64 = u64::from_le_bytes(*b"GRADFLY1");

/// Words of an event or operation.
const SLOT: usize = 64;

const EVENTS: usize = 4096;
const RANKS: usize = EVENTS + KEPT * SLOT;
const RANK_WORDS: usize = SLOT + KEPT * SLOT;

/// Words of the header.
mod header {
    use std::ops::Range;

    pub(super) const RANKS: usize = 1;
    pub(super) const FIRST_RANK: usize = 2;
    pub(super) const NODE: usize = 3;
    pub(super) const NODES: usize = 4;
    pub(super) const SIZE: usize = 5;
    pub(super) const EPOCH: usize = 6;
    pub(super) const TO_COMMON: usize = 7;
    pub(super) const ERROR: usize = 8;
    pub(super) const UNIX: usize = 9;
    pub(super) const UNIX_AT: usize = 10;
    pub(super) const PID: usize = 11;
    pub(super) const EVENTS: usize = 12;
    pub(super) const SAVED: usize = 13;
    pub(super) const FAILED: usize = 14;
    pub(super) const JOB: Range<usize> = 16..32;
    pub(super) const HOST: Range<usize> = 32..64;
    pub(super) const FAILURE: Range<usize> = 64..512;
    pub(super) const SETS: Range<usize> = 512..super::EVENTS;
}

/// Words of a rank.
mod rank {
    pub(super) const COUNT: usize = 0;
    pub(super) const PID: usize = 1;
    pub(super) const ATTACHED: usize = 2;
    pub(super) const GONE: usize = 3;
}

/// Words of an operation.
mod operation {
    use std::ops::Range;

    pub(super) const TICKET: usize = 0;
    pub(super) const SUBMITTED: usize = 1;
    pub(super) const ANNOUNCED: usize = 2;
    pub(super) const ORDERED: usize = 3;
    pub(super) const BEGUN: usize = 4;
    pub(super) const ENDED: usize = 5;
    pub(super) const SEQUENCE: usize = 6;
    pub(super) const BYTES: usize = 7;
    pub(super) const KINDS: usize = 8;
    pub(super) const SET: usize = 9;
    pub(super) const NUMBER: usize = 10;
    pub(super) const PEER: usize = 11;
    pub(super) const DIMS: usize = 12;
    pub(super) const NAME: Range<usize> = 20..43;
    pub(super) const SITE: Range<usize> = 43..super::SLOT;
}

/// Words of an event.
mod event {
    use std::ops::Range;

    pub(super) const AT: usize = 1;
    pub(super) const LEVEL: usize = 2;
    pub(super) const TEXT: Range<usize> = 3..super::SLOT;
}

/// How an operation has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Outcome {
    /// It has not.
    InFlight = 0,
    /// Its result was published.
    Done = 1,
    /// It alone has failed.
    Failed = 2,
}

impl Outcome {
    fn of(number: u8) -> Self {
        match number {
            1 => Self::Done,
            2 => Self::Failed,
            _ => Self::InFlight,
        }
    }
}

/// How many words the recording of a node with this many ranks takes.
pub const fn words(ranks: usize) -> usize {
    RANKS + ranks * RANK_WORDS
}

/// The most bytes of a failure as JSON.
pub const MAX_FAILURE: usize = room(header::FAILURE.end - header::FAILURE.start);

/// The bytes of a text that `words` words can hold, besides its length.
const fn room(words: usize) -> usize {
    (words - 1) * 8
}

/// The end of a text that fits.
fn fitting(text: &str, room: usize) -> &str {
    &text[text.ceil_char_boundary(text.len().saturating_sub(room))..]
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::*;

    fn memory(ranks: usize) -> Vec<AtomicU64> {
        (0..words(ranks)).map(|_| AtomicU64::new(0)).collect()
    }

    fn bytes(memory: &[AtomicU64]) -> Vec<u8> {
        memory.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
    }

    fn submitted<'a>(ticket: u64, name: &'a str, dims: &'a [u64]) -> Submitted<'a> {
        Submitted {
            ticket,
            name,
            site: "train.py:3 in step",
            collective: 1,
            dtype: 2,
            reduce_op: 3,
            process_set: 4,
            root: 5,
            receiver: 6,
            bytes: 7,
            tensors: 8,
            dims,
        }
    }

    #[test]
    fn what_is_written_can_be_read() {
        let memory = memory(2);
        let flight = Flight::begin(&memory, 2, "job-1", "host-a", 3);
        assert!(Image::parse(&bytes(&memory)).unwrap().world.is_none());
        flight.formed(4, 7, 2, 9, 1);
        flight.clock(-5, 6);
        flight.add_set(3, &[0, 4, 5]);
        flight.add_set(4, &[1]);
        flight.attached(1, 77, 100);
        flight.submitted(1, 200, &submitted(42, "w", &[2, 3]));
        flight.announced(1, 42, 201);
        flight.ordered(1, 42, 202, Some(0));
        // The later pieces of the tensor change nothing.
        flight.ordered(1, 42, 999, Some(5));
        flight.begun(1, 42, 203);
        flight.ended(1, 42, 204, Outcome::Done);
        // Other tickets and ranks do not exist.
        flight.ended(1, 43, 999, Outcome::Failed);
        flight.ended(9, 42, 999, Outcome::Failed);
        flight.event(300, 2, "it began");
        flight.failed(301, r#"{"kind":"x"}"#);
        let image = Image::parse(&bytes(&memory)).unwrap();
        assert_eq!(
            (&*image.job, &*image.host, image.to_common),
            ("job-1", "host-a", Some((-5, 6)))
        );
        let world = image.world.unwrap();
        assert_eq!((image.node, image.first_rank, world.nodes, world.ranks), (1, 4, 2, 7));
        assert_eq!((image.epoch, image.failed_ns), (9, 301));
        assert_eq!(image.failure, r#"{"kind":"x"}"#);
        assert_eq!(image.sets, [(3, vec![0, 4, 5]), (4, vec![1])]);
        assert_eq!(image.events, [Recorded { at_ns: 300, level: 2, text: "it began".into() }]);
        let rank = &image.ranks[1];
        assert_eq!((rank.rank, rank.pid, rank.attached_ns, rank.count), (5, 77, 100, 1));
        let [operation] = &rank.operations[..] else { panic!("{rank:?}") };
        assert_eq!((&*operation.name, &*operation.site), ("w", "train.py:3 in step"));
        let Operation { submitted_ns, announced_ns, ordered_ns, begun_ns, ended_ns, .. } =
            *operation;
        let times = [submitted_ns, announced_ns, ordered_ns, begun_ns, ended_ns];
        assert_eq!(times, [200, 201, 202, 203, 204]);
        assert_eq!((operation.sequence, operation.outcome), (Some(0), Outcome::Done));
        assert_eq!((operation.dims.as_slice(), operation.tensors), (&[2, 3][..], 8));
        assert_eq!((operation.process_set, operation.root, operation.receiver), (4, 5, 6));
        assert_eq!(flight.last(1, 3).len(), 1);
        assert_eq!(flight.operation(1, 42).as_ref(), Some(operation));
    }

    #[test]
    fn the_last_operations_and_events_are_kept() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        let all = 3 * KEPT as u64 + 5;
        for ticket in 1..=all {
            flight.submitted(0, ticket, &submitted(ticket, "w", &[]));
            flight.event(ticket, 0, &ticket.to_string());
        }
        flight.ended(0, 1, 9, Outcome::Done);
        let image = Image::parse(&bytes(&memory)).unwrap();
        let rank = &image.ranks[0];
        let tickets: Vec<u64> = rank.operations.iter().map(|it| it.ticket).collect();
        assert_eq!(tickets, (all - KEPT as u64 + 1..=all).collect::<Vec<_>>(), "BOUND");
        assert!(rank.operations.iter().all(|it| it.outcome == Outcome::InFlight));
        assert_eq!(image.events.len(), KEPT);
        assert_eq!(image.events[KEPT - 1].text, all.to_string());
        assert_eq!(
            flight.last(0, 2).iter().map(|it| it.ticket).collect::<Vec<_>>(),
            [all, all - 1]
        );
    }

    #[test]
    fn long_texts_keep_their_end() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        let long = format!("{}end", "é".repeat(3000));
        flight.submitted(0, 1, &submitted(1, &long, &[1; 20]));
        flight.event(1, 0, &long);
        flight.failed(1, &long);
        flight.add_set(1, &vec![7; 100_000]);
        let image = Image::parse(&bytes(&memory)).unwrap();
        let operation = &image.ranks[0].operations[0];
        for text in [&operation.name, &image.events[0].text] {
            assert!(text.starts_with('é') && text.ends_with("éend"), "{text}");
        }
        assert_eq!((operation.dims.len(), image.sets.len()), (MAX_DIMS, 0), "BOUND");
        assert_eq!(image.failure, "", "a part of JSON is of no use");
    }

    #[test]
    fn a_damaged_image_is_refused_or_read_in_part() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        flight.submitted(0, 1, &submitted(1, "w", &[1]));
        let good = bytes(&memory);
        assert_eq!(Image::parse(b"").unwrap_err(), Damaged::Magic);
        assert_eq!(Image::parse(&[7; 40_000]).unwrap_err(), Damaged::Magic);
        let short = Image::parse(&good[..good.len() - 8]).unwrap_err();
        let expected = good.len() as u64;
        assert_eq!(short, Damaged::Size { bytes: expected - 8, expected });
        // Any word may have any value (TRUST).
        let places = [1..34, 64..66, 512..515, EVENTS..EVENTS + 5, RANKS..RANKS + 4];
        let slot = RANKS + 2 * SLOT;
        let mut bad = good.clone();
        for word in places.into_iter().chain([slot..slot + 22, words(1) - 1..words(1)]).flatten() {
            for value in [u64::MAX, 1 << 32] {
                bad[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
                if let Ok(image) = Image::parse(&bad) {
                    assert!(image.ranks[0].operations.len() <= KEPT, "{word}");
                }
            }
            bad[word * 8..][..8].copy_from_slice(&good[word * 8..][..8]);
        }
    }
}
