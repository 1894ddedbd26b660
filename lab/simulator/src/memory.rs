//! The memory that a run will need.

use std::sync::Arc;

use gradwire_collectives::{
    Schedule,
    algorithms::{generate, generate_sections},
};

use crate::{
    collapse::classes,
    job::{Content, Operation},
    setup::Setup,
};

/// Bytes of a planned step, with its progress and the list of waiting steps.
const STEP: u64 = 560;

/// Bytes of a block, shared by all.
const BLOCK: u64 = 16;

/// Bytes of a connection, with its chunks in flight.
const CONNECTION: u64 = 512;

/// Bytes of a host that another one represents.
const HOST: u64 = 1024;

/// Bytes of a recorded step.
const RECORDED: u64 = 24;

/// The least bytes that a run of `pieces` equal operations needs. The first and the last
/// participant often have the most and the fewest steps.
pub fn needed(setup: &Setup, operation: &Operation, pieces: u32) -> u64 {
    let topology = setup.network.topology.part(operation.hosts.iter().copied());
    let hosts = topology.participants();
    let of = |me: u32| -> Schedule {
        match &operation.content {
            Content::Kind(kind, count) => generate(*kind, operation.spec, &topology, me, *count),
            Content::Sections(sections) => {
                generate_sections(sections, operation.spec, &topology, me)
            }
        }
    };
    let one = |me: u32| {
        let schedule = of(me);
        let mut peers: Vec<u32> = schedule
            .steps
            .iter()
            .filter_map(|step| step.action.sends_to())
            .map(|(peer, _)| peer)
            .collect();
        peers.sort_unstable();
        peers.dedup();
        let steps = schedule.steps.len() as u64;
        let recorded = if setup.details { steps * RECORDED * u64::from(pieces) } else { 0 };
        let streams = u64::from(setup.transport.lanes * setup.transport.streams);
        let shared = schedule.blocks.len() as u64 * BLOCK;
        let each = steps * STEP + recorded + peers.len() as u64 * streams * CONNECTION;
        (each, shared)
    };
    if let Some(symmetry) = classes(setup, &[Arc::new(operation.clone())]) {
        let simulated = symmetry.representatives();
        let (each, shared) = simulated.first().map_or((0, 0), |&first| one(first));
        return each * simulated.len() as u64 + shared + u64::from(hosts) * HOST;
    }
    let (each, shared) = [0, hosts / 2, hosts - 1].map(one).into_iter().max().unwrap_or((0, 0));
    each * u64::from(hosts) + shared
}
