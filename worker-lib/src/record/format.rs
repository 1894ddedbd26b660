//! The layout of a record. Pure.
//!
//! ```text
//!  "gwrecord" │ u32 version │ frame │ frame │ …
//!  frame:  u8 kind │ u32 length │ 8 bytes checksum │ that many bytes
//!  1 header   the rank, its place in the job, its variables
//!  2 call     an operation that has ended: what was asked for, and how it ended
//!  3 data     up to 1 MiB of the results of the call before it: u32 length, u8 packed, bytes
//!  4 end      why nothing follows; missing if the process was killed
//! ```
//!
//! Numbers are little endian. The checksum is the beginning of the SHA-256 of the other bytes of
//! the frame. Calls are in the order in which they have ended.

use std::{collections::BTreeMap, fmt};

use gradwire_proto::{Collective, Failure, Request};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::tickets;

/// What every record begins with.
pub const MAGIC: [u8; 8] = *b"gwrecord";

/// The version of the layout.
pub const VERSION: u32 = 1;

/// The bytes of a frame before its body.
pub const HEAD: usize = 13;

/// The longest body of a frame (BOUND).
pub const MAX_BODY: usize = 8 << 20;

/// The most bytes of results in a frame, before they are compressed.
pub const MAX_DATA: usize = 1 << 20;

/// The file of a rank in the folder of its job.
pub const FILE: &str = "calls";

/// The folder of a rank in the folder of its job.
pub fn folder(rank: u32) -> String {
    format!("rank.{rank}")
}

/// What a frame contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the module's documentation has them")]
pub enum Kind {
    Header = 1,
    Call = 2,
    Data = 3,
    End = 4,
}

impl Kind {
    fn of(number: u8) -> Option<Self> {
        [Self::Header, Self::Call, Self::Data, Self::End]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

/// Which rank was recorded, and what it knew of its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    /// The version of Gradwire.
    pub gradwire: String,
    /// The job's id.
    pub job: String,
    /// The rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// The daemon's message about the place of the rank (`pb::Attached`).
    pub attached: Vec<u8>,
    /// The variables by which the launcher has described the job.
    pub variables: BTreeMap<String, String>,
    /// The command line of the rank.
    pub command: Vec<String>,
    /// The limit of the file in bytes.
    pub limit: u64,
}

/// An operation of the recorded rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallHead {
    /// The number of the call in the session, from 1.
    pub number: u64,
    /// The number of the thread that made the call.
    pub thread: u32,
    /// The number of its process set.
    pub process_set: u32,
    /// Its name.
    pub name: String,
    /// What was asked for (`pb::Request`).
    pub request: Vec<u8>,
    /// How it ended.
    pub outcome: Outcome,
}

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// It succeeded.
    Done {
        /// The number in the completion.
        aux: u64,
        /// Whether its results are in memory that the daemon has asked for.
        moved: bool,
        /// Its results, for each tensor; without elements where this rank gets none.
        results: Vec<Stored>,
    },
    /// It failed.
    Failed(Failure),
    /// It had not ended when the session did.
    Open,
}

impl Outcome {
    /// The bytes of all results.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Done { results, .. } => {
                results.iter().fold(0, |all, each| all.saturating_add(each.bytes))
            }
            Self::Failed(_) | Self::Open => 0,
        }
    }
}

/// The result of one tensor. Its bytes follow in data frames.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// The size of the result.
    pub bytes: u64,
    /// Its shape, if it is in memory that the daemon has asked for.
    pub shape: Vec<u64>,
    /// Then also its number of rows from each member.
    pub rows: Vec<u64>,
}

/// Why a record ends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// How many calls the program had made.
    pub calls: u64,
    /// What happened.
    pub why: Why,
}

/// What happened at the end of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Why {
    /// The rank has left the job.
    Left,
    /// The session has failed.
    Failed(Failure),
    /// The file has reached its limit.
    Full,
    /// The file could not be written any more.
    Unwritten(String),
}

fn checksum(kind: u8, body: &[u8]) -> [u8; 8] {
    let mut hash = Sha256::new();
    hash.update([kind]);
    hash.update((body.len() as u64).to_le_bytes());
    hash.update(body);
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    first
}

/// A frame.
pub fn frame(kind: Kind, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + body.len());
    bytes.push(kind as u8);
    bytes.extend((body.len() as u32).to_le_bytes());
    bytes.extend(checksum(kind as u8, body));
    bytes.extend(body);
    bytes
}

/// The body of a data frame: compressed, if that makes it shorter.
pub fn pack(data: &[u8]) -> Vec<u8> {
    let packed = lz4_flex::block::compress(data);
    let (is_packed, bytes) = if packed.len() < data.len() { (1, &*packed) } else { (0, data) };
    let mut body = Vec::with_capacity(5 + bytes.len());
    body.extend((data.len() as u32).to_le_bytes());
    body.push(is_packed);
    body.extend(bytes);
    body
}

/// The results in the body of a data frame.
///
/// # Errors
/// What is wrong with it.
pub fn unpack(body: &[u8]) -> Result<Vec<u8>, &'static str> {
    let (length, rest) = body.split_first_chunk::<4>().ok_or("a data frame without a length")?;
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_DATA {
        return Err("a data frame of more than 1 MiB");
    }
    let data = match rest.split_first() {
        Some((0, bytes)) => bytes.to_vec(),
        Some((1, bytes)) => lz4_flex::block::decompress(bytes, length)
            .map_err(|_| "a data frame that can't be decompressed")?,
        _ => return Err("a data frame that is neither packed nor plain"),
    };
    if data.len() == length { Ok(data) } else { Err("a data frame of another length") }
}

/// The beginning of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// What the frame contains.
    pub kind: Kind,
    /// The length of its body.
    pub length: usize,
    checksum: [u8; 8],
}

impl Head {
    /// Reads the beginning of a frame.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn read(bytes: &[u8; HEAD]) -> Result<Self, &'static str> {
        let [kind, a, b, c, d, checksum @ ..] = *bytes;
        let kind = Kind::of(kind).ok_or("a frame of an unknown kind")?;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MAX_BODY {
            Err("a frame of more than 8 MiB")
        } else {
            Ok(Self { kind, length, checksum })
        }
    }

    /// Whether this is the body of the frame.
    pub fn fits(&self, body: &[u8]) -> bool {
        body.len() == self.length && checksum(self.kind as u8, body) == self.checksum
    }
}

/// A call in one line, for errors.
#[derive(Debug)]
pub struct Described<'a> {
    /// Its process set; 0 stands for all ranks.
    pub process_set: u32,
    /// Its name.
    pub name: &'a str,
    /// What it asks for.
    pub request: &'a Request,
}

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Request { collective, list, .. } = self.request;
        write!(f, "{}", tickets::described(self.request))?;
        for (factor, what) in [(self.request.prescale, "before"), (self.request.postscale, "after")]
        {
            if factor != 1.0 {
                write!(f, ", factor {factor} {what} it")?;
            }
        }
        if *collective == Collective::SendReceive {
            write!(f, " from rank {} to rank {}", self.request.root, list.first().unwrap_or(&0))?;
        } else if !list.is_empty() {
            let shown = &list[..list.len().min(16)];
            write!(f, ", list {shown:?}{}", if list.len() > 16 { "…" } else { "" })?;
        }
        write!(f, " '{}'", self.name)?;
        match self.process_set {
            0 => Ok(()),
            set => write!(f, " in process set {set}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use gradwire_proto::{DType, Rank, ReduceOp, Shape};

    use super::*;

    #[test]
    fn data_is_the_same_after_packing() {
        for data in [vec![], vec![7; 100_000], (0..=255u8).cycle().take(MAX_DATA).collect()] {
            let body = pack(&data);
            assert_eq!(unpack(&body), Ok(data.clone()));
            assert!(body.len() <= data.len() + 5);
        }
        assert!(pack(&[0; 4096]).len() < 100, "it is compressed");
    }

    #[test]
    fn a_changed_frame_is_recognised() {
        let body = pack(b"some results");
        let good = frame(Kind::Data, &body);
        let read = |bytes: &[u8]| {
            let (head, body) = bytes.split_first_chunk::<HEAD>().unwrap();
            Head::read(head).is_ok_and(|head| head.fits(body))
        };
        assert!(read(&good));
        for byte in 0..good.len() {
            let mut bad = good.clone();
            bad[byte] ^= 0x10;
            assert!(!read(&bad), "byte {byte}");
        }
    }

    #[test]
    fn invalid_data_is_refused() {
        for body in [&[][..], &[1, 0, 0, 0], &[1, 0, 0, 0, 2, 9], &[2, 0, 0, 0, 0, 9]] {
            assert!(unpack(body).is_err(), "{body:?}");
        }
        assert!(unpack(&[255, 255, 255, 255, 1, 0]).is_err(), "BOUND");
    }

    #[test]
    fn a_call_is_described_in_one_line() {
        let text = |request: &Request, process_set| {
            Described { process_set, name: "w", request }.to_string()
        };
        let shape = Shape::new(&[2, 3]).unwrap();
        let sum = Request::allreduce(DType::F32, shape.clone(), ReduceOp::Sum);
        assert_eq!(text(&sum, 0), "allreduce (sum) of f32 [2, 3] 'w'");
        let cast = Request::broadcast(DType::F32, shape, Rank(1));
        assert_eq!(text(&cast, 4), "broadcast (root 1) of f32 [2, 3] 'w' in process set 4");
    }
}
