//! The cost model that the `network.*` settings describe.

use gradwire_collectives::{CostModel, LinkCost};

use crate::table::Settings;

const BITS: f64 = 8.0;
const MEGA: f64 = 1e6;

impl Settings {
    /// The cost of links, reductions and messages.
    pub fn cost_model(&self) -> CostModel {
        let (network, data) = (&self.network, &self.data);
        let usual = CostModel::default();
        let per_byte = |mbit: u32| BITS / (f64::from(mbit) * MEGA);
        CostModel {
            in_rack: LinkCost {
                latency: network.latency.as_secs_f64(),
                per_byte: per_byte(network.rate_mbit),
            },
            cross_rack: LinkCost {
                latency: network.rack_latency.as_secs_f64(),
                per_byte: per_byte(network.rack_rate_mbit),
            },
            reduce_per_byte: 1.0 / (f64::from(network.reduce_mb) * MEGA),
            per_message: f64::from(network.message_ns) / 1e9,
            lane_per_byte: if network.lane_rate_mbit == 0 {
                0.0
            } else {
                per_byte(network.lane_rate_mbit)
            },
            publish_per_byte: if network.publish_mb == 0 {
                0.0
            } else {
                1.0 / (f64::from(network.publish_mb) * MEGA)
            },
            operation: network.operation.as_secs_f64(),
            chunk: usual.chunk.min(data.chunk_bytes),
            paths: network.rack_paths,
            connections: data.lanes * data.streams,
            lanes: data.lanes,
            ..usual
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The defaults are repeated in the model, which is also used without settings.
    #[test]
    fn the_defaults_are_those_of_the_model() {
        let (ours, theirs) = (Settings::default().cost_model(), CostModel::default());
        let numbers = |model: CostModel| {
            [
                model.in_rack.latency,
                model.in_rack.per_byte,
                model.cross_rack.latency,
                model.cross_rack.per_byte,
                model.reduce_per_byte,
                model.per_message,
                model.chunk as f64,
                model.burst_loss,
                f64::from(model.free_fan_in),
                f64::from(model.paths),
                f64::from(model.connections),
                f64::from(model.lanes),
                model.incast_loss,
                // These are zero by default, and the comparison divides.
                1.0 + model.lane_per_byte,
                1.0 + model.publish_per_byte,
                1.0 + model.operation,
                1.0 + model.queue as f64,
                1.0 + model.overflow,
            ]
        };
        for (ours, theirs) in numbers(ours).into_iter().zip(numbers(theirs)) {
            assert!((ours / theirs - 1.0).abs() < 1e-9, "{ours} {theirs}");
        }
    }
}
