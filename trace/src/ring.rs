//! A ring of records that overwrites the oldest.
//!
//! Any number of threads write, including those of other processes, and none of them waits. One
//! reader looks from time to time. Each slot has a stamp: odd while record `n` is written, `2 n +
//! 2` once it is there. A reader that finds the expected stamp before and after reading the words
//! has read one whole record. The words are written with release and read with acquire, so a reader
//! that sees a word of a later record also sees that record's stamp (H.-J. Boehm, "Can seqlocks get
//! along with programming language memory models?", MSPC 2012).
//!
//! A writer that sleeps in the middle of a record while others write a whole round can leave a torn
//! record. So the reader trusts no record.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{self, Acquire, Relaxed, Release},
};

/// Words of a record.
pub const WORDS: usize = 5;

/// Words of a slot: a stamp and a record.
pub const SLOT_WORDS: usize = WORDS + 1;

/// A word that writers and the reader share. The model checker has its own implementation.
pub trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u64;
    /// Writes it.
    fn store(&self, value: u64, order: Ordering);
    /// Adds to it, wrapping around, and returns the previous value.
    fn fetch_add(&self, value: u64, order: Ordering) -> u64;
}

impl Word for AtomicU64 {
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.fetch_add(value, order)
    }
}

/// A ring over words that begin as zeros.
#[derive(Debug)]
pub struct Ring<'a, W = AtomicU64> {
    head: &'a W,
    slots: &'a [W],
}

impl<'a, W: Word> Ring<'a, W> {
    /// A ring with the next number in `head`, and with slots of [`SLOT_WORDS`] each, at least one.
    /// Remaining words are not used.
    pub fn new(head: &'a W, slots: &'a [W]) -> Self {
        debug_assert!(slots.len() >= SLOT_WORDS);
        Self { head, slots }
    }

    fn capacity(&self) -> u64 {
        (self.slots.len() / SLOT_WORDS) as u64
    }

    fn slot(&self, number: u64) -> &'a [W] {
        let first = (number % self.capacity()) as usize * SLOT_WORDS;
        &self.slots[first..first + SLOT_WORDS]
    }

    /// Writes one record.
    pub fn push(&self, record: [u64; WORDS]) {
        let number = self.head.fetch_add(1, Relaxed);
        let slot = self.slot(number);
        let stamp = number.wrapping_mul(2);
        slot[0].store(stamp.wrapping_add(1), Relaxed);
        for (word, value) in slot[1..].iter().zip(record) {
            word.store(value, Release);
        }
        slot[0].store(stamp.wrapping_add(2), Release);
    }
}

/// The position of a reader of a ring.
#[derive(Debug, Default)]
pub struct Reader {
    next: u64,
    /// A record that was not whole at the last look.
    unfinished: Option<u64>,
}

impl Reader {
    /// Skips all records up to now.
    pub fn skip<W: Word>(&mut self, ring: &Ring<'_, W>) {
        *self = Self { next: ring.head.load(Acquire), unfinished: None };
    }

    /// Calls `take` with the records since the last call, at most `limit`. Returns how many were
    /// lost: overwritten before they were read, or never finished.
    pub fn read<W: Word>(
        &mut self,
        ring: &Ring<'_, W>,
        limit: usize,
        mut take: impl FnMut([u64; WORDS]),
    ) -> u64 {
        let head = ring.head.load(Acquire);
        let mut lost = 0;
        for _ in 0..limit {
            // A writer that breaks the rules may have moved the head back (TRUST).
            if self.next >= head {
                break;
            }
            let oldest = head.saturating_sub(ring.capacity());
            if self.next < oldest {
                lost += oldest - self.next;
                self.next = oldest;
            }
            let slot = ring.slot(self.next);
            let whole = self.next.wrapping_mul(2).wrapping_add(2);
            let stamp = slot[0].load(Acquire);
            let record = std::array::from_fn(|word| slot[1 + word].load(Acquire));
            let is_same = slot[0].load(Relaxed) == stamp;
            if stamp == whole && is_same {
                take(record);
            } else if stamp < whole && self.unfinished != Some(self.next) {
                // Its writer has just begun, and has time until the next look.
                self.unfinished = Some(self.next);
                break;
            } else {
                lost += 1;
            }
            self.next += 1;
        }
        lost
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, thread};

    use super::*;

    struct Memory {
        head: AtomicU64,
        slots: Vec<AtomicU64>,
    }

    impl Memory {
        fn new(records: usize) -> Self {
            let slots = (0..records * SLOT_WORDS).map(|_| AtomicU64::new(0)).collect();
            Self { head: AtomicU64::new(0), slots }
        }

        fn ring(&self) -> Ring<'_> {
            Ring::new(&self.head, &self.slots)
        }
    }

    fn record(number: u64) -> [u64; WORDS] {
        std::array::from_fn(|word| number * 10 + word as u64)
    }

    fn read(reader: &mut Reader, memory: &Memory) -> (Vec<u64>, u64) {
        let mut numbers = Vec::new();
        let lost = reader.read(&memory.ring(), usize::MAX, |found| {
            assert_eq!(found, record(found[0] / 10));
            numbers.push(found[0] / 10);
        });
        (numbers, lost)
    }

    #[test]
    fn the_oldest_records_are_lost() {
        let (memory, mut reader) = (Memory::new(4), Reader::default());
        assert_eq!(read(&mut reader, &memory), (vec![], 0));
        (0..3).for_each(|number| memory.ring().push(record(number)));
        assert_eq!(read(&mut reader, &memory), (vec![0, 1, 2], 0));
        (3..13).for_each(|number| memory.ring().push(record(number)));
        assert_eq!(read(&mut reader, &memory), (vec![9, 10, 11, 12], 6), "BOUND");
        memory.ring().push(record(13));
        reader.skip(&memory.ring());
        memory.ring().push(record(14));
        assert_eq!(read(&mut reader, &memory), (vec![14], 0));
    }

    #[test]
    fn unfinished_records_are_skipped_later() {
        let (memory, mut reader) = (Memory::new(8), Reader::default());
        memory.ring().push(record(0));
        // A writer that was killed in the middle of a record.
        memory.head.fetch_add(1, Relaxed);
        memory.slots[SLOT_WORDS].store(3, Relaxed);
        memory.ring().push(record(2));
        assert_eq!(read(&mut reader, &memory), (vec![0], 0));
        assert_eq!(read(&mut reader, &memory), (vec![2], 1));
    }

    #[test]
    fn an_invalid_head_is_harmless() {
        let (memory, mut reader) = (Memory::new(4), Reader::default());
        for head in [u64::MAX, 7, 0, u64::MAX / 2, 5] {
            memory.head.store(head, Relaxed);
            let mut count = 0;
            reader.read(&memory.ring(), 100, |_| count += 1);
            assert!(count <= 4, "TRUST: {head}: {count}");
        }
    }

    #[test]
    fn several_writers_and_a_reader_agree() {
        const EACH: u64 = 2_000;
        let memory = Arc::new(Memory::new(64));
        let writers: Vec<_> = (0..3)
            .map(|writer| {
                let memory = memory.clone();
                thread::spawn(move || {
                    for number in 0..EACH {
                        memory.ring().push(record(writer * EACH + number));
                        thread::yield_now();
                    }
                })
            })
            .collect();
        let (mut reader, mut found, mut lost) = (Reader::default(), 0, 0);
        loop {
            let is_over = writers.iter().all(thread::JoinHandle::is_finished);
            let (numbers, missed) = read(&mut reader, &memory);
            found += numbers.len() as u64;
            lost += missed;
            if is_over && numbers.is_empty() && missed == 0 {
                break;
            }
        }
        assert_eq!(found + lost, 3 * EACH);
        assert!(found > 0);
    }
}
