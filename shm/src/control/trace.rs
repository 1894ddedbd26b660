//! What a rank records about itself while the job is traced: when it submits, waits and steps.
//! Without a trace it records the steps that its daemon samples, from the beginning of the step to
//! its end.

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

/// The calling thread's number among the threads of this process that have recorded an event.
fn thread_number() -> u32 {
    static THREADS: AtomicU32 = AtomicU32::new(0);
    thread_local! {
        static NUMBER: u32 = THREADS.fetch_add(1, Relaxed);
    }
    // A thread whose storage is already destroyed shares the number of the first one.
    NUMBER.try_with(|number| *number).unwrap_or_default()
}

/// The daemon's side: reads a rank's events. The rank may have written anything (TRUST).
#[derive(Debug)]
pub struct RankTrace {
    page: Page,
    state: Mutex<TraceState>,
    /// Fills the memory of the trace ring. A test replaces it with a function that fails.
    fill: fn(&Page) -> Result<(), SegmentError>,
}

#[derive(Debug, Default)]
struct TraceState {
    reader: Reader,
    /// Whether the rank was asked to record.
    is_asked: bool,
    /// Whether it records sampled steps.
    samples: bool,
    room: Room,
}

/// Whether the trace ring has memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Room {
    /// It has not been needed yet.
    #[default]
    Unasked,
    Filled,
    /// Memory was missing, so the rank does not record this time.
    Refused,
}

impl TraceState {
    /// Fills the memory of the trace ring, if it has not been tried yet. Returns whether it is
    /// filled.
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

    /// Asks the rank to record each step with a multiple of this number; none if it is 0.
    ///
    /// # Errors
    /// [`SegmentError`] if memory for the ring is missing; the rank then records nothing.
    pub fn sample(&self, steps: u64) -> Result<(), SegmentError> {
        let mut state = self.state.lock();
        if steps > 0 {
            match state.fill(|| (self.fill)(&self.page)) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(error) => {
                    // A later trace of the job tries again, and reports the error.
                    state.room = Room::Unasked;
                    return Err(error);
                }
            }
        }
        state.samples = steps > 0;
        self.page.sample_steps().store(steps, Relaxed);
        Ok(())
    }

    /// Whether the rank records because its current step is sampled.
    pub fn is_sampled(&self) -> bool {
        self.page.tracing().load(Acquire) & SAMPLED != 0
    }

    /// Ends the recording of a step that takes too long.
    pub fn end_sample(&self) {
        self.page.tracing().fetch_and(!SAMPLED, Release);
    }

    /// Turns the recording of the rank on or off.
    ///
    /// # Errors
    /// [`SegmentError`], once, if memory for the ring is missing; the rank then records nothing.
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

    /// Calls `take` with the events since the last call, at most `limit`. Returns how many were
    /// lost.
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

/// The current time, if the rank must record.
pub(super) fn begin(page: &Page) -> Option<u64> {
    (page.tracing().load(Relaxed) != 0).then(now_ns)
}

/// Records an event that began at `at_ns` and ends now.
pub(super) fn end(page: &Page, kind: Kind, at_ns: u64, subject: u64) {
    let duration_ns = now_ns().saturating_sub(at_ns);
    let event = Event { duration_ns, other: thread_number(), ..Event::new(kind, at_ns, subject) };
    page.trace().push(event.encode());
}

/// Notes that a step has ended at `at_ns`. The end is recorded if this step or the next one is: the
/// end of one step is the beginning of the next.
pub(super) fn step(page: &Page, at_ns: u64, number: u64) {
    let tracing = page.tracing().load(Relaxed);
    let sampled = page.sample_steps().load(Relaxed);
    let is_next = sampled > 0 && number.wrapping_add(1).is_multiple_of(sampled);
    if tracing != 0 || is_next {
        end(page, Kind::Step, at_ns, number);
    }
    // Last: when the daemon sees that a step is no longer recorded, it can read the step's end.
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

    /// Without memory for its ring a rank records nothing, neither side touches the ring, each
    /// request reports this once, and a later request can succeed.
    #[test]
    fn a_rank_without_ring_memory_records_nothing() {
        let (worker, fd) = WorkerControl::create("gradwire-test-refused", 8).unwrap();
        let DaemonControl { mut trace, .. } = DaemonControl::open(fd, 8).unwrap();
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
            // The daemon asks again in each round; the error must not be repeated.
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
