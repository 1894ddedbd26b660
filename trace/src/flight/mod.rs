//! The flight recording of a node: the last operations of its ranks and the last events of its
//! daemon, in memory of a fixed size that another process can read after the daemon has ended.
//!
//! - `write`: the daemon's side
//! - `layout`: what is where in it
//! - `read`: an image of the memory, which may be damaged (TRUST)

mod layout;
mod read;
mod write;

pub use layout::{KEPT, MAX_DIMS, MAX_FAILURE, Outcome, words};
pub use read::{Damaged, Image, MAX_RANKS, Operation, RankImage, Recorded, World};
pub use write::{Flight, Submitted};

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    use super::{layout::*, *};

    fn memory(ranks: usize) -> Vec<AtomicU64> {
        (0..words(ranks)).map(|_| AtomicU64::new(0)).collect()
    }

    fn bytes(memory: &[AtomicU64]) -> Vec<u8> {
        memory.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect()
    }

    fn submitted<'a>(ticket: u64, name: &'a str, dims: &'a [u64]) -> Submitted<'a> {
        Submitted {
            ticket,
            name,
            site: "train.py:3 in step",
            collective: 1,
            dtype: 2,
            reduce_op: 3,
            process_set: 4,
            root: 5,
            receiver: 6,
            bytes: 7,
            tensors: 8,
            dims,
        }
    }

    #[test]
    fn what_is_written_can_be_read() {
        let memory = memory(2);
        let flight = Flight::begin(&memory, 2, "job-1", "host-a", 3);
        assert!(Image::parse(&bytes(&memory)).unwrap().world.is_none());
        flight.formed(4, 7, 2, 9, 1);
        flight.clock(-5, 6);
        flight.add_set(3, &[0, 4, 5]);
        flight.add_set(4, &[1]);
        flight.attached(1, 77, 100);
        flight.submitted(1, 200, &submitted(42, "w", &[2, 3]));
        flight.announced(1, 42, 201);
        flight.ordered(1, 42, 202, Some(0));
        // The later pieces of the tensor change nothing.
        flight.ordered(1, 42, 999, Some(5));
        flight.begun(1, 42, 203);
        flight.ended(1, 42, 204, Outcome::Done);
        // Other tickets and ranks do not exist.
        flight.ended(1, 43, 999, Outcome::Failed);
        flight.ended(9, 42, 999, Outcome::Failed);
        flight.event(300, 2, "it began");
        flight.failed(301, r#"{"kind":"x"}"#);
        let image = Image::parse(&bytes(&memory)).unwrap();
        assert_eq!(
            (&*image.job, &*image.host, image.to_common),
            ("job-1", "host-a", Some((-5, 6)))
        );
        let world = image.world.unwrap();
        assert_eq!((image.node, image.first_rank, world.nodes, world.ranks), (1, 4, 2, 7));
        assert_eq!((image.epoch, image.failed_ns), (9, 301));
        assert_eq!(image.failure, r#"{"kind":"x"}"#);
        assert_eq!(image.sets, [(3, vec![0, 4, 5]), (4, vec![1])]);
        assert_eq!(image.events, [Recorded { at_ns: 300, level: 2, text: "it began".into() }]);
        let rank = &image.ranks[1];
        assert_eq!((rank.rank, rank.pid, rank.attached_ns, rank.count), (5, 77, 100, 1));
        let [operation] = &rank.operations[..] else { panic!("{rank:?}") };
        assert_eq!((&*operation.name, &*operation.site), ("w", "train.py:3 in step"));
        let Operation { submitted_ns, announced_ns, ordered_ns, begun_ns, ended_ns, .. } =
            *operation;
        let times = [submitted_ns, announced_ns, ordered_ns, begun_ns, ended_ns];
        assert_eq!(times, [200, 201, 202, 203, 204]);
        assert_eq!((operation.sequence, operation.outcome), (Some(0), Outcome::Done));
        assert_eq!((operation.dims.as_slice(), operation.tensors), (&[2, 3][..], 8));
        assert_eq!((operation.process_set, operation.root, operation.receiver), (4, 5, 6));
        assert_eq!(flight.last(1, 3).len(), 1);
        assert_eq!(flight.operation(1, 42).as_ref(), Some(operation));
    }

    #[test]
    fn the_last_operations_and_events_are_kept() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        let all = 3 * KEPT as u64 + 5;
        for ticket in 1..=all {
            flight.submitted(0, ticket, &submitted(ticket, "w", &[]));
            flight.event(ticket, 0, &ticket.to_string());
        }
        flight.ended(0, 1, 9, Outcome::Done);
        let image = Image::parse(&bytes(&memory)).unwrap();
        let rank = &image.ranks[0];
        let tickets: Vec<u64> = rank.operations.iter().map(|it| it.ticket).collect();
        assert_eq!(tickets, (all - KEPT as u64 + 1..=all).collect::<Vec<_>>(), "BOUND");
        assert!(rank.operations.iter().all(|it| it.outcome == Outcome::InFlight));
        assert_eq!(image.events.len(), KEPT);
        assert_eq!(image.events[KEPT - 1].text, all.to_string());
        assert_eq!(
            flight.last(0, 2).iter().map(|it| it.ticket).collect::<Vec<_>>(),
            [all, all - 1]
        );
    }

    #[test]
    fn long_texts_are_cut() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        let long = format!("{}end", "é".repeat(3000));
        flight.submitted(0, 1, &submitted(1, &long, &[1; 20]));
        flight.event(1, 0, &format!("start{long}\nand more"));
        flight.event(2, 0, "one line\nand more");
        flight.failed(1, &long);
        flight.add_set(1, &vec![7; 100_000]);
        let image = Image::parse(&bytes(&memory)).unwrap();
        let operation = &image.ranks[0].operations[0];
        let name = &operation.name;
        assert!(name.starts_with('é') && name.ends_with("éend"), "{name}");
        let event = &image.events[0].text;
        assert!(event.starts_with("starté") && event.ends_with('é'), "{event}");
        assert_eq!(image.events[1].text, "one line");
        assert_eq!((operation.dims.len(), image.sets.len()), (MAX_DIMS, 0), "BOUND");
        assert_eq!(image.failure, "", "a part of JSON is of no use");
    }

    #[test]
    fn a_damaged_image_is_refused_or_read_in_part() {
        let memory = memory(1);
        let flight = Flight::begin(&memory, 1, "j", "h", 0);
        flight.submitted(0, 1, &submitted(1, "w", &[1]));
        let good = bytes(&memory);
        assert_eq!(Image::parse(b"").unwrap_err(), Damaged::Magic);
        assert_eq!(Image::parse(&[7; 40_000]).unwrap_err(), Damaged::Magic);
        let expected = good.len() as u64;
        for bytes in [16, 100, 4096, 40_000, expected - 8, expected - 1] {
            let short = Image::parse(&good[..bytes as usize]).unwrap_err();
            assert_eq!(short, Damaged::Size { bytes, expected });
        }
        let shortest = Image::parse(&good[..9]).unwrap_err();
        assert_eq!(shortest, Damaged::Size { bytes: 9, expected: 8 * words(0) as u64 });
        // Any word may have any value (TRUST).
        let places = [1..34, 64..66, 512..515, EVENTS..EVENTS + 5, RANKS..RANKS + 4];
        let slot = RANKS + 2 * SLOT;
        let mut bad = good.clone();
        for word in places.into_iter().chain([slot..slot + 22, words(1) - 1..words(1)]).flatten() {
            for value in [u64::MAX, 1 << 32] {
                bad[word * 8..][..8].copy_from_slice(&value.to_le_bytes());
                if let Ok(image) = Image::parse(&bad) {
                    assert!(image.ranks[0].operations.len() <= KEPT, "{word}");
                }
            }
            bad[word * 8..][..8].copy_from_slice(&good[word * 8..][..8]);
        }
    }

    #[test]
    fn a_number_in_an_empty_slot_is_nothing() {
        let memory = memory(1);
        Flight::begin(&memory, 1, "j", "h", 0);
        memory[EVENTS].store(7, Relaxed);
        memory[RANKS + SLOT].store(7, Relaxed);
        let image = Image::parse(&bytes(&memory)).unwrap();
        assert!(image.events.is_empty() && image.ranks[0].operations.is_empty(), "TRUST");
    }

    #[test]
    fn contradicting_numbers_are_refused() {
        let memory = memory(2);
        let flight = Flight::begin(&memory, 2, "j", "h", 0);
        flight.add_set(3, &[0, 6]);
        flight.add_set(4, &[0, 7]);
        flight.add_set(5, &[1]);
        let parse = || Image::parse(&bytes(&memory));
        flight.formed(5, 7, 3, 0, 2);
        assert_eq!(parse().unwrap().sets, [(3, vec![0, 6]), (5, vec![1])], "rank 7 of 7");
        for (wrong, first_rank, ranks, nodes, node) in [
            ("first rank is 6, but at most 5", 6, 7, 3, 2),
            ("number of the node is 3, but at most 2", 5, 7, 3, 3),
            ("number of ranks is 2, but at most 1", 0, 1, 1, 0),
            ("number of nodes is 4097, but at most 4096", 5, 7, 4097, 2),
            ("number of ranks of the job is 4097, but at most 4096", 5, 4097, 3, 2),
            ("first rank is 4095, but at most 4094", 4095, 7, 0, 2),
            ("number of the node is 4096, but at most 4095", 5, 7, 0, 4096),
        ] {
            flight.formed(first_rank, ranks, nodes, 0, node);
            let text = parse().unwrap_err().to_string();
            assert_eq!(text, format!("it is damaged: its {wrong} is possible"), "BOUND");
        }
    }
}
