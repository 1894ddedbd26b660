//! The end of a launch: nothing of the job runs any more, and its output still has to be written.
//! The launcher waits for a slow reader, and not for one that is gone. A signal ends the wait.

use std::{pin::pin, sync::mpsc, thread, time::Duration};

use tokio::time::sleep;

use super::{console::Reading, report::Cause};
use crate::{error::print_line, signals::Endings};

/// How long agents and the writing thread may take to end where no reader keeps them.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(2);

/// How long standard error may take the last words where output has failed before.
const PRINT_TIMEOUT: Duration = Duration::from_millis(200);

/// Waits for work that waits for the reader of our output.
#[derive(Debug)]
pub struct Drain<'a> {
    /// Whether somebody reads.
    pub reading: &'a mut Reading,
    /// What ends the wait.
    pub signals: &'a mut Endings,
    /// The user wants an end: no wait for a reader.
    pub hurried: bool,
}

impl Drain<'_> {
    /// Waits for `work`.
    ///
    /// # Errors
    /// The cause of the end if the wait was given up: output is lost.
    pub async fn wait<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Cause> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                signal = self.signals.next() => {
                    self.hurried = true;
                    return Err(Cause::Interrupted(signal));
                }
                () = sleep(UNREAD_TIMEOUT) => {
                    if self.hurried || !self.reading.is_slow() {
                        return Err(Cause::Output("nobody reads it".to_owned()));
                    }
                }
            }
        }
    }
}

/// Prints lines where the writing thread can't, to a standard error that may be blocked too.
pub fn print_all(lines: Vec<String>) {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        lines.iter().for_each(print_line);
        // Nobody listens after a while.
        let _ = done.send(());
    });
    let _ = is_done.recv_timeout(PRINT_TIMEOUT);
}
