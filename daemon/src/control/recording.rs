//! The flight recording of this node: what is recorded besides operations, and when it is saved.
//!
//! A slow disk must not delay anything, so a thread of its own (`gw-recorder`) saves.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use gradwire_proto::{Ending, Failure};
use gradwire_shm::flight::FlightMemory;
use gradwire_trace::{flight::MAX_FAILURE, time};
use tokio::{
    sync::oneshot::{self, error::TryRecvError},
    time::timeout,
};

use super::node::Node;
use crate::model::{members::Members, world::World};

/// How long the end of a daemon, or its answer to the coordinator, is delayed until its recording
/// is saved (WAIT).
const SAVING: Duration = Duration::from_secs(5);

/// The path of the file, or why it can't be written.
pub(crate) type Saved = Result<PathBuf, String>;

/// The world has formed.
pub(super) fn formed(node: &Node, world: &World) {
    let (me, nodes) = (world.me(), world.nodes.len() as u32);
    let (first_rank, epoch) = (me.first_rank.0, world.epoch.0);
    node.flight().formed(first_rank, world.size(), nodes, epoch, world.node.0);
    tracing::debug!(first_rank, ranks = world.size(), nodes, epoch, "the world has formed");
}

/// A process set was created.
pub(super) fn add_set(node: &Node, set: u32, members: &Members) {
    let ranks: Vec<u32> = members.ranks.iter().map(|rank| rank.0).collect();
    node.flight().add_set(set, &ranks);
}

/// Notes how the clock of this node differs from the coordinator's.
pub(super) fn clock(node: &Node) {
    let Some(ahead) = node.liveness.ahead() else { return };
    let (clock_ns, at_ns) = time::beside(|| node.liveness.clock().now_ns());
    let to_common = i128::from(clock_ns) - i128::from(at_ns) - i128::from(ahead.offset_ns);
    let error_ns = u64::try_from(ahead.error.as_nanos()).unwrap_or(u64::MAX - 1);
    node.flight().clock(i64::try_from(to_common).unwrap_or_default(), error_ns);
}

/// A save in progress.
#[derive(Debug)]
pub(crate) struct Saving(oneshot::Receiver<Saved>);

impl Saving {
    /// Waits until it is done, for a limited time.
    ///
    /// # Errors
    /// Why it was not saved.
    pub(crate) async fn wait(self) -> Saved {
        let saved = timeout(SAVING, self.0).await;
        saved.map_or_else(|_| late(), |saved| saved.unwrap_or_else(|_| aborted()))
    }

    /// The same on a thread without a runtime.
    pub(super) fn wait_blocking(mut self) -> Saved {
        let until = Instant::now() + SAVING;
        loop {
            match self.0.try_recv() {
                Ok(saved) => return saved,
                Err(TryRecvError::Closed) => return aborted(),
                Err(TryRecvError::Empty) if Instant::now() >= until => return late(),
                Err(TryRecvError::Empty) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }
}

fn late() -> Saved {
    Err(format!("the flight recording was not saved within {SAVING:?}; look there later"))
}

fn aborted() -> Saved {
    Err("the thread that saves the flight recording has ended".to_owned())
}

/// The job has ended. If it has failed, records why, and saves the recording if that is wanted.
pub(crate) fn ended(node: &Node, ending: &Ending) -> Option<Saving> {
    let Ending::Failed(failure) = ending else { return None };
    tracing::debug!(%failure, "the job has failed");
    node.flight().failed(time::now_ns(), &as_json(failure));
    save(node)
}

/// A failure with texts that are short enough to be recorded (BOUND).
fn as_json(failure: &Failure) -> String {
    let mut failure = failure.clone();
    let mut most = MAX_FAILURE;
    loop {
        failure.limit(most);
        // Can't fail: it is plain data.
        let json = serde_json::to_string(&failure).unwrap_or_default();
        most /= 2;
        if json.len() <= MAX_FAILURE || most == 0 {
            return json;
        }
    }
}

/// Saves the recording, if there is a folder for it.
pub(super) fn save(node: &Node) -> Option<Saving> {
    let folder = node.config.recorder_directory.clone()?;
    let (recording, host) = (node.recording.clone(), node.config.host.clone());
    let (done, saving) = oneshot::channel();
    let run = move || {
        // The receiver may have stopped waiting.
        let _ = done.send(written(&recording, &folder, &host));
    };
    if let Err(error) = thread::Builder::new().name("gw-recorder".to_owned()).spawn(run) {
        tracing::warn!(%error, "the system refused the thread that saves the flight recording");
        return None;
    }
    Some(Saving(saving))
}

fn written(recording: &Arc<FlightMemory>, folder: &Path, host: &str) -> Saved {
    recording.save(folder).map_err(|error: io::Error| {
        format!(
            "the flight recording of host {host} can't be written to {}: {error}; see \
             recorder.directory",
            folder.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use gradwire_proto::FailureKind;

    use super::*;

    #[test]
    fn a_slow_save_is_waited_for() {
        let (done, saving) = oneshot::channel();
        let saves = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            done.send(Ok(PathBuf::from("saved"))).unwrap();
        });
        assert_eq!(Saving(saving).wait_blocking().unwrap(), Path::new("saved"));
        saves.join().unwrap();
        let (done, saving) = oneshot::channel();
        drop(done);
        assert!(Saving(saving).wait_blocking().unwrap_err().contains("has ended"));
    }

    #[test]
    fn a_long_failure_fits_into_the_recording() {
        let long = "é\"".repeat(2000);
        let failure = Failure::new(FailureKind::Internal, long.clone()).hint(long.clone());
        let json = as_json(&failure.tensor(long));
        assert!(json.len() <= MAX_FAILURE, "{}", json.len());
        let read: Failure = serde_json::from_str(&json).unwrap();
        assert!(read.what.starts_with("é\"") && read.details.hint.ends_with('…'));
    }
}
