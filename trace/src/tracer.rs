//! The rings of a process, and whether anything is recorded at all.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
    time::Instant,
};

use parking_lot::Mutex;

use crate::{
    event::{Event, Kind},
    names::Names,
    ring::{Reader, Ring, SLOT_WORDS},
    time::Instants,
};

/// Bytes of a ring (BOUND).
pub const RING_BYTES: usize = 4 << 20;

const SLOTS: usize = RING_BYTES / 8 / SLOT_WORDS;

/// The thread, or the group of threads, of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Track {
    /// The threads of a daemon except lanes.
    Control,
    /// The data thread with this number.
    Lane(u32),
    /// The local rank with this number.
    Rank(u32),
}

/// The memory of a ring of this process.
#[derive(Debug)]
struct Memory {
    head: AtomicU64,
    slots: Vec<AtomicU64>,
}

impl Memory {
    fn new() -> Self {
        let slots = (0..SLOTS * SLOT_WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { head: AtomicU64::new(0), slots }
    }

    fn ring(&self) -> Ring<'_> {
        Ring::new(&self.head, &self.slots)
    }
}

/// A track and its ring, which is allocated with the first event.
#[derive(Debug)]
struct Lines {
    track: Track,
    memory: OnceLock<Memory>,
    reader: Mutex<Reader>,
}

/// The recorded events of a process, shared by its threads.
#[derive(Debug, Default)]
pub struct Tracer {
    is_on: AtomicBool,
    names: Names,
    instants: Instants,
    lines: Mutex<Vec<Arc<Lines>>>,
}

impl Tracer {
    /// A recorder for one or several threads.
    pub fn recorder(self: &Arc<Self>, track: Track) -> Recorder {
        let lines = Lines { track, memory: OnceLock::new(), reader: Mutex::default() };
        let lines = Arc::new(lines);
        self.lines.lock().push(lines.clone());
        Recorder { tracer: self.clone(), lines }
    }

    /// Whether events are recorded.
    pub fn is_on(&self) -> bool {
        self.is_on.load(Acquire)
    }

    /// Turns recording on or off. Events from before it was turned on are left out.
    pub fn turn(&self, on: bool) {
        if on && !self.is_on() {
            for lines in self.lines.lock().iter() {
                // Here, because it takes a millisecond, for which recording threads have no time.
                let memory = lines.memory.get_or_init(Memory::new);
                lines.reader.lock().skip(&memory.ring());
            }
            self.names.restart();
        }
        self.is_on.store(on, Release);
    }

    /// The numbers of names.
    pub fn names(&self) -> &Names {
        &self.names
    }

    /// An instant in the clock of events.
    pub fn ns(&self, at: Instant) -> u64 {
        self.instants.ns(at)
    }

    /// Calls `take` with the events since the last call, at most `limit` of each track. Returns how
    /// many were lost.
    pub fn read(&self, limit: usize, mut take: impl FnMut(Track, Event)) -> u64 {
        let all = self.lines.lock().clone();
        let mut lost = 0;
        for lines in all {
            let Some(memory) = lines.memory.get() else { continue };
            lost += lines.reader.lock().read(&memory.ring(), limit, |record| {
                if let Some(event) = Event::decode(record) {
                    take(lines.track, event);
                }
            });
        }
        lost
    }
}

/// Records the events of one track.
#[derive(Debug, Clone)]
pub struct Recorder {
    tracer: Arc<Tracer>,
    lines: Arc<Lines>,
}

impl Recorder {
    /// Whether events are recorded. Ask first if an event has to be computed.
    pub fn is_on(&self) -> bool {
        self.tracer.is_on.load(Relaxed)
    }

    /// The tracer of the process.
    pub fn tracer(&self) -> &Tracer {
        &self.tracer
    }

    /// Records an event, if events are recorded.
    pub fn record(&self, event: Event) {
        if self.is_on() {
            self.lines.memory.get_or_init(Memory::new).ring().push(event.encode());
        }
    }

    /// An event between two instants.
    pub fn between(&self, kind: Kind, begin: Instant, end: Instant, subject: u64) -> Event {
        let (at_ns, end_ns) = (self.tracer.ns(begin), self.tracer.ns(end));
        let duration_ns = end_ns.saturating_sub(at_ns);
        Event { duration_ns, ..Event::new(kind, at_ns, subject) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subjects(tracer: &Tracer) -> (Vec<(Track, u64)>, u64) {
        let mut found = Vec::new();
        let lost = tracer.read(usize::MAX, |track, event| found.push((track, event.subject)));
        (found, lost)
    }

    #[test]
    fn events_are_recorded_while_it_is_on() {
        let tracer = Arc::new(Tracer::default());
        let [control, lane] = [Track::Control, Track::Lane(0)].map(|track| tracer.recorder(track));
        let record = |recorder: &Recorder, subject| {
            recorder.record(Event::new(Kind::Reduce, 1, subject));
        };
        record(&control, 1);
        assert_eq!(subjects(&tracer), (vec![], 0));
        tracer.turn(true);
        record(&control, 2);
        record(&lane, 3);
        assert_eq!(subjects(&tracer), (vec![(Track::Control, 2), (Track::Lane(0), 3)], 0));
        record(&control, 4);
        tracer.turn(false);
        record(&control, 5);
        // The last events can still be read.
        assert_eq!(subjects(&tracer), (vec![(Track::Control, 4)], 0));
        tracer.turn(true);
        record(&lane, 6);
        assert_eq!(subjects(&tracer), (vec![(Track::Lane(0), 6)], 0));
    }

    #[test]
    fn lost_events_are_counted() {
        let tracer = Arc::new(Tracer::default());
        let recorder = tracer.recorder(Track::Control);
        tracer.turn(true);
        for subject in 0..2 * SLOTS as u64 {
            recorder.record(Event::new(Kind::Reduce, 1, subject));
        }
        let (found, lost) = subjects(&tracer);
        assert_eq!((found.len(), lost), (SLOTS, SLOTS as u64), "BOUND");
    }

    #[test]
    fn an_event_between_instants_has_its_duration() {
        let tracer = Arc::new(Tracer::default());
        let recorder = tracer.recorder(Track::Control);
        let begin = Instant::now();
        let end = begin + std::time::Duration::from_micros(7);
        let event = recorder.between(Kind::Send, begin, end, 3);
        assert_eq!((event.duration_ns, event.subject), (7000, 3));
        assert_eq!(recorder.between(Kind::Send, end, begin, 3).duration_ns, 0);
    }
}
