//! The end of a launch: all processes of the job have ended, and their output still has to be
//! written. The launcher waits for a slow reader, but not for a missing one. A signal ends the
//! wait.

use std::{pin::pin, sync::mpsc, thread, time::Duration};

use tokio::time::sleep;

use super::{console::Reading, report::Cause};
use crate::{error::print_line, signals::Endings};

/// How long agents and the writing thread may take to end if no reader holds them up.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(2);

/// How long writing the report to standard error may take if output has failed before.
const PRINT_TIMEOUT: Duration = Duration::from_millis(200);

/// Waits for work that depends on the reader of our output.
#[derive(Debug)]
pub struct Drain<'a> {
    /// Whether the reader reads.
    pub reading: &'a mut Reading,
    /// What ends the wait.
    pub signals: &'a mut Endings,
    /// The user wants the job to end now: don't wait for a reader.
    pub hurried: bool,
}

impl Drain<'_> {
    /// Waits for `work`.
    ///
    /// # Errors
    /// The reason if the wait was given up: output is lost.
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

/// Prints lines if the writing thread can't. Standard error may be blocked, too.
pub fn print_all(lines: Vec<String>) {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        lines.iter().for_each(print_line);
        // The receiver may have given up.
        let _ = done.send(());
    });
    let _ = is_done.recv_timeout(PRINT_TIMEOUT);
}
