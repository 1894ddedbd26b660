//! Fits the costs of the model to measured times. Pure arithmetic.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gradwire_collectives::{CostModel, LinkCost, Topology, algorithms::probe::Pattern};
use gradwire_proto::NodeId;

use crate::model::network::{LinkMeasured, Network};

/// The bytes of the first transfer between two nodes.
pub(super) const SMALL: u64 = 64 << 10;

/// The smallest ratio from which a lane counts as slower than the line; less is noise.
const SLOWER: f64 = 1.05;

/// The most round trips that a transfer takes in addition to its bytes: its first message, and the
/// growth of TCP's window from about ten packets.
const START_TRIPS: f64 = 4.0;

/// One measurement.
#[derive(Debug, Clone)]
pub(super) struct Sample {
    pub(super) pattern: Pattern,
    pub(super) nodes: Vec<NodeId>,
    /// How many lanes ran it at the same time.
    pub(super) lanes: u32,
    /// Whether as many nodes as possible crossed between racks at the same time.
    pub(super) is_shared: bool,
    /// The seconds that it took.
    pub(super) time: f64,
    /// The seconds from its order until all of its nodes had reported it.
    pub(super) whole: f64,
    /// The seconds from order to report, without the time on the slowest node; `None` if not all
    /// nodes have reported.
    pub(super) besides: Option<f64>,
    /// How many packets of its nodes were retransmitted, if they have reported that.
    pub(super) lost: Option<u64>,
}

impl Sample {
    /// Its two nodes, the smaller first, unless they shared an uplink with others.
    fn pair(&self) -> Option<(NodeId, NodeId)> {
        match self.nodes[..] {
            [a, b] if !self.is_shared => Some((a.min(b), a.max(b))),
            _ => None,
        }
    }
}

/// The times of a link; `None` if not measured.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct LinkTimes {
    /// Seconds of a small message.
    pub(super) latency: Option<f64>,
    /// Seconds per byte of one lane.
    pub(super) lane_per_byte: Option<f64>,
    /// Seconds per byte of all lanes.
    pub(super) per_byte: Option<f64>,
}

fn least(times: impl Iterator<Item = f64>) -> Option<f64> {
    times.reduce(f64::min)
}

/// The median, and the smaller one of two middle values.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied()
}

/// The time for the bytes of a transfer, without `besides`, but at least half of its time.
fn at_best(time: f64, besides: f64) -> f64 {
    (time - besides).max(time / 2.0)
}

/// The times of the link between two nodes.
pub(super) fn link(samples: &[Sample], a: NodeId, b: NodeId) -> LinkTimes {
    let of = |sample: &&Sample| sample.pair() == Some((a.min(b), a.max(b)));
    times(&samples.iter().filter(of).collect::<Vec<_>>(), false)
}

/// A line lets bursts through if small transfers are faster than large ones by this ratio.
const BURSTS: f64 = 1.2;

/// If at least one link in this many shows bursts, all lines let them through.
const SHOW: usize = 4;

/// Whether the line between two nodes lets bursts through, as lines with a token bucket do. Tokens
/// also accumulate while the nodes wait for their orders, so the whole time of a transfer counts.
fn saves_up(here: &[&Sample], trip: f64) -> bool {
    let exchanges = || {
        here.iter().filter_map(|sample| match sample.pattern {
            Pattern::Exchange(bytes) if sample.lanes == 1 => Some((bytes, sample)),
            _ => None,
        })
    };
    let Some(small) = exchanges().map(|(bytes, _)| bytes).min() else { return false };
    let few = exchanges().filter(|(bytes, _)| *bytes == small);
    let few = least(few.map(|(bytes, sample)| at_best(sample.time, trip / 2.0) / bytes as f64));
    let many = exchanges().filter(|(bytes, _)| *bytes >= 2 * small);
    let many = median(many.map(|(bytes, sample)| sample.time / bytes as f64));
    few.zip(many).is_some_and(|(few, many)| BURSTS * few < many)
}

/// Whether all lines let bursts through, because enough links show it. On the other links, small
/// transfers were late.
fn all_save_up(pairs: &BTreeMap<(NodeId, NodeId), Vec<&Sample>>) -> bool {
    let some = pairs.values().filter(|here| saves_up(here, 0.0)).count();
    some > 0 && some * SHOW >= pairs.len()
}

/// The times of a link from the samples of its two nodes. `all_save_up` says whether all lines let
/// bursts through.
fn times(here: &[&Sample], all_save_up: bool) -> LinkTimes {
    // A busy processor makes round trips too long, and nothing makes them too short.
    let latency = least(here.iter().filter_map(|sample| match sample.pattern {
        Pattern::RoundTrips(count) => Some(sample.time / f64::from(2 * count)),
        _ => None,
    }));
    let trip = 2.0 * latency.unwrap_or(0.0);
    let saves_up = all_save_up || saves_up(here, trip);
    let small = here.iter().filter_map(|sample| match sample.pattern {
        Pattern::Exchange(bytes) if sample.lanes == 1 => Some(bytes),
        _ => None,
    });
    let small = small.min().unwrap_or(0);
    let exchanges = |several: bool| {
        here.iter().filter_map(move |sample| match sample.pattern {
            Pattern::Exchange(bytes) if (sample.lanes > 1) == several => {
                let is_whole = saves_up && (several || bytes >= 2 * small);
                let time = if is_whole { sample.whole } else { sample.time };
                Some((bytes, time, sample.lanes))
            }
            _ => None,
        })
    };
    let fastest = |several: bool, bytes: u64| {
        let times = exchanges(several).filter(|(moved, ..)| *moved == bytes);
        least(times.map(|(_, time, _)| time))
    };
    let small = exchanges(false).map(|(bytes, ..)| bytes).min();
    let small = small.and_then(|bytes| Some((bytes, fastest(false, bytes)?)));
    // A line with a token bucket lets a burst through at any rate. Right after a large transfer,
    // the bucket is empty. So small transfers and the first large one count only without others.
    let is_large =
        |&(bytes, ..): &(u64, f64, u32)| small.is_none_or(|(small, _)| bytes >= 2 * small);
    let drained = match exchanges(false).filter(is_large).count() {
        0 => exchanges(false).collect(),
        1 => exchanges(false).filter(is_large).collect(),
        _ => exchanges(false).filter(is_large).skip(1).collect::<Vec<_>>(),
    };
    // Two estimates, both too slow: one includes the fixed time, and the other one assumes that a
    // small transfer has the rate of the line.
    let lane_per_byte = least(drained.into_iter().flat_map(|(bytes, time, _)| {
        let direct = at_best(time, trip / 2.0) / bytes as f64;
        let slope = small.filter(|(small, at_least)| bytes >= 2 * small && time > *at_least);
        let slope = slope.map(|(small, at_least)| (time - at_least) / (bytes - small) as f64);
        // The small transfer may have been slow for another reason.
        let slope = slope.map(|slope| slope.max(at_best(time, START_TRIPS * trip) / bytes as f64));
        [Some(direct), slope].into_iter().flatten()
    }));
    let fixed = small.zip(lane_per_byte);
    let fixed =
        fixed.map_or(0.0, |((bytes, time), per_byte)| (time - bytes as f64 * per_byte).max(0.0));
    let fixed = fixed.min(START_TRIPS * trip);
    let all = exchanges(true).map(|(bytes, _, lanes)| (bytes, lanes)).max();
    let all = all.and_then(|(bytes, lanes)| {
        let time = fastest(true, bytes)?;
        Some(at_best(time, fixed) / (bytes * u64::from(lanes)) as f64)
    });
    // All lanes together are at least as fast as one.
    let per_byte = all.into_iter().chain(lane_per_byte).reduce(f64::min);
    LinkTimes { latency, lane_per_byte, per_byte }
}

/// The seconds per byte for which a transfer between two nodes is sized: those of the link, or more
/// if a node has no link as fast as that. 0 if nothing is known. Small transfers count only until
/// there was a large one, because a line may let them through in a burst.
pub(super) fn expected_per_byte(samples: &[Sample], a: NodeId, b: NodeId) -> f64 {
    let is_large = |sample: &&Sample| match sample.pattern {
        Pattern::Exchange(bytes) => bytes >= 2 * SMALL,
        _ => false,
    };
    let fastest = |node: NodeId| {
        let pairs =
            || samples.iter().filter(|one| one.nodes.len() == 2 && one.nodes.contains(&node));
        let others = |large: bool| -> BTreeSet<NodeId> {
            let counting = pairs().filter(|sample| !large || is_large(sample));
            counting
                .flat_map(|sample| sample.nodes.iter().copied().filter(|other| *other != node))
                .collect()
        };
        let large = others(true);
        let counting = if large.is_empty() { others(false) } else { large };
        least(counting.into_iter().filter_map(|other| link(samples, node, other).lane_per_byte))
    };
    let known = [fastest(a), fastest(b), link(samples, a, b).lane_per_byte];
    known.into_iter().flatten().fold(0.0, f64::max)
}

/// The seconds of each message in a series without waits.
fn per_message(samples: &[Sample]) -> Option<f64> {
    let series = samples.iter().filter_map(|sample| match sample.pattern {
        Pattern::Messages(count) => Some((count, sample.time)),
        _ => None,
    });
    let (few, many) =
        (series.clone().min_by_key(|s| s.0)?.0, series.clone().max_by_key(|s| s.0)?.0);
    let of = |count| least(series.clone().filter(|s| s.0 == count).map(|(_, time)| time));
    let more = of(many)? - of(few)?;
    (many > few && more > 0.0).then(|| more / f64::from(many - few))
}

/// A transfer from several nodes to one at the same time.
#[derive(Debug, Clone, Copy)]
struct Gathered {
    senders: f64,
    /// The bytes of all senders.
    bytes: f64,
    time: f64,
    /// Whether packets were lost.
    is_lossy: bool,
}

fn gathered(samples: &[Sample]) -> Vec<Gathered> {
    let gathers = samples.iter().filter_map(|sample| match sample.pattern {
        Pattern::Gather(bytes) => {
            let senders = sample.nodes.len() as f64 - 1.0;
            let is_lossy = sample.lost.is_some_and(|lost| lost > 0);
            Some(Gathered { senders, bytes: bytes as f64 * senders, time: sample.time, is_lossy })
        }
        _ => None,
    });
    gathers.collect()
}

/// The fraction of the rate that is lost when several nodes send to one, without lost packets. It
/// applies to all bytes but the share of one sender.
fn burst_loss(gathered: &[Gathered]) -> Option<f64> {
    let alone = || gathered.iter().filter(|one| one.senders == 1.0);
    let usual = alone().map(|one| one.bytes).reduce(f64::min)?;
    let one = median(alone().map(|one| one.time / one.bytes))?;
    // Small transfers are slower for other reasons.
    let several = gathered.iter().filter(|all| {
        all.senders > 1.0 && !all.is_lossy && (0.5..=2.0).contains(&(all.bytes / usual))
    });
    median(several.map(|all| {
        let lost = all.time / all.bytes / one - 1.0;
        (lost / (1.0 - 1.0 / all.senders)).clamp(0.0, 1.0)
    }))
}

/// A transfer with lost packets overflowed a queue if it took longer by at least this fraction.
const OVERFLOWED: f64 = 0.25;

/// How many bytes several nodes could send to one without loss, and the extra seconds of larger
/// transfers. `None` if nothing was lost.
fn overflow(gathered: &[Gathered], per_byte: f64, burst_loss: f64) -> Option<(u64, f64)> {
    // While all shares arrive, one share leaves the queue.
    let waiting = |all: &Gathered| all.bytes * (1.0 - 1.0 / all.senders);
    let longer = |all: &Gathered| {
        let usual = all.bytes * per_byte * (1.0 + burst_loss * (1.0 - 1.0 / all.senders));
        (all.time - usual, usual)
    };
    let overflows = |all: &&Gathered| {
        let (longer, usual) = longer(all);
        all.is_lossy && longer > OVERFLOWED * usual
    };
    let several = || gathered.iter().filter(|all| all.senders > 1.0);
    let least = least(several().filter(overflows).map(waiting))?;
    let fits = several().map(waiting).filter(|bytes| *bytes < least);
    let queue = fits.fold(least / 2.0, f64::max);
    Some((queue as u64, median(several().filter(overflows).map(|all| longer(all).0))?))
}

/// The samples of each pair of nodes.
fn by_pair(samples: &[Sample]) -> BTreeMap<(NodeId, NodeId), Vec<&Sample>> {
    let mut pairs: BTreeMap<(NodeId, NodeId), Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        sample.pair().into_iter().for_each(|pair| pairs.entry(pair).or_default().push(sample));
    }
    pairs
}

/// The measurements of each link.
pub(super) fn measured(samples: &[Sample]) -> Vec<LinkMeasured> {
    let pairs = by_pair(samples);
    let all_save_up = all_save_up(&pairs);
    let links = pairs.into_iter().filter_map(|((from, to), here)| {
        let LinkTimes { latency, lane_per_byte, per_byte } = times(&here, all_save_up);
        let (lane_rate, rate) = (1.0 / lane_per_byte?, 1.0 / per_byte?);
        Some(LinkMeasured { from, to, latency: latency?, lane_rate, rate })
    });
    links.collect()
}

/// The costs that follow from samples, and the measurements of each link.
pub(super) fn fit(
    topology: &Topology,
    samples: &[Sample],
    took: Duration,
    is_complete: bool,
) -> Network {
    let links = measured(samples);
    let usual = CostModel::default();
    // The processor time of a message on both ends is less than its latency.
    let shortest = least(links.iter().map(|link| link.latency)).unwrap_or(f64::MAX);
    let per_message = per_message(samples).unwrap_or(usual.per_message).min(shortest / 3.0);
    let class = |across: bool| {
        let of = move |link: &&LinkMeasured| topology.same_rack(link.from.0, link.to.0) != across;
        let links: Vec<&LinkMeasured> = links.iter().filter(of).collect();
        // The model adds the processor time on both ends to the latency of a hop.
        let alone = |link: &&LinkMeasured| (link.latency - 2.0 * per_message).max(0.0);
        Some(LinkCost {
            latency: median(links.iter().map(alone))?,
            per_byte: median(links.iter().map(|link| 1.0 / link.rate))?,
        })
    };
    let (inside, across) = (class(false), class(true));
    // If each node has its own rack, its line is the uplink of the rack.
    let in_rack = inside.or(across).unwrap_or(usual.in_rack);
    let mut cross_rack = across.or(inside).unwrap_or(usual.cross_rack);
    let saves_up = all_save_up(&by_pair(samples));
    let crosses = |link: &&LinkMeasured| !topology.same_rack(link.from.0, link.to.0);
    let far = links.iter().filter(crosses).map(|link| link.latency);
    let far = median(far).unwrap_or(0.0);
    let shared = samples.iter().filter(|sample| sample.is_shared).filter_map(|sample| {
        let Pattern::Exchange(bytes) = sample.pattern else { return None };
        // With racks of different sizes, all nodes of the smaller one cross. The model also uses
        // the smaller one, which has the fewest shares.
        let time = if saves_up { sample.whole } else { sample.time };
        // If only some nodes were measured before, these transfers are short.
        Some(at_best(time, far) / (bytes * u64::from(sample.lanes)) as f64)
    });
    if let Some(per_byte) = median(shared) {
        cross_rack.per_byte = per_byte;
    }
    // Between racks the shared line hides the limit of a lane.
    let is_near =
        |link: &&LinkMeasured| inside.is_none() || topology.same_rack(link.from.0, link.to.0);
    let near = links.iter().filter(is_near);
    let lane = median(near.map(|link| 1.0 / link.lane_rate)).unwrap_or(0.0);
    let line = in_rack.per_byte;
    let in_memory = |of: fn(Pattern) -> Option<u64>| {
        let nodes: BTreeSet<&NodeId> = samples.iter().flat_map(|sample| &sample.nodes).collect();
        let fastest = |node: &NodeId| {
            let own = samples.iter().filter(|sample| sample.nodes[..] == [*node]);
            least(own.filter_map(|sample| Some(sample.time / of(sample.pattern)? as f64)))
        };
        median(nodes.into_iter().filter_map(fastest))
    };
    let reduced = |pattern| if let Pattern::Reduce(bytes) = pattern { Some(bytes) } else { None };
    let copied = |pattern| if let Pattern::Copy(bytes) = pattern { Some(bytes) } else { None };
    let gathered = gathered(samples);
    let burst_loss = burst_loss(&gathered).unwrap_or(usual.burst_loss);
    let (queue, overflow) = overflow(&gathered, line.max(lane), burst_loss).unwrap_or_default();
    let cost = CostModel {
        in_rack,
        cross_rack,
        reduce_per_byte: in_memory(reduced).unwrap_or(usual.reduce_per_byte),
        per_message,
        lane_per_byte: if lane > SLOWER * line { lane } else { 0.0 },
        publish_per_byte: in_memory(copied).unwrap_or(usual.publish_per_byte),
        operation: median(samples.iter().filter_map(|sample| sample.besides)).unwrap_or(0.0),
        burst_loss,
        queue,
        overflow,
        ..usual
    };
    Network { took, is_complete, links, arrangement: None, cost }
}
