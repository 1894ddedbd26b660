//! ParameterHub: a parameter server in each rack, and one of them for all racks (Luo et al.,
//! "Parameter Hub: a Rack-Scale Parameter Server for Distributed Deep Neural Network Training",
//! SoCC 2018).
//!
//! In each rack the servers own a share of the piece each, or the nodes with ranks if the rack has
//! no server. Every node sends the owners of its rack their shares. The owners of a share in all
//! racks send it to the owner in its home rack, either directly or from rack to rack (the paper's
//! ring), and the result goes back the same way. Homes take turns. So 2(r−1) times the piece
//! crosses between r racks, and a node with servers in its rack sends the piece once. Servers in
//! racks without ranks are idle.
//!
//! Without servers, direct exchange equals [`hierarchical`] with one tier, in another order
//! and with a message for each block.

use super::{hierarchical, prelude::*, servers};

const ACROSS: Parameter = Parameter {
    name: "across",
    about: "how data goes between the owners of a share in all racks",
    values: Values::Word(&["direct", "ring"]),
};

/// How data goes between the owners of a share in all racks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Across {
    Direct,
    Ring,
}

impl Across {
    fn of(spec: &Spec) -> Self {
        if spec.number("across") == 0 { Self::Direct } else { Self::Ring }
    }
}

pub(super) struct Parameterhub;

impl Definition for Parameterhub {
    fn about(&self) -> About {
        About {
            idea: "the servers of each rack, or else its nodes, own shares; the owner in the home \
                   rack of each share adds up those of all racks",
            cost: "4α + max(1, (w+2(r−1)/r)/k)·S·β for k servers in each rack of w others; 2rα \
                   with across=ring",
            when: "hosts to spare in each rack, slow links between racks",
            source: "Luo et al., \"Parameter Hub: a Rack-Scale Parameter Server for Distributed \
                     Deep Neural Network Training\", SoCC 2018",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[ACROSS]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        if topology.contributors() == 1 || count == 0 {
            return servers::alone(topology, me, count);
        }
        let racks = Racks::new(topology, Across::of(spec));
        let homes = racks.owners.len() as u32;
        let blocks = hierarchical::blocks(racks.most_owners(), homes, hierarchical::BLOCK, count);
        build::reduce_and_return_over_servers(topology, me, blocks, |block| racks.place(me, block))
    }

    /// The cost of an allreduce: 4α, and what the busiest owner sends; 2rα around the racks.
    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        let across = Across::of(spec);
        let racks = Racks::new(topology, across);
        let many = racks.owners.len() as f64;
        let (mut line, mut reduced, mut messages, mut uplink) = (0.0f64, 0.0f64, 0.0f64, 0.0f64);
        let all_members = topology.members();
        let slowest = (0..racks.all).map(|one| topology.line(one)).min().unwrap_or(1);
        for (rack, owners) in racks.owners.iter().enumerate() {
            let own = (0..racks.contributors).filter(|&one| racks.of[one as usize] == rack);
            let members = own.count() as f64;
            let size = all_members.iter().find(|members| members.contains(&owners[0]));
            let share = 1.0 / owners.len() as f64;
            // To the home or from it, and the same backwards.
            let across = 2.0 * (many - 1.0) / many;
            for &owner in owners {
                let is_server = owner >= racks.contributors;
                let (kept, inside) =
                    if is_server { (0.0, members) } else { (share, members - 1.0) };
                let sent =
                    (1.0 - kept) * f64::from(u8::from(!is_server)) + share * (inside + across);
                line = line.max(sent * f64::from(slowest) / f64::from(topology.line(owner)));
                reduced = reduced.max(share * (inside + across / 2.0));
                messages = messages.max(2.0 * (many * inside + many - 1.0));
            }
            // A node that owns nothing sends the piece.
            line = line.max(if owners[0] >= racks.contributors { 1.0 } else { 0.0 });
            uplink = uplink.max(across / size.map_or(1.0, |members| members.len() as f64));
        }
        let hops_across = match across {
            _ if many < 2.0 => 0.0,
            Across::Ring => 2.0 * (many - 1.0),
            Across::Direct => 2.0,
        };
        let inside = racks.owners.iter().enumerate().any(|(rack, owners)| {
            let own = (0..racks.contributors).filter(|&one| racks.of[one as usize] == rack);
            owners[0] >= racks.contributors || own.count() > 1
        });
        let inside = if inside { 2.0 } else { 0.0 };
        let has_servers = topology.servers() > 0;
        let blocks = many * f64::from(racks.most_owners());
        let shape = Shape {
            hops_in: inside,
            hops_across,
            line,
            senders: cluster.largest as u32,
            uplink: if many > 1.0 { uplink } else { 0.0 },
            reduced,
            messages,
            blocks,
            first: if has_servers { blocks } else { 0.0 },
            ..Shape::default()
        };
        shape.at_once(inside + hops_across)
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&hierarchical::Hierarchical)
    }

    fn takes_servers(&self) -> bool {
        true
    }
}

/// The racks that have ranks.
struct Racks {
    contributors: u32,
    all: u32,
    /// The owners of shares in each rack.
    owners: Vec<Vec<u32>>,
    /// The rack of each participant; an invalid one if it takes no part.
    of: Vec<usize>,
    across: Across,
}

impl Racks {
    fn new(topology: &Topology, across: Across) -> Self {
        let (contributors, all) = (topology.contributors(), topology.participants());
        let (mut owners, mut of) = (Vec::new(), vec![usize::MAX; all as usize]);
        for members in topology.members() {
            let (own, servers): (Vec<u32>, Vec<u32>) =
                members.iter().partition(|&&member| member < contributors);
            if own.is_empty() {
                continue;
            }
            members.iter().for_each(|&member| of[member as usize] = owners.len());
            owners.push(if servers.is_empty() { own } else { servers });
        }
        Self { contributors, all, owners, of, across }
    }

    fn most_owners(&self) -> u32 {
        self.owners.iter().map(Vec::len).max().unwrap_or(1) as u32
    }

    /// The owner of a block in a rack, and how many racks it is away from the block's home.
    fn owner(&self, rack: usize, block: u32) -> (u32, u32) {
        let racks = self.owners.len() as u32;
        let owners = &self.owners[rack];
        let home = block % racks;
        let owner = owners[(block / racks) as usize % owners.len()];
        (owner, (home + racks - rack as u32) % racks)
    }

    /// The link between the owners of two racks, seen from either end; `away` is the distance of
    /// the farther one from home.
    fn between(&self, away: u32, peer: u32) -> Link {
        let (racks, start) = (self.owners.len() as u32, self.all);
        match self.across {
            // The farthest begin.
            Across::Ring => Link { peer, up: start + racks - 1 - away, down: start + racks + away },
            Across::Direct => Link { peer, up: start + away, down: start + 2 * racks - away },
        }
    }

    /// The place of a participant in the tree of a block; empty if it takes no part.
    fn place(&self, me: u32, block: u32) -> Place {
        let rack = self.of[me as usize];
        let Some(owners) = self.owners.get(rack) else { return Place::default() };
        let racks = self.owners.len();
        let (owner, away) = self.owner(rack, block);
        let inside = |member: u32, peer: u32| Link {
            peer,
            up: (owner + self.all - member) % self.all,
            down: self.all + 2 * racks as u32 + (member + self.all - owner) % self.all,
        };
        if me != owner {
            let takes_part = me < self.contributors;
            return Place { parent: takes_part.then(|| inside(me, owner)), children: Vec::new() };
        }
        debug_assert!(owners.contains(&me), "{me} owns a block of another rack");
        let members = (0..self.contributors).filter(|&one| self.of[one as usize] == rack);
        let members = members.filter(|&one| one != me).map(|one| inside(one, one));
        let others = (0..racks).map(|other| self.owner(other, block));
        let nearest = |wanted: u32| {
            let mut others = others.clone();
            others.find(move |&(_, away)| away == wanted)
        };
        let (parent, children): (Option<u32>, Vec<(u32, u32)>) = match self.across {
            Across::Ring => (
                away.checked_sub(1).and_then(nearest).map(|(peer, _)| peer),
                nearest(away + 1).into_iter().collect(),
            ),
            Across::Direct if away == 0 => {
                (None, others.clone().filter(|&(_, away)| away > 0).collect())
            }
            Across::Direct => (nearest(0).map(|(peer, _)| peer), Vec::new()),
        };
        let below = children.into_iter().map(|(peer, away)| self.between(away, peer));
        Place {
            parent: parent.map(|peer| self.between(away, peer)),
            children: members.chain(below).collect(),
        }
    }
}
