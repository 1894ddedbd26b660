//! Merges the recordings of all hosts of a job. All times become those of the coordinator's clock,
//! which counts nanoseconds since 1970.

use std::collections::{BTreeMap, BTreeSet};

use gradwire_proto::{Collective, Failure, Rank};
use gradwire_trace::flight::{Image, MAX_RANKS, Operation, Outcome, RankImage, Recorded};

/// What is read of a file is within the limits of a job (BOUND).
const _: () = assert!(MAX_RANKS == Rank::MAX);

/// A job, as far as it is recorded.
#[derive(Debug)]
pub struct Job {
    /// Its id.
    pub job: String,
    /// The epoch of an elastic job.
    pub epoch: u64,
    /// The recorded hosts, by node.
    pub hosts: BTreeMap<u32, Host>,
    /// The recorded ranks.
    pub ranks: BTreeMap<u32, RankRecord>,
    /// The process sets with their ranks. Set 0 has all ranks. A set that is not recorded has the
    /// ranks that have used it.
    pub sets: BTreeMap<u32, BTreeSet<u32>>,
    /// How many nodes and ranks it had, recorded or not.
    pub nodes: u32,
    /// See `nodes`.
    pub size: u32,
    /// Why it failed, and when that was recorded.
    pub failure: Option<(Failure, u64)>,
    /// The last recorded time.
    pub end_ns: u64,
    /// The largest error between the times of two hosts; `None` if a clock is not known.
    pub error_ns: Option<u64>,
    /// Hosts that were recorded in an earlier epoch only.
    pub left_out: Vec<String>,
}

/// The recording of a host.
#[derive(Debug)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Its first rank, and the number of its ranks.
    pub first_rank: u32,
    /// See `first_rank`.
    pub slots: u32,
    /// The process id of its daemon.
    pub pid: u32,
    /// When its daemon saved the recording; `None` if another process did, after the daemon had
    /// ended.
    pub saved_ns: Option<u64>,
    /// The last events, the oldest first.
    pub events: Vec<Recorded>,
}

/// The recording of a rank.
#[derive(Debug)]
pub struct RankRecord {
    /// The node.
    pub node: u32,
    /// Its process id; `None` if it did not attach.
    pub pid: Option<u32>,
    /// When it left or its connection ended.
    pub gone_ns: Option<u64>,
    /// How many operations it has submitted.
    pub count: u64,
    /// The last of them, the oldest first.
    pub operations: Vec<Operation>,
}

/// What was called, such as `allreduce`.
pub fn call(operation: &Operation) -> String {
    let known = Collective::from_wire(operation.collective.into());
    known.map_or_else(|| format!("collective {}", operation.collective), |it| it.to_string())
}

/// The clock of a host.
#[derive(Debug, Clone, Copy)]
struct Clock(i64);

impl Clock {
    /// The time on the common clock; 0 stays 0, for what has not happened.
    fn common(self, at_ns: u64) -> u64 {
        if at_ns == 0 { 0 } else { at_ns.saturating_add_signed(self.0).max(1) }
    }

    fn operation(self, it: Operation) -> Operation {
        Operation {
            submitted_ns: self.common(it.submitted_ns),
            announced_ns: self.common(it.announced_ns),
            ordered_ns: self.common(it.ordered_ns),
            begun_ns: self.common(it.begun_ns),
            ended_ns: self.common(it.ended_ns),
            ..it
        }
    }
}

impl Job {
    /// Merges recordings of one job; `None` without any. In an elastic job only the last epoch
    /// counts.
    pub fn merge(images: Vec<Image>) -> Option<Self> {
        let epoch = images.iter().map(|image| image.epoch).max()?;
        let (images, earlier): (Vec<_>, Vec<_>) =
            images.into_iter().partition(|image| image.epoch == epoch);
        let mut job = Self {
            job: images.first()?.job.clone(),
            epoch,
            hosts: BTreeMap::new(),
            ranks: BTreeMap::new(),
            sets: BTreeMap::new(),
            nodes: images.len() as u32,
            size: 0,
            failure: None,
            end_ns: 0,
            error_ns: Some(0),
            left_out: earlier.into_iter().map(|image| image.host).collect(),
        };
        let mut errors = Vec::new();
        for image in images {
            errors.push(image.to_common.map(|(_, error_ns)| error_ns));
            job.add(image);
        }
        errors.sort_unstable();
        let largest = errors.iter().rev().take(2).copied();
        // An unknown one sorts first.
        let is_known = errors.first().is_some_and(Option::is_some) || errors.len() == 1;
        job.error_ns = is_known.then(|| largest.flatten().fold(0, u64::saturating_add));
        let all = (0..job.size).collect();
        job.sets.insert(0, all);
        job.add_used_sets();
        job.settle();
        Some(job)
    }

    fn add(&mut self, image: Image) {
        let (unix_ns, unix_at_ns) = image.unix;
        // A host whose clock is not known may be wrong by the error of its system's time.
        let own = || i64::try_from(i128::from(unix_ns) - i128::from(unix_at_ns));
        let clock = Clock(image.to_common.map_or_else(|| own().unwrap_or(0), |(add, _)| add));
        let node = image.node;
        if let Some(world) = image.world {
            self.nodes = self.nodes.max(world.nodes);
            self.size = self.size.max(world.ranks);
        }
        self.size = self.size.max(image.first_rank.saturating_add(image.ranks.len() as u32));
        for (set, ranks) in image.sets {
            self.sets.entry(set).or_default().extend(ranks);
        }
        let failed_ns = clock.common(image.failed_ns);
        if let Ok(failure) = serde_json::from_str::<Failure>(&image.failure)
            && self.failure.as_ref().is_none_or(|(_, at_ns)| failed_ns < *at_ns)
        {
            self.failure = Some((failure, failed_ns));
        }
        let saved_ns = Some(clock.common(image.saved_ns)).filter(|at_ns| *at_ns > 0);
        let shifted = |it: Recorded| Recorded { at_ns: clock.common(it.at_ns), ..it };
        // Nothing happens after the file was written (TRUST).
        let is_earlier = |it: &Recorded| saved_ns.is_none_or(|saved_ns| it.at_ns <= saved_ns);
        let events: Vec<Recorded> =
            image.events.into_iter().map(shifted).filter(is_earlier).collect();
        let last = events.last().map(|event| event.at_ns);
        self.end_ns = self.end_ns.max(saved_ns.unwrap_or(0)).max(last.unwrap_or(0));
        let (first_rank, slots) = (image.first_rank, image.ranks.len() as u32);
        for rank in image.ranks {
            let (number, record) = of_rank(node, clock, rank);
            let newest = record.operations.iter().map(|it| it.submitted_ns.max(it.ended_ns)).max();
            self.end_ns = self.end_ns.max(newest.unwrap_or(0));
            self.ranks.insert(number, record);
        }
        let host = Host { name: image.host, first_rank, slots, pid: image.pid, saved_ns, events };
        self.hosts.insert(node, host);
    }

    fn add_used_sets(&mut self) {
        let mut used: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
        for (rank, record) in &self.ranks {
            for it in record.operations.iter().filter(|it| !self.sets.contains_key(&it.process_set))
            {
                used.entry(it.process_set).or_default().insert(*rank);
            }
        }
        self.sets.extend(used);
    }

    /// Gives an operation in flight its sequence number also on hosts that its order has not
    /// reached. A name is in flight once at a time.
    fn settle(&mut self) {
        let all = self.ranks.values().flat_map(|rank| &rank.operations);
        let ordered = all
            .filter(|it| is_in_flight(it))
            .filter_map(|it| Some(((it.process_set, it.name.clone()), it.sequence?)));
        let ordered: BTreeMap<(u32, String), u64> = ordered.collect();
        let all = self.ranks.values_mut().flat_map(|rank| &mut rank.operations);
        for it in all.filter(|it| is_in_flight(it) && it.ordered_ns == 0) {
            it.sequence = ordered.get(&(it.process_set, it.name.clone())).copied();
        }
    }

    /// The name of the host of a rank, if it is recorded.
    pub fn host_of(&self, rank: u32) -> Option<&str> {
        let record = self.ranks.get(&rank)?;
        self.hosts.get(&record.node).map(|host| host.name.as_str())
    }

    /// The nodes without a recording.
    pub fn unrecorded_nodes(&self) -> Vec<u32> {
        (0..self.nodes).filter(|node| !self.hosts.contains_key(node)).collect()
    }
}

fn of_rank(node: u32, clock: Clock, image: RankImage) -> (u32, RankRecord) {
    let record = RankRecord {
        node,
        pid: Some(image.pid).filter(|pid| *pid > 0),
        gone_ns: Some(clock.common(image.gone_ns)).filter(|at_ns| *at_ns > 0),
        count: image.count,
        operations: image.operations.into_iter().map(|it| clock.operation(it)).collect(),
    };
    (image.rank, record)
}

/// Whether an operation had not ended.
pub fn is_in_flight(operation: &Operation) -> bool {
    operation.outcome == Outcome::InFlight && operation.ended_ns == 0
}

/// `rank 3`, `ranks 0-2,5`.
pub(super) fn named(ranks: impl IntoIterator<Item = u32>) -> String {
    let ranks: Vec<Rank> = ranks.into_iter().map(Rank).collect();
    let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
    if ranks.is_empty() { "no rank".to_owned() } else { format!("{noun} {}", Rank::list(ranks)) }
}
