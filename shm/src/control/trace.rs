//! What a rank records of itself while somebody traces the job: when it submits, waits and steps.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Relaxed, Release},
};

use gradwire_trace::{Event, Kind, ring::Reader, time::now_ns};
use parking_lot::Mutex;

use super::page::Page;

/// The number of the calling thread among those of this process that have recorded something.
fn thread_number() -> u32 {
    static THREADS: AtomicU32 = AtomicU32::new(0);
    thread_local! {
        static NUMBER: u32 = THREADS.fetch_add(1, Relaxed);
    }
    // A thread that ends, and whose storage is gone, shares the number of the first one.
    NUMBER.try_with(|number| *number).unwrap_or_default()
}

/// The daemon's side: reads what a rank records. The rank may have written anything (TRUST).
#[derive(Debug)]
pub struct RankTrace {
    page: Page,
    /// `None` while it is not to record.
    reader: Mutex<Option<Reader>>,
}

impl RankTrace {
    pub(super) fn new(page: Page) -> Self {
        Self { page, reader: Mutex::default() }
    }

    /// The rank is to record from now on, or no longer.
    pub fn turn(&self, on: bool) {
        let mut reader = self.reader.lock();
        if on == reader.is_some() {
            return;
        }
        *reader = on.then(|| {
            let mut reader = Reader::default();
            reader.skip(&self.page.trace());
            reader
        });
        self.page.tracing().store(on.into(), Release);
    }

    /// Calls `take` with what was recorded since the last call, at most `limit` events. Returns how
    /// many were lost.
    pub fn read(&self, limit: usize, mut take: impl FnMut(Event)) -> u64 {
        let mut reader = self.reader.lock();
        let Some(reader) = &mut *reader else { return 0 };
        reader.read(&self.page.trace(), limit, |record| {
            if let Some(event) = Event::decode(record).filter(|event| event.kind.is_of_rank()) {
                take(event);
            }
        })
    }
}

/// The time now, if the rank is to record.
pub(super) fn begin(page: &Page) -> Option<u64> {
    (page.tracing().load(Relaxed) != 0).then(now_ns)
}

/// Records something that began at `at_ns` and ends now.
pub(super) fn end(page: &Page, kind: Kind, at_ns: u64, subject: u64) {
    let duration_ns = now_ns().saturating_sub(at_ns);
    let event = Event { duration_ns, other: thread_number(), ..Event::new(kind, at_ns, subject) };
    page.trace().push(event.encode());
}
