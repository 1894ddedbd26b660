//! A record that is replayed: what the program needs to find its daemon, and how often it ran.

use std::{
    collections::BTreeMap,
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener},
    },
    path::{Path, PathBuf},
};

use gradwire_proto::{Secret, pb};
use gradwire_worker::record::{
    format::{Header, folder},
    reader::{Reader, RecordError},
};
use prost::Message;

/// What the program has done with its record the last time it was a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Summary {
    /// The recorded calls that it has made.
    pub made: u64,
    /// All recorded calls.
    pub recorded: u64,
    /// Why the replay has ended early, if it has.
    pub problem: Option<String>,
}

/// A recorded rank, and the socket at which a program becomes that rank.
#[derive(Debug)]
pub struct Replay {
    pub(crate) folder: PathBuf,
    pub(crate) rank: u32,
    pub(crate) header: Header,
    pub(crate) attached: pb::Attached,
    pub(crate) secret: Secret,
    socket: String,
    pub(crate) listener: UnixListener,
}

impl Replay {
    /// Opens the record of a rank in the folder of its job, and listens.
    ///
    /// # Errors
    /// [`RecordError`] says what is wrong with the record.
    pub fn open(folder: &Path, rank: u32) -> Result<Self, RecordError> {
        let header = Reader::open(folder, rank)?.header;
        let attached = pb::Attached::decode(&*header.attached).map_err(|error| {
            let what = format!("the place of the rank: {error}");
            RecordError::Damaged { path: folder.to_owned(), at: 0, what }
        })?;
        let socket = format!("@gradwire-replay-{}-{rank}", std::process::id());
        let listener = SocketAddr::from_abstract_name(&socket[1..])
            .and_then(|address| UnixListener::bind_addr(&address))
            .and_then(|listener| listener.set_nonblocking(true).map(|()| listener))
            .map_err(|source| RecordError::Io { path: folder.to_owned(), source })?;
        let (folder, secret) = (folder.to_owned(), Secret::generate());
        Ok(Self { folder, rank, header, attached, secret, socket, listener })
    }

    /// The recorded rank.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The variables of the program.
    pub fn variables(&self) -> BTreeMap<String, String> {
        let mut all = self.header.variables.clone();
        let own = self.folder.join(folder(self.rank)).display().to_string();
        for (name, value) in [
            ("GRADWIRE_JOB", self.header.job.clone()),
            ("GRADWIRE_SECRET", self.secret.to_hex()),
            ("GRADWIRE_SOCKET", self.socket.clone()),
            ("GRADWIRE_LOCAL_RANK", self.attached.local_rank.to_string()),
            ("GRADWIRE_REPLAY", own),
            // Results are written to the memory as to a file, which huge pages refuse.
            ("GRADWIRE_WORKER__HUGE_PAGES", "never".to_owned()),
        ] {
            all.insert(name.to_owned(), value);
        }
        all
    }
}
