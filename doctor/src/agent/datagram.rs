//! Checks whether datagrams reach another agent and come back. Both sides prove that they know the
//! secret of the run (TRUST). An answer is shorter than its question, so answers can't be used to
//! flood a third host.
//!
//! ```text
//! dialler ── "gwdoctor", nonce (32), proof (32) ──► acceptor
//!         ◄── proof (32) ──
//! ```

use std::{net::SocketAddr, sync::Arc, time::Duration};

use gradwire_proto::{
    Secret,
    auth::{Claim, NONCE_BYTES, PROOF_BYTES, nonce},
};
use tokio::{
    net::UdpSocket,
    time::{sleep, timeout},
};

use crate::limits::DATAGRAM;

const MAGIC: &[u8; 8] = b"gwdoctor";
const QUESTION: usize = MAGIC.len() + NONCE_BYTES + PROOF_BYTES;

/// Repeats a question until there is an answer or the time is over: single datagrams may be lost.
///
/// # Errors
/// The reason, in one line.
pub async fn ask(address: SocketAddr, secret: &Secret, limit: Duration) -> Result<(), String> {
    let own = if address.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(own).await.map_err(|error| error.to_string())?;
    socket.connect(address).await.map_err(|error| error.to_string())?;
    let nonce = nonce();
    let claim = Claim::DataDialler { challenge: MAGIC, hello: &nonce };
    let question = [&MAGIC[..], &nonce, &secret.prove(&claim)].concat();
    let answered = async {
        // One byte more, to recognise a longer datagram, which is not an answer.
        let mut answer = [0; PROOF_BYTES + 1];
        loop {
            // The next call reports a closed port, which may open later.
            let _ = socket.send(&question).await;
            let received = timeout(DATAGRAM, socket.recv(&mut answer)).await;
            let claim = Claim::DataAcceptor { challenge: MAGIC, hello: &nonce };
            match received {
                Ok(Ok(length)) if secret.verify(&claim, &answer[..length]) => return,
                Err(_) => {}
                // From another sender, or an error that comes at once.
                _ => sleep(DATAGRAM).await,
            }
        }
    };
    let none = |_| format!("no answer within {} ms", limit.as_millis());
    timeout(limit, answered).await.map_err(none)
}

/// Answers questions until it is dropped.
pub async fn answer(socket: UdpSocket, secret: Arc<Secret>) {
    // One byte more, to recognise a longer datagram, which is not a question.
    let mut question = [0; QUESTION + 1];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut question).await else {
            // Most errors are about an earlier datagram. A lasting error must not make this spin.
            sleep(DATAGRAM).await;
            continue;
        };
        let Some(nonce) = proven(&question[..length], &secret) else { continue };
        let answer = secret.prove(&Claim::DataAcceptor { challenge: MAGIC, hello: nonce });
        let _ = socket.try_send_to(&answer, from);
    }
}

/// The nonce of a question of this run.
fn proven<'a>(question: &'a [u8], secret: &Secret) -> Option<&'a [u8]> {
    let (nonce, proof) = question.strip_prefix(MAGIC)?.split_at_checked(NONCE_BYTES)?;
    secret.verify(&Claim::DataDialler { challenge: MAGIC, hello: nonce }, proof).then_some(nonce)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_agents_of_one_run_answer_each_other() {
        let secret = Arc::new(Secret::generate());
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let server = tokio::spawn(answer(socket, secret.clone()));
        assert_eq!(ask(address, &secret, Duration::from_secs(20)).await, Ok(()));
        let refused = ask(address, &Secret::generate(), Duration::from_millis(300)).await;
        assert_eq!(refused, Err("no answer within 300 ms".to_owned()), "TRUST");
        // Other datagrams get no answer.
        let stranger = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        for bytes in [&b""[..], b"gwdoctor", &[7; QUESTION], &[7; 1000]] {
            stranger.send_to(bytes, address).await.unwrap();
        }
        let mut any = [0; 8];
        assert!(timeout(DATAGRAM, stranger.recv(&mut any)).await.is_err());
        assert_eq!(ask(address, &secret, Duration::from_secs(20)).await, Ok(()));
        server.abort();
    }
}
