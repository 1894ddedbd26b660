//! The data that a collective moves: which range of which tensor goes where in which result. The
//! checks, the baseline and the time on the line follow from it. Pure.
//!
//! The flows are defined independently of those in the daemons, so that mistakes there are noticed.

use gradwire_proto::ReduceOp;

use super::operation::Operation;

/// A range that is moved. Offsets and count are in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The rank whose tensor it comes from; `None` for the reduction of all.
    pub from: Option<u32>,
    /// The rank whose result it goes to; `None` for all ranks.
    pub to: Option<u32>,
    /// Its first element in the input.
    pub source: usize,
    /// Its first element in the result.
    pub target: usize,
    /// The number of elements.
    pub count: usize,
}

impl Operation {
    /// All flows between `ranks` ranks. `elements` is the size.
    pub fn flows(self, ranks: u32, elements: usize) -> Box<dyn Iterator<Item = Flow>> {
        let whole = Flow { from: None, to: None, source: 0, target: 0, count: elements };
        let share = elements / ranks.max(1) as usize;
        let part = Flow { count: share, ..whole };
        let at = move |rank: u32| rank as usize * share;
        match self {
            Self::Allreduce(_) => Box::new([whole].into_iter()),
            Self::Reduce { root, .. } => Box::new([Flow { to: Some(root), ..whole }].into_iter()),
            Self::Broadcast { root } => Box::new([Flow { from: Some(root), ..whole }].into_iter()),
            Self::Allgather => Box::new((0..ranks).map(move |rank| Flow {
                from: Some(rank),
                target: at(rank),
                ..part
            })),
            Self::Gather { root } => Box::new((0..ranks).map(move |rank| Flow {
                from: Some(rank),
                to: Some(root),
                target: at(rank),
                ..part
            })),
            Self::Scatter { root } => Box::new((0..ranks).map(move |rank| Flow {
                from: Some(root),
                to: Some(rank),
                source: at(rank),
                ..part
            })),
            Self::ReduceScatter(_) => Box::new((0..ranks).map(move |rank| Flow {
                to: Some(rank),
                source: at(rank),
                ..part
            })),
            Self::Alltoall => Box::new((0..ranks).flat_map(move |from| {
                (0..ranks).map(move |to| Flow {
                    from: Some(from),
                    to: Some(to),
                    source: at(to),
                    target: at(from),
                    ..part
                })
            })),
            Self::SendReceive => Box::new((0..ranks).map(move |rank| Flow {
                from: Some(rank),
                to: Some((rank + 1) % ranks),
                ..whole
            })),
            Self::Barrier => Box::new(std::iter::empty()),
        }
    }

    /// The number of elements that a rank contributes.
    pub fn input(self, rank: u32, ranks: u32, elements: usize) -> usize {
        let share = elements / ranks.max(1) as usize;
        match self {
            Self::Allgather | Self::Gather { .. } => share,
            Self::Scatter { root } if root != rank => 0,
            Self::Barrier => 0,
            _ => elements,
        }
    }

    /// The number of elements in the result of a rank.
    pub fn output(self, rank: u32, ranks: u32, elements: usize) -> usize {
        let mine = self.flows(ranks, elements).filter(|flow| flow.to.is_none_or(|to| to == rank));
        mine.map(|flow| flow.target + flow.count).max().unwrap_or_default()
    }

    /// How often each byte of the size must pass the line of the busiest node in one direction.
    /// `slots` is the number of ranks of each node. One daemon per node sends and receives for all
    /// its ranks. No algorithm needs less.
    pub fn line_factor(self, slots: &[u32]) -> f64 {
        let ranks: u32 = slots.iter().sum();
        let nodes = slots.len() as f64;
        if slots.len() < 2 {
            return 0.0;
        }
        let node_of: Vec<usize> =
            slots.iter().enumerate().flat_map(|(i, &n)| vec![i; n as usize]).collect();
        let node = |rank: Option<u32>| rank.and_then(|rank| node_of.get(rank as usize).copied());
        // A thousand elements for each rank; only the ratio matters.
        let elements = 1000 * ranks as usize;
        let (mut out, mut into) = (vec![0.0; slots.len()], vec![0.0; slots.len()]);
        for flow in self.flows(ranks, elements) {
            let count = flow.count as f64;
            match (node(flow.from), node(flow.to)) {
                // Patarasuk and Yuan, JPDC 2009: all nodes send and receive this much.
                (None, None) => return 2.0 * (nodes - 1.0) / nodes,
                // The contributions of a node's ranks are reduced there and leave it once. The
                // reduction arrives once.
                (None, Some(to)) => {
                    out.iter_mut()
                        .enumerate()
                        .filter(|(i, _)| *i != to)
                        .for_each(|(_, n)| *n += count);
                    into[to] += count;
                }
                (Some(from), None) => {
                    into.iter_mut()
                        .enumerate()
                        .filter(|(i, _)| *i != from)
                        .for_each(|(_, n)| *n += count);
                    out[from] += count;
                }
                (Some(from), Some(to)) if from != to => {
                    out[from] += count;
                    into[to] += count;
                }
                (Some(_), Some(_)) => {}
            }
        }
        out.into_iter().chain(into).fold(0.0, f64::max) / elements as f64
    }

    /// The reduction, if any.
    pub fn reduction(self) -> Option<ReduceOp> {
        match self {
            Self::Allreduce(op) | Self::ReduceScatter(op) | Self::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Operation; 10] = [
        Operation::Allreduce(ReduceOp::Sum),
        Operation::Reduce { op: ReduceOp::Sum, root: 1 },
        Operation::Broadcast { root: 1 },
        Operation::Allgather,
        Operation::Gather { root: 1 },
        Operation::Scatter { root: 1 },
        Operation::ReduceScatter(ReduceOp::Sum),
        Operation::Alltoall,
        Operation::SendReceive,
        Operation::Barrier,
    ];

    #[test]
    fn every_result_is_covered_once() {
        for operation in ALL {
            for ranks in [2, 3, 5] {
                let elements = operation.granule(ranks) * 4;
                for rank in 0..ranks {
                    let mut times = vec![0; operation.output(rank, ranks, elements)];
                    for flow in operation.flows(ranks, elements) {
                        let from = flow.from.unwrap_or(0);
                        assert!(flow.source + flow.count <= operation.input(from, ranks, elements));
                        if flow.to.is_none_or(|to| to == rank) {
                            times[flow.target..][..flow.count].iter_mut().for_each(|n| *n += 1);
                        }
                    }
                    assert!(times.iter().all(|n| *n == 1), "{operation:?} of {ranks}: {times:?}");
                }
            }
        }
    }

    #[test]
    fn the_line_factor_is_right() {
        let even = ALL.map(|operation| operation.line_factor(&[2, 2]));
        assert_eq!(even, [1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 0.0]);
        let four = ALL.map(|operation| operation.line_factor(&[1, 1, 1, 1]));
        assert_eq!(four, [1.5, 1.0, 1.0, 0.75, 0.75, 0.75, 0.75, 0.75, 1.0, 0.0]);
        // In an allgather the smaller node receives most. The root's node receives what the others
        // have.
        let uneven = ALL.map(|operation| operation.line_factor(&[1, 3]));
        assert_eq!(uneven, [1.0, 1.0, 1.0, 0.75, 0.25, 0.25, 0.75, 0.75, 1.0, 0.0]);
        assert_eq!(ALL.map(|operation| operation.line_factor(&[4])), [0.0; 10]);
    }
}
