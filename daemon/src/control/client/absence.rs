//! How long a node has been without a working stream, and the stream that may follow.

use std::time::Duration;

use tokio::time::Instant;

use crate::control::connect::ToCoordinator;

/// A stream that breaks earlier than this, and on which nothing has arrived, does not restart the
/// time limit.
const STABLE: Duration = Duration::from_secs(1);

/// What is known of the streams after the first one.
#[derive(Debug, Default)]
pub(super) struct Absence {
    /// Another stream, on which the coordinator has not answered the join yet, and until when it
    /// may take for that.
    pub(super) next: Option<(ToCoordinator, Instant)>,
    /// The number of the stream.
    pub(super) attempt: u32,
    /// When the last working stream broke; `None` once a message has arrived again. The time limit
    /// begins then.
    pub(super) broke: Option<Instant>,
    /// Whether that stream was only silent.
    pub(super) was_silent: bool,
    /// When the coordinator continued on this stream.
    pub(super) returned: Option<Instant>,
    /// Whether the coordinator has proven the secret on this stream.
    pub(super) is_proven: bool,
}

impl Absence {
    /// A stream is lost, which last worked at `since`.
    pub(super) fn begin(&mut self, since: Instant, was_silent: bool) {
        (self.next, self.is_proven) = (None, false);
        if self.returned.take().is_some_and(|returned| returned.elapsed() >= STABLE) {
            self.broke = None;
        }
        if self.broke.is_none() {
            (self.broke, self.was_silent) = (Some(since), was_silent);
        }
        self.attempt += 1;
    }

    /// A message has arrived.
    pub(super) fn is_of_use(&mut self) {
        self.broke = None;
    }
}
