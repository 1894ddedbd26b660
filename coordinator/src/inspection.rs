//! How people look at a job: once, or twice per second until it ends, or at all that its nodes do.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
    time::Duration,
};

use gradwire_proto::{JobId, pb::StatusResponse};
use tokio::{
    sync::{Mutex, mpsc, oneshot},
    time::{Instant, sleep_until},
};
use tonic::Status;

use crate::{
    inbox::{Inbound, Snapshot},
    snapshot::snapshot,
    traces::{Traced, Traces},
    viewers::{INTERVAL, Viewers, Watched},
};

/// The shortest time between two snapshots for those who ask for one.
const SHORTEST: Duration = Duration::from_millis(20);

/// Shows one job to those who look at it. The calls work on any thread that runs tokio.
#[derive(Debug)]
pub struct Inspection {
    inbox: mpsc::Sender<Inbound>,
    job: JobId,
    viewers: Viewers,
    traces: Arc<Traces>,
    page: OnceLock<SocketAddr>,
    /// The newest snapshot that somebody asked for, and when it was made.
    newest: Mutex<Option<(Instant, Arc<StatusResponse>)>>,
}

impl Inspection {
    pub(crate) fn new(inbox: mpsc::Sender<Inbound>, job: JobId, traces: Arc<Traces>) -> Self {
        let (viewers, page) = (Viewers::default(), OnceLock::new());
        Self { inbox, job, viewers, traces, page, newest: Mutex::default() }
    }

    /// Says where the status page is. Snapshots tell it from now on.
    pub fn shown_at(&self, page: SocketAddr) {
        // There is one page: the first one.
        let _ = self.page.set(page);
    }

    /// What is to be seen now; `None` once the job is over. Those who ask at the same time get the
    /// same, so however many ask, the thread of the negotiation makes few snapshots (BOUND).
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
        let seen = Arc::new(self.message(seen.await.ok()?));
        *newest = Some((made, seen.clone()));
        Some(seen)
    }

    /// A snapshot now and twice per second, until the job is over. The last one says how it ended.
    ///
    /// # Errors
    /// `ResourceExhausted` if there are 32 viewers (BOUND), and `Unavailable` once the job is over.
    pub fn watch(&self) -> Result<Watched, Status> {
        self.viewers.add()
    }

    /// What all nodes record of themselves, from now on until the job is over.
    ///
    /// # Errors
    /// `ResourceExhausted` if there are 4 readers (BOUND), and `Unavailable` once the job is over.
    pub(crate) async fn trace(&self) -> Result<Traced, Status> {
        let traced = self.traces.add()?;
        self.traces_changed().await;
        Ok(traced)
    }

    /// What all nodes record of the steps that are sampled, from now on until the job is over.
    ///
    /// # Errors
    /// `Unavailable` once the job is over.
    pub fn sample(&self) -> Result<Traced, Status> {
        self.traces.sample()
    }

    /// Whether a step that is sampled goes on somewhere: then all nodes are to record.
    pub async fn samples(&self, goes_on: bool) {
        if self.traces.goes_on(goes_on) {
            self.traces_changed().await;
        }
    }

    /// Asks for what nodes are to do about traces now, and not with the next heartbeat.
    async fn traces_changed(&self) {
        // Once the job is over, nobody is to do anything.
        let _ = self.inbox.send(Inbound::Traced { by: None }).await;
    }

    fn message(&self, seen: Snapshot) -> StatusResponse {
        let page = self.page.get().map(ToString::to_string).unwrap_or_default();
        StatusResponse { page, ..snapshot(self.job.as_str(), seen) }
    }

    /// Shows snapshots to those who watch, without end.
    pub(crate) async fn serve(&self) {
        self.viewers.serve(INTERVAL, || self.look()).await;
    }

    /// Shows how the job ended, and that there is no more to be seen.
    pub(crate) fn end(&self, last: Option<Snapshot>) {
        self.traces.end();
        self.viewers.end(last.map(|seen| Arc::new(self.message(seen))));
    }
}
