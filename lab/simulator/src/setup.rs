//! The parameters of a simulation.

use crate::{
    config::{Processor, Tcp, Transport},
    fault::Fault,
    network::Network,
};

/// The parameters of a simulation.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The hosts and links.
    pub network: Network,
    /// How daemons move bytes.
    pub transport: Transport,
    /// Their processor time.
    pub processor: Processor,
    /// Effects of TCP beyond fair sharing.
    pub tcp: Option<Tcp>,
    /// The faults.
    pub faults: Vec<Fault>,
    /// The seed of all random choices.
    pub seed: u64,
    /// The most simulated seconds.
    pub limit: f64,
    /// Whether to record the use of links over time and the critical path.
    pub details: bool,
    /// Whether one host may represent all that do the same, where the result stays the same.
    pub collapse: bool,
}

impl Setup {
    /// A network in which only the links limit the speed.
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
