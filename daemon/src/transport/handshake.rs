//! How two daemons authenticate each other before a data connection carries data.
//!
//! ```text
//!   dialler                                       acceptor
//!     │ Hello: who, to whom, number, epoch, job, nonce ► │  136 bytes, fixed
//!     │ ◄── Challenge: its nonce, proof over the Hello   │   64 bytes
//!     │ proof over its nonce and the Hello ────────────► │   32 bytes
//!     │ ◄── Admission                                    │    1 byte
//!     │ Begin ─────────────────────────────────────────► │    1 byte
//! ```
//!
//! Each of the dialler's attempts has its own number, and the latest one wins, so a lost Admission
//! has no lasting effect. The acceptor sends no data before it has received Begin: until then the
//! dialler may not know that it was admitted. The Hello also carries the byte counts of the
//! connections that this one replaces: the acceptor continues at the byte after `read`, and says
//! at which byte the dialler continues ([`frame`](super::frame)).
//!
//! Both sides prove the job's secret over the other's nonce, so neither a replayed handshake nor a
//! daemon of another job or epoch succeeds (TRUST). No message of the other side decides how much
//! memory is allocated.

use gradwire_proto::{
    Epoch, JobId, NodeId, Secret,
    auth::{Claim, NONCE_BYTES, PROOF_BYTES, nonce},
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::frame::Totals;

/// The limit of connections that one lane has with a peer.
pub(crate) const MAX_STREAMS: u32 = 16;

const MAGIC: [u8; 8] = *b"GRADWIRE";
const VERSION: u32 = 3;

/// Bytes of a Hello.
pub const HELLO_BYTES: usize = 8 + 4 + 8 + 5 * 4 + 2 * 8 + JobId::MAX_BYTES + NONCE_BYTES;
const BEGIN: u8 = 1;

/// Why a connection could not be made.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The connection itself failed.
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] std::io::Error),
    /// The other side is not a Gradwire daemon of this version.
    #[error("the other side does not speak version {VERSION} of Gradwire's data protocol")]
    NotGradwire,
    /// The other side is a daemon of another job, epoch or node.
    #[error("the other side belongs to another job, epoch or node ({0})")]
    WrongPeer(String),
    /// The other side does not know the secret.
    #[error("the other side could not prove the job's secret")]
    Secret,
    /// The acceptor has refused.
    #[error("the other side refused the connection: {0}")]
    Refused(Admission),
}

/// The acceptor's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Admission {
    /// The connection is accepted.
    Granted = 0,
    /// The dialler's proof is wrong.
    Secret = 1,
    /// This connection already exists, from the same attempt or a later one.
    Taken = 2,
}

impl std::fmt::Display for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Granted => "granted",
            Self::Secret => "the secrets differ",
            Self::Taken => "this connection already exists",
        })
    }
}

/// A daemon's place in its job.
#[derive(Debug, Clone)]
pub struct Identity {
    /// The job.
    pub job: JobId,
    /// Its secret.
    pub secret: Secret,
    /// The world's epoch.
    pub epoch: Epoch,
    /// This node.
    pub node: NodeId,
    /// The number of nodes.
    pub nodes: u32,
    /// The number of data threads of each node. Connection n belongs to thread n modulo this
    /// number.
    pub lanes: u32,
}

/// Identifies a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    /// The node at the other end.
    pub peer: NodeId,
    /// Its number among the connections with that node; the dialler chooses how many there are.
    pub number: u32,
}

impl ConnectionId {
    /// Its lane, and its number among the connections of that lane.
    pub(crate) fn place(self, lanes: u32) -> (u32, u32) {
        (self.number % lanes, self.number / lanes)
    }
}

/// An attempt to make a connection, and what it replaces.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Attempt {
    /// Attempts to make the same connection have ascending numbers.
    pub number: u32,
    /// The bytes that the earlier connections have carried, as counted by the dialler.
    pub totals: Totals,
}

/// The Hello with which a dialler asks for a connection.
pub fn hello(
    me: &Identity,
    id: ConnectionId,
    attempt: Attempt,
    nonce: &[u8; NONCE_BYTES],
) -> [u8; HELLO_BYTES] {
    let mut bytes = [0; HELLO_BYTES];
    let mut at = 0;
    let mut put = |part: &[u8]| {
        bytes[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    let mut job = [0; JobId::MAX_BYTES];
    job[..me.job.as_str().len()].copy_from_slice(me.job.as_str().as_bytes());
    put(&MAGIC);
    put(&VERSION.to_le_bytes());
    put(&me.epoch.0.to_le_bytes());
    put(&me.node.0.to_le_bytes());
    put(&id.peer.0.to_le_bytes());
    put(&id.number.to_le_bytes());
    put(&me.lanes.to_le_bytes());
    put(&attempt.number.to_le_bytes());
    put(&attempt.totals.written.to_le_bytes());
    put(&attempt.totals.read.to_le_bytes());
    put(&job);
    put(nonce);
    bytes
}

/// Authenticates the acceptor on a new connection to `id.peer`.
///
/// # Errors
/// [`HandshakeError`]; then the connection can't be used.
pub async fn dial<S>(
    stream: &mut S,
    me: &Identity,
    id: ConnectionId,
    attempt: Attempt,
) -> Result<(), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let nonce = nonce();
    let hello = hello(me, id, attempt, &nonce);
    stream.write_all(&hello).await?;
    let mut challenge = [0; NONCE_BYTES + PROOF_BYTES];
    stream.read_exact(&mut challenge).await?;
    let (theirs, proof) = challenge.split_at(NONCE_BYTES);
    let claim = Claim::DataAcceptor { challenge: theirs, hello: &hello };
    if !me.secret.verify(&claim, proof) {
        return Err(HandshakeError::Secret);
    }
    let claim = Claim::DataDialler { challenge: theirs, hello: &hello };
    stream.write_all(&me.secret.prove(&claim)).await?;
    match stream.read_u8().await? {
        0 => Ok(stream.write_u8(BEGIN).await?),
        1 => Err(HandshakeError::Refused(Admission::Secret)),
        2 => Err(HandshakeError::Refused(Admission::Taken)),
        _ => Err(HandshakeError::NotGradwire),
    }
}

/// Checks that a Hello is for this daemon, from one of the same job and epoch. Its sender has not
/// proven yet that it knows the secret.
///
/// # Errors
/// [`HandshakeError::NotGradwire`] and [`HandshakeError::WrongPeer`].
pub fn check_hello(
    me: &Identity,
    received: &[u8; HELLO_BYTES],
) -> Result<(ConnectionId, Attempt), HandshakeError> {
    let word = |at: usize| u32::from_le_bytes([0, 1, 2, 3].map(|i| received[at + i]));
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    if received[..8] != MAGIC || word(8) != VERSION {
        return Err(HandshakeError::NotGradwire);
    }
    let id = ConnectionId { peer: NodeId(word(20)), number: word(28) };
    let totals = Totals { written: long(40), read: long(48) };
    let attempt = Attempt { number: word(36), totals };
    // A proof holds only for this Hello with its nonce, for this epoch and this node.
    let mut theirs = [0; NONCE_BYTES];
    theirs.copy_from_slice(&received[HELLO_BYTES - NONCE_BYTES..]);
    let dialler = Identity { node: id.peer, ..me.clone() };
    let expected =
        hello(&dialler, ConnectionId { peer: me.node, number: id.number }, attempt, &theirs);
    if *received != expected || id.peer.0 >= me.nodes || id.number >= me.lanes * MAX_STREAMS {
        let epoch = long(12);
        return Err(HandshakeError::WrongPeer(format!(
            "its Hello is from node {} to node {}, connection {}, epoch {epoch}",
            id.peer,
            word(24),
            id.number
        )));
    }
    Ok((id, attempt))
}

/// Authenticates the dialler. `admit` decides whether this attempt gets the connection. It is
/// called before the other side may send data.
///
/// # Errors
/// [`HandshakeError`]; then the connection can't be used.
pub async fn accept<S>(
    stream: &mut S,
    me: &Identity,
    admit: impl FnOnce(ConnectionId, Attempt, &S) -> bool,
) -> Result<(ConnectionId, Attempt), HandshakeError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let mut received = [0; HELLO_BYTES];
    stream.read_exact(&mut received).await?;
    let (id, attempt) = check_hello(me, &received)?;
    let nonce = nonce();
    let claim = Claim::DataAcceptor { challenge: &nonce, hello: &received };
    let proof = me.secret.prove(&claim);
    stream.write_all(&nonce).await?;
    stream.write_all(&proof).await?;
    let mut answer = [0; PROOF_BYTES];
    stream.read_exact(&mut answer).await?;
    let claim = Claim::DataDialler { challenge: &nonce, hello: &received };
    let admission = if !me.secret.verify(&claim, &answer) {
        Admission::Secret
    } else if !admit(id, attempt, stream) {
        Admission::Taken
    } else {
        Admission::Granted
    };
    stream.write_u8(admission as u8).await?;
    match admission {
        Admission::Granted => match stream.read_u8().await? {
            BEGIN => Ok((id, attempt)),
            _ => Err(HandshakeError::NotGradwire),
        },
        Admission::Secret => Err(HandshakeError::Secret),
        Admission::Taken => Err(HandshakeError::Refused(admission)),
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            Arc,
            atomic::{AtomicBool, Ordering::Relaxed},
        },
        time::Duration,
    };

    use super::*;

    fn identity(node: u32) -> Identity {
        Identity {
            job: JobId::new("job").unwrap(),
            secret: Secret::from_hex(&"ab".repeat(32)).unwrap(),
            epoch: Epoch(3),
            node: NodeId(node),
            nodes: 2,
            lanes: 2,
        }
    }

    async fn shake(
        dialler: Identity,
        acceptor: Identity,
        id: ConnectionId,
        admit: bool,
    ) -> (Result<(), HandshakeError>, Result<(ConnectionId, Attempt), HandshakeError>) {
        let (mut a, mut b) = tokio::io::duplex(64);
        let both = async {
            let dial = async {
                let result = dial(&mut a, &dialler, id, ATTEMPT).await;
                drop(a);
                result
            };
            let accept = async {
                let result = accept(&mut b, &acceptor, |_, _, _| admit).await;
                drop(b);
                result
            };
            tokio::join!(dial, accept)
        };
        tokio::time::timeout(Duration::from_secs(5), both).await.unwrap()
    }

    const ID: ConnectionId = ConnectionId { peer: NodeId(1), number: 1 };
    const ATTEMPT: Attempt =
        Attempt { number: 7, totals: Totals { written: 5 << 40, read: 6 << 33 } };

    #[tokio::test]
    async fn two_nodes_of_one_job_connect() {
        let (dialled, accepted) = shake(identity(0), identity(1), ID, true).await;
        dialled.unwrap();
        assert_eq!(accepted.unwrap(), (ConnectionId { peer: NodeId(0), number: 1 }, ATTEMPT));
    }

    /// `admit` has finished before the first byte of data can arrive.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn the_dialler_waits_for_its_admission() {
        let (mut a, mut b) = tokio::io::duplex(4096);
        let welcomed = Arc::new(AtomicBool::new(false));
        let dialler = {
            let welcomed = welcomed.clone();
            tokio::spawn(async move {
                dial(&mut a, &identity(0), ID, ATTEMPT).await.unwrap();
                welcomed.store(true, Relaxed);
            })
        };
        let acceptor = identity(1);
        let admit = |_, _, _: &_| {
            // Long enough for a dialler to receive the Admission.
            std::thread::sleep(Duration::from_millis(50));
            !welcomed.load(Relaxed)
        };
        let accepted =
            tokio::time::timeout(Duration::from_secs(5), accept(&mut b, &acceptor, admit));
        accepted.await.unwrap().unwrap();
        dialler.await.unwrap();
    }

    #[tokio::test]
    async fn a_wrong_secret_is_refused_by_both_sides() {
        let stranger =
            Identity { secret: Secret::from_hex(&"cd".repeat(32)).unwrap(), ..identity(0) };
        let (dialled, accepted) = shake(stranger, identity(1), ID, true).await;
        assert!(matches!(dialled, Err(HandshakeError::Secret)));
        assert!(accepted.is_err());
    }

    #[tokio::test]
    async fn another_job_epoch_or_node_is_refused() {
        let other_job = Identity { job: JobId::new("other").unwrap(), ..identity(0) };
        let other_epoch = Identity { epoch: Epoch(4), ..identity(0) };
        for dialler in [other_job, other_epoch, identity(7)] {
            let (dialled, accepted) = shake(dialler, identity(1), ID, true).await;
            assert!(matches!(accepted, Err(HandshakeError::WrongPeer(_))), "{accepted:?}");
            assert!(dialled.is_err());
        }
        let wrong = ConnectionId { peer: NodeId(0), number: 0 };
        let (_, accepted) = shake(identity(0), identity(1), wrong, true).await;
        assert!(matches!(accepted, Err(HandshakeError::WrongPeer(_))));
    }

    #[tokio::test]
    async fn a_duplicate_connection_is_refused() {
        let (dialled, _) = shake(identity(0), identity(1), ID, false).await;
        assert_eq!(
            dialled.unwrap_err().to_string(),
            "the other side refused the connection: this connection already exists"
        );
    }

    /// Before the dialler has sent Begin, it may not know that it was accepted.
    #[tokio::test]
    async fn a_dialler_that_does_not_begin_is_dropped() {
        let (mut a, mut b) = tokio::io::duplex(4096);
        let cut = async {
            let nonce = nonce();
            let hello = hello(&identity(0), ID, ATTEMPT, &nonce);
            a.write_all(&hello).await.unwrap();
            let mut challenge = [0; NONCE_BYTES + PROOF_BYTES];
            a.read_exact(&mut challenge).await.unwrap();
            let claim = Claim::DataDialler { challenge: &challenge[..NONCE_BYTES], hello: &hello };
            a.write_all(&identity(0).secret.prove(&claim)).await.unwrap();
            assert_eq!(a.read_u8().await.unwrap(), Admission::Granted as u8);
            drop(a);
        };
        let acceptor = identity(1);
        let accepted = accept(&mut b, &acceptor, |_, _, _| true);
        let both = async { tokio::join!(cut, accepted).1 };
        let accepted = tokio::time::timeout(Duration::from_secs(5), both).await.unwrap();
        assert!(matches!(accepted, Err(HandshakeError::Io(_))), "{accepted:?}");
    }

    #[tokio::test]
    async fn other_protocols_and_short_hellos_are_refused() {
        for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], &MAGIC] {
            let (mut a, mut b) = tokio::io::duplex(8192);
            a.write_all(bytes).await.unwrap();
            drop(a);
            let me = identity(1);
            let accepted = accept(&mut b, &me, |_, _, _| true);
            let accepted = tokio::time::timeout(Duration::from_secs(5), accepted).await.unwrap();
            assert!(accepted.is_err());
        }
    }
}
