//! Builds the piece of an operation.

use std::{sync::Arc, time::Instant};

use gradwire_kernels::{Combine, Finish, Form};
use gradwire_proto::{
    Collective, Compression, DType, Failure, FailureKind, ReduceOp, Request, Sequence,
};

use super::plans::Plans;
use crate::{
    data::piece::{Piece, PieceSegment},
    model::{
        operation::{FlowRange, Operation, OperationSegment},
        tensor::{AllocationRequest, QueuedTensor},
    },
    queue::TensorQueue,
};

/// Builds pieces.
#[derive(Debug)]
pub(super) struct Builder {
    pub(super) queue: Arc<TensorQueue>,
    pub(super) plans: Plans,
    /// The compression of the job.
    pub(super) compression: Compression,
}

fn protocol(sequence: Sequence, what: impl std::fmt::Display) -> Failure {
    let what = format!("the coordinator ordered operation {sequence}, but {what}");
    Failure::new(FailureKind::Protocol, what)
}

/// The arithmetic on the elements of a piece.
struct Arithmetic {
    combine: Combine,
    prescale: f64,
    finish: Finish,
}

impl Arithmetic {
    fn of(request: &Request, contributors: u32) -> Self {
        let Request { dtype, reduce_op: op, prescale, postscale, .. } = *request;
        match request.collective {
            // f32 holds the sum of the other short floats for any possible number of ranks. bf16
            // has the range of f32. So an average of bf16 is a sum of parts, which is never too
            // large.
            Collective::Allreduce | Collective::Reduce | Collective::ReduceScatter
                if op == ReduceOp::Average && dtype == DType::Bf16 =>
            {
                let op = ReduceOp::Sum;
                Self {
                    combine: Combine { dtype, op },
                    prescale: prescale / f64::from(contributors.max(1)),
                    finish: Finish { dtype, op, contributors, postscale },
                }
            }
            Collective::Allreduce | Collective::Reduce | Collective::ReduceScatter => Self {
                combine: Combine { dtype, op },
                prescale,
                finish: Finish { dtype, op, contributors, postscale },
            },
            _ => Self::copy(dtype),
        }
    }

    /// One input is copied bit for bit, whatever its type. The widest words that fit it are the
    /// fastest.
    fn copy(dtype: DType) -> Self {
        let dtype = match dtype.size() {
            1 => DType::U8,
            2 => DType::F16,
            4 => DType::I32,
            _ => DType::I64,
        };
        let combine = Combine { dtype, op: ReduceOp::Sum };
        Self { combine, prescale: 1.0, finish: Finish::none(dtype) }
    }
}

impl Builder {
    /// The piece of an operation, and the allocations that it needs before it can run.
    ///
    /// # Errors
    /// A [`Failure`] when the order does not fit what was announced: the coordinator and this node
    /// disagree on the past, which can't be repaired.
    pub(super) fn build(
        &self,
        operation: Operation,
    ) -> Result<(Piece, Vec<AllocationRequest>), Failure> {
        let Operation { sequence, request, spec, route, members, segments } = operation;
        let element = request.dtype.size() as u64;
        let wire = self.compression.between_nodes(&request);
        let mut wanted = Vec::new();
        let mut start = 0;
        let mut parts = Vec::with_capacity(segments.len());
        for segment in segments {
            let tensor = self.tensor(sequence, &segment, &mut wanted)?;
            let part = piece_segment(tensor, segment.range, element, start).ok_or_else(|| {
                let name = &segment.tensor.name;
                protocol(sequence, format!("it moves more of '{name}' than there is"))
            })?;
            start += part.bytes;
            parts.push(part);
        }
        let (plan, nodes) = self
            .plans
            .of(route, &members.nodes, spec, start / element, wire.size() as u64)
            .ok_or_else(|| protocol(sequence, "this node takes no part in its schedule"))?;
        let Arithmetic { combine, prescale, finish } =
            Arithmetic::of(&request, members.ranks.len() as u32);
        let piece = Piece {
            sequence,
            combine,
            prescale,
            finish,
            wire: Form::of(wire).filter(|_| wire != request.dtype),
            segments: parts,
            bytes: start,
            plan,
            nodes,
            ordered: Instant::now(),
        };
        Ok((piece, wanted))
    }

    fn tensor(
        &self,
        sequence: Sequence,
        segment: &OperationSegment,
        wanted: &mut Vec<AllocationRequest>,
    ) -> Result<Arc<QueuedTensor>, Failure> {
        let name = &segment.tensor.name;
        let tensor = self
            .queue
            .announced(&segment.tensor)
            .ok_or_else(|| protocol(sequence, format!("'{name}' is not in flight here")))?;
        let more = tensor
            .agree(&segment.agreement)
            .map_err(|_| protocol(sequence, format!("it is not what was asked of '{name}'")))?;
        wanted.extend(more);
        Ok(tensor)
    }
}

/// One segment of a piece; `None` if it is more than is left of the tensor.
fn piece_segment(
    tensor: Arc<QueuedTensor>,
    range: Option<FlowRange>,
    element: u64,
    start: u64,
) -> Option<PieceSegment> {
    let Some(range) = range else {
        return tensor.order(1).then(|| PieceSegment::nothing(tensor, start));
    };
    let bytes = range.count * element;
    tensor.order(bytes).then(|| PieceSegment {
        part: range.part,
        sources: tensor.at(range.source),
        targets: tensor.at(range.target),
        source_offset: range.source_offset * element,
        target_offset: range.target_offset * element,
        tensor,
        start,
        bytes,
    })
}
