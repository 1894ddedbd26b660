//! A job of many ranks with small tensors needs little memory.

use std::fs;

use gradwire_tests::cluster::{Cluster, Plan};
use gradwire_worker::AllreduceOptions;

const MIB: u64 = 1 << 20;
const RANKS: u32 = 32;

/// Bytes of a job's shared memory, which worker and daemon both map in this process.
fn shared_memory(job: &str) -> u64 {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let name = format!("/memfd:gradwire-{job}-");
    let mut of_the_job = false;
    let mut kib = 0;
    for line in smaps.lines() {
        if let Some(pss) = line.strip_prefix("Pss:") {
            // The memory of a page is divided between all its mappings.
            let pss: u64 = pss.trim().strip_suffix(" kB").unwrap().parse().unwrap();
            kib += if of_the_job { pss } else { 0 };
        } else if line.split_whitespace().next().is_some_and(|word| word.contains('-')) {
            of_the_job = line.contains(&name);
        }
    }
    kib * 1024
}

#[test]
fn ranks_with_small_tensors_need_little_memory() {
    // The default size, unlike in other tests.
    let cluster = Cluster::start(&Plan::nodes(&[RANKS]).set("worker.arena_segment_bytes=64MiB"));
    let cluster = cluster.unwrap();
    let job = cluster.job().to_string();
    let taken = cluster.ranks(move |session| {
        for layer in 0..20 {
            let options = AllreduceOptions::named(format!("layer{layer}"));
            session.allreduce_slice(&mut [1f32; 1000], options).unwrap();
        }
        session.barrier().unwrap();
        let taken = (session.rank() == 0).then(|| shared_memory(&job));
        session.barrier().unwrap();
        let arena = session.stats().arena;
        assert_eq!((arena.segments, arena.reserved as u64), (1, 4 * MIB));
        taken
    });
    let taken = taken.unwrap().into_iter().flatten().next().unwrap();
    println!("{RANKS} ranks take {} MiB", taken / MIB);
    let ranks = u64::from(RANKS);
    assert!((ranks * 4 * MIB..ranks * 8 * MIB).contains(&taken), "{taken} bytes");
    cluster.finish().unwrap();
}
