//! The end of a launch: nothing of the job runs any more, and what it has written still has to come
//! out. A slow reader is waited for, one that is gone is not; a signal ends the wait.

use std::{pin::pin, sync::mpsc, thread, time::Duration};

use tokio::time::sleep;

use super::{console::Reading, verdict::Failure};
use crate::{error::tell, signals::Endings};

/// How long agents and the writing thread may take to end where no reader keeps them.
const GOODBYE: Duration = Duration::from_secs(2);

/// How long standard error may take the last words where output has failed before.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Waits for what waits for our output's reader.
#[derive(Debug)]
pub struct Farewell<'a> {
    /// Whether anybody reads.
    pub reading: &'a mut Reading,
    /// What ends the wait.
    pub signals: &'a mut Endings,
    /// Somebody wants an end: no reader is waited for.
    pub hurried: bool,
}

impl Farewell<'_> {
    /// Waits for `work`.
    ///
    /// # Errors
    /// What the job has come to if that is waited for no longer: output is lost.
    pub async fn wait<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Failure> {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok(done),
                signal = self.signals.next() => {
                    self.hurried = true;
                    return Err(Failure::Interrupted(signal));
                }
                () = sleep(GOODBYE) => {
                    if self.hurried || !self.reading.is_slow() {
                        return Err(Failure::Output("nobody reads it".to_owned()));
                    }
                }
            }
        }
    }
}

/// Says the last words where the writing thread can't, to a standard error that may be blocked too.
pub fn tell_all(lines: Vec<String>) {
    let (done, told) = mpsc::channel();
    thread::spawn(move || {
        lines.iter().for_each(tell);
        // Nobody listens after a while.
        let _ = done.send(());
    });
    let _ = told.recv_timeout(LAST_WORDS);
}
