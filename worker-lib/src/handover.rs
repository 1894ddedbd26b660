//! Hands memory segments over to the daemon, and takes them back.

use std::{os::fd::OwnedFd, process, sync::Arc, time::Duration};

use gradwire_keys::RankSettings;
use gradwire_proto::pb::{self, worker_message::Message};
use gradwire_shm::{
    arena::{Register, RegisterError, Release},
    segment::{self, Segment, SegmentId},
};

use crate::{link, shared::Shared};

/// The functions with which an arena hands its segments over to the daemon of an epoch, before
/// anything is allocated in them, and gives them back.
pub(crate) fn functions(shared: &Arc<Shared>, tuning: &RankSettings) -> (Register, Release) {
    let (max_segments, within) = (tuning.worker.max_segments, tuning.start.timeout);
    let (shared, releasing) = (shared.clone(), shared.clone());
    let register = move |id: SegmentId, memory: &Segment, fd: OwnedFd| {
        if id.0 >= max_segments {
            let text = format!(
                "this rank needs more than {max_segments} segments; raise worker.max_segments \
                 or worker.arena_segment_bytes"
            );
            return Err(RegisterError::Refused(text.into()));
        }
        let bytes = memory.bytes();
        shared.hand_over(id.0, bytes, &fd, within + segment::time_to_fill(bytes))
    };
    // A forked child must not use the connection.
    let made_in = process::id();
    let release = move |id: SegmentId| {
        if made_in == process::id() {
            releasing.drop_segment(id.0);
        }
    };
    (Box::new(register), Box::new(release))
}

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
