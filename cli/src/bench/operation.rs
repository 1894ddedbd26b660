//! The collectives that are measured: what each one calls, what it must come to, and what bounds
//! it. A further one is a variant of [`Operation`] and an arm of each `match` here.

use gradwire_proto::ReduceOp;
use gradwire_worker::{AllreduceOptions, BroadcastOptions, GradwireError, Session, Tensor};

use super::{
    args::Memory,
    value::{Pattern, Value},
};

/// A collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// Everybody gets the reduction.
    Allreduce(ReduceOp),
    /// Everybody gets the root's tensor.
    Broadcast {
        /// Whose.
        root: u32,
    },
    /// Nobody goes on before everybody has come.
    Barrier,
}

/// What a plain program would do with the ranks' tensors in memory that all of them see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plain {
    /// Read all, reduce, write the result over all.
    Reduce(ReduceOp),
    /// Read one, write the others.
    Copy,
}

/// A tensor where it was asked to lie.
#[derive(Debug)]
pub enum Place<T: Value> {
    /// In shared memory.
    Arena(Tensor<T>),
    /// In memory of this process.
    Ordinary(Vec<T>),
}

impl<T: Value> Place<T> {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn zeros(
        session: &Session,
        memory: Memory,
        elements: usize,
    ) -> Result<Self, GradwireError> {
        Ok(match memory {
            Memory::Arena => Self::Arena(session.zeros(&[elements])?),
            Memory::Ordinary => Self::Ordinary(vec![T::whole(0); elements]),
        })
    }

    /// The elements.
    pub fn as_slice(&self) -> &[T] {
        match self {
            Self::Arena(tensor) => tensor.as_slice(),
            Self::Ordinary(values) => values,
        }
    }

    /// The elements, to be changed.
    pub fn as_mut_slice(&mut self) -> &mut [T] {
        match self {
            Self::Arena(tensor) => tensor.as_mut_slice(),
            Self::Ordinary(values) => values,
        }
    }
}

impl Operation {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Barrier => "barrier",
        }
    }

    /// What is special about it, for a heading.
    pub fn detail(self) -> String {
        match self {
            Self::Allreduce(op) => op.name().to_owned(),
            Self::Broadcast { root } => format!("from rank {root}"),
            Self::Barrier => String::new(),
        }
    }

    /// Calls it, and waits for it.
    ///
    /// # Errors
    /// What the session says.
    pub fn call<T: Value>(
        self,
        session: &Session,
        name: &str,
        place: &mut Place<T>,
    ) -> Result<(), GradwireError> {
        match self {
            Self::Allreduce(op) => {
                let options = AllreduceOptions::named(name).op(op);
                match place {
                    Place::Arena(tensor) => session.allreduce(tensor, options),
                    Place::Ordinary(values) => session.allreduce_slice(values, options),
                }
            }
            Self::Broadcast { root } => {
                let options = BroadcastOptions::from_rank(root).name(name);
                match place {
                    Place::Arena(tensor) => session.broadcast(tensor, options),
                    Place::Ordinary(values) => session.broadcast_slice(values, options),
                }
            }
            Self::Barrier => session.barrier(),
        }
    }

    /// What a rank's tensor holds before; `salt` tells several tensors apart.
    pub fn before<T: Value>(self, rank: u32, ranks: u32, salt: usize) -> Pattern<T> {
        match self {
            Self::Allreduce(op) => Pattern::contribution(op, rank, ranks, salt),
            Self::Broadcast { .. } | Self::Barrier => Pattern::own(rank),
        }
    }

    /// What a rank's tensor must hold after.
    pub fn after<T: Value>(self, rank: u32, ranks: u32, salt: usize) -> Pattern<T> {
        match self {
            Self::Allreduce(op) => Pattern::reduction(op, ranks, salt),
            Self::Broadcast { root } => Pattern::own(root),
            Self::Barrier => Pattern::own(rank),
        }
    }

    /// What the algorithm bandwidth is multiplied by to compare with a link's (nccl-tests,
    /// `doc/PERFORMANCE.md`): how often each byte of the tensor must pass each rank's link.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::Allreduce(_) => 2.0 * (n - 1.0) / n,
            Self::Broadcast { .. } => 1.0,
            Self::Barrier => 0.0,
        }
    }

    /// How often each byte of the tensor must pass the line of each of `nodes` in one direction,
    /// where one daemon of a node speaks for all of its ranks.
    pub fn line_factor(self, nodes: u32) -> f64 {
        let nodes_apart = if nodes > 1 { 1.0 } else { 0.0 };
        match self {
            Self::Allreduce(_) => self.bus_factor(nodes),
            Self::Broadcast { .. } => nodes_apart,
            Self::Barrier => 0.0,
        }
    }

    /// The plain program that does the same within a node; none for what moves no bytes.
    pub fn plain(self) -> Option<Plain> {
        match self {
            Self::Allreduce(op) => Some(Plain::Reduce(op)),
            Self::Broadcast { .. } => Some(Plain::Copy),
            Self::Barrier => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factors_are_those_of_nccl_tests() {
        let sum = Operation::Allreduce(ReduceOp::Sum);
        assert_eq!([1, 2, 4].map(|n| sum.bus_factor(n)), [0.0, 1.0, 1.5]);
        assert_eq!([1, 2, 4].map(|n| sum.line_factor(n)), [0.0, 1.0, 1.5]);
        let root = Operation::Broadcast { root: 0 };
        assert_eq!([1, 4].map(|n| root.bus_factor(n)), [1.0, 1.0]);
        assert_eq!([1, 4].map(|n| root.line_factor(n)), [0.0, 1.0]);
        assert_eq!(Operation::Barrier.plain(), None);
    }
}
