//! The flight recording of the daemon, if no agent saves it after the daemon's end: under torchrun,
//! for example, the ranks do.

use std::{io::Write as _, os::unix::net::UnixStream, path::PathBuf};

use gradwire_shm::{flight::Held, handover};

/// The recording of a daemon, held by a rank.
#[derive(Debug)]
pub(crate) struct DaemonRecording {
    folder: PathBuf,
    held: Held,
}

impl DaemonRecording {
    /// The recording of the daemon at the other end, to be saved in this folder; `None` without a
    /// folder, or if this process may not look at the daemon.
    pub(crate) fn open(daemon: &UnixStream, folder: &str) -> Option<Self> {
        if folder.is_empty() {
            return None;
        }
        let held = Held::of_daemon(handover::peer(daemon).ok()?.pid)?;
        Some(Self { folder: folder.into(), held })
    }

    /// Saves it. The daemon has ended without a message.
    pub(crate) fn save(&self) {
        if let Err(error) = self.held.save(&self.folder) {
            // Standard error may be closed.
            let _ = writeln!(
                std::io::stderr(),
                "gradwire: the flight recording can't be written to {}: {error}; see \
                 recorder.directory",
                self.folder.display()
            );
        }
    }
}
