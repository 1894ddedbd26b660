//! Leader ring: the members of each rack send the whole piece to the first one, their leader. The
//! leaders form a ring, and each sends the result to its members (Jia et al., 2018,
//! arXiv:1807.11205, within and between groups).
//!
//! 2(r−1) times the piece crosses between r racks, the minimum, over few connections. But a leader
//! receives and sends the piece once for each of its members. To or from one participant it is the
//! same as [`hierarchical`].

use super::{hierarchical, prelude::*};

pub(super) struct LeaderRing;

impl Definition for LeaderRing {
    fn about(&self) -> About {
        About {
            idea: "the leader of each rack reduces for its members, and a ring joins the leaders",
            cost: "2rα + 2(w−1 + (r−1)/r)S·β",
            when: "few connections between racks",
            source: "Jia et al., \"Highly Scalable Deep Learning Training System with \
                     Mixed-Precision\", 2018 (arXiv:1807.11205)",
        }
    }

    fn allreduce(&self, _: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        let racks = topology.members();
        let many = racks.len() as u32;
        let rack = racks.iter().position(|members| members.contains(&me)).unwrap_or(0);
        let largest = racks.iter().map(Vec::len).max().unwrap_or(1) as u32;
        let (leader, members) = (racks[rack][0], &racks[rack]);
        // Up in the rack, around and back among the leaders, down in the rack.
        let around = many - 1;
        let inside = |peer, member: u32| Link {
            peer,
            up: member - 1,
            down: largest + 2 * around + member - 1,
        };
        let blocks = split(count, many.into());
        let order = |_, block| block;
        build::reduce_and_return_together(topology.participants(), me, blocks, order, |block| {
            if me != leader {
                let member = build::position(members, me);
                return Place { parent: Some(inside(leader, member)), children: Vec::new() };
            }
            let mut children: Vec<Link> =
                (1..).zip(&members[1..]).map(|(member, &peer)| inside(peer, member)).collect();
            // The block starts at the rack of its number and ends at the rack before it.
            let start = block % many;
            let along = (rack as u32 + many - start) % many;
            let link = |other: u32, below: u32| Link {
                peer: racks[((other + start) % many) as usize][0],
                up: largest + below,
                down: largest + 2 * around - 1 - below,
            };
            children.extend(along.checked_sub(1).map(|child| link(child, child)));
            let parent = (along + 1 < many).then(|| link(along + 1, along));
            Place { parent, children }
        })
    }

    /// 2rα + 2(w−1 + (r−1)/r)·S·β, for racks of w.
    fn allreduce_cost(&self, _: &Spec, _: &Topology, cluster: &Cluster) -> Shape {
        let &Cluster { racks, largest, smallest, .. } = cluster;
        let ring = 2.0 * (racks - 1.0) / racks;
        let inside = if largest > 1.0 { 2.0 } else { 0.0 };
        Shape {
            line: 1.5 * (largest - 1.0) + ring,
            senders: (largest - 1.0) as u32,
            burst: largest - 1.0,
            crossing: if racks > 1.0 { 2.0 } else { 0.0 },
            // One node of each rack.
            uplink: cluster.uplink(ring).max(ring / smallest),
            reduced: largest - 1.0 + ring / 2.0,
            messages: 2.0 * (racks - 1.0) + largest - 1.0,
            blocks: racks,
            ..cluster.hops(inside + 2.0 * (racks - 1.0), 2.0 * (racks - 1.0))
        }
    }

    fn like(&self) -> Option<&'static dyn Definition> {
        Some(&hierarchical::Hierarchical)
    }
}
