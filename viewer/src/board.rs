//! The JSON of the newest snapshot. It is made once, however many viewers there are.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_coordinator::{Inspection, Watched};
use gradwire_proto::pb::StatusResponse;
use tonic::Status;

use crate::{
    json,
    view::{Lags, Shares},
};

/// How long the answer to a single question is good for others, too.
const FRESH: Duration = Duration::from_millis(500);

/// The job as JSON, for all viewers of the page.
#[derive(Debug)]
pub struct Board {
    inspection: Arc<Inspection>,
    /// For those who watch.
    newest: parking_lot::Mutex<Newest>,
    /// For those who ask once. The lock is held while somebody asks.
    answer: tokio::sync::Mutex<Option<(Instant, Arc<str>)>>,
}

#[derive(Debug, Default)]
struct Newest {
    lags: Lags,
    uptime: u64,
    json: Option<Arc<str>>,
}

impl Board {
    /// Shows this job.
    pub fn new(inspection: Arc<Inspection>) -> Self {
        let (newest, answer) = Default::default();
        Self { inspection, newest, answer }
    }

    /// Snapshots until the job is over.
    ///
    /// # Errors
    /// There are too many viewers, or the job is over.
    pub fn watch(&self) -> Result<Watched, Status> {
        self.inspection.watch()
    }

    /// A snapshot that somebody watches, or a newer one.
    pub fn json(&self, snapshot: &StatusResponse) -> Arc<str> {
        let mut newest = self.newest.lock();
        let Newest { lags, uptime, json } = &mut *newest;
        match json {
            Some(json) if snapshot.uptime_ms <= *uptime => json.clone(),
            _ => {
                *uptime = snapshot.uptime_ms;
                let shares = lags.add(snapshot);
                json.insert(text(snapshot, &shares)).clone()
            }
        }
    }

    /// What is to be seen now; `None` once the job is over.
    pub async fn look(&self) -> Option<Arc<str>> {
        let mut answer = self.answer.lock().await;
        match &*answer {
            Some((made, json)) if made.elapsed() < FRESH => Some(json.clone()),
            _ => {
                let status = self.inspection.look().await?;
                let json = text(&status, &Lags::default().add(&status));
                *answer = Some((Instant::now(), json.clone()));
                Some(json)
            }
        }
    }
}

fn text(status: &StatusResponse, shares: &Shares) -> Arc<str> {
    json::of(status, shares).to_string().into()
}
