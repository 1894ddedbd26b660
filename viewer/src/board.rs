//! The JSON of the newest snapshot. It is made once for all viewers.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use gradwire_coordinator::{Inspection, Watched};
use gradwire_proto::pb::{Explanation, StatusResponse};
use tonic::Status;

use crate::{
    json, over_time,
    view::{Lags, Shares},
};

/// How long the answer to a single request is used for others.
const FRESH: Duration = Duration::from_millis(500);

/// The same for what ranks do: all of them are asked for each answer.
const FRESH_RANKS: Duration = Duration::from_secs(2);

/// The job as JSON, for all viewers of the page.
#[derive(Debug)]
pub struct Board {
    inspection: Arc<Inspection>,
    /// For viewers that watch.
    newest: parking_lot::Mutex<Newest>,
    /// For single requests. The lock is held while the coordinator answers one.
    answer: tokio::sync::Mutex<Option<(Instant, Arc<str>)>>,
    /// What the ranks do. The lock is held while they answer.
    explanation: tokio::sync::Mutex<Option<(Instant, Arc<Explanation>)>>,
    /// The last minutes, and how far they go.
    over_time: parking_lot::Mutex<Option<(Duration, Arc<str>)>>,
}

#[derive(Debug, Default)]
struct Newest {
    lags: Lags,
    uptime: u64,
    phase: String,
    json: Option<Arc<str>>,
}

impl Newest {
    fn json(&mut self, snapshot: &StatusResponse) -> Arc<str> {
        let Self { lags, uptime, phase, json } = self;
        // The end of the job is new, even in the same millisecond.
        let is_known = snapshot.uptime_ms < *uptime
            || snapshot.uptime_ms == *uptime && snapshot.phase == *phase;
        match json {
            Some(json) if is_known => json.clone(),
            _ => {
                *uptime = snapshot.uptime_ms;
                phase.clone_from(&snapshot.phase);
                let shares = lags.add(snapshot);
                json.insert(text(snapshot, &shares)).clone()
            }
        }
    }
}

impl Board {
    /// The JSON of this job.
    pub fn new(inspection: Arc<Inspection>) -> Self {
        let (newest, answer, explanation, over_time) = Default::default();
        Self { inspection, newest, answer, explanation, over_time }
    }

    /// Snapshots until the job is over.
    ///
    /// # Errors
    /// There are too many viewers, or the job is over.
    pub fn watch(&self) -> Result<Watched, Status> {
        self.inspection.watch()
    }

    /// The JSON of a watched snapshot, or of a newer one.
    pub fn json(&self, snapshot: &StatusResponse) -> Arc<str> {
        self.newest.lock().json(snapshot)
    }

    /// The last minutes of the job as JSON.
    pub fn over_time(&self) -> Arc<str> {
        let points = self.inspection.over_time();
        let end = points.last().map(|point| point.at).unwrap_or_default();
        let mut made = self.over_time.lock();
        match &*made {
            Some((until, json)) if *until == end => json.clone(),
            _ => made.insert((end, over_time::of(&points).to_string().into())).1.clone(),
        }
    }

    /// What the ranks do now, at most two seconds old; `None` once the job is over. Requests share
    /// an answer, so the ranks are asked rarely, however many requests there are (BOUND).
    pub async fn explain(&self) -> Option<Arc<Explanation>> {
        let mut answer = self.explanation.lock().await;
        match &*answer {
            Some((made, explained)) if made.elapsed() < FRESH_RANKS => Some(explained.clone()),
            _ => {
                let explained = Arc::new(self.inspection.explain(false, false).await?);
                *answer = Some((Instant::now(), explained.clone()));
                Some(explained)
            }
        }
    }

    /// The JSON of the job now; `None` once it is over.
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

#[cfg(test)]
mod tests {
    use gradwire_tests::sample;

    use super::*;

    #[test]
    fn all_viewers_get_the_newest_snapshot() {
        let mut newest = Newest::default();
        let running = newest.json(&sample::status(5000));
        assert!(Arc::ptr_eq(&newest.json(&sample::status(5000)), &running));
        // A late viewer gets the same as the others.
        assert!(Arc::ptr_eq(&newest.json(&sample::status(4500)), &running));
        let last = StatusResponse { phase: "failed".to_owned(), ..sample::status(5000) };
        let ended = newest.json(&last);
        assert!(ended.contains("\"phase\":\"failed\""), "{ended}");
        assert!(Arc::ptr_eq(&newest.json(&last), &ended));
    }
}
