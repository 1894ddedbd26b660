//! The outcome of a run.

use crate::fair::ResourceId;

/// The most bins of a timeline (BOUND). When time exceeds the last bin, pairs are merged.
const BINS: usize = 256;

/// The width of the first bins, in seconds.
const FIRST: f64 = 10e-6;

/// The use of each resource, in total and over time.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Usage {
    totals: Vec<f64>,
    /// The bins of each resource, if recorded.
    bins: Vec<Vec<f64>>,
    width: f64,
}

impl Usage {
    /// For a number of resources, with or without timelines.
    pub(crate) fn new(resources: usize, over_time: bool) -> Self {
        let bins = if over_time { vec![Vec::new(); resources] } else { Vec::new() };
        Self { totals: vec![0.0; resources], bins, width: FIRST }
    }

    pub(crate) fn add(&mut self, resource: ResourceId, from: f64, to: f64, amount: f64) {
        self.totals[resource as usize] += amount;
        if self.bins.is_empty() || amount <= 0.0 {
            return;
        }
        while to >= self.width * BINS as f64 {
            self.width *= 2.0;
            for bins in &mut self.bins {
                *bins = bins.chunks(2).map(|pair| pair.iter().sum()).collect();
            }
        }
        let width = self.width;
        let bins = &mut self.bins[resource as usize];
        let (first, last) = ((from / width) as usize, (to / width) as usize);
        if bins.len() <= last {
            bins.resize(last + 1, 0.0);
        }
        if first == last {
            bins[first] += amount;
            return;
        }
        for (bin, sum) in bins.iter_mut().enumerate().take(last + 1).skip(first) {
            let begin = from.max(bin as f64 * width);
            let end = to.min((bin + 1) as f64 * width);
            *sum += amount * ((end - begin).max(0.0) / (to - from));
        }
    }

    /// Adds the use of one resource to another.
    pub(crate) fn copy(&mut self, from: ResourceId, to: ResourceId) {
        self.totals[to as usize] = self.totals[from as usize];
        if !self.bins.is_empty() {
            self.bins[to as usize] = self.bins[from as usize].clone();
        }
    }

    /// The total use of a resource.
    pub fn total(&self, resource: ResourceId) -> f64 {
        self.totals[resource as usize]
    }

    /// The use of a resource in each bin, and the seconds of a bin. None if not recorded.
    pub fn over_time(&self, resource: ResourceId) -> Option<(&[f64], f64)> {
        self.bins.get(resource as usize).map(|bins| (&bins[..], self.width))
    }
}

/// A finished operation.
#[derive(Debug, Clone, PartialEq)]
pub struct Done {
    /// Its sequence number.
    pub sequence: u64,
    /// When it was ordered.
    pub ordered: f64,
    /// When each node published it: host and time.
    pub nodes: Vec<(u32, f64)>,
}

impl Done {
    /// When the last node published it.
    pub fn end(&self) -> f64 {
        self.nodes.iter().map(|&(_, time)| time).fold(self.ordered, f64::max)
    }
}

/// A part of the critical path.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hop {
    /// The host.
    pub host: u32,
    /// The operation.
    pub sequence: u64,
    /// The step of its schedule there.
    pub step: u32,
    /// The host that sent to it, if the step receives.
    pub from: Option<u32>,
    /// The bytes of the step's message.
    pub bytes: u64,
    /// When the step ended.
    pub end: f64,
}

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Outcome {
    /// The finished operations, by sequence number.
    pub done: Vec<Done>,
    /// Seconds until all had finished.
    pub seconds: f64,
    /// If some did not finish: since when nothing has moved, and which hosts wait for which.
    pub standstill: Option<String>,
    /// Bytes sent by each host.
    pub sent: Vec<f64>,
    /// Bytes received by each host.
    pub received: Vec<f64>,
    /// For each host, the most hosts that sent to it at the same time.
    pub senders: Vec<u32>,
    /// The use of each resource.
    pub usage: Usage,
    /// The critical path of the last operation, from the start to the end, if recorded.
    pub critical_path: Vec<Hop>,
    /// The number of simulated hosts; the others did the same as one of these.
    pub simulated_hosts: u32,
    /// The number of chunks moved.
    pub chunks: u64,
    /// How often TCP waited for its timer.
    pub timeouts: u64,
}

impl Outcome {
    /// The most hosts that sent to one host at the same time.
    pub fn most_senders(&self) -> u32 {
        self.senders.iter().copied().max().unwrap_or(0)
    }

    /// Bytes sent by the busiest host.
    pub fn most_sent(&self) -> f64 {
        self.sent.iter().copied().fold(0.0, f64::max)
    }
}
