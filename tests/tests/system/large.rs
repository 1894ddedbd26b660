//! More elements than 31 bits can count, in place. The test needs much memory and some seconds; it
//! runs in `make soak`.

use std::fs;

use gradwire_proto::{DType, ReduceOp};
use gradwire_tests::cluster::{Plan, run_job};
use gradwire_worker::{AllreduceOptions, BroadcastOptions, Buffer};

const ELEMENTS: usize = (1 << 31) + 4099;
/// The tensors of two ranks, and memory for everything else.
const NEEDED: u64 = 3 * ELEMENTS as u64;

/// Bytes of available memory on this machine.
fn available() -> u64 {
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or_default() * 1024
}

/// Checks that every byte is `value`, except those at `marks`.
fn check(buffer: &Buffer, value: u8, marks: &[(usize, u8)]) {
    let bytes = buffer.bytes();
    for (at, value) in marks {
        assert_eq!(bytes[*at], *value, "at {at}");
    }
    let like = vec![value; 1 << 20];
    for (number, chunk) in bytes.chunks(like.len()).enumerate() {
        let marked = marks.iter().any(|(at, _)| at >> 20 == number);
        assert!(marked || *chunk == like[..chunk.len()], "MiB {number}");
    }
}

fn large(slots: &[u32]) {
    if available() < NEEDED {
        println!("skipped: it needs {NEEDED} bytes of memory, {} are available", available());
        return;
    }
    run_job(&Plan::nodes(slots).set("worker.arena_segment_bytes=64MiB"), |session| {
        let rank = session.rank() as u8;
        let mut buffer = session.buffer(DType::U8, &[ELEMENTS]).unwrap();
        buffer.bytes_mut().fill(3 + rank);
        let last = buffer.bytes().len() - 1;
        let marks = [0, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, last];
        for (at, value) in marks.into_iter().zip(10..) {
            buffer.bytes_mut()[at] = value * (1 + rank);
        }
        session.allreduce(&mut buffer, AllreduceOptions::named("w").op(ReduceOp::Sum)).unwrap();
        let sums: Vec<(usize, u8)> = marks.into_iter().zip((10..).map(|v: u8| 3 * v)).collect();
        check(&buffer, 7, &sums);
        buffer.bytes_mut()[last] = 77 + rank;
        session.broadcast(&mut buffer, BroadcastOptions::from_rank(1)).unwrap();
        let moved = [&sums[..4], &[(last, 78)]].concat();
        check(&buffer, 7, &moved);
    });
}

#[test]
#[ignore = "takes gigabytes and seconds; run by make soak"]
fn more_than_two_to_the_31_elements_on_one_node() {
    large(&[2]);
}

#[test]
#[ignore = "takes gigabytes and seconds; run by make soak"]
fn more_than_two_to_the_31_elements_on_two_nodes() {
    large(&[1, 1]);
}
