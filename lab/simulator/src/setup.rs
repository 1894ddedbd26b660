//! What is simulated, and how.

use crate::{
    config::{Processor, Tcp, Transport},
    fault::Fault,
    network::Network,
};

/// What is simulated, and how.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The hosts and links.
    pub network: Network,
    /// How daemons move bytes.
    pub transport: Transport,
    /// What their processors take.
    pub processor: Processor,
    /// What TCP does besides.
    pub tcp: Option<Tcp>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// For everything that chance decides.
    pub seed: u64,
    /// The most simulated seconds.
    pub limit: f64,
    /// Whether the use of links over time and the critical path are recorded.
    pub details: bool,
    /// Whether one host may stand for all that do the same, where that changes nothing.
    pub collapse: bool,
}

impl Setup {
    /// A network on which only the links are a limit.
    pub fn new(network: Network) -> Self {
        Self {
            network,
            transport: Transport::default(),
            processor: Processor::default(),
            tcp: None,
            faults: Vec::new(),
            seed: 0,
            limit: 3600.0,
            details: false,
            collapse: true,
        }
    }
}
