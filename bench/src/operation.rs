//! The measured collectives: their names, their calls, and how their bandwidth is reported. A new
//! one needs a variant of [`Operation`] and an arm in each `match` here and in
//! [`flow`](super::flow).
//!
//! Sizes are those of nccl-tests: for an allgather and a gather the whole result, for a
//! reducescatter and a scatter the tensor that is divided, for all others the tensor of one rank.

use clap::ValueEnum;
use gradwire_proto::{
    Collective, DType, ReduceOp, Request, Shape,
    compression::{GROUP, GROUP_BYTES},
};
use gradwire_worker::{
    AllgatherOptions, AllreduceOptions, AlltoallOptions, BroadcastOptions, Buffer, GatherOptions,
    GradwireError, ReceiveOptions, ReduceOptions, ReduceScatterOptions, ScatterOptions,
    SendOptions, Session,
};
use serde::Serialize;

/// A collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum Operation {
    /// Every rank gets the reduction.
    Allreduce(ReduceOp),
    /// The root gets the reduction.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets it.
        root: u32,
    },
    /// Every rank gets the root's tensor.
    Broadcast {
        /// The rank whose tensor it is.
        root: u32,
    },
    /// Every rank gets the tensors of all ranks.
    Allgather,
    /// The root gets the tensors of all ranks.
    Gather {
        /// The rank that gets them.
        root: u32,
    },
    /// Every rank gets a share of the root's tensor.
    Scatter {
        /// The rank whose tensor it is.
        root: u32,
    },
    /// Every rank gets a share of the reduction.
    #[strum(serialize = "reducescatter")]
    ReduceScatter(ReduceOp),
    /// Every rank gets a share of every rank's tensor.
    Alltoall,
    /// Every rank sends to the next rank, and receives from the previous one.
    SendReceive,
    /// No rank continues before all ranks have called it.
    Barrier,
}

/// The memory of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// Shared memory: tensors are not copied.
    Arena,
    /// The process's own memory: tensors are copied into shared memory and back.
    Ordinary,
}

/// A tensor, in either kind of memory.
#[derive(Debug)]
pub enum Place {
    /// In shared memory.
    Arena(Buffer),
    /// In the process's own memory.
    Ordinary(Vec<u8>),
}

impl Place {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn zeros(
        session: &Session,
        memory: Memory,
        dtype: DType,
        elements: usize,
    ) -> Result<Self, GradwireError> {
        Ok(match memory {
            Memory::Arena => Self::Arena(session.buffer(dtype, &[elements])?),
            Memory::Ordinary => Self::Ordinary(vec![0; elements * dtype.size()]),
        })
    }

    /// The bytes of the elements.
    pub fn bytes(&self) -> &[u8] {
        match self {
            Self::Arena(buffer) => buffer.bytes(),
            Self::Ordinary(bytes) => bytes,
        }
    }

    /// The bytes of the elements, mutable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Arena(buffer) => buffer.bytes_mut(),
            Self::Ordinary(bytes) => bytes,
        }
    }
}

/// The tensors of one rank.
#[derive(Debug)]
pub struct Tensors {
    /// The element type of both.
    pub dtype: DType,
    /// The input.
    pub input: Place,
    /// The result, if it is a separate tensor.
    pub output: Option<Place>,
}

impl Tensors {
    /// The bytes of the rank's result.
    pub fn result(&self) -> &[u8] {
        self.output.as_ref().unwrap_or(&self.input).bytes()
    }

    /// Makes a call that works in place. A tensor in ordinary memory is copied to shared memory for
    /// it.
    fn in_place(
        &mut self,
        session: &Session,
        call: impl FnOnce(&mut Buffer) -> Result<(), GradwireError>,
    ) -> Result<(), GradwireError> {
        match &mut self.input {
            Place::Arena(buffer) => call(buffer),
            Place::Ordinary(bytes) => {
                let mut copy = session.buffer_from(self.dtype, bytes)?;
                call(&mut copy)?;
                bytes.copy_from_slice(copy.bytes());
                Ok(())
            }
        }
    }

    /// Makes a call that may return a new tensor. If tensors are in ordinary memory, the result is
    /// copied there.
    fn apart(
        &mut self,
        session: &Session,
        call: impl FnOnce(&Buffer) -> Result<Option<Buffer>, GradwireError>,
    ) -> Result<(), GradwireError> {
        match &self.input {
            Place::Arena(buffer) => {
                // So that the new result can reuse this memory.
                self.output = None;
                self.output = call(buffer)?.map(Place::Arena);
            }
            Place::Ordinary(bytes) => {
                let copy = session.buffer_from(self.dtype, bytes)?;
                let result = call(&copy)?;
                let result = result.as_ref().map(Buffer::bytes).unwrap_or_default();
                match &mut self.output {
                    Some(Place::Ordinary(bytes)) => {
                        bytes.clear();
                        bytes.extend_from_slice(result);
                    }
                    output => *output = Some(Place::Ordinary(result.to_vec())),
                }
            }
        }
        Ok(())
    }
}

impl Operation {
    /// The name of the wire format between nodes; that of large tensors if it depends on the size.
    pub fn wire(self, session: &Session, dtype: DType) -> &'static str {
        let compression = session.compression();
        match self {
            Self::Allreduce(op)
                if session.nodes().len() > 1
                    && compression.quantizes(Collective::Allreduce, dtype, op, u64::MAX) =>
            {
                compression.name()
            }
            _ => self.wire_dtype(session, dtype).name(),
        }
    }

    /// The wire type between nodes, for tensors that are not quantized.
    fn wire_dtype(self, session: &Session, dtype: DType) -> DType {
        // This is the same for all collectives that reduce.
        let travels = |op| {
            session.compression().between_nodes(&Request::allreduce(dtype, Shape::default(), op))
        };
        self.reduction().filter(|_| session.nodes().len() > 1).map_or(dtype, travels)
    }

    /// The bytes of a tensor on the wire between nodes.
    pub fn wire_bytes(self, session: &Session, dtype: DType, elements: usize) -> f64 {
        let bytes = (elements * dtype.size()) as u64;
        match self {
            Self::Allreduce(op)
                if session.compression().quantizes(Collective::Allreduce, dtype, op, bytes) =>
            {
                (elements.div_ceil(GROUP) * GROUP_BYTES) as f64
            }
            _ => (elements * self.wire_dtype(session, dtype).size()) as f64,
        }
    }

    /// The name of the collective.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// The reduction or the root, for a heading.
    pub fn detail(self) -> String {
        match self {
            Self::Allreduce(op) | Self::ReduceScatter(op) => op.name().to_owned(),
            Self::Reduce { op, root } => format!("{op} to rank {root}"),
            Self::Broadcast { root } | Self::Scatter { root } => format!("from rank {root}"),
            Self::Gather { root } => format!("to rank {root}"),
            Self::SendReceive => "to the next rank".to_owned(),
            Self::Allgather | Self::Alltoall | Self::Barrier => String::new(),
        }
    }

    /// The root, if any.
    pub fn root(self) -> Option<u32> {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// Sizes are multiples of this number of elements. If a tensor is divided, each rank has an
    /// equal share of at least one element.
    pub fn granule(self, ranks: u32) -> usize {
        match self {
            Self::Allgather
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter(_)
            | Self::Alltoall => ranks.max(1) as usize,
            _ => 1,
        }
    }

    /// Whether the result replaces the input.
    pub fn is_in_place(self) -> bool {
        matches!(
            self,
            Self::Allreduce(_) | Self::Reduce { .. } | Self::Broadcast { .. } | Self::Barrier
        )
    }

    /// Makes the call and waits for its end. `elements` is the size.
    ///
    /// # Errors
    /// The error of the session.
    pub fn call(
        self,
        session: &Session,
        name: &str,
        elements: usize,
        tensors: &mut Tensors,
    ) -> Result<(), GradwireError> {
        let dtype = tensors.dtype;
        let (rank, ranks) = (session.rank(), session.size().max(1));
        match self {
            Self::Allreduce(op) => {
                let options = AllreduceOptions::named(name).op(op);
                match &mut tensors.input {
                    Place::Arena(buffer) => session.allreduce(buffer, options),
                    Place::Ordinary(bytes) => session.allreduce_bytes(dtype, bytes, options),
                }
            }
            Self::Broadcast { root } => {
                let options = BroadcastOptions::from_rank(root).name(name);
                match &mut tensors.input {
                    Place::Arena(buffer) => session.broadcast(buffer, options),
                    Place::Ordinary(bytes) => session.broadcast_bytes(dtype, bytes, options),
                }
            }
            Self::Reduce { op, root } => {
                let options = ReduceOptions::to_rank(root).op(op).name(name);
                tensors.in_place(session, |buffer| session.reduce(buffer, options))
            }
            Self::Allgather => tensors.apart(session, |buffer| {
                let gathered = session.allgather(buffer, AllgatherOptions::named(name))?;
                Ok(Some(gathered.tensor))
            }),
            Self::Gather { root } => tensors.apart(session, |buffer| {
                let options = GatherOptions::to_rank(root).name(name);
                Ok(session.gather(buffer, options)?.map(|gathered| gathered.tensor))
            }),
            Self::Scatter { root } => tensors.apart(session, |buffer| {
                let share = [elements / ranks as usize];
                let options = ScatterOptions::from_rank(root).dtype(dtype).expecting(&share);
                let options = options.name(name);
                session.scatter(Some(buffer).filter(|_| rank == root), options).map(Some)
            }),
            Self::ReduceScatter(op) => tensors.apart(session, |buffer| {
                session.reducescatter(buffer, ReduceScatterOptions::named(name).op(op)).map(Some)
            }),
            Self::Alltoall => tensors.apart(session, |buffer| {
                let gathered = session.alltoall(buffer, AlltoallOptions::named(name))?;
                Ok(Some(gathered.tensor))
            }),
            Self::SendReceive => tensors.apart(session, |buffer| {
                // Both at the same time: if all ranks sent first, they would wait for each other.
                let from = (rank + ranks - 1) % ranks;
                let options = ReceiveOptions::from_rank(from).dtype(dtype).expecting(&[elements]);
                let received = session.receive_async(options)?;
                session.send(buffer, SendOptions::to_rank((rank + 1) % ranks))?;
                received.wait().map(Some)
            }),
            Self::Barrier => session.barrier(),
        }
    }

    /// The factor between the algorithm bandwidth and that of a link, for comparisons (nccl-tests,
    /// `doc/PERFORMANCE.md`; for gather, scatter and send-receive its source). It is how often each
    /// byte of the size must pass each rank's link.
    pub fn bus_factor(self, ranks: u32) -> f64 {
        let n = f64::from(ranks.max(1));
        match self {
            Self::Allreduce(_) => 2.0 * (n - 1.0) / n,
            Self::Reduce { .. } | Self::Broadcast { .. } | Self::SendReceive => 1.0,
            Self::Allgather
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter(_)
            | Self::Alltoall => (n - 1.0) / n,
            Self::Barrier => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factors_are_those_of_nccl_tests() {
        let sum = ReduceOp::Sum;
        for (operation, factors) in [
            (Operation::Allreduce(sum), [0.0, 1.0, 1.5]),
            (Operation::Reduce { op: sum, root: 0 }, [1.0; 3]),
            (Operation::Broadcast { root: 0 }, [1.0; 3]),
            (Operation::Allgather, [0.0, 0.5, 0.75]),
            (Operation::Gather { root: 0 }, [0.0, 0.5, 0.75]),
            (Operation::Scatter { root: 0 }, [0.0, 0.5, 0.75]),
            (Operation::ReduceScatter(sum), [0.0, 0.5, 0.75]),
            (Operation::Alltoall, [0.0, 0.5, 0.75]),
            (Operation::SendReceive, [1.0; 3]),
            (Operation::Barrier, [0.0; 3]),
        ] {
            assert_eq!([1, 2, 4].map(|n| operation.bus_factor(n)), factors, "{operation:?}");
        }
    }
}
