//! Reads an image of a recording. Its writer may have been killed in the middle, or the file may be
//! damaged (TRUST): what is impossible is refused or left out.

use std::ops::Range;

use super::layout::{
    EVENTS, KEPT, MAGIC, MAX_DIMS, Outcome, RANK_WORDS, RANKS, SLOT, event, header, operation,
    rank, room, words,
};

/// The most ranks of a job, and the most nodes, so that a damaged number is not believed (BOUND).
pub const MAX_RANKS: u32 = 4096;

/// Why an image is not a recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damaged {
    /// It begins with something else, or it has another version.
    Magic,
    /// It is too short or too long for its number of ranks, or too short to have that.
    Size {
        /// Its size in bytes.
        bytes: u64,
        /// The size of a recording of a node with this many ranks.
        expected: u64,
    },
    /// A number of its header is too large.
    Number {
        /// Which one.
        what: &'static str,
        /// The number.
        value: u64,
        /// The largest that is possible.
        most: u64,
    },
}

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Magic => f.write_str("it is not a recording of this release of Gradwire"),
            Self::Size { bytes, expected } => {
                write!(f, "it is damaged: it has {bytes} bytes instead of {expected}")
            }
            Self::Number { what, value, most } => {
                write!(f, "it is damaged: its {what} is {value}, but at most {most} is possible")
            }
        }
    }
}

impl std::error::Error for Damaged {}

/// The recording of a node. Times are in nanoseconds of its monotonic clock; 0 if something has not
/// happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// The job.
    pub job: String,
    /// The name of its host.
    pub host: String,
    /// Its number in the job; before the world has formed, its place in the order of nodes.
    pub node: u32,
    /// The rank of local rank 0.
    pub first_rank: u32,
    /// The job as a whole, once the world has formed.
    pub world: Option<World>,
    /// The epoch of an elastic job.
    pub epoch: u64,
    /// What to add to a time for the coordinator's clock, and the largest error of that.
    pub to_common: Option<(i64, u64)>,
    /// Nanoseconds since 1970, and the node's time at that moment.
    pub unix: (u64, u64),
    /// The process id of its daemon.
    pub pid: u32,
    /// When it was saved by its daemon; 0 if another process has saved it after the daemon's end.
    pub saved_ns: u64,
    /// The failure that ended the job, as JSON; empty if there is none.
    pub failure: String,
    /// When the failure was recorded.
    pub failed_ns: u64,
    /// The process sets that were created, with their ranks.
    pub sets: Vec<(u32, Vec<u32>)>,
    /// The last events, the oldest first.
    pub events: Vec<Recorded>,
    /// The ranks of the node.
    pub ranks: Vec<RankImage>,
}

/// The size of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct World {
    /// Nodes.
    pub nodes: u32,
    /// Ranks.
    pub ranks: u32,
}

/// An event of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recorded {
    /// When it happened.
    pub at_ns: u64,
    /// 0 for an error; grows with less important events.
    pub level: u8,
    /// What happened.
    pub text: String,
}

/// What is recorded of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankImage {
    /// Its number in the job.
    pub rank: u32,
    /// Its process id; 0 if it has not attached.
    pub pid: u32,
    /// When it attached.
    pub attached_ns: u64,
    /// When it left, or its connection ended.
    pub gone_ns: u64,
    /// How many operations it has submitted.
    pub count: u64,
    /// The last of them, the oldest first.
    pub operations: Vec<Operation>,
}

/// An operation of a rank. The numbers of its kinds are those of the wire, and are not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what the fields are")]
pub struct Operation {
    pub ticket: u64,
    /// Its number among those of the rank, from 1 on.
    pub number: u64,
    pub name: String,
    /// Where the program has called it; empty if it is not known.
    pub site: String,
    pub collective: u8,
    pub dtype: u8,
    pub reduce_op: u8,
    pub outcome: Outcome,
    pub process_set: u32,
    pub root: u32,
    /// The receiver of a message.
    pub receiver: u64,
    pub bytes: u64,
    pub tensors: u16,
    /// The first dimensions of the first tensor, at most [`MAX_DIMS`].
    pub dims: Vec<u64>,
    /// Its place in the order of the job, if it has one.
    pub sequence: Option<u64>,
    pub submitted_ns: u64,
    /// When all ranks of the node had submitted it.
    pub announced_ns: u64,
    pub ordered_ns: u64,
    /// When its first byte moved.
    pub begun_ns: u64,
    pub ended_ns: u64,
}

impl Operation {
    /// The operation in a slot; `None` if there is none, or if it is not whole.
    pub(super) fn of(slot: &[u64; SLOT]) -> Option<Self> {
        let (ticket, number) = (slot[operation::TICKET], slot[operation::NUMBER]);
        if ticket == 0 || number == 0 || slot[operation::NAME.start] == 0 {
            return None;
        }
        let [collective, dtype, reduce_op, outcome, dims, _, low, high] =
            slot[operation::KINDS].to_le_bytes();
        let dims = usize::from(dims).min(MAX_DIMS);
        Some(Self {
            ticket,
            number,
            name: text(&slot[operation::NAME]),
            site: text(&slot[operation::SITE]),
            collective,
            dtype,
            reduce_op,
            outcome: Outcome::of(outcome),
            process_set: slot[operation::SET] as u32,
            root: (slot[operation::SET] >> 32) as u32,
            receiver: slot[operation::PEER],
            bytes: slot[operation::BYTES],
            tensors: u16::from_le_bytes([low, high]),
            dims: slot[operation::DIMS..operation::DIMS + dims].to_vec(),
            sequence: slot[operation::SEQUENCE].checked_sub(1),
            submitted_ns: slot[operation::SUBMITTED],
            announced_ns: slot[operation::ANNOUNCED],
            ordered_ns: slot[operation::ORDERED],
            begun_ns: slot[operation::BEGUN],
            ended_ns: slot[operation::ENDED],
        })
    }
}

/// The text of these words. What is not text is replaced.
fn text(place: &[u64]) -> String {
    let bytes: Vec<u8> = place[1..].iter().flat_map(|word| word.to_le_bytes()).collect();
    let length = usize::try_from(place[0]).unwrap_or(usize::MAX).min(room(place.len()));
    let text = String::from_utf8_lossy(&bytes[..length]);
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// The words of an image.
struct Words<'a>(&'a [[u8; 8]]);

impl Words<'_> {
    fn at(&self, word: usize) -> u64 {
        u64::from_le_bytes(self.0[word])
    }

    fn number(&self, word: usize) -> u32 {
        u32::try_from(self.at(word)).unwrap_or_default()
    }

    fn text(&self, place: Range<usize>) -> String {
        text(&place.map(|word| self.at(word)).collect::<Vec<_>>())
    }

    fn slot(&self, first: usize) -> [u64; SLOT] {
        std::array::from_fn(|word| self.at(first + word))
    }

    /// The number in a word, unless it is larger than possible.
    fn limited(&self, what: &'static str, word: usize, most: u32) -> Result<u32, Damaged> {
        let (value, most) = (self.at(word), u64::from(most));
        let is_possible = |value: &u32| u64::from(*value) <= most;
        u32::try_from(value).ok().filter(is_possible).ok_or(Damaged::Number { what, value, most })
    }

    /// The process sets, without those that have a rank which the job does not have.
    fn sets(&self, all_ranks: u32) -> Vec<(u32, Vec<u32>)> {
        let (mut sets, mut at) = (Vec::new(), header::SETS.start);
        while at < header::SETS.end {
            let (set, count) = (self.at(at) as u32, (self.at(at) >> 32) as usize);
            let end = at + 1 + count.div_ceil(2);
            if count == 0 || end > header::SETS.end {
                break;
            }
            let both = (at + 1..end).map(|word| self.at(word));
            let ranks = both.flat_map(|word| [word as u32, (word >> 32) as u32]);
            let ranks: Vec<u32> = ranks.take(count).collect();
            if ranks.iter().all(|rank| *rank < all_ranks) {
                sets.push((set, ranks));
            }
            at = end;
        }
        sets
    }

    fn events(&self) -> Vec<Recorded> {
        let mut events: Vec<(u64, Recorded)> = (0..KEPT)
            .map(|number| self.slot(EVENTS + number * SLOT))
            .filter(|slot| slot[0] != 0 && slot[event::AT] != 0)
            .map(|slot| {
                let level = u8::try_from(slot[event::LEVEL]).unwrap_or(u8::MAX);
                let (at_ns, text) = (slot[event::AT], text(&slot[event::TEXT]));
                (slot[0], Recorded { at_ns, level, text })
            })
            .collect();
        events.sort_by_key(|(number, _)| *number);
        events.into_iter().map(|(_, event)| event).collect()
    }

    fn rank(&self, local_rank: usize, rank_number: u32) -> RankImage {
        let first = RANKS + local_rank * RANK_WORDS;
        let slots = (1..=KEPT).map(|number| self.slot(first + number * SLOT));
        let mut operations: Vec<Operation> =
            slots.filter_map(|slot| Operation::of(&slot)).collect();
        operations.sort_by_key(|operation| operation.number);
        RankImage {
            rank: rank_number,
            pid: self.number(first + rank::PID),
            attached_ns: self.at(first + rank::ATTACHED),
            gone_ns: self.at(first + rank::GONE),
            count: self.at(first + rank::COUNT),
            operations,
        }
    }
}

impl Image {
    /// The largest image, in bytes.
    pub const MAX_BYTES: u64 = 8 * words(MAX_RANKS as usize) as u64;

    /// Reads an image.
    ///
    /// # Errors
    /// [`Damaged`] if it is not a recording, or a part of one.
    pub fn parse(bytes: &[u8]) -> Result<Self, Damaged> {
        let (all, _) = bytes.as_chunks::<8>();
        let image = Words(all);
        if all.is_empty() || image.at(0) != MAGIC {
            return Err(Damaged::Magic);
        }
        let is_known = all.len() > header::RANKS;
        let own = "number of ranks";
        let ranks = if is_known { image.limited(own, header::RANKS, MAX_RANKS)? } else { 0 };
        let (bytes, expected) = (bytes.len() as u64, 8 * words(ranks as usize) as u64);
        if bytes != expected {
            return Err(Damaged::Size { bytes, expected });
        }
        let nodes = image.limited("number of nodes", header::NODES, MAX_RANKS)?;
        let size = image.limited("number of ranks of the job", header::SIZE, MAX_RANKS)?;
        let world = (nodes > 0).then_some(World { nodes, ranks: size });
        // Before the world has formed, the size of the job is not recorded.
        let most = world.unwrap_or(World { nodes: MAX_RANKS, ranks: MAX_RANKS });
        image.limited(own, header::RANKS, most.ranks)?;
        let first_rank = image.limited("first rank", header::FIRST_RANK, most.ranks - ranks)?;
        let node = image.limited("number of the node", header::NODE, most.nodes - 1)?;
        let error = image.at(header::ERROR);
        let to_common = image.at(header::TO_COMMON).cast_signed();
        Ok(Self {
            job: image.text(header::JOB),
            host: image.text(header::HOST),
            node,
            first_rank,
            world,
            epoch: image.at(header::EPOCH),
            to_common: (error != u64::MAX).then_some((to_common, error)),
            unix: (image.at(header::UNIX), image.at(header::UNIX_AT)),
            pid: image.number(header::PID),
            saved_ns: image.at(header::SAVED),
            failure: image.text(header::FAILURE),
            failed_ns: image.at(header::FAILED),
            sets: image.sets(most.ranks),
            events: image.events(),
            ranks: (0..ranks).map(|local| image.rank(local as usize, first_rank + local)).collect(),
        })
    }
}
