//! Simulates one host on behalf of all hosts that do the same at the same time, and adapts the
//! network: what a host sends to a represented host arrives at its representative, and a link that
//! the class shares carries a multiple of the traffic.
//!
//! This holds if hosts are alike in all that is simulated: in schedules ([`symmetry`]), hosts,
//! links and faults. Nothing may depend on chance, or on the order of simultaneous events.

use std::sync::Arc;

use gradwire_collectives::{Symmetry, execution::whole, generate, symmetry};

use crate::{
    fair::{ResourceId, Use},
    job::{Content, Operation},
    network::{Ecmp, Links, Network},
    setup::Setup,
};

/// Hosts that represent all others.
#[derive(Debug)]
pub(crate) struct Collapse {
    symmetry: Symmetry,
    hosts: Vec<u32>,
    /// For each resource its representative, and how many flows share it for each simulated flow.
    resources: Vec<(ResourceId, f64)>,
}

/// The largest classes of hosts that behave alike in every operation, if there are any.
pub(crate) fn classes(setup: &Setup, operations: &[Arc<Operation>]) -> Option<Symmetry> {
    let (first, others) = operations.split_first()?;
    if !setup.collapse || !is_even(setup) {
        return None;
    }
    let mut all = of_operation(setup, first);
    let mut before = first;
    for other in others {
        if other != before && !all.is_empty() {
            let its = of_operation(setup, other);
            all.retain(|one| its.contains(one));
        }
        before = other;
    }
    all.into_iter().find(|one| orbits(&setup.network, one).is_some())
}

/// Whether hosts and links are alike, and nothing depends on chance or on event order.
fn is_even(setup: &Setup) -> bool {
    let Setup { network, processor, tcp, faults, .. } = setup;
    let Network { hosts, tiers, pairs, ecmp, burst, .. } = network;
    let Some(first) = hosts.first() else { return false };
    let about = |host: &crate::network::Host| (host.egress, host.ingress, host.slowness);
    hosts.iter().all(|host| about(host) == about(first))
        && (*ecmp == Ecmp::Ideal || tiers.iter().all(|tier| tier.links == 1))
        && pairs.is_empty()
        && *burst == 0.0
        && faults.is_empty()
        && tcp.is_none()
        && !processor.is_limit()
        && processor.local == 0.0
}

fn of_operation(setup: &Setup, operation: &Operation) -> Vec<Symmetry> {
    let topology = &setup.network.topology;
    let Content::Kind(kind, count) = operation.content else { return Vec::new() };
    if operation.hosts.len() != setup.network.hosts.len() {
        return Vec::new();
    }
    let mut all = symmetry(kind, &operation.spec, topology);
    if !all.is_empty() {
        let schedule = generate(kind, operation.spec, topology, 0, count);
        let chunk = operation.spec.chunk().unwrap_or(setup.transport.chunk);
        let chunk = whole(chunk, operation.element) / operation.element;
        all.retain(|one| one.holds(&schedule, chunk));
    }
    all
}

/// For each tier of links, the representative of each group. None if the network differs between
/// hosts of a class.
fn orbits(network: &Network, symmetry: &Symmetry) -> Option<Vec<Vec<u32>>> {
    let tiers = network.tiers.len().min(network.topology.tiers().len());
    let generators = symmetry.generators();
    let orbits = |tier: usize| {
        let groups = network.topology.groups(tier);
        let mut group_of = vec![0u32; network.hosts.len()];
        for (group, members) in (0..).zip(&groups) {
            members.iter().for_each(|&member| group_of[member as usize] = group);
        }
        let mut orbit: Vec<u32> = (0..groups.len() as u32).collect();
        for images in &generators {
            for members in &groups {
                let image = |&member: &u32| group_of[images[member as usize] as usize];
                let to = image(&members[0]);
                if members.iter().any(|member| image(member) != to) {
                    return None;
                }
                let (to, from) =
                    (orbit[to as usize], orbit[group_of[members[0] as usize] as usize]);
                let (least, most) = (to.min(from), to.max(from));
                if least != most {
                    orbit.iter_mut().filter(|one| **one == most).for_each(|one| *one = least);
                }
            }
        }
        Some(orbit)
    };
    (1..=tiers).map(orbits).collect()
}

impl Collapse {
    /// Some if a few hosts can represent all in each of these operations.
    pub(crate) fn new(setup: &Setup, operations: &[Arc<Operation>], links: &Links) -> Option<Self> {
        let symmetry = classes(setup, operations)?;
        let orbits = orbits(&setup.network, &symmetry)?;
        let count = links.egress.len() + links.ingress.len();
        let count = count + 2 * links.up.iter().flatten().flatten().count();
        let mut resources: Vec<_> = (0..count as ResourceId).map(|id| (id, 1.0)).collect();
        for lines in [&links.egress, &links.ingress] {
            for (host, &id) in (0..).zip(lines) {
                resources[id as usize].0 = lines[symmetry.representative(host) as usize];
            }
        }
        let class = f64::from(symmetry.class_size());
        for tiers in [&links.up, &links.down] {
            for (groups, orbit) in tiers.iter().zip(&orbits) {
                for (all, &stands) in groups.iter().zip(orbit) {
                    let size = orbit.iter().filter(|one| **one == stands).count() as f64;
                    for (&id, &other) in all.iter().zip(&groups[stands as usize]) {
                        resources[id as usize] = (other, class / size);
                    }
                }
            }
        }
        Some(Self { hosts: symmetry.representatives(), symmetry, resources })
    }

    pub(crate) fn symmetry(&self) -> &Symmetry {
        &self.symmetry
    }

    /// The representatives.
    pub(crate) fn hosts(&self) -> &[u32] {
        &self.hosts
    }

    /// The number of hosts in each class.
    pub(crate) fn class_size(&self) -> u32 {
        self.symmetry.class_size()
    }

    /// The representative of a host.
    pub(crate) fn representative(&self, host: u32) -> u32 {
        self.symmetry.representative(host)
    }

    /// Maps `host` to its counterpart as seen by the representative of `me`.
    pub(crate) fn seen_from(&self, me: u32, host: u32) -> u32 {
        self.symmetry.seen_from(me, host)
    }

    /// All hosts that a host represents, including itself.
    pub(crate) fn class(&self, host: u32) -> Vec<u32> {
        let hosts = 0..self.symmetry.class_size() * self.hosts.len() as u32;
        hosts.filter(|&one| self.representative(one) == host).collect()
    }

    /// Each resource with its representative.
    pub(crate) fn resources(&self) -> impl Iterator<Item = (ResourceId, ResourceId)> {
        (0..).zip(&self.resources).map(|(id, &(stands, _))| (id, stands))
    }

    /// Turns the uses of a flow into those of its whole class, on the representative resources.
    pub(crate) fn stand_in(&self, uses: &mut [Use]) {
        for Use { resource, weight } in uses {
            let (stands, times) = self.resources[*resource as usize];
            (*resource, *weight) = (stands, *weight * times);
        }
    }
}
