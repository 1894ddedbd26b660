//! The ring under a model checker: for any order of memory accesses, a reader gets whole records
//! only, in order, and counts all others.

use gradwire_trace::ring::{Reader, Ring, SLOT_WORDS, WORDS, Word};
use loom::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

struct Modelled(AtomicU64);

impl Word for Modelled {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        self.0.store(value, order);
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
}

/// Writes `records` to a ring of one slot, beside a reader that looks twice.
fn check(records: u64) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let word = || Modelled(AtomicU64::new(0));
        let memory = Arc::new((word(), (0..SLOT_WORDS).map(|_| word()).collect::<Vec<_>>()));
        let writer = {
            let memory = memory.clone();
            thread::spawn(move || {
                let ring = Ring::new(&memory.0, &memory.1);
                (1..=records).for_each(|number| ring.push([number; WORDS]));
            })
        };
        let ring = Ring::new(&memory.0, &memory.1);
        let (mut reader, mut found, mut lost) = (Reader::default(), Vec::new(), 0);
        let mut look = || {
            lost += reader.read(&ring, 8, |record| {
                assert!(record.iter().all(|word| *word == record[0]), "torn: {record:?}");
                found.push(record[0]);
            });
        };
        look();
        writer.join().unwrap();
        // What was unfinished at the first look is whole now.
        look();
        assert!(found.is_sorted_by(|a, b| a < b), "{found:?}");
        assert_eq!(found.last(), Some(&records));
        assert_eq!(found.len() as u64 + lost, records);
    });
}

#[test]
fn a_reader_gets_whole_records_only() {
    check(2);
}
