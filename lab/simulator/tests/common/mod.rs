//! Hosts that several tests have.

use gradwire_collectives::Topology;

/// Bytes per second of 10 Gbit/s.
pub(crate) const RATE: f64 = 1.25e9;

/// Racks of so many hosts.
pub(crate) fn racks(hosts: u32, size: u32) -> Topology {
    Topology::from_racks((0..hosts).map(|host| host / size).collect())
}
