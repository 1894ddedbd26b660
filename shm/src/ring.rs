//! The two rings, over any [`Backing`]: which side writes what, and which side wakes the other.
//!
//! Positions are free-running counters. Each is written by one side, which keeps its own copy and
//! never reads the shared one back. The other side's counter is checked before it is used (TRUST),
//! so a hostile peer can only cause an error.
//!
//! - Submissions are records of whole words. The first word holds the record's length. A record may
//!   wrap around the end; both sides copy word by word.
//! - Completions have three words each.
//!
//! Sleeping uses the store–load pattern with a fence on both sides: the sleeper registers itself
//! and then checks once more; the other side publishes and then checks for a sleeper. At least one
//! of them sees the other, so no wake-up is lost, and only sleeping threads are woken. A worker
//! also registers its ticket: a training step has hundreds of completions and waits for a few of
//! them. Each unneeded wake-up would take a core from the threads that work on the rest.

use std::{
    sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release},
    time::{Duration, Instant},
};

use gradwire_proto::Request;

use crate::backing::{Backing, Cell, Flag, Signal};

/// The longest record, in words: a 1024-byte name, a tensor of 32 dimensions, and the longest lists
/// and groups fit.
pub const MAX_RECORD_WORDS: usize = 208 + Request::MAX_EXTRA_WORDS;

/// Words of one completion, the ticket first.
pub const COMPLETION_WORDS: usize = 3;

/// The ticket registered by a sleeper that any completion wakes. No real ticket has this number.
pub const ANY: u64 = 0;

/// An impossible counter or length from the other side. The caller adds which ring it is about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Nonsense {
    /// The producer claims more than the ring can hold.
    #[error(
        "the ring's tail is {tail} with the head at {head}: the distance exceeds its \
         {capacity} words"
    )]
    Tail {
        /// The tail that was read.
        tail: u64,
        /// Our own head.
        head: u64,
        /// Words or entries of the ring.
        capacity: u64,
    },
    /// The producer withdrew what it had published.
    #[error("the ring's tail went back from {seen} to {tail}")]
    TailWentBack {
        /// The tail that was seen before.
        seen: u64,
        /// The tail now.
        tail: u64,
    },
    /// The consumer claims to have read entries that were never written.
    #[error(
        "the ring's head is {head} with the tail at {tail}: the distance exceeds its \
         {capacity} entries"
    )]
    Head {
        /// The head that was read.
        head: u64,
        /// Our own tail.
        tail: u64,
        /// Words or entries of the ring.
        capacity: u64,
    },
    /// A record's length is impossible.
    #[error(
        "a record claims {words} words, but {available} are published and at most {max} \
         are allowed",
        max = MAX_RECORD_WORDS
    )]
    Length {
        /// The length that was read.
        words: u64,
        /// The words between head and tail.
        available: u64,
    },
}

/// Why a producer could not publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PushError {
    /// The ring has no room now.
    Full,
    /// The consumer's counter is impossible.
    Nonsense(Nonsense),
}

/// The ring from the worker to the daemon.
#[derive(Debug)]
pub struct SubmissionRing<'a, B: Backing> {
    /// Words consumed so far; written by the daemon.
    pub head: &'a B::Cell,
    /// Words published so far; written by the worker.
    pub tail: &'a B::Cell,
    /// 1 while the daemon sleeps; set by the daemon, cleared by the thread that wakes it.
    pub sleeping: &'a B::Flag,
    /// The records; the number of words is a power of two.
    pub cells: &'a [B::Cell],
}

impl<B: Backing> SubmissionRing<'_, B> {
    fn capacity(&self) -> u64 {
        self.cells.len() as u64
    }

    fn cell(&self, position: u64) -> &B::Cell {
        // The index is in range for any position, even one that a hostile peer has chosen.
        &self.cells[(position % self.capacity()) as usize]
    }

    /// Publishes a record; `tail` is the producer's own count. True if the daemon sleeps: then this
    /// caller must wake it.
    ///
    /// # Errors
    /// [`PushError`] if the record does not fit now or the daemon's counter is impossible.
    pub fn push(&self, tail: &mut u64, record: &[u64]) -> Result<bool, PushError> {
        // Acquire: the daemon has copied the words out before we write over them.
        let head = self.head.load(Acquire);
        let used = tail.wrapping_sub(head);
        if used > self.capacity() {
            let capacity = self.capacity();
            return Err(PushError::Nonsense(Nonsense::Head { head, tail: *tail, capacity }));
        }
        let words = record.len() as u64 + 1;
        if record.len() >= MAX_RECORD_WORDS || words > self.capacity() - used {
            return Err(PushError::Full);
        }
        self.cell(*tail).store(words, Relaxed);
        for (place, word) in (1..).zip(record) {
            self.cell(tail.wrapping_add(place)).store(*word, Relaxed);
        }
        *tail = tail.wrapping_add(words);
        self.tail.store(*tail, Release);
        B::fence();
        // Load before the swap: a swap on every submission would bounce the daemon's cache line.
        Ok(self.sleeping.load(Relaxed) != 0 && self.sleeping.swap(0, AcqRel) != 0)
    }

    /// Takes the next record out into `record`, without its length; `head` is the consumer's own
    /// count, `seen` the highest tail so far. `None` if the ring is empty.
    ///
    /// # Errors
    /// [`Nonsense`] if the tail or length is impossible (TRUST); then nothing is consumed.
    pub fn pop<'r>(
        &self,
        head: &mut u64,
        seen: u64,
        record: &'r mut Vec<u64>,
    ) -> Result<Option<&'r [u64]>, Nonsense> {
        let tail = self.tail.load(Acquire);
        let available = tail.wrapping_sub(*head);
        if available > self.capacity() {
            let capacity = self.capacity();
            return Err(Nonsense::Tail { tail, head: *head, capacity });
        }
        if available < seen.wrapping_sub(*head) {
            return Err(Nonsense::TailWentBack { seen, tail });
        }
        if available == 0 {
            return Ok(None);
        }
        let words = self.cell(*head).load(Relaxed);
        if words == 0 || words > available || words > MAX_RECORD_WORDS as u64 {
            return Err(Nonsense::Length { words, available });
        }
        record.resize(words as usize - 1, 0); // at most MAX_RECORD_WORDS, checked above (BOUND)
        for (place, word) in (1..).zip(record.iter_mut()) {
            *word = self.cell(head.wrapping_add(place)).load(Relaxed);
        }
        *head = head.wrapping_add(words);
        self.head.store(*head, Release);
        Ok(Some(record))
    }

    /// Whether nothing has been published beyond `head`, the consumer's own count.
    pub fn is_empty(&self, head: u64) -> bool {
        self.tail.load(Relaxed) == head
    }

    /// Announces that the consumer sleeps, and checks once more. Returns the tail if a record has
    /// arrived meanwhile: then the flag is cleared and the consumer must not sleep.
    pub fn prepare_sleep(&self, head: u64) -> Option<u64> {
        self.sleeping.store(1, Relaxed);
        B::fence();
        let tail = self.tail.load(Acquire);
        if tail == head {
            return None;
        }
        self.awake();
        Some(tail)
    }

    /// Announces that the consumer no longer sleeps, so that no wake-up is sent.
    pub fn awake(&self) {
        self.sleeping.store(0, Relaxed);
    }
}

/// The ring from the daemon to the worker.
#[derive(Debug)]
pub struct CompletionRing<'a, B: Backing> {
    /// Entries consumed so far; written by the worker.
    pub head: &'a B::Cell,
    /// Entries published so far; written by the daemon.
    pub tail: &'a B::Cell,
    /// Moves with every entry; the worker's threads sleep on it.
    pub epoch: &'a B::Signal,
    /// How many threads sleep or are about to sleep.
    pub waiters: &'a B::Flag,
    /// The ticket that they sleep for, or [`ANY`].
    pub wanted: &'a B::Cell,
    /// The entries, [`COMPLETION_WORDS`] words each; their number is a power of two.
    pub cells: &'a [B::Cell],
}

impl<B: Backing> CompletionRing<'_, B> {
    fn capacity(&self) -> u64 {
        (self.cells.len() / COMPLETION_WORDS) as u64
    }

    fn cells(&self, position: u64) -> &[B::Cell] {
        let start = (position % self.capacity()) as usize * COMPLETION_WORDS;
        &self.cells[start..start + COMPLETION_WORDS]
    }

    /// Publishes an entry and wakes the threads that sleep for it; `tail` is the producer's own
    /// count.
    ///
    /// # Errors
    /// [`PushError`] if the ring is full or the worker's counter is impossible.
    pub fn push(&self, tail: &mut u64, entry: [u64; COMPLETION_WORDS]) -> Result<(), PushError> {
        let head = self.head.load(Acquire);
        let used = tail.wrapping_sub(head);
        if used > self.capacity() {
            let capacity = self.capacity();
            return Err(PushError::Nonsense(Nonsense::Head { head, tail: *tail, capacity }));
        }
        if used == self.capacity() {
            return Err(PushError::Full);
        }
        for (cell, word) in self.cells(*tail).iter().zip(entry) {
            cell.store(word, Relaxed);
        }
        *tail = tail.wrapping_add(1);
        self.tail.store(*tail, Release);
        self.move_on(|wanted| wanted == ANY || wanted == entry[0]);
        Ok(())
    }

    /// Moves the epoch and wakes all threads that sleep on it.
    pub fn signal(&self) {
        self.move_on(|_| true);
    }

    fn move_on(&self, concerns: impl FnOnce(u64) -> bool) {
        self.epoch.fetch_add(1, Release);
        B::fence();
        // A wake-up is a system call, so only a sleeper gets one. A thread that is about to sleep
        // for a ticket other than `wanted` sees the epoch move.
        if self.waiters.load(Relaxed) != 0 && concerns(self.wanted.load(Relaxed)) {
            self.epoch.wake_all();
        }
    }

    /// Takes the next entry out; `head` is the consumer's own count.
    ///
    /// # Errors
    /// [`Nonsense`] if the daemon's counter is impossible.
    pub fn pop(&self, head: &mut u64) -> Result<Option<[u64; COMPLETION_WORDS]>, Nonsense> {
        let tail = self.tail.load(Acquire);
        let available = tail.wrapping_sub(*head);
        if available > self.capacity() {
            return Err(Nonsense::Tail { tail, head: *head, capacity: self.capacity() });
        }
        if available == 0 {
            return Ok(None);
        }
        let mut entry = [0; COMPLETION_WORDS];
        for (word, cell) in entry.iter_mut().zip(self.cells(*head)) {
            *word = cell.load(Relaxed);
        }
        *head = head.wrapping_add(1);
        self.head.store(*head, Release);
        Ok(Some(entry))
    }

    /// Registers a thread that is about to [`sleep`](Self::sleep), and its ticket. Only one thread
    /// may call this at a time. If others are registered, it registers [`ANY`], so that no other
    /// ticket is lost.
    pub fn register_waiter(&self, wanted: u64) {
        let others = self.waiters.fetch_add(1, Relaxed);
        self.wanted.store(if others == 0 { wanted } else { ANY }, Relaxed);
    }

    /// Sleeps, after [`register_waiter`](Self::register_waiter), until another thread moves the
    /// epoch and wakes this one, or until the time is up. Returns at once if the epoch is not
    /// `seen`. True if the epoch moved.
    pub fn sleep(&self, seen: u32, timeout: Duration) -> bool {
        let start = Instant::now();
        B::fence();
        let moved = loop {
            if self.epoch.load(Acquire) != seen {
                break true;
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                break false;
            }
            self.epoch.sleep(seen, left);
        };
        self.waiters.fetch_add(u32::MAX, Relaxed); // one less, wrapping around
        moved
    }
}

/// These tests use heap memory and never sleep, so they run under miri.
#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, AtomicU64},
        thread,
    };

    use super::*;
    use crate::backing::Shared;

    #[derive(Default)]
    struct Words {
        head: AtomicU64,
        tail: AtomicU64,
        signal: AtomicU32,
        flag: AtomicU32,
        wanted: AtomicU64,
        cells: [AtomicU64; 24],
    }

    impl Words {
        fn submissions(&self) -> SubmissionRing<'_, Shared> {
            let Self { head, tail, flag, cells, .. } = self;
            SubmissionRing { head, tail, sleeping: flag, cells: &cells[..16] }
        }

        fn completions(&self) -> CompletionRing<'_, Shared> {
            let Self { head, tail, signal, flag, wanted, cells } = self;
            CompletionRing { head, tail, epoch: signal, waiters: flag, wanted, cells }
        }
    }

    #[test]
    fn records_wrap_around_between_threads() {
        const RECORDS: u64 = if cfg!(miri) { 200 } else { 20_000 };
        let words = Words::default();
        let content = |record: u64| vec![record; (record % 15) as usize];
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut tail = 0;
                for record in 0..RECORDS {
                    while words.submissions().push(&mut tail, &content(record)).is_err() {
                        thread::yield_now();
                    }
                }
            });
            let (mut head, mut copy) = (0, Vec::new());
            for record in 0..RECORDS {
                loop {
                    let seen = head;
                    let popped = words.submissions().pop(&mut head, seen, &mut copy).unwrap();
                    let Some(got) = popped else {
                        thread::yield_now();
                        continue;
                    };
                    assert_eq!(got, content(record));
                    break;
                }
            }
        });
    }

    #[test]
    fn counters_wrap_around_at_their_end() {
        let words = Words::default();
        let start = u64::MAX - 7;
        for counter in [&words.head, &words.tail] {
            counter.store(start, Relaxed);
        }
        let (mut tail, mut head, mut copy) = (start, start, Vec::new());
        for record in 0..10 {
            assert_eq!(words.submissions().push(&mut tail, &[record, record]), Ok(false));
            let seen = head;
            let popped = words.submissions().pop(&mut head, seen, &mut copy).unwrap();
            assert_eq!(popped, Some(&[record, record][..]));
        }
    }

    #[test]
    fn a_full_ring_accepts_again_once_there_is_room() {
        let words = Words::default();
        let ring = words.completions();
        let (mut tail, mut head) = (0, 0);
        for entry in 0..8 {
            ring.push(&mut tail, [entry, 0, 0]).unwrap();
        }
        assert_eq!(ring.push(&mut tail, [8, 0, 0]), Err(PushError::Full));
        assert_eq!(ring.pop(&mut head), Ok(Some([0, 0, 0])));
        ring.push(&mut tail, [8, 0, 0]).unwrap();
        for entry in 1..=8 {
            assert_eq!(ring.pop(&mut head), Ok(Some([entry, 0, 0])));
        }
        assert_eq!(ring.pop(&mut head), Ok(None));
        assert_eq!(words.signal.load(Relaxed), 9, "the epoch moves with every entry");
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let words = Words::default();
        let ring = words.submissions();
        let mut tail = 0;
        assert_eq!(ring.prepare_sleep(0), None);
        assert_eq!(ring.push(&mut tail, &[1]), Ok(true));
        assert_eq!(ring.push(&mut tail, &[2]), Ok(false));
        assert_eq!(ring.prepare_sleep(0), Some(4), "not empty: no sleep");
        assert_eq!(ring.push(&mut tail, &[3]), Ok(false));
    }
}
