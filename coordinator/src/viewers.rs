//! The viewers of the job: each gets a snapshot twice per second.
//!
//! Snapshots are made only while there are viewers, and all get the same. Nothing here waits for a
//! viewer: one that does not read its snapshots is disconnected (BOUND).

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

/// How many snapshots may wait for a viewer (BOUND), besides the reason of the end.
const WAITING: usize = 4;

/// The stream of a viewer. The last item says why it ended.
pub type Watched = mpsc::Receiver<Result<Arc<StatusResponse>, Status>>;

type Viewer = mpsc::Sender<Result<Arc<StatusResponse>, Status>>;

/// The viewers of a job.
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
    /// Adds a viewer.
    ///
    /// # Errors
    /// There are too many (BOUND), or the job is over.
    pub(crate) fn add(&self) -> Result<Watched, Status> {
        let mut viewers = self.viewers.lock();
        let viewers = viewers.as_mut().ok_or_else(|| Status::unavailable(OVER))?;
        viewers.retain(|viewer| !viewer.is_closed());
        if viewers.len() >= MAX_VIEWERS {
            let what = format!("{MAX_VIEWERS} viewers already watch this job: close one of them");
            return Err(Status::resource_exhausted(what));
        }
        let (viewer, watched) = mpsc::channel(WAITING + 1);
        viewers.push(viewer);
        self.came.notify_one();
        Ok(watched)
    }

    /// Sends snapshots forever, at most one per interval `each`, as long as `look` makes them.
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
                    // The job is over, and `end` sends the last snapshot.
                    None => return pending().await,
                }
            }
            self.came.notified().await;
        }
    }

    /// Sends the last snapshot, and ends all streams.
    pub(crate) fn end(&self, last: Option<Arc<StatusResponse>>) {
        for viewer in self.viewers.lock().take().unwrap_or_default() {
            // The last place of each queue is reserved for the reason.
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

/// Sends a snapshot to a viewer. Returns false if the viewer does not read its snapshots.
fn give(viewer: &Viewer, snapshot: &Arc<StatusResponse>) -> bool {
    if viewer.capacity() > 1 {
        return viewer.try_send(Ok(snapshot.clone())).is_ok();
    }
    let what = "disconnected, because this viewer does not read its snapshots";
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

    /// Serves numbered snapshots; returns the number of snapshots.
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

    // The paused clock advances only when all tasks are idle, so a busy machine does not matter.
    #[tokio::test(start_paused = true)]
    async fn snapshots_are_made_only_for_viewers() {
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
        // The next viewer gets a snapshot at once.
        viewers.add().unwrap().recv().await.unwrap().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn slow_viewers_are_disconnected() {
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
    async fn viewers_are_limited_and_end() {
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
