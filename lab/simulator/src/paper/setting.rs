//! Settings that the simulated papers share.

use std::sync::Arc;

use gradwire_collectives::{Kind, Spec, Topology};

use crate::{
    config::{Control, Transport},
    engine::{Setup, run},
    job::{InOrder, Operation},
    network::Network,
    report::Outcome,
};

/// An allreduce of `bytes` between all hosts that are not servers, alone.
pub(crate) fn allreduce(setup: &Setup, spec: Spec, bytes: u64) -> Outcome {
    let hosts = setup.network.hosts.len() as u32;
    let operation = Operation::new(Kind::Allreduce, spec, bytes, hosts);
    run(setup, &mut InOrder::new(vec![Arc::new(operation)], Control::default()))
}

/// Gbit/s as bytes per second.
pub(crate) fn gigabits(rate: f64) -> f64 {
    rate * 1e9 / 8.0
}

/// Hosts in one rack with equal lines, and chunks that are small compared to shares.
pub(crate) fn flat(hosts: u32, rate: f64, latency: f64) -> Setup {
    let network = Network::even(Topology::flat(hosts), rate, latency);
    Setup { transport: one_lane(), ..Setup::new(network) }
}

/// One lane with one connection.
pub(crate) fn one_lane() -> Transport {
    Transport { lanes: 1, ..Transport::default() }
}

/// A valid spec.
pub(crate) fn spec(text: &str) -> Spec {
    Spec::parse(text).unwrap_or_else(|error| unreachable!("{error}"))
}

pub(crate) fn milliseconds(seconds: f64) -> String {
    format!("{:.2}", seconds * 1e3)
}
