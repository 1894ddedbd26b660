//! What a rank records of itself while somebody traces the job: when it submits, waits and steps.
//! It also does so by itself in each step whose number its daemon samples, from the first moment of
//! that step to its last.

use std::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use gradwire_trace::{Event, Kind, ring::Reader, time::now_ns};
use parking_lot::Mutex;

use super::page::Page;
use crate::segment::SegmentError;

/// A reason to record: the daemon asks for it.
const ASKED: u32 = 1;

/// A reason to record: the rank is in a step that is sampled.
const SAMPLED: u32 = 2;

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
    state: Mutex<State>,
    /// Makes room for what the rank records. A test has one that finds no memory.
    fill: fn(&Page) -> Result<(), SegmentError>,
}

#[derive(Debug, Default)]
struct State {
    reader: Reader,
    /// Whether the rank was asked to record.
    is_asked: bool,
    /// Whether it also does so by itself.
    samples: bool,
    room: Room,
}

/// Whether there is memory for what the rank records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Room {
    /// It was not needed yet.
    #[default]
    Unasked,
    Filled,
    /// There was none, so the rank does not record this time.
    Refused,
}

impl State {
    /// Makes room for what the rank records, if there is none yet. Returns whether there is.
    fn fill(
        &mut self,
        fill: impl FnOnce() -> Result<(), SegmentError>,
    ) -> Result<bool, SegmentError> {
        if self.room == Room::Unasked {
            self.room = Room::Refused;
            fill()?;
            self.room = Room::Filled;
        }
        Ok(self.room == Room::Filled)
    }
}

impl RankTrace {
    pub(super) fn new(page: Page) -> Self {
        Self { page, state: Mutex::default(), fill: Page::fill_trace }
    }

    /// The rank is to record each step whose number is a multiple of this one; none if it is 0.
    ///
    /// # Errors
    /// [`SegmentError`] if there is no memory for what it records; it records nothing then.
    pub fn sample(&self, steps: u64) -> Result<(), SegmentError> {
        let mut state = self.state.lock();
        if steps > 0 {
            match state.fill(|| (self.fill)(&self.page)) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    // Whoever traces the job later asks again, and is told.
                    state.room = Room::Unasked;
                    return Err(error);
                }
            }
        }
        state.samples = steps > 0;
        self.page.sample_steps().store(steps, Relaxed);
        Ok(())
    }

    /// Whether the rank records because of the step that it is in.
    pub fn is_sampled(&self) -> bool {
        self.page.tracing().load(Acquire) & SAMPLED != 0
    }

    /// Ends the recording of a step that takes too long.
    pub fn end_sample(&self) {
        self.page.tracing().fetch_and(!SAMPLED, Release);
    }

    /// The rank is to record from now on, or no longer.
    ///
    /// # Errors
    /// [`SegmentError`], once, if there is no memory for what it records; it records nothing then.
    pub fn turn(&self, on: bool) -> Result<(), SegmentError> {
        let mut state = self.state.lock();
        if on == state.is_asked {
            return Ok(());
        }
        state.is_asked = on;
        if !on {
            self.page.tracing().fetch_and(!ASKED, Release);
            if state.room == Room::Refused {
                state.room = Room::Unasked;
            }
            return Ok(());
        }
        if !state.fill(|| (self.fill)(&self.page))? {
            return Ok(());
        }
        // A step that is sampled has begun before its daemon knows.
        if !state.samples {
            state.reader.skip(&self.page.trace());
        }
        self.page.tracing().fetch_or(ASKED, Release);
        Ok(())
    }

    /// Calls `take` with what was recorded since the last call, at most `limit` events. Returns how
    /// many were lost.
    pub fn read(&self, limit: usize, mut take: impl FnMut(Event)) -> u64 {
        let mut state = self.state.lock();
        if state.room != Room::Filled {
            return 0;
        }
        state.reader.read(&self.page.trace(), limit, |record| {
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

/// Notes that a step has ended at `at_ns`. It is recorded if it was, and if the next one will be:
/// the end of the one is the beginning of the other.
pub(super) fn step(page: &Page, at_ns: u64, number: u64) {
    let tracing = page.tracing().load(Relaxed);
    let sampled = page.sample_steps().load(Relaxed);
    let is_next = sampled > 0 && number.wrapping_add(1).is_multiple_of(sampled);
    if tracing != 0 || is_next {
        end(page, Kind::Step, at_ns, number);
    }
    // Last: who sees that a step is no longer recorded can read its end.
    let was_sampled = tracing & SAMPLED != 0;
    if is_next && !was_sampled {
        page.tracing().fetch_or(SAMPLED, Release);
    } else if was_sampled && !is_next {
        page.tracing().fetch_and(!SAMPLED, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{DaemonControl, WorkerControl};

    /// Where there is no memory for what a rank records it records nothing, neither side touches
    /// the ring, each request says so once, and the next one has what it needs.
    #[test]
    fn a_rank_without_memory_for_its_ring_records_nothing() {
        let (worker, fd) = WorkerControl::create("gradwire-test-refused").unwrap();
        let DaemonControl { mut trace, .. } = DaemonControl::open(fd).unwrap();
        trace.fill = |_| Err(SegmentError::Size { bytes: 1 });
        let is_silent = |trace: &RankTrace| {
            (1..10).for_each(|_| worker.mark_step());
            worker.traced().is_none()
                && !trace.is_sampled()
                && trace.read(usize::MAX, |_| panic!("an event")) == 0
        };
        assert!(trace.sample(3).is_err() && is_silent(&trace));
        for _ in 0..2 {
            assert!(trace.turn(true).is_err() && is_silent(&trace));
            // The daemon asks again at each look, and nobody wants to read the same again.
            assert!(trace.turn(true).is_ok() && is_silent(&trace));
            assert!(trace.sample(3).is_ok() && is_silent(&trace));
            assert!(trace.turn(false).is_ok() && is_silent(&trace));
        }
        trace.fill = Page::fill_trace;
        trace.turn(true).unwrap();
        worker.record(Kind::Submit, worker.traced().unwrap(), 7);
        let mut subjects = Vec::new();
        assert_eq!(trace.read(usize::MAX, |event| subjects.push(event.subject)), 0);
        assert_eq!(subjects, [7]);
    }
}
