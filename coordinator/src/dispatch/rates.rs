//! The rates of lines and links, as the nodes get them for algorithms that distribute load by them.
//! They come from what hosts say of their lines, from the probe, or from the settings `network.*`.

use gradwire_collectives::{CostModel, Links, MAX_LINE_MBIT};

use crate::model::network::Network;

/// In Mbit/s, at least 1.
fn mbit(bytes_per_second: f64) -> u32 {
    (bytes_per_second * 8e-6).round().clamp(1.0, f64::from(MAX_LINE_MBIT)) as u32
}

/// Of all nodes with lines of these rates in Mbit/s, 0 where they are not known. `None` for more
/// nodes than may have links of different rates.
pub(super) fn links(
    mut lines: Vec<u32>,
    cost: &CostModel,
    network: Option<&Network>,
) -> Option<Links> {
    let measured = network.map_or(&[][..], |network| &network.links);
    let nodes = lines.len() as u32;
    let usual = mbit(1.0 / cost.in_rack.per_byte);
    for (node, line) in (0..).zip(&mut lines).filter(|(_, line)| **line == 0) {
        // A line is at least as fast as any of its links.
        let own = measured.iter().filter(|link| link.from.0 == node || link.to.0 == node);
        let fastest = own.map(|link| mbit(link.rate.max(link.lane_rate))).max();
        *line = fastest.unwrap_or(usual);
    }
    let rate = |a: u32, b: u32| {
        let mut both = measured.iter();
        let link =
            both.find(|link| (link.from.0.min(link.to.0), link.from.0.max(link.to.0)) == (a, b));
        link.map_or(0, |link| mbit(link.rate.max(link.lane_rate)))
    };
    let pairs = if measured.is_empty() {
        Vec::new()
    } else {
        (0..nodes)
            .flat_map(|a| (a + 1..nodes).map(move |b| (a, b)))
            .map(|(a, b)| rate(a, b))
            .collect()
    };
    Links::new(lines, mbit(1.0 / cost.cross_rack.per_byte), pairs)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gradwire_proto::NodeId;

    use super::*;
    use crate::model::network::LinkMeasured;

    #[test]
    fn rates_are_the_best_that_is_known() {
        let cost = CostModel::default();
        let unmeasured = links(vec![0, 10_000, 0], &cost, None).unwrap();
        assert_eq!(unmeasured.lines(), [25_000, 10_000, 25_000]);
        assert_eq!((unmeasured.uplink(), unmeasured.pairs()), (8_333, &[][..]));
        let link = |from, to, rate| LinkMeasured {
            from: NodeId(from),
            to: NodeId(to),
            latency: 1e-4,
            lane_rate: 1e6,
            rate,
        };
        let network = Network {
            took: Duration::ZERO,
            is_complete: true,
            links: vec![link(0, 1, 125e6), link(1, 2, 250e6)],
            arrangement: None,
            cost,
        };
        let measured = links(vec![0, 40_000, 0], &cost, Some(&network)).unwrap();
        assert_eq!(measured.lines(), [1000, 40_000, 2000]);
        assert_eq!(measured.pairs(), [1000, 0, 2000], "one was not measured");
        assert_eq!(links(vec![0; 129], &cost, Some(&network)), None, "BOUND");
    }
}
