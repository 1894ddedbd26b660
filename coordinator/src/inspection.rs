//! Gives viewers a view of the job: one snapshot, a snapshot twice per second, or a trace.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use gradwire_proto::pb::{self, StatusResponse};
use tokio::{
    sync::{Mutex, mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tonic::Status;

use crate::{
    explanation::explanation_text,
    inbox::Inbound,
    permits::Permits,
    timeline::{Point, Timeline},
    traces::{Traced, Traces},
    viewers::{INTERVAL, Viewers, Watched},
};

/// The shortest time between two requested snapshots.
const SHORTEST: Duration = Duration::from_millis(20);

/// The view of one job. Its functions work on any tokio thread.
#[derive(Debug)]
pub struct Inspection {
    inbox: mpsc::Sender<Inbound>,
    viewers: Viewers,
    traces: Arc<Traces>,
    pub(crate) permits: Permits,
    timeline: Arc<parking_lot::Mutex<Timeline>>,
    page: OnceLock<SocketAddr>,
    /// The newest requested snapshot, and when it was made.
    newest: Mutex<Option<(Instant, Arc<StatusResponse>)>>,
}

impl Inspection {
    pub(crate) fn new(inbox: mpsc::Sender<Inbound>, traces: Arc<Traces>, permits: Permits) -> Self {
        let (viewers, timeline, page, newest) = Default::default();
        Self { inbox, viewers, traces, permits, timeline, page, newest }
    }

    /// The last minutes of the job, to which the runtime adds.
    pub(crate) fn timeline(&self) -> Arc<parking_lot::Mutex<Timeline>> {
        self.timeline.clone()
    }

    /// The last minutes of the job, the oldest point first. This does not ask the negotiation
    /// thread.
    pub fn over_time(&self) -> Vec<Arc<Point>> {
        self.timeline.lock().points()
    }

    /// Sets the address of the status page, which snapshots contain from now on.
    pub fn shown_at(&self, page: SocketAddr) {
        // Only the first address counts.
        let _ = self.page.set(page);
    }

    /// A current snapshot; `None` once the job is over. Concurrent requests share a snapshot, so
    /// the negotiation thread makes only a few, however many requests there are (BOUND).
    pub async fn look(&self) -> Option<Arc<StatusResponse>> {
        let asked = Instant::now();
        let mut newest = self.newest.lock().await;
        if let Some((made, seen)) = &*newest {
            if *made >= asked {
                return Some(seen.clone());
            }
            sleep_until(*made + SHORTEST).await;
        }
        let made = Instant::now();
        let (reply, seen) = oneshot::channel();
        self.inbox.send(Inbound::Inspect(reply)).await.ok()?;
        let seen = self.with_page(seen.await.ok()?);
        *newest = Some((made, seen.clone()));
        Some(seen)
    }

    /// Why the job waits, with a text for people; `None` once the job is over. `stacks`: the text
    /// has the whole stacks of all ranks. `save`: the daemons also save their flight recordings.
    pub async fn explain(&self, stacks: bool, save: bool) -> Option<pb::Explanation> {
        let (reply, explained) = oneshot::channel();
        self.inbox.send(Inbound::Explain { reply, save }).await.ok()?;
        let explained = explained.await.ok()?;
        let text = explanation_text(&explained, stacks);
        Some(pb::Explanation { text, ..explained })
    }

    /// A snapshot now and twice per second, until the job is over. The last one shows how it ended.
    ///
    /// # Errors
    /// `ResourceExhausted` if there are 32 viewers (BOUND), and `Unavailable` once the job is over.
    pub fn watch(&self) -> Result<Watched, Status> {
        self.viewers.add()
    }

    /// The trace of all nodes, from now on until the job is over.
    ///
    /// # Errors
    /// `ResourceExhausted` if there are 4 readers (BOUND), and `Unavailable` once the job is over.
    pub(crate) async fn trace(&self) -> Result<Traced, Status> {
        let traced = self.traces.add()?;
        self.traces_changed().await;
        Ok(traced)
    }

    /// The trace of all nodes during sampled steps, from now on until the job is over.
    ///
    /// # Errors
    /// `Unavailable` once the job is over.
    pub fn sample(&self) -> Result<Traced, Status> {
        self.traces.sample()
    }

    /// Sets whether a sampled step is in progress on any node; if so, all nodes record.
    pub async fn samples(&self, goes_on: bool) {
        if self.traces.goes_on(goes_on) {
            self.traces_changed().await;
        }
    }

    /// Tells nodes about a change of tracing now, instead of with the next heartbeat.
    async fn traces_changed(&self) {
        // Once the job is over, there is nothing to tell.
        let _ = self.inbox.send(Inbound::Traced { by: None }).await;
    }

    fn with_page(&self, seen: StatusResponse) -> Arc<StatusResponse> {
        let page = self.page.get().map(ToString::to_string).unwrap_or_default();
        Arc::new(StatusResponse { page, ..seen })
    }

    /// Sends snapshots to viewers forever.
    pub(crate) async fn serve(&self) {
        self.viewers.serve(INTERVAL, || self.look()).await;
    }

    /// Sends the last snapshot, and ends all streams to viewers.
    pub(crate) fn end(&self, last: Option<StatusResponse>) {
        self.traces.end();
        self.viewers.end(last.map(|seen| self.with_page(seen)));
    }
}
