//! The measured links between nodes.

use std::time::Duration;

use gradwire_collectives::CostModel;
use gradwire_proto::{NodeId, pb};

use super::status::costs;

/// The measurements between two nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinkMeasured {
    /// The node with the smaller number.
    pub from: NodeId,
    /// The other node.
    pub to: NodeId,
    /// The seconds of a small message.
    pub latency: f64,
    /// Bytes per second in each direction at the same time, with one data thread.
    pub lane_rate: f64,
    /// The same with all data threads.
    pub rate: f64,
}

impl LinkMeasured {
    /// All lanes can't be faster than one by more than this times their number.
    const POSSIBLE: f64 = 1.25;

    /// Whether the rates with one of `lanes` lanes and with all of them are possible. Otherwise the
    /// measurement was disturbed, for example by other work while one lane was measured.
    pub(crate) fn is_possible(&self, lanes: u32) -> bool {
        self.rate <= Self::POSSIBLE * f64::from(lanes) * self.lane_rate
    }
}

/// An arrangement of nodes by measurements, if those clearly differ from labels and numbers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Arrangement {
    /// The rack of each node; empty: by label.
    pub racks: Vec<u32>,
    /// All nodes in the order of a ring, as far as racks stay together; empty: by number.
    pub order: Vec<u32>,
    /// The reason.
    pub reason: String,
}

/// The measurements of all nodes, and what follows from them.
#[derive(Debug, Clone, PartialEq)]
pub struct Network {
    /// How long the measurements took.
    pub took: Duration,
    /// Whether there was time for all measurements.
    pub is_complete: bool,
    /// By number of the nodes.
    pub links: Vec<LinkMeasured>,
    /// The arrangement of nodes that follows from the links, if any.
    pub arrangement: Option<Arrangement>,
    /// The costs that follow from all measurements.
    pub cost: CostModel,
}

impl Network {
    /// The network in a status.
    pub(crate) fn status(&self) -> pb::Network {
        let links = self.links.iter().map(|link| pb::Link {
            from: link.from.0,
            to: link.to.0,
            latency_seconds: link.latency,
            lane_bytes_per_second: link.lane_rate,
            bytes_per_second: link.rate,
        });
        let arranged = self.arrangement.clone().unwrap_or_default();
        pb::Network {
            took_seconds: self.took.as_secs_f64(),
            complete: self.is_complete,
            links: links.collect(),
            costs: Some(costs(&self.cost)),
            racks: arranged.racks,
            order: arranged.order,
            arrangement: arranged.reason,
        }
    }
}
