//! What was measured of the links between nodes.

use std::time::Duration;

use gradwire_collectives::CostModel;
use gradwire_proto::NodeId;

/// What was measured between two nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkMeasured {
    /// The node with the smaller number.
    pub from: NodeId,
    /// The other one.
    pub to: NodeId,
    /// Seconds that a small message takes.
    pub latency: f64,
    /// Bytes per second in each direction at the same time, by one data thread.
    pub lane_rate: f64,
    /// The same by all data threads.
    pub rate: f64,
}

/// What was measured of all nodes, and the costs that follow from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// How long it took.
    pub took: Duration,
    /// Whether there was time for everything.
    pub is_complete: bool,
    /// By number of the nodes.
    pub links: Vec<LinkMeasured>,
    /// What follows from all measurements.
    pub cost: CostModel,
}
