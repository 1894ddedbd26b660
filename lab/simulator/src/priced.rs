//! Runs operations by the cost model alone, for too many hosts to simulate their schedules.
//!
//! An operation takes the time of its [`Cost`]. The line, uplink or processor that it uses most is
//! busy for the time that the cost says, and serves one operation after the other. So concurrent
//! operations hide their latencies, as in a pipeline.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
    sync::Arc,
};

use gradwire_collectives::{
    CostModel, Spec, Topology,
    cost::{Cost, cost},
};

use crate::job::{Content, Director, Operation, Order};

/// A time as an ordered key: it is never NaN and never negative.
fn key(time: f64) -> u64 {
    time.to_bits()
}

/// Runs the operations that a director orders. Returns when the last one has ended, or None if the
/// director waits for something that never happens.
///
/// # Panics
/// If an operation consists of sections, which have no price.
pub fn run(model: &CostModel, topology: &Topology, director: &mut impl Director) -> Option<f64> {
    let mut prices: HashMap<(Spec, u64), (f64, f64)> = HashMap::new();
    let mut price_of = |operation: &Operation| {
        let (spec, bytes) = (operation.spec, operation.bytes());
        let Content::Kind(kind, _) = operation.content else { panic!("sections have no price") };
        *prices.entry((spec, bytes)).or_insert_with(|| {
            let Cost { alone, busy } = cost(model, topology, kind, spec, bytes);
            (alone.max(busy), busy)
        })
    };
    let mut under_way: BTreeMap<u64, Arc<Operation>> = BTreeMap::new();
    // The ends of operations. An entry without an operation is a wake-up of the director.
    let mut events: BinaryHeap<Reverse<(u64, Option<u64>)>> = BinaryHeap::new();
    let (mut now, mut free) = (0.0f64, 0.0f64);
    loop {
        for Order { sequence, operation, at } in director.orders(now) {
            let (alone, occupied) = price_of(&operation);
            let begin = at.max(now).max(free);
            free = begin + occupied;
            events.push(Reverse((key(begin + alone), Some(sequence))));
            under_way.insert(sequence, operation);
        }
        if let Some(wake) = director.wake() {
            events.push(Reverse((key(wake.max(now)), None)));
        }
        if director.is_over() && under_way.is_empty() {
            return Some(now);
        }
        let Reverse((at, ended)) = events.pop()?;
        now = f64::from_bits(at);
        if let Some(sequence) = ended
            && let Some(operation) = under_way.remove(&sequence)
        {
            operation.hosts.iter().for_each(|&host| director.done(host, sequence, now));
        }
    }
}
