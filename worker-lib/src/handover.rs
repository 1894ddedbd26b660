//! Hands memory segments over to the daemon, and takes them back.

use std::{os::fd::OwnedFd, time::Duration};

use gradwire_proto::pb::{self, worker_message::Message};
use gradwire_shm::arena::RegisterError;

use crate::{link, shared::Shared};

impl Shared {
    /// Hands a segment over to the daemon and waits for its answer.
    pub(crate) fn hand_over(
        &self,
        segment: u32,
        bytes: u64,
        fd: &OwnedFd,
        within: Duration,
    ) -> Result<(), RegisterError> {
        self.segments.expect(segment);
        let add = Message::AddSegment(pb::AddSegment { segment, bytes });
        self.send(add, Some(fd)).map_err(|error| RegisterError::Unanswered(error.into()))?;
        self.segments.wait(segment, within, || self.check())
    }

    /// Notes that the daemon has received a segment.
    pub(crate) fn segment_taken(&self, segment: u32) {
        if self.segments.taken(segment) {
            self.drop_segment(segment);
        }
    }

    /// Notifies the daemon that a segment is not used any more. Errors are ignored: the watcher
    /// notices them, too.
    pub(crate) fn drop_segment(&self, segment: u32) {
        if self.ended().is_some() {
            return;
        }
        self.segments.forget(segment);
        let gone = Message::DropSegment(pb::DropSegment { segment });
        let _sending = self.sending.lock();
        let _ = link::send(&self.stream, gone, None);
    }
}
