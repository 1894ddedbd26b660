//! Proofs that the other side knows the job's secret. The secret itself is never sent.
//!
//! A proof is HMAC-SHA-256 (RFC 2104) over a label and the parts of a [`Claim`], each prefixed with
//! its length, so that no two claims give the same bytes. The challenger's nonce is one of the
//! parts, so an intercepted proof can't be used again.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// The length of a nonce in bytes.
pub const NONCE_BYTES: usize = 32;

/// The length of a proof in bytes.
pub const PROOF_BYTES: usize = 32;

/// What a proof is about. Both sides build the same value; the proof is valid only if all fields
/// are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields are those of the messages that carry the proof")]
pub enum Claim<'a> {
    /// A node joins the job; `challenge` is the coordinator's nonce, `nonce` the node's own.
    Join {
        challenge: &'a [u8],
        nonce: &'a [u8],
        job: &'a str,
        host: &'a str,
        data_address: &'a str,
        slots: u32,
        order: u32,
        rack: &'a str,
        metrics_address: &'a str,
        line_mbit: u32,
        epoch: u64,
        attempt: u32,
        received: u64,
    },
    /// The coordinator answers a node's join; `nonce` is the node's.
    World { nonce: &'a [u8], job: &'a str, epoch: u64 },
    /// The coordinator answers a node that joins again; `nonce` is the node's.
    Resumed { nonce: &'a [u8], job: &'a str, epoch: u64, received: u64 },
    /// A worker attaches to its node's daemon; `challenge` is the daemon's nonce. In an elastic job
    /// `local_rank` is the number of the worker in the job.
    Attach { challenge: &'a [u8], job: &'a str, local_rank: u32 },
    /// The dialling side of a data connection; `hello` is its description of itself.
    DataDialler { challenge: &'a [u8], hello: &'a [u8] },
    /// The accepting side of a data connection; `hello` holds the dialler's nonce.
    DataAcceptor { challenge: &'a [u8], hello: &'a [u8] },
    /// A viewer wants to see what the ranks of a job do; `challenge` is the coordinator's nonce.
    View { challenge: &'a [u8], job: &'a str },
    /// A node or the coordinator is alive; `body` is the part of the message before the proof.
    Beat { job: &'a str, body: &'a [u8] },
}

impl Claim<'_> {
    /// Passes the claim's label and parts to `take`, in one fixed order.
    fn parts(&self, take: impl FnMut(&[u8])) {
        let each = |parts: &[&[u8]]| parts.iter().copied().for_each(take);
        match *self {
            Self::Join {
                challenge,
                nonce,
                job,
                host,
                data_address,
                slots,
                order,
                rack,
                metrics_address,
                line_mbit,
                epoch,
                attempt,
                received,
            } => each(&[
                b"gradwire join",
                challenge,
                nonce,
                job.as_bytes(),
                host.as_bytes(),
                data_address.as_bytes(),
                &slots.to_le_bytes(),
                &order.to_le_bytes(),
                rack.as_bytes(),
                metrics_address.as_bytes(),
                &line_mbit.to_le_bytes(),
                &epoch.to_le_bytes(),
                &attempt.to_le_bytes(),
                &received.to_le_bytes(),
            ]),
            Self::World { nonce, job, epoch } => {
                each(&[b"gradwire world", nonce, job.as_bytes(), &epoch.to_le_bytes()]);
            }
            Self::Resumed { nonce, job, epoch, received } => each(&[
                b"gradwire resumed",
                nonce,
                job.as_bytes(),
                &epoch.to_le_bytes(),
                &received.to_le_bytes(),
            ]),
            Self::Attach { challenge, job, local_rank } => {
                let local_rank = local_rank.to_le_bytes();
                each(&[b"gradwire attach", challenge, job.as_bytes(), &local_rank]);
            }
            Self::DataDialler { challenge, hello } => {
                each(&[b"gradwire data dialler", challenge, hello]);
            }
            Self::DataAcceptor { challenge, hello } => {
                each(&[b"gradwire data acceptor", challenge, hello]);
            }
            Self::View { challenge, job } => each(&[b"gradwire view", challenge, job.as_bytes()]),
            Self::Beat { job, body } => each(&[b"gradwire beat", job.as_bytes(), body]),
        }
    }
}

/// A text is not a job secret.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the job secret must be 64 hexadecimal digits (32 bytes), but has {given} characters")]
pub struct SecretError {
    given: usize,
}

/// The secret that all processes of one job share. Never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Random bytes for a challenge, from the operating system.
///
/// # Panics
/// Panics if the operating system has no random bytes.
pub fn nonce() -> [u8; NONCE_BYTES] {
    let mut bytes = [0; NONCE_BYTES];
    getrandom::fill(&mut bytes).expect("the operating system provides random bytes");
    bytes
}

impl Secret {
    /// A new random secret.
    pub fn generate() -> Self {
        Self(nonce())
    }

    /// Reads 64 hexadecimal digits. The text of an error does not contain what was given.
    pub fn from_hex(text: &str) -> Result<Self, SecretError> {
        let error = SecretError { given: text.chars().count() };
        if text.len() != 64 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(error);
        }
        let mut bytes = [0; 32];
        for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(|_| error.clone())?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| error.clone())?;
        }
        Ok(Self(bytes))
    }

    /// The 64 hexadecimal digits, for a file, the environment or a pipe, never for a command line.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn mac(&self, claim: &Claim<'_>) -> Hmac<Sha256> {
        let mut mac =
            Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC accepts a key of any length");
        claim.parts(|part| {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        });
        mac
    }

    /// The proof of this secret for a claim.
    pub fn prove(&self, claim: &Claim<'_>) -> [u8; PROOF_BYTES] {
        self.mac(claim).finalize().into_bytes().into()
    }

    /// Whether a proof is valid, in constant time.
    pub fn verify(&self, claim: &Claim<'_>, proof: &[u8]) -> bool {
        self.mac(claim).verify_slice(proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_binds_secret_purpose_and_parts() {
        let secret = Secret::generate();
        let claim = Claim::World { nonce: b"nonce", job: "job", epoch: 7 };
        let proof = secret.prove(&claim);
        assert!(secret.verify(&claim, &proof));
        let others = [
            Claim::World { nonce: b"nonce", job: "job", epoch: 8 },
            Claim::World { nonce: b"noncej", job: "ob", epoch: 7 },
            Claim::Attach { challenge: b"nonce", job: "job", local_rank: 7 },
        ];
        for other in others {
            assert!(!secret.verify(&other, &proof), "{other:?}");
        }
        assert!(!secret.verify(&claim, &proof[..31]));
        assert!(!Secret::generate().verify(&claim, &proof));
    }

    #[test]
    fn a_secret_survives_hex_and_is_never_printed() {
        let secret = Secret::generate();
        assert_eq!(Secret::from_hex(&secret.to_hex()), Ok(secret.clone()));
        assert!(!format!("{secret:?}").contains(&secret.to_hex()[..8]));
        for bad in ["", "12", &"g".repeat(64), &"+1".repeat(32), &"é".repeat(32)] {
            let text = Secret::from_hex(bad).unwrap_err().to_string();
            assert!(text.contains("64 hexadecimal digits"), "{text}");
        }
    }
}
