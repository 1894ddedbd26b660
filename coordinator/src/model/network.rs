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

/// How nodes are arranged, where what was measured makes another arrangement clear than their
/// labels and numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Arrangement {
    /// The rack of each node; empty: as they are labelled.
    pub racks: Vec<u32>,
    /// All nodes in the order in which a ring visits them, as far as racks stay together; empty: by
    /// number.
    pub order: Vec<u32>,
    /// Why.
    pub reason: String,
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
    /// What follows from the links for the arrangement of nodes, if something does.
    pub arrangement: Option<Arrangement>,
    /// What follows from all measurements.
    pub cost: CostModel,
}
