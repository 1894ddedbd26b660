//! Recommendations for settings that are fixed while a job runs. Pure.

use crate::model::{EngineConfig, network::Network};

/// The largest values that the settings allow.
const MAX_LANES: u32 = gradwire_proto::MAX_LANES;
const MAX_STREAMS: u32 = 16;

/// One lane is enough if all lanes together are less than this many times as fast as one.
const USELESS: f64 = 1.15;

/// More lanes may help if each lane reaches more than this fraction of the rate of a single one.
const USEFUL: f64 = 0.8;

/// A lane is limited by its connection if it is slower than this fraction of the reduction rate.
const IDLE: f64 = 0.25;

fn median(mut rates: Vec<f64>) -> Option<f64> {
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied()
}

/// The recommended settings for the next start, each with its reason.
pub(crate) fn advice(config: &EngineConfig, network: &Network) -> Vec<String> {
    let (lanes, streams) = (config.lanes, config.streams);
    // A link with impossible rates says nothing: its measurement was disturbed, also the second
    // time.
    let links = || network.links.iter().filter(|link| link.is_possible(lanes));
    let one = median(links().map(|link| link.lane_rate).collect());
    let all = median(links().map(|link| link.rate).collect());
    // A single lane can't be compared.
    let both = one.zip(all).filter(|(one, all)| lanes > 1 && *one > 0.0 && *all > 0.0);
    let Some((one, all)) = both else { return Vec::new() };
    let ratio = all / one;
    let measured = format!("{lanes} lanes are {ratio:.2} times as fast as one");
    let mut advice = Vec::new();
    if ratio < USELESS {
        advice.push(format!("data.lanes=1: {measured}, so one lane is enough"));
    }
    let is_limit = ratio > USEFUL * f64::from(lanes);
    let waits = one * network.cost.reduce_per_byte < IDLE;
    if is_limit && waits && streams < MAX_STREAMS {
        let more = (2 * streams).min(MAX_STREAMS);
        advice.push(format!(
            "data.streams={more}: {measured} and the processor is mostly idle, so the connections \
             are the bottleneck"
        ));
    } else if is_limit && lanes < MAX_LANES {
        let more = (2 * lanes).min(MAX_LANES);
        advice.push(format!("data.lanes={more}: {measured}, so more lanes may be faster"));
    }
    advice
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use gradwire_collectives::CostModel;
    use gradwire_proto::{JobId, NodeId};
    use gradwire_settings::Settings;

    use super::*;
    use crate::model::network::LinkMeasured;

    /// The advice for two lanes, given the rates of a single lane and of both, in GB/s.
    fn advised(lane_rate: f64, rate: f64) -> Vec<String> {
        let settings = Settings::default();
        let config = EngineConfig::new(JobId::new("job").unwrap(), 2, 0, &settings).unwrap();
        let config = EngineConfig { lanes: 2, streams: 1, ..config };
        let link = LinkMeasured {
            from: NodeId(0),
            to: NodeId(1),
            latency: 1e-4,
            lane_rate: lane_rate * 1e9,
            rate: rate * 1e9,
        };
        let network = Network {
            took: Duration::ZERO,
            is_complete: true,
            links: vec![link; 3],
            arrangement: None,
            cost: CostModel::default(),
        };
        advice(&config, &network)
    }

    #[test]
    fn lanes_and_streams_are_recommended() {
        let of = |lane_rate, rate| {
            let all = advised(lane_rate, rate);
            assert!(all.len() <= 1, "{all:?}");
            all.into_iter().next().unwrap_or_default()
        };
        assert!(of(3.0, 3.1).starts_with("data.lanes=1: 2 lanes are 1.03 times"));
        assert!(of(0.6, 1.2).starts_with("data.streams=2: 2 lanes are 2.00 times"));
        assert!(of(3.0, 5.8).starts_with("data.lanes=4: 2 lanes are 1.93 times"));
        assert_eq!(of(3.0, 4.2), "", "in between, nothing is recommended");
        assert_eq!(of(0.0, 0.0), "", "nothing was measured");
        assert_eq!(of(0.1, 1.102), "", "impossible: the measurement was disturbed");
    }
}
