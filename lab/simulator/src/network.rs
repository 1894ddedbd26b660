//! Hosts, and the links between them.
//!
//! A host has a line to its rack. Links of tier 1 connect the racks, those of tier 2 the groups of
//! racks, and so on: each group has as many links up as down. A byte from one rack to another takes
//! an uplink of the first and a downlink of the second. A hash of the connection selects among
//! several links, as in switches (ECMP); or all links of a group act as one (ideal).

use std::collections::BTreeMap;

use gradwire_collectives::Topology;

use crate::fair::{Fair, ResourceId, Use};

/// A host and its line.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// Its name.
    pub name: String,
    /// Bytes per second that it can send.
    pub egress: f64,
    /// Bytes per second that it can receive.
    pub ingress: f64,
    /// How many times slower than others its processor is; 1 if it is not.
    pub slowness: f64,
}

/// The links between the groups of a tier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierLinks {
    /// How many links each group has in each direction.
    pub links: u32,
    /// Bytes per second of one of them.
    pub rate: f64,
    /// Whether the rate is one host's fair share; the group then has a multiple of it.
    pub is_share: bool,
    /// Latency in seconds, for the ways up and down together.
    pub latency: f64,
}

/// How connections are assigned to the links of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ecmp {
    /// To all of them at once.
    #[default]
    Ideal,
    /// To one of them, by a hash.
    Hash,
}

/// Properties of the connections between two hosts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pair {
    /// Latency in seconds.
    pub latency: f64,
    /// The most bytes per second of one connection.
    pub cap: f64,
}

/// The hosts and links.
#[derive(Debug, Clone)]
pub struct Network {
    /// The hosts, in the order of the topology.
    pub hosts: Vec<Host>,
    /// The groups of the hosts.
    pub topology: Topology,
    /// Latency within a rack, in seconds.
    pub latency: f64,
    /// The most bytes per second of one connection.
    pub connection: f64,
    /// The links of each tier of the topology, racks first; empty if only lines limit the speed.
    pub tiers: Vec<TierLinks>,
    /// How connections are spread over the links of a group.
    pub ecmp: Ecmp,
    /// Pairs of hosts with their own properties.
    pub pairs: BTreeMap<(u32, u32), Pair>,
    /// Bytes of a burst that each line and link passes after idling.
    pub burst: f64,
    /// Bytes per second during a burst.
    pub burst_rate: f64,
}

/// The path from one host to another.
#[derive(Debug, Clone, PartialEq)]
pub struct Path {
    /// The resources that each byte uses.
    pub uses: Vec<Use>,
    /// Latency in seconds.
    pub latency: f64,
    /// The most bytes per second.
    pub cap: f64,
}

/// The resources of a network.
#[derive(Debug, Clone, PartialEq)]
pub struct Links {
    /// The line of each host, outgoing.
    pub egress: Vec<ResourceId>,
    /// The line of each host, incoming.
    pub ingress: Vec<ResourceId>,
    /// For each tier and group, its links up.
    pub up: Vec<Vec<Vec<ResourceId>>>,
    /// For each tier and group, its links down.
    pub down: Vec<Vec<Vec<ResourceId>>>,
    /// The group of each host in each tier, as an index into the above.
    groups: Vec<Vec<u32>>,
}

impl Links {
    /// All lines and links.
    pub(crate) fn all(&self) -> impl Iterator<Item = ResourceId> + '_ {
        let tiers = self.up.iter().chain(&self.down).flatten().flatten();
        self.egress.iter().chain(&self.ingress).chain(tiers).copied()
    }
}

/// A hash of a connection's identity, reproducible by its seed.
pub(crate) fn hash(seed: u64, parts: [u32; 4]) -> u64 {
    // SplitMix64 (Steele et al., OOPSLA 2014), over each part.
    let mix = |state: u64| {
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    };
    parts.iter().fold(mix(seed.wrapping_add(0x9e37_79b9_7f4a_7c15)), |state, &part| {
        mix(state.wrapping_add(u64::from(part)).wrapping_add(0x9e37_79b9_7f4a_7c15))
    })
}

impl Network {
    /// Hosts with equal lines of `rate` bytes per second and `latency` seconds between any two, in
    /// racks without limits between them.
    pub fn even(topology: Topology, rate: f64, latency: f64) -> Self {
        let host = |at: u32| Host {
            name: format!("host{at}"),
            egress: rate,
            ingress: rate,
            slowness: 1.0,
        };
        Self {
            hosts: (0..topology.participants()).map(host).collect(),
            topology,
            latency,
            connection: f64::INFINITY,
            tiers: Vec::new(),
            ecmp: Ecmp::Ideal,
            pairs: BTreeMap::new(),
            burst: 0.0,
            burst_rate: 0.0,
        }
    }

    /// The same with `spines` uplinks of `rate` bytes per second from each rack, one to each spine.
    #[must_use]
    pub fn with_spines(self, spines: u32, rate: f64, latency: f64, ecmp: Ecmp) -> Self {
        Self {
            tiers: vec![TierLinks { links: spines, rate, is_share: false, latency }],
            ecmp,
            ..self
        }
    }

    /// The number of resources for a group's links, and the rate of each.
    pub(crate) fn rates(&self, links: &TierLinks, members: usize) -> (u32, f64) {
        let share = if links.is_share { members as f64 } else { 1.0 };
        match self.ecmp {
            Ecmp::Ideal => (1, links.rate * share * f64::from(links.links)),
            Ecmp::Hash => (links.links, links.rate * share),
        }
    }

    /// Adds the resources of all links.
    pub fn add_to(&self, fair: &mut Fair) -> Links {
        let egress = self.hosts.iter().map(|host| fair.add_resource(host.egress)).collect();
        let ingress = self.hosts.iter().map(|host| fair.add_resource(host.ingress)).collect();
        let mut links =
            Links { egress, ingress, up: Vec::new(), down: Vec::new(), groups: Vec::new() };
        for (tier, about) in (1..).zip(&self.tiers) {
            if tier > self.topology.tiers().len() {
                break;
            }
            let groups = self.topology.groups(tier);
            let mut group_of = vec![0; self.hosts.len()];
            for (group, members) in (0..).zip(&groups) {
                members.iter().for_each(|&member| group_of[member as usize] = group);
            }
            let mut add = || -> Vec<Vec<ResourceId>> {
                let mut group = |members: usize| {
                    let (count, rate) = self.rates(about, members);
                    (0..count).map(|_| fair.add_resource(rate)).collect()
                };
                groups.iter().map(|members| group(members.len())).collect()
            };
            let (up, down) = (add(), add());
            links.up.push(up);
            links.down.push(down);
            links.groups.push(group_of);
        }
        links
    }

    /// The path of a connection between two hosts, with the numbers of its lane and stream.
    pub fn path(&self, links: &Links, seed: u64, (from, to): (u32, u32), lane: [u32; 2]) -> Path {
        let take = |resource| Use { resource, weight: 1.0 };
        let mut uses = vec![take(links.egress[from as usize])];
        let pair = self.pairs.get(&(from, to));
        let mut latency = pair.map_or(self.latency, |pair| pair.latency);
        let chosen = hash(seed, [from, to, lane[0], lane[1]]);
        for (tier, about) in self.tiers.iter().enumerate().take(links.up.len()) {
            let groups = &links.groups[tier];
            let (mine, theirs) = (groups[from as usize], groups[to as usize]);
            if mine == theirs {
                break;
            }
            // The same spine up and down.
            let of = |groups: &Vec<Vec<ResourceId>>, group: u32| {
                let all = &groups[group as usize];
                all[(chosen.rotate_left(7 * tier as u32) % all.len() as u64) as usize]
            };
            uses.push(take(of(&links.up[tier], mine)));
            uses.push(take(of(&links.down[tier], theirs)));
            if pair.is_none() {
                latency += about.latency;
            }
        }
        uses.push(take(links.ingress[to as usize]));
        let cap = pair.map_or(self.connection, |pair| pair.cap.min(self.connection));
        Path { uses, latency, cap }
    }
}
