//! Connections between agents, which begin with proofs (TRUST): a peer that does not know the
//! secret of this run gets nothing but a random challenge.
//!
//! ```text
//! dialler ◄── "gwdoctor", challenge (32)                               ── acceptor
//!         ── hello: kind (1), number of its host (4), nonce (32); proof (32) ──►
//!         ◄── proof (32) ──
//! ```
//!
//! Numbers are little-endian. Both proofs are those of data connections (`gradwire_proto::auth`).

use std::{io, net::SocketAddr, time::Duration};

use gradwire_proto::{
    Secret,
    auth::{Claim, NONCE_BYTES, PROOF_BYTES, nonce},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const MAGIC: &[u8; 8] = b"gwdoctor";
const HELLO: usize = 1 + 4 + NONCE_BYTES;

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::FromRepr)]
#[repr(u8)]
pub enum Kind {
    /// Only to see whether it can be made.
    Reach,
    /// Small messages and a large one.
    Ping,
    /// As many bytes as possible.
    Bulk,
}

/// Dials another agent.
///
/// # Errors
/// The reason, in one line.
pub async fn dial(
    address: SocketAddr,
    secret: &Secret,
    own: u32,
    kind: Kind,
    limit: Duration,
) -> Result<TcpStream, String> {
    let connected = timeout(limit, TcpStream::connect(address)).await;
    let no_answer = || format!("no answer within {} ms", limit.as_millis());
    let mut stream = connected.map_err(|_| no_answer())?.map_err(|error| error.to_string())?;
    match timeout(limit, prove(&mut stream, secret, own, kind)).await {
        Ok(Ok(true)) => Ok(stream),
        Ok(Ok(false)) => Err("another program listens there".to_owned()),
        Ok(Err(error)) => Err(format!("the connection broke in the handshake: {error}")),
        Err(_) => Err(format!("connected, but {}", no_answer())),
    }
}

async fn prove(stream: &mut TcpStream, secret: &Secret, own: u32, kind: Kind) -> io::Result<bool> {
    stream.set_nodelay(true)?;
    let mut greeting = [0; MAGIC.len() + NONCE_BYTES];
    stream.read_exact(&mut greeting).await?;
    let Some(challenge) = greeting.strip_prefix(MAGIC) else { return Ok(false) };
    let mut hello = vec![kind as u8];
    hello.extend(own.to_le_bytes());
    hello.extend(nonce());
    let proof = secret.prove(&Claim::DataDialler { challenge, hello: &hello });
    stream.write_all(&[&hello[..], &proof].concat()).await?;
    let mut answer = [0; PROOF_BYTES];
    stream.read_exact(&mut answer).await?;
    Ok(secret.verify(&Claim::DataAcceptor { challenge, hello: &hello }, &answer))
}

/// Lets a dialler prove itself, and returns the number of its host and the kind of connection.
/// `None` if it is not an agent of this run, or too slow.
pub async fn accept(
    stream: &mut TcpStream,
    secret: &Secret,
    limit: Duration,
) -> Option<(u32, Kind)> {
    timeout(limit, verify(stream, secret)).await.ok()?.ok()?
}

async fn verify(stream: &mut TcpStream, secret: &Secret) -> io::Result<Option<(u32, Kind)>> {
    stream.set_nodelay(true)?;
    let challenge = nonce();
    stream.write_all(&[&MAGIC[..], &challenge].concat()).await?;
    let mut hello = [0; HELLO];
    stream.read_exact(&mut hello).await?;
    let mut proof = [0; PROOF_BYTES];
    stream.read_exact(&mut proof).await?;
    let (challenge, hello) = (&challenge[..], &hello[..]);
    if !secret.verify(&Claim::DataDialler { challenge, hello }, &proof) {
        return Ok(None);
    }
    stream.write_all(&secret.prove(&Claim::DataAcceptor { challenge, hello })).await?;
    let number = hello[1..5].try_into().map(u32::from_le_bytes).ok();
    Ok(number.zip(Kind::from_repr(hello[0])))
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    async fn meet(
        dialler: &Secret,
        acceptor: &Secret,
    ) -> (Result<(), String>, Option<(u32, Kind)>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let accepted = async {
            let mut stream = listener.accept().await.unwrap().0;
            accept(&mut stream, acceptor, LIMIT).await
        };
        let dialled = dial(address, dialler, 7, Kind::Bulk, LIMIT);
        let (dialled, accepted) = tokio::join!(dialled, accepted);
        (dialled.map(drop), accepted)
    }

    #[tokio::test]
    async fn only_agents_of_one_run_meet() {
        let secret = Secret::generate();
        assert_eq!(meet(&secret, &secret).await, (Ok(()), Some((7, Kind::Bulk))));
        let (dialled, accepted) = meet(&Secret::generate(), &secret).await;
        assert!(dialled.unwrap_err().starts_with("the connection broke in the handshake"));
        assert_eq!(accepted, None, "TRUST");
    }

    #[tokio::test]
    async fn other_programs_and_silent_ones_are_no_agents() {
        let secret = Secret::generate();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = async {
            let mut other = listener.accept().await.unwrap().0;
            other.write_all(&[b'x'; 100]).await.unwrap();
            let silent = listener.accept().await.unwrap().0;
            (other, silent)
        };
        let dial = |limit| dial(address, &secret, 0, Kind::Reach, Duration::from_millis(limit));
        let dialled = async {
            let other = dial(20_000).await.unwrap_err();
            (other, dial(50).await.unwrap_err())
        };
        let ((other, silent), _open) = tokio::join!(dialled, server);
        assert_eq!(other, "another program listens there");
        assert_eq!(silent, "connected, but no answer within 50 ms");
    }
}
