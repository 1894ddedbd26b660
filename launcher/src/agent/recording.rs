//! Saves the flight recording of a daemon that was killed. A daemon that ends by itself has saved
//! its own.

use std::{path::PathBuf, sync::Arc, thread, time::Duration};

use gradwire_services::launch::ProcessEnd;
use gradwire_shm::flight::Held;
use tokio::{sync::oneshot, time::timeout};

use crate::error::print_line;

/// How long the end of the agent is delayed until a recording is saved (WAIT).
const SAVING: Duration = Duration::from_secs(5);

/// The recording of this host's daemon.
#[derive(Debug)]
pub(super) struct Recording {
    /// `None`: nothing is saved.
    folder: Option<PathBuf>,
    /// The memory of the daemon with this process id.
    held: Option<(u32, Arc<Held>)>,
    saving: Option<oneshot::Receiver<()>>,
}

impl Recording {
    /// Recordings are saved in this folder; nowhere if it is empty.
    pub(super) fn new(folder: &str) -> Self {
        let folder = Some(folder).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        Self { folder, held: None, saving: None }
    }

    /// Opens the memory of the daemon with this process id, unless it is open. A daemon has this
    /// memory once it serves.
    pub(super) fn look(&mut self, pid: u32) {
        let is_held = self.held.as_ref().is_some_and(|(of, _)| *of == pid);
        if self.folder.is_some() && !is_held {
            self.held = Held::of_daemon(pid).map(|held| (pid, Arc::new(held)));
        }
    }

    /// The daemon has ended.
    pub(super) fn daemon_ended(&mut self, end: ProcessEnd) {
        let (Some(folder), Some((_, held))) = (self.folder.clone(), self.held.take()) else {
            return;
        };
        if !matches!(end, ProcessEnd::Signal(_) | ProcessEnd::OutOfMemory) {
            return;
        }
        let (done, saving) = oneshot::channel();
        // A slow disk must not delay the agent.
        let run = move || {
            if let Err(error) = held.save(&folder) {
                print_line(format_args!(
                    "gradwire agent: the flight recording can't be written to {}: {error}; see \
                     recorder.directory",
                    folder.display()
                ));
            }
            let _ = done.send(());
        };
        let started = thread::Builder::new().name("gw-recorder".to_owned()).spawn(run);
        self.saving = started.is_ok().then_some(saving);
    }

    /// Waits until a recording that is being saved is there, for a limited time.
    pub(super) async fn finish(&mut self) {
        if let Some(saving) = self.saving.take() {
            let _ = timeout(SAVING, saving).await;
        }
    }
}
