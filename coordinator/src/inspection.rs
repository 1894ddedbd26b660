//! How people look at a job: once, or twice per second until it ends, or at all that its nodes do.

use std::{
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use gradwire_proto::{JobId, pb::StatusResponse};
use tokio::sync::{mpsc, oneshot};
use tonic::Status;

use crate::{
    inbox::{Inbound, Snapshot},
    snapshot::snapshot,
    traces::{Traced, Traces},
    viewers::{INTERVAL, Viewers, Watched},
};

/// Shows one job to those who look at it. The calls work on any thread that runs tokio.
#[derive(Debug)]
pub struct Inspection {
    inbox: mpsc::Sender<Inbound>,
    job: JobId,
    viewers: Viewers,
    traces: Arc<Traces>,
    page: OnceLock<SocketAddr>,
}

impl Inspection {
    pub(crate) fn new(inbox: mpsc::Sender<Inbound>, job: JobId, traces: Arc<Traces>) -> Self {
        Self { inbox, job, viewers: Viewers::default(), traces, page: OnceLock::new() }
    }

    /// Says where the status page is. Snapshots tell it from now on.
    pub fn shown_at(&self, page: SocketAddr) {
        // There is one page: the first one.
        let _ = self.page.set(page);
    }

    /// What is to be seen now; `None` once the job is over.
    pub async fn look(&self) -> Option<StatusResponse> {
        let (reply, seen) = oneshot::channel();
        self.inbox.send(Inbound::Inspect(reply)).await.ok()?;
        Some(self.message(seen.await.ok()?))
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
    pub(crate) fn trace(&self) -> Result<Traced, Status> {
        self.traces.add()
    }

    fn message(&self, seen: Snapshot) -> StatusResponse {
        let page = self.page.get().map(ToString::to_string).unwrap_or_default();
        StatusResponse { page, ..snapshot(self.job.as_str(), seen) }
    }

    /// Shows snapshots to those who watch, without end.
    pub(crate) async fn serve(&self) {
        let look = || async { self.look().await.map(Arc::new) };
        self.viewers.serve(INTERVAL, look).await;
    }

    /// Shows how the job ended, and that there is no more to be seen.
    pub(crate) fn end(&self, last: Option<Snapshot>) {
        self.traces.end();
        self.viewers.end(last.map(|seen| Arc::new(self.message(seen))));
    }
}
