//! Limits the output that is on its way to the launcher. If the reader of the launcher's output is
//! slow, processes that write must wait. Other reports need no credit: the launcher must learn of
//! an end and act on it, also while nobody reads the output.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// The most pieces of output that the launcher has received and not yet passed on (BOUND).
const PIECES: usize = 1024;

/// What the processes of a host may send.
#[derive(Debug, Clone)]
pub struct Credit(Arc<Semaphore>);

impl Credit {
    pub(super) fn new() -> Self {
        Self(Arc::new(Semaphore::new(PIECES)))
    }

    /// Waits until a piece of output may be sent.
    pub(super) async fn take(&self) {
        // After the end of all processes, the rest of their output is small and needs no credit.
        if let Ok(permit) = self.0.acquire().await {
            permit.forget();
        }
    }

    /// The launcher has passed on this number of pieces, which can't be more than it got (TRUST).
    pub(super) fn give(&self, pieces: u32) {
        let most = PIECES.saturating_sub(self.0.available_permits());
        self.0.add_permits(most.min(pieces as usize));
    }

    /// All processes have ended: the rest of their output is sent at once.
    pub(super) fn end(&self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn output_waits_for_credit() {
        let credit = Credit::new();
        for _ in 0..PIECES {
            credit.take().await;
        }
        let waits = async |credit: &Credit| timeout(Duration::from_secs(9), credit.take()).await;
        assert!(waits(&credit).await.is_err(), "BOUND");
        credit.give(2);
        assert!(waits(&credit).await.is_ok() && waits(&credit).await.is_ok());
        assert!(waits(&credit).await.is_err());
        credit.give(u32::MAX);
        assert_eq!(credit.0.available_permits(), PIECES, "TRUST");
        for _ in 0..PIECES {
            credit.take().await;
        }
        credit.end();
        assert!(waits(&credit).await.is_ok());
    }
}
