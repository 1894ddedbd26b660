//! The readers of traces: each gets the recordings of all nodes.
//!
//! Nodes record while there is a reader, or during sampled steps. Nothing here looks into the
//! recordings or waits for a reader: a slow one loses batches and learns how many (BOUND).

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use gradwire_proto::pb::TracePart;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tonic::Status;

use crate::inbox::OVER;

/// The most readers (BOUND).
const MAX_READERS: usize = 4;

/// How many batches may wait for a reader (BOUND).
const WAITING: usize = 256;

/// The stream of a reader. The last item says why it ended.
pub type Traced = mpsc::Receiver<Result<TracePart, Status>>;

#[derive(Debug)]
struct Reader {
    parts: mpsc::Sender<Result<TracePart, Status>>,
    /// Batches lost since the last delivered one.
    lost: u64,
    /// Whether it wants only sampled steps.
    samples: bool,
}

/// The readers of traces.
#[derive(Debug)]
pub(crate) struct Traces {
    /// `None` once the job is over.
    readers: Mutex<Option<Vec<Reader>>>,
    /// Whether a sampled step is in progress on any node.
    goes_on: AtomicBool,
    /// Whether there is a new reader since the last check.
    has_new: AtomicBool,
}

impl Default for Traces {
    fn default() -> Self {
        let (goes_on, has_new) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { readers: Mutex::new(Some(Vec::new())), goes_on, has_new }
    }
}

impl Traces {
    /// Adds a reader.
    ///
    /// # Errors
    /// There are too many (BOUND), or the job is over.
    pub(crate) fn add(&self) -> Result<Traced, Status> {
        let traced = self.open(false)?;
        self.has_new.store(true, SeqCst);
        Ok(traced)
    }

    /// Adds a reader of sampled steps.
    ///
    /// # Errors
    /// The job is over.
    pub(crate) fn sample(&self) -> Result<Traced, Status> {
        self.open(true)
    }

    fn open(&self, samples: bool) -> Result<Traced, Status> {
        let mut readers = self.readers.lock();
        let readers = readers.as_mut().ok_or_else(|| Status::unavailable(OVER))?;
        readers.retain(|reader| !reader.parts.is_closed());
        if !samples && readers.iter().filter(|reader| !reader.samples).count() >= MAX_READERS {
            let what = format!("{MAX_READERS} others already trace this job: stop one of them");
            return Err(Status::resource_exhausted(what));
        }
        let (parts, traced) = mpsc::channel(WAITING + 1);
        readers.push(Reader { parts, lost: 0, samples });
        Ok(traced)
    }

    /// Sets whether a sampled step is in progress. Returns whether that has changed.
    pub(crate) fn goes_on(&self, goes_on: bool) -> bool {
        self.goes_on.swap(goes_on, SeqCst) != goes_on
    }

    /// Whether nodes should record a trace.
    pub(crate) fn is_wanted(&self) -> bool {
        let goes_on = self.goes_on.load(SeqCst);
        let readers = self.readers.lock();
        let wants = |reader: &Reader| !reader.parts.is_closed() && (goes_on || !reader.samples);
        readers.iter().flatten().any(wants)
    }

    /// Whether there is a new reader since the last call.
    pub(crate) fn has_new_reader(&self) -> bool {
        self.has_new.swap(false, SeqCst)
    }

    /// Passes a batch of a node to the readers.
    pub(crate) fn give(&self, batch: &[u8]) {
        for reader in self.readers.lock().iter_mut().flatten() {
            // The last place is reserved for the reason of the end.
            if reader.parts.capacity() <= 1 {
                reader.lost += 1;
                continue;
            }
            let part = TracePart { batch: batch.to_vec(), lost_batches: reader.lost };
            if reader.parts.try_send(Ok(part)).is_ok() {
                reader.lost = 0;
            }
        }
    }

    /// Ends all streams, because the job is over.
    pub(crate) fn end(&self) {
        for reader in self.readers.lock().take().unwrap_or_default() {
            let _ = reader.parts.try_send(Err(Status::unavailable(OVER)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_reader_loses_batches_and_is_told() {
        let traces = Traces::default();
        assert!(!traces.is_wanted());
        let [mut slow, mut other] = [(); 2].map(|()| traces.add().unwrap());
        for number in 0..WAITING + 5 {
            traces.give(&[number as u8]);
            other.try_recv().unwrap().unwrap();
        }
        for _ in 0..WAITING {
            assert_eq!(slow.try_recv().unwrap().unwrap().lost_batches, 0);
        }
        traces.give(&[7]);
        let part = slow.try_recv().unwrap().unwrap();
        assert_eq!((part.batch, part.lost_batches), (vec![7], 5), "BOUND");
        drop((slow, other));
        assert!(!traces.is_wanted());
    }

    #[test]
    fn nodes_record_during_sampled_steps() {
        let traces = Traces::default();
        assert!(traces.goes_on(true) && !traces.is_wanted(), "there is no reader");
        let samples = traces.sample().unwrap();
        assert!(traces.is_wanted());
        assert!(traces.goes_on(false) && !traces.goes_on(false) && !traces.is_wanted());
        assert!(!traces.has_new_reader());
        let readers: Vec<_> = (0..MAX_READERS).map(|_| traces.add().unwrap()).collect();
        assert!(traces.is_wanted() && traces.has_new_reader() && !traces.has_new_reader());
        drop((readers, samples));
        assert!(traces.goes_on(true) && !traces.is_wanted());
    }

    #[test]
    fn readers_are_limited_and_end() {
        let traces = Traces::default();
        let mut all: Vec<_> = (0..MAX_READERS).map(|_| traces.add().unwrap()).collect();
        assert!(traces.add().unwrap_err().message().contains("4 others"), "BOUND");
        drop(all.pop());
        all.push(traces.add().unwrap());
        (0..2 * WAITING).for_each(|_| traces.give(&[]));
        traces.end();
        for reader in &mut all {
            (0..WAITING).for_each(|_| drop(reader.try_recv().unwrap().unwrap()));
            assert_eq!(reader.try_recv().unwrap().unwrap_err().message(), OVER);
        }
        assert!(traces.add().is_err() && !traces.is_wanted());
    }
}
