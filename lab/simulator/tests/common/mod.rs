//! Hosts that several tests use.

use gradwire_collectives::Topology;

/// Bytes per second of 10 Gbit/s.
pub(crate) const RATE: f64 = 1.25e9;

/// Racks of `size` hosts.
pub(crate) fn racks(hosts: u32, size: u32) -> Topology {
    Topology::from_racks((0..hosts).map(|host| host / size).collect())
}
