//! Reads a record. Everything is checked here (TRUST): behind it there are only types.
//!
//! A process that is killed leaves a file that ends anywhere. All complete calls in it count.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use gradwire_proto::{Rank, Request, Shape, TensorName, VERSION, pb};
use prost::Message;
use serde::de::DeserializeOwned;

use super::format::{self, CallHead, End, HEAD, Head, Header, Kind, Outcome};

/// Why a record can't be used.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// It can't be read.
    #[error("the record {path} can't be read: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// There is none of this rank.
    #[error("{folder} has no record of rank {rank}: it has {found}")]
    NoRank {
        /// The folder of the job.
        folder: PathBuf,
        /// The rank.
        rank: u32,
        /// What is there.
        found: String,
    },
    /// It is something else.
    #[error("{path} is not a record: `gradwire run --record DIR` makes records")]
    Other {
        /// The file.
        path: PathBuf,
    },
    /// Another version of Gradwire has made it.
    #[error(
        "the record {path} was made by Gradwire {found}, but this is Gradwire {VERSION}: replay it \
         with the release that made it"
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// It has no complete header.
    #[error(
        "the record {path} has no beginning: the rank ended before it had joined the job, or no \
         space was left"
    )]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// It was changed.
    #[error("the record {path} is damaged at byte {at}: {what}; record the job again")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The place of the frame.
        at: u64,
        /// What is wrong there.
        what: String,
    },
}

/// A recorded call.
#[derive(Debug, Clone)]
pub struct Call {
    /// Its number, thread, process set and outcome.
    pub head: CallHead,
    /// Its name.
    pub name: TensorName,
    /// What it asked for.
    pub request: Request,
    /// Where its results begin in the file.
    data: u64,
}

impl Call {
    /// A call whose results are not in a file.
    pub fn new(head: CallHead, name: TensorName, request: Request) -> Self {
        Self { head, name, request, data: 0 }
    }
}

/// What comes next in a record.
#[derive(Debug)]
pub enum Next {
    /// A call.
    Call(Box<Call>),
    /// The end.
    End(End),
    /// The file ends there without a reason: the process was killed.
    Cut,
}

/// A record that is being read, from its beginning to its end.
#[derive(Debug)]
pub struct Reader {
    file: File,
    path: PathBuf,
    at: u64,
    length: u64,
    /// Which rank it is of.
    pub header: Header,
}

impl Reader {
    /// Opens the record of a rank in the folder of its job.
    ///
    /// # Errors
    /// [`RecordError`] says what is wrong.
    pub fn open(folder: &Path, rank: u32) -> Result<Self, RecordError> {
        let path = folder.join(format::folder(rank)).join(format::FILE);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.len(), file)));
        let (length, file) = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let folder = folder.to_owned();
                return Err(RecordError::NoRank { found: found(&folder), folder, rank });
            }
            opened => opened.map_err(|source| RecordError::Io { path: path.clone(), source })?,
        };
        let mut begin = [0; 12];
        if length < 12 {
            let is_begun = length == 0;
            return Err(if is_begun {
                RecordError::Empty { path }
            } else {
                RecordError::Other { path }
            });
        }
        file.read_exact_at(&mut begin, 0)
            .map_err(|source| RecordError::Io { path: path.clone(), source })?;
        let [magic @ .., a, b, c, d] = begin;
        if magic != format::MAGIC {
            return Err(RecordError::Other { path });
        }
        let version = u32::from_le_bytes([a, b, c, d]);
        if version != format::VERSION {
            let found = format!("of another release (version {version} of the file)");
            return Err(RecordError::Version { path, found });
        }
        let header = Header {
            gradwire: String::new(),
            job: String::new(),
            rank,
            size: 0,
            attached: Vec::new(),
            variables: Default::default(),
            command: Vec::new(),
            limit: 0,
        };
        let mut reader = Self { file, path, at: 12, length, header };
        let Some((head, body)) = reader.frame()? else {
            return Err(RecordError::Empty { path: reader.path });
        };
        if head.kind != Kind::Header {
            return Err(reader.damaged(12, "its first frame is not a header"));
        }
        let header: Header = reader.decode(12, &body)?;
        if header.gradwire != VERSION {
            return Err(RecordError::Version { path: reader.path, found: header.gradwire });
        }
        if header.rank != rank || header.size <= rank {
            let what = format!("it is the record of rank {} of {}", header.rank, header.size);
            return Err(reader.damaged(12, what));
        }
        reader.header = header;
        Ok(reader)
    }

    fn damaged(&self, at: u64, what: impl Into<String>) -> RecordError {
        RecordError::Damaged { path: self.path.clone(), at, what: what.into() }
    }

    fn decode<T: DeserializeOwned>(&self, at: u64, body: &[u8]) -> Result<T, RecordError> {
        postcard::from_bytes(body).map_err(|error| self.damaged(at, error.to_string()))
    }

    /// The beginning of the frame at a place; `None` if the file ends within the frame.
    fn head(&self, at: u64) -> Result<Option<Head>, RecordError> {
        if self.length.saturating_sub(at) < HEAD as u64 {
            return Ok(None);
        }
        let mut bytes = [0; HEAD];
        self.read(&mut bytes, at)?;
        let head = Head::read(&bytes).map_err(|what| self.damaged(at, what))?;
        let is_whole = self.length - at - HEAD as u64 >= head.length as u64;
        Ok(is_whole.then_some(head))
    }

    fn read(&self, bytes: &mut [u8], at: u64) -> Result<(), RecordError> {
        let read = self.file.read_exact_at(bytes, at);
        read.map_err(|source| RecordError::Io { path: self.path.clone(), source })
    }

    fn body(&self, head: &Head, at: u64) -> Result<Vec<u8>, RecordError> {
        let mut body = vec![0; head.length];
        self.read(&mut body, at + HEAD as u64)?;
        if head.fits(&body) { Ok(body) } else { Err(self.damaged(at, "its checksum is wrong")) }
    }

    /// The next frame and its body; `None` if the file ends before.
    fn frame(&mut self) -> Result<Option<(Head, Vec<u8>)>, RecordError> {
        let Some(head) = self.head(self.at)? else { return Ok(None) };
        let body = self.body(&head, self.at)?;
        self.at += (HEAD + head.length) as u64;
        Ok(Some((head, body)))
    }

    /// What comes next. The results of a call are not read.
    ///
    /// # Errors
    /// [`RecordError`] if the file can't be read or is damaged.
    #[expect(clippy::should_implement_trait, reason = "it may fail, and ends with a reason")]
    pub fn next(&mut self) -> Result<Next, RecordError> {
        let at = self.at;
        let Some((head, body)) = self.frame()? else { return Ok(Next::Cut) };
        match head.kind {
            Kind::Call => {}
            Kind::End => return Ok(Next::End(self.decode(at, &body)?)),
            Kind::Header | Kind::Data => return Err(self.damaged(at, "a frame out of order")),
        }
        let call: CallHead = self.decode(at, &body)?;
        let call = self.check(at, call)?;
        let mut left = call.head.outcome.bytes();
        while left > 0 {
            // A call without all its results was not finished.
            let Some(head) = self.head(self.at)? else { return Ok(Next::Cut) };
            if head.kind != Kind::Data {
                return Err(self.damaged(self.at, "results are missing"));
            }
            self.at += (HEAD + head.length) as u64;
            left -= left.min(format::MAX_DATA as u64);
        }
        Ok(Next::Call(Box::new(call)))
    }

    /// Checks a call (TRUST).
    fn check(&self, at: u64, head: CallHead) -> Result<Call, RecordError> {
        let wrong = |what: String| self.damaged(at, what);
        let name = TensorName::new(&head.name).map_err(|error| wrong(error.to_string()))?;
        let request = pb::Request::decode(&*head.request).map_err(|error| wrong(error.to_string()));
        let request = Request::try_from(request?).map_err(|error| wrong(error.to_string()))?;
        if let Outcome::Done { moved, results, .. } = &head.outcome {
            if results.len() != request.parts() {
                let what = format!("{} results of {} tensors", results.len(), request.parts());
                return Err(wrong(what));
            }
            for (part, result) in results.iter().enumerate().filter(|_| *moved) {
                let shape = Shape::new(&result.shape).map_err(|error| wrong(error.to_string()))?;
                if shape.elements() * request.dtype_of(part).size() as u64 != result.bytes {
                    return Err(wrong(format!("{} bytes of shape {shape}", result.bytes)));
                }
            }
        }
        Ok(Call { head, name, request, data: self.at })
    }

    /// Reads the results of a call, in parts: `take` gets the bytes of all tensors one after the
    /// other.
    ///
    /// # Errors
    /// [`RecordError`] if the file can't be read or is damaged.
    pub fn results(&self, call: &Call, mut take: impl FnMut(&[u8])) -> Result<(), RecordError> {
        let (mut at, mut left) = (call.data, call.head.outcome.bytes());
        while left > 0 {
            let head = self.head(at)?.ok_or_else(|| self.damaged(at, "results are missing"))?;
            let data = format::unpack(&self.body(&head, at)?);
            let data = data.map_err(|what| self.damaged(at, what))?;
            if data.len() as u64 != left.min(format::MAX_DATA as u64) {
                return Err(self.damaged(at, "results of another length"));
            }
            take(&data);
            left -= data.len() as u64;
            at += (HEAD + head.length) as u64;
        }
        Ok(())
    }
}

/// The ranks that have a record in the folder of their job, ascending.
pub fn recorded_ranks(folder: &Path) -> Vec<u32> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let rank = |name: &str| name.strip_prefix("rank.")?.parse().ok();
    let mut ranks: Vec<u32> =
        entries.filter_map(|entry| rank(entry.file_name().to_str()?)).collect();
    ranks.sort_unstable();
    ranks
}

fn found(folder: &Path) -> String {
    match &*recorded_ranks(folder) {
        [] => "no records; `gradwire run --record DIR` makes them".to_owned(),
        [one] => format!("that of rank {one}"),
        several => format!("those of ranks {}", Rank::list(several.iter().copied().map(Rank))),
    }
}
