//! The costs by which the coordinator chooses in a described cluster.

use gradwire_collectives::{CostModel, LinkCost, Topology};

use super::file::{ANY, File, InputError, MEGABITS, MICRO, MOST, NetworkPart, POSITIVE, Reader};
use crate::{config::Transport, network::TierLinks};

const PERCENT: f64 = 100.0;

/// The costs of a cluster as its probe found them, or as they follow from its links. Missing keys
/// have their usual values.
pub(super) fn cost(
    reader: &Reader<'_>,
    file: &File,
    topology: &Topology,
    tiers: &[TierLinks],
    transport: &Transport,
) -> Result<CostModel, InputError> {
    let part = &file.network;
    let usual = CostModel::default();
    let number = |value, key: &str, range, usual| reader.number(value, key, range, usual);
    let per_byte = |rate: f64| if rate > 0.0 { 1.0 / rate } else { 0.0 };
    let NetworkPart { latency_us, rate_mbit, rack_latency_us, rack_rate_mbit, .. } = part;
    let latency = number(latency_us, "network.latency_us", ANY, 40.0)? * MICRO;
    let rate = number(rate_mbit, "network.rate_mbit", POSITIVE, 25_000.0)? * MEGABITS;
    // The fair share of a host in the links of its rack.
    let members = topology.members().iter().map(Vec::len).max().unwrap_or(1) as f64;
    let share = tiers.first().map_or(rate, |tier| {
        let all = tier.rate * f64::from(tier.links);
        if tier.is_share { tier.rate } else { (all / members).min(rate) }
    });
    let more = tiers.first().map_or(0.0, |tier| tier.latency);
    let across = rack_rate_mbit.as_ref().map_or(share / MEGABITS, |_| 0.0);
    let across = number(rack_rate_mbit, "network.rack_rate_mbit", POSITIVE, across)? * MEGABITS;
    let far = (latency + more) / MICRO;
    let far = number(rack_latency_us, "network.rack_latency_us", ANY, far)? * MICRO;
    let reduce = usual.reduce_per_byte.recip() / 1e6;
    let reduce = number(&part.reduce_mb_per_s, "network.reduce_mb_per_s", POSITIVE, reduce)?;
    let publish = number(&part.publish_mb_per_s, "network.publish_mb_per_s", ANY, 0.0)?;
    let lane = number(&part.lane_rate_mbit, "network.lane_rate_mbit", ANY, 0.0)?;
    let message = usual.per_message * 1e9;
    let bursts = usual.burst_loss * PERCENT;
    let sender = usual.incast_loss * PERCENT;
    let free = f64::from(usual.free_fan_in);
    let whole = |value, key: &str, least, usual| reader.whole(value, key, (least, MOST), usual);
    Ok(CostModel {
        in_rack: LinkCost { latency, per_byte: per_byte(rate) },
        cross_rack: LinkCost { latency: far, per_byte: per_byte(across) },
        reduce_per_byte: per_byte(reduce * 1e6),
        per_message: number(&part.message_ns, "network.message_ns", ANY, message)? * 1e-9,
        lane_per_byte: per_byte(lane * MEGABITS),
        publish_per_byte: per_byte(publish * 1e6),
        operation: number(&part.operation_us, "network.operation_us", ANY, 0.0)? * MICRO,
        chunk: whole(&part.chunk_bytes, "network.chunk_bytes", 1.0, usual.chunk as f64)? as u64,
        burst_loss: number(&part.burst_loss_percent, "network.burst_loss_percent", ANY, bursts)?
            / PERCENT,
        free_fan_in: whole(&part.free_senders, "network.free_senders", 1.0, free)? as u32,
        incast_loss: number(&part.sender_loss_percent, "network.sender_loss_percent", ANY, sender)?
            / PERCENT,
        queue: whole(&part.queue_bytes, "network.queue_bytes", 0.0, 0.0)? as u64,
        overflow: number(&part.overflow_us, "network.overflow_us", ANY, 0.0)? * MICRO,
        paths: whole(&part.rack_paths, "network.rack_paths", 1.0, 1.0)? as u32,
        connections: transport.lanes * transport.streams,
        lanes: transport.lanes,
    })
}
