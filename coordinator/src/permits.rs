//! Challenges for viewers. What ranks do is shown only to viewers that prove the job's secret:
//! stacks contain file names, and names of functions and tensors.
//!
//! A challenge serves one call. Only the newest ones are kept (BOUND): a viewer that asks for many
//! can make others ask again, but learns nothing.

use std::collections::VecDeque;

use gradwire_proto::{
    JobId, Secret,
    auth::{self, Claim, NONCE_BYTES},
    pb,
};
use parking_lot::Mutex;

/// The most open challenges (BOUND).
const MAX_OPEN: usize = 64;

/// The open challenges of a job.
#[derive(Debug)]
pub(crate) struct Permits {
    secret: Secret,
    job: JobId,
    open: Mutex<VecDeque<[u8; NONCE_BYTES]>>,
}

impl Permits {
    pub(crate) fn new(secret: Secret, job: JobId) -> Self {
        Self { secret, job, open: Mutex::default() }
    }

    /// A new challenge.
    pub(crate) fn challenge(&self) -> pb::ViewerChallenge {
        let nonce = auth::nonce();
        let mut open = self.open.lock();
        open.truncate(MAX_OPEN - 1);
        open.push_front(nonce);
        pb::ViewerChallenge { nonce: nonce.to_vec(), job: self.job.to_string() }
    }

    /// Whether a viewer has proven the secret over an open challenge, which is used up.
    pub(crate) fn admits(&self, nonce: &[u8], proof: &[u8]) -> bool {
        let mut open = self.open.lock();
        let Some(at) = open.iter().position(|own| own == nonce) else { return false };
        open.remove(at);
        drop(open);
        self.secret.verify(&Claim::View { challenge: nonce, job: self.job.as_str() }, proof)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_admits_once() {
        let (secret, job) = (Secret::generate(), JobId::new("j1").unwrap());
        let permits = Permits::new(secret.clone(), job);
        let prove = |secret: &Secret, nonce: &[u8]| {
            secret.prove(&Claim::View { challenge: nonce, job: "j1" })
        };
        let pb::ViewerChallenge { nonce, job } = permits.challenge();
        let proof = prove(&secret, &nonce);
        assert_eq!(job, "j1");
        assert!(!permits.admits(&[7; NONCE_BYTES], &prove(&secret, &[7; NONCE_BYTES])), "not ours");
        assert!(permits.admits(&nonce, &proof));
        assert!(!permits.admits(&nonce, &proof), "used up");
        let other = permits.challenge().nonce;
        assert!(!permits.admits(&other, &prove(&Secret::generate(), &other)));
    }

    #[test]
    fn only_the_newest_challenges_are_kept() {
        let secret = Secret::generate();
        let permits = Permits::new(secret.clone(), JobId::new("j1").unwrap());
        let first = permits.challenge().nonce;
        let all: Vec<_> = (0..MAX_OPEN).map(|_| permits.challenge().nonce).collect();
        assert_eq!(permits.open.lock().len(), MAX_OPEN, "BOUND");
        let admits = |nonce: &[u8]| {
            permits.admits(nonce, &secret.prove(&Claim::View { challenge: nonce, job: "j1" }))
        };
        assert!(!admits(&first) && admits(&all[0]));
    }
}
