//! Those who watch the job: each gets a snapshot twice per second.
//!
//! Snapshots are made while somebody watches, and one serves all. Nothing here waits for a viewer:
//! one that does not read what it gets is disconnected (BOUND).

use std::{future::pending, sync::Arc, time::Duration};

use gradwire_proto::pb::StatusResponse;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    time::{MissedTickBehavior, interval},
};
use tonic::Status;

use crate::inbox::OVER;

/// The shortest time between two snapshots.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

/// The most viewers (BOUND).
const MAX_VIEWERS: usize = 32;

/// How many snapshots may wait for a viewer (BOUND), and the reason why there will be no more.
const WAITING: usize = 4;

/// What a viewer reads. The last item says why there are no more.
pub type Watched = mpsc::Receiver<Result<Arc<StatusResponse>, Status>>;

type Viewer = mpsc::Sender<Result<Arc<StatusResponse>, Status>>;

/// Those who watch.
#[derive(Debug)]
pub(crate) struct Viewers {
    /// `None` once the job is over.
    viewers: Mutex<Option<Vec<Viewer>>>,
    came: Notify,
}

impl Default for Viewers {
    fn default() -> Self {
        Self { viewers: Mutex::new(Some(Vec::new())), came: Notify::new() }
    }
}

impl Viewers {
    /// One more viewer.
    ///
    /// # Errors
    /// There are too many (BOUND), or the job is over.
    pub(crate) fn add(&self) -> Result<Watched, Status> {
        let mut viewers = self.viewers.lock();
        let viewers = viewers.as_mut().ok_or_else(|| Status::unavailable(OVER))?;
        viewers.retain(|viewer| !viewer.is_closed());
        if viewers.len() >= MAX_VIEWERS {
            let what = format!("{MAX_VIEWERS} viewers watch this job already: close one of them");
            return Err(Status::resource_exhausted(what));
        }
        let (viewer, watched) = mpsc::channel(WAITING + 1);
        viewers.push(viewer);
        self.came.notify_one();
        Ok(watched)
    }

    /// Shows snapshots without end, at most one in each such time, as long as `look` makes one.
    pub(crate) async fn serve<F: Future<Output = Option<Arc<StatusResponse>>>>(
        &self,
        each: Duration,
        look: impl Fn() -> F,
    ) {
        let mut ticks = interval(each);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            while self.is_watched() {
                ticks.tick().await;
                match look().await {
                    Some(snapshot) => self.show(&snapshot),
                    // The job is over. How it ended is shown by `end`.
                    None => return pending().await,
                }
            }
            self.came.notified().await;
        }
    }

    /// Shows the last snapshot, and that the job is over.
    pub(crate) fn end(&self, last: Option<Arc<StatusResponse>>) {
        for viewer in self.viewers.lock().take().unwrap_or_default() {
            // The last place of each queue is kept for the reason.
            if last.as_ref().is_none_or(|last| give(&viewer, last)) {
                let _ = viewer.try_send(Err(Status::unavailable(OVER)));
            }
        }
    }

    fn is_watched(&self) -> bool {
        let mut viewers = self.viewers.lock();
        let Some(viewers) = viewers.as_mut() else { return false };
        viewers.retain(|viewer| !viewer.is_closed());
        !viewers.is_empty()
    }

    fn show(&self, snapshot: &Arc<StatusResponse>) {
        let mut viewers = self.viewers.lock();
        viewers.iter_mut().for_each(|viewers| viewers.retain(|viewer| give(viewer, snapshot)));
    }
}

/// Gives a snapshot to a viewer. Returns whether it reads what it gets.
fn give(viewer: &Viewer, snapshot: &Arc<StatusResponse>) -> bool {
    if viewer.capacity() > 1 {
        return viewer.try_send(Ok(snapshot.clone())).is_ok();
    }
    let what = "this viewer does not read what it gets, and was disconnected";
    let _ = viewer.try_send(Err(Status::resource_exhausted(what)));
    false
}

#[cfg(test)]
mod tests {
    use std::{
        future::ready,
        sync::atomic::{AtomicU64, Ordering},
    };

    use tokio::{task::JoinHandle, time::sleep};

    use super::*;

    const SHORT: Duration = Duration::from_millis(5);

    /// Serves snapshots with numbers; returns how many were made.
    fn serve(viewers: &Arc<Viewers>) -> (Arc<AtomicU64>, JoinHandle<()>) {
        let (viewers, made) = (viewers.clone(), Arc::new(AtomicU64::new(0)));
        let count = made.clone();
        let task = tokio::spawn(async move {
            let look = || {
                let epoch = count.fetch_add(1, Ordering::Relaxed);
                ready(Some(Arc::new(StatusResponse { epoch, ..StatusResponse::default() })))
            };
            viewers.serve(SHORT, look).await;
        });
        (made, task)
    }

    // The clock is paused: it goes on when no task can, so a busy machine makes no difference.
    #[tokio::test(start_paused = true)]
    async fn snapshots_are_made_while_somebody_watches() {
        let viewers = Arc::new(Viewers::default());
        let (made, _task) = serve(&viewers);
        sleep(SHORT * 10).await;
        assert_eq!(made.load(Ordering::Relaxed), 0);
        let [mut one, mut other] = [(); 2].map(|()| viewers.add().unwrap());
        for expected in 0..5 {
            for viewer in [&mut one, &mut other] {
                assert_eq!(viewer.recv().await.unwrap().unwrap().epoch, expected);
            }
        }
        drop((one, other));
        sleep(SHORT * 4).await;
        let before = made.load(Ordering::Relaxed);
        sleep(SHORT * 20).await;
        assert_eq!(made.load(Ordering::Relaxed), before);
        // The next one begins at once.
        viewers.add().unwrap().recv().await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_read_is_disconnected_and_others_are_not() {
        let viewers = Arc::new(Viewers::default());
        let (_, _task) = serve(&viewers);
        let [mut slow, mut other] = [(); 2].map(|()| viewers.add().unwrap());
        for _ in 0..3 * WAITING {
            other.recv().await.unwrap().unwrap();
        }
        for _ in 0..WAITING {
            slow.recv().await.unwrap().unwrap();
        }
        let error = slow.recv().await.unwrap().unwrap_err();
        assert!(error.message().contains("does not read"), "BOUND: {error}");
        assert!(slow.recv().await.is_none());
    }

    #[tokio::test]
    async fn there_is_a_limit_and_an_end() {
        let viewers = Viewers::default();
        let mut all: Vec<_> = (0..MAX_VIEWERS).map(|_| viewers.add().unwrap()).collect();
        let error = viewers.add().unwrap_err();
        assert!(error.message().contains("32 viewers"), "BOUND: {error}");
        drop(all.pop());
        all.push(viewers.add().unwrap());
        viewers.end(Some(Arc::new(StatusResponse { epoch: 7, ..StatusResponse::default() })));
        for viewer in &mut all {
            assert_eq!(viewer.recv().await.unwrap().unwrap().epoch, 7);
            assert_eq!(viewer.recv().await.unwrap().unwrap_err().message(), OVER);
        }
        assert!(viewers.add().is_err());
    }
}
