//! Lines that pass bursts at a higher rate: they are shaped with a token bucket, like the lines of
//! virtual machines.
//!
//! Capacity that a line does not use is saved up, to a limit. While some is left, the line is
//! faster. Rates change when it is used up, so that is an event.

use crate::fair::{Fair, ResourceId};

/// Less than a packet counts as nothing.
const PACKET: f64 = 1500.0;

/// An empty bucket may hold this much, after rounding.
const NOTHING: f64 = 1.0;

#[derive(Debug)]
struct Bucket {
    resource: ResourceId,
    /// Bytes per second when nothing is saved up.
    rate: f64,
    saved: f64,
    /// The time of the last update, and the rate at which the line has been used since.
    updated: f64,
    load: f64,
    is_fast: bool,
}

impl Bucket {
    /// When the bucket will be empty.
    fn empty(&self) -> f64 {
        if self.is_fast && self.load > self.rate {
            self.updated + self.saved / (self.load - self.rate)
        } else {
            f64::INFINITY
        }
    }
}

/// The lines with buckets.
#[derive(Debug, Default)]
pub(crate) struct Buckets {
    all: Vec<Bucket>,
    /// The most bytes that a line saves up.
    most: f64,
    /// Bytes per second of a line while it has savings.
    fast: f64,
    next: f64,
}

impl Buckets {
    /// Each of these lines saves up to `most` bytes, which it passes at `fast` bytes per second.
    /// All buckets start full.
    pub(crate) fn new(
        lines: impl Iterator<Item = ResourceId>,
        most: f64,
        fast: f64,
        fair: &mut Fair,
    ) -> Self {
        if most < PACKET {
            return Self { next: f64::INFINITY, ..Self::default() };
        }
        let bucket = |resource| {
            let rate = fair.capacity(resource);
            fair.set_capacity(resource, fast.max(rate));
            Bucket { resource, rate, saved: most, updated: 0.0, load: 0.0, is_fast: true }
        };
        Self { all: lines.map(bucket).collect(), most, fast, next: f64::INFINITY }
    }

    /// When the next bucket is empty.
    pub(crate) fn next(&self) -> f64 {
        self.next
    }

    /// Changes the rate of a line.
    pub(crate) fn set_rate(&mut self, resource: ResourceId, rate: f64, fair: &mut Fair) {
        match self.all.iter_mut().find(|one| one.resource == resource) {
            Some(bucket) => {
                bucket.rate = rate;
                // Nothing passes through a dead line.
                let fast = if bucket.is_fast && rate > 0.0 { self.fast.max(rate) } else { rate };
                fair.set_capacity(resource, fast);
            }
            None => fair.set_capacity(resource, rate),
        }
    }

    /// Counts what was used and saved until now, and changes capacities accordingly.
    pub(crate) fn settle(&mut self, fair: &mut Fair, now: f64) {
        for one in &mut self.all {
            let saved = one.saved + (one.rate - one.load) * (now - one.updated);
            (one.saved, one.updated) = (saved.clamp(0.0, self.most), now);
            let least = if one.is_fast { NOTHING } else { PACKET };
            let is_fast = one.saved > least && one.rate > 0.0;
            if is_fast != one.is_fast {
                one.is_fast = is_fast;
                let rate = if is_fast { self.fast.max(one.rate) } else { one.rate };
                fair.set_capacity(one.resource, rate);
            }
        }
    }

    /// Stores the newly computed rates.
    pub(crate) fn note(&mut self, fair: &Fair) {
        self.next = f64::INFINITY;
        for one in &mut self.all {
            one.load = fair.load(one.resource);
            self.next = self.next.min(one.empty());
        }
    }
}
