//! Mesh: along the rows of a [grid](crate::algorithms::parts::grid) from both ends towards each
//! owner, then along its columns (Barnett et al., "Global Combine Algorithms for 2-D Meshes with
//! Wormhole Routing", JPDC 1995).
//!
//! A line is a ring without the closing link: at most 2Σ(p−1) messages, too, but only between
//! neighbours on a mesh. All nodes together send the same number of bytes, but an inner node of a
//! line passes results on to both sides: on A×B it sends up to 2(1 + 1/A) times the piece.
//!
//! A broadcast or a reduction to one participant goes along the tree of a block that the root owns.

use super::prelude::*;

pub(super) struct Mesh;

fn grid(spec: &Spec, topology: &Topology) -> Grid {
    Grid::new(spec, 2, Along::Line, topology)
}

impl Definition for Mesh {
    fn about(&self) -> About {
        About {
            idea: "along the rows of a grid from both ends towards each owner, then along \
                   its columns",
            cost: "2(A+B−2)α + 2(1+1/A)·S·β",
            when: "nodes with links to their neighbours only",
            source: "Barnett et al., \"Global Combine Algorithms for 2-D Meshes with Wormhole \
                     Routing\", 1995",
        }
    }

    fn parameters(&self) -> &'static [Parameter] {
        &[TWO]
    }

    fn allreduce(&self, spec: &Spec, topology: &Topology, me: u32, count: u64) -> Schedule {
        grid(spec, topology).allreduce(topology, me, count)
    }

    /// Up to 2Σ(p−1)·α + 2(1+1/A)·S·β for A×B.
    fn allreduce_cost(&self, spec: &Spec, topology: &Topology, cluster: &Cluster) -> Shape {
        let grid = grid(spec, topology);
        Shape { line: sent_by_busiest(&grid.sizes), ..grid.cost(cluster) }
    }

    fn rooted(&self, spec: &Spec, topology: &Topology, root: u32, me: u32, count: u64) -> Rooted {
        let order = topology.order();
        let (at, owner) = (build::position(&order, me), build::position(&order, root));
        let grid = grid(spec, topology);
        Rooted::new(split(count, trees::blocks_for(count)), move |block| {
            let delayed =
                |link: Link| Link { up: block + link.up, down: block + link.down, ..link };
            let place = grid.place(at, owner, |position| order[position as usize]);
            Place {
                parent: place.parent.map(delayed),
                children: place.children.into_iter().map(delayed).collect(),
            }
        })
    }

    /// Up to Σ(p−1)·α + 2d·S·β, from the middle of d dimensions.
    fn broadcast_cost(
        &self,
        spec: &Spec,
        topology: &Topology,
        _root: u32,
        cluster: &Cluster,
    ) -> Shape {
        let grid = grid(spec, topology);
        // The first node of each line has one neighbour.
        let neighbours = grid.sizes.len() as f64;
        Shape {
            line: neighbours,
            uplink: cluster.uplink(cluster.largest.min(f64::from(grid.sizes[0]))),
            messages: neighbours,
            ..cluster.hops(grid.links(), cluster.racks - 1.0)
        }
    }
}

/// What the busiest node sends, in units of the piece. Along a line of p it sends (p−1)/p of what
/// the line reduces, and passes on (p+1)/p of it, to both sides; on a line of two, a half each
/// time.
fn sent_by_busiest(sizes: &[u32]) -> f64 {
    let mut left = 1.0;
    let mut sent = 0.0;
    for &size in sizes.iter().filter(|&&size| size > 1) {
        sent += if size == 2 { left } else { 2.0 * left };
        left /= f64::from(size);
    }
    sent
}
