//! Builds the piece of an operation.

use std::{sync::Arc, time::Instant};

use gradwire_collectives::{Roles, Section};
use gradwire_kernels::{Combine, Finish, Form, Quantized};
use gradwire_proto::{
    Collective, Compression, DType, Failure, FailureKind, Flow, ReduceOp, Request, Sequence,
    compression::{GROUP, GROUP_BYTES},
};

use super::plans::{Planned, Plans};
use crate::{
    data::{
        feedback::Feedback,
        piece::{NAMES, Piece, PieceSegment, Purpose, Wire},
    },
    metrics,
    model::{
        agreement::Agreement,
        operation::{Operation, OperationSegment, PartRange},
        tensor::{AllocationRequest, QueuedTensor},
    },
    queue::TensorQueue,
};

/// Builds pieces from operations.
#[derive(Debug)]
pub(super) struct Builder {
    pub(super) queue: Arc<TensorQueue>,
    pub(super) plans: Plans,
    pub(super) compression: Compression,
    pub(super) feedback: Feedback,
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
            // f32 can hold the sum of other short floats for any possible number of ranks, but bf16
            // has the range of f32. So an average of bf16 is a sum of scaled parts, which does not
            // overflow.
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

    /// A single input is copied bit for bit, whatever its type. The widest words that fit are the
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
    /// A [`Failure`] if the order does not fit the announcements: the coordinator and this node
    /// disagree on the past, which can't be repaired.
    pub(super) fn build(
        &self,
        operation: Operation,
    ) -> Result<(Piece, Vec<AllocationRequest>), Failure> {
        let nodes = operation.nodes().clone();
        let Operation { sequence, request, spec, route, members, segments, quantized, chunk } =
            operation;
        let element = request.dtype.size() as u64;
        let wire = self.wire(&request, quantized);
        let mut wanted = Vec::new();
        let mut content = Content::default();
        let mut others = Vec::new();
        for segment in segments {
            if segment.agreement.members.here.is_empty() {
                // This node is a server and reduces for others. One name more than texts list.
                let is_new = others.last() != Some(&segment.tensor.name);
                if is_new && others.len() <= NAMES {
                    others.push(segment.tensor.name.clone());
                }
                if let Some(range) = segment.range {
                    content.add(None, &segment.agreement, range);
                }
                continue;
            }
            let tensor = self.tensor(sequence, &segment, &mut wanted)?;
            let elements = segment.range.map_or(0, |range| range.count);
            if !tensor.order(elements.max(1)) {
                let name = &segment.tensor.name;
                return Err(protocol(
                    sequence,
                    format!("it moves more elements of '{name}' than exist"),
                ));
            }
            if let Some(range) = segment.range {
                content.add(Some(&tensor), &segment.agreement, range);
            }
            content.tensors.push((tensor, elements));
        }
        let Content { mut sections, ranges, tensors } = content;
        let (unit, per_unit) = match wire {
            Wire::Ranks => (element, 1),
            Wire::Partial(form) => (form.size() as u64, 1),
            Wire::Quantized(_) => (GROUP_BYTES as u64, GROUP as u64),
        };
        let all: u64 = sections.iter().map(|section| section.count).sum();
        // All quantized elements have the same roles, so they are one section.
        sections.iter_mut().for_each(|section| section.count = section.count.div_ceil(per_unit));
        let Planned { plan, nodes, starts, elements } = self
            .plans
            .of(route, &nodes, spec, sections, unit)
            .ok_or_else(|| protocol(sequence, "this node takes no part in its schedule"))?;
        let elements = if per_unit == 1 { elements } else { all };
        let now = Instant::now();
        let keep = |range: &Range| {
            let key = &range.tensor.key;
            let errors = self.feedback.of(key, range.part, range.flow.count, now)?;
            Some((errors, range.offset))
        };
        let is_quantized = matches!(wire, Wire::Quantized(_)) && nodes.len() > 1;
        let segment = |range: Range| {
            let errors = if is_quantized { keep(&range) } else { None };
            PieceSegment { errors, ..range.segment(&starts, element) }
        };
        let mut segments: Vec<PieceSegment> = ranges.into_iter().map(segment).collect();
        segments.sort_by_key(|segment| segment.start);
        let Arithmetic { combine, prescale, finish } =
            Arithmetic::of(&request, members.ranks.len() as u32);
        let purpose = if others.is_empty() { Purpose::Ranks } else { Purpose::Others(others) };
        let algorithm = Some(spec.algorithm()).filter(|_| nodes.len() > 1);
        let piece = Piece {
            sequence,
            purpose,
            combine,
            prescale,
            finish,
            wire,
            tensors,
            segments,
            bytes: elements * element,
            plan,
            moved: Some(metrics::moved(request.collective, algorithm)),
            nodes,
            ordered: now,
            chunk,
        };
        Ok((piece, wanted))
    }

    /// The wire form of partial results.
    fn wire(&self, request: &Request, quantized: bool) -> Wire {
        match self.compression {
            Compression::Int8 if quantized => return Wire::Quantized(Quantized::Int8),
            Compression::Fp8 if quantized => return Wire::Quantized(Quantized::Fp8),
            _ => {}
        }
        let dtype = self.compression.between_nodes(request);
        // Sums of bf16 are computed in f32, even if they are sent as bf16 because of the
        // compression.
        let is_own = dtype == request.dtype;
        let is_computed = Compression::None.between_nodes(request) != request.dtype;
        let form = Form::of(dtype).filter(|_| is_computed || !is_own);
        form.map_or(Wire::Ranks, Wire::Partial)
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
        let more = tensor.agree(&segment.agreement).map_err(|_| {
            protocol(sequence, format!("it does not fit the requests for '{name}'"))
        })?;
        wanted.extend(more);
        Ok(tensor)
    }
}

#[derive(Default)]
struct Content {
    /// Consecutive flows with the same roles form one section.
    sections: Vec<Section>,
    /// The ranges of flows that concern this node.
    ranges: Vec<Range>,
    tensors: Vec<(Arc<QueuedTensor>, u64)>,
}

/// A range of one flow, in elements.
struct Range {
    tensor: Arc<QueuedTensor>,
    part: usize,
    flow: Flow,
    /// The first element in the flow.
    offset: u64,
    count: u64,
    /// Its section, and its place there.
    section: usize,
    at: u64,
}

impl Content {
    /// Adds a range of all flows of a tensor, which is `None` on a server.
    fn add(&mut self, tensor: Option<&Arc<QueuedTensor>>, agreement: &Agreement, range: PartRange) {
        let PartRange { part, offset, count } = range;
        let Some(flows) = agreement.part(part) else { return };
        let mut here = flows.here.iter().peekable();
        for (number, flow) in flows.all.iter().enumerate() {
            let own = here.next_if(|(own, _)| *own == number);
            let count = (offset + count).min(flow.count).saturating_sub(offset);
            if count == 0 {
                continue;
            }
            let (section, at) = self.extend(flow.roles, count);
            if let Some((&(_, flow), tensor)) = own.zip(tensor) {
                let tensor = tensor.clone();
                self.ranges.push(Range { tensor, part, flow, offset, count, section, at });
            }
        }
    }

    /// Adds `count` elements with these roles. Returns their section, and their place there.
    fn extend(&mut self, roles: Roles, count: u64) -> (usize, u64) {
        match self.sections.last_mut() {
            Some(last) if last.roles == roles => {
                last.count += count;
                let at = last.count - count;
                (self.sections.len() - 1, at)
            }
            _ => {
                self.sections.push(Section { roles, count });
                (self.sections.len() - 1, 0)
            }
        }
    }
}

impl Range {
    /// The segment of the piece; the piece's sections begin at `starts`.
    fn segment(self, starts: &[u64], element: u64) -> PieceSegment {
        let Self { tensor, part, flow, offset, count, section, at } = self;
        PieceSegment {
            part,
            sources: tensor.at(flow.source),
            targets: tensor.at(flow.target),
            source_offset: (flow.source_offset + offset) * element,
            target_offset: (flow.target_offset + offset) * element,
            start: (starts[section] + at) * element,
            bytes: count * element,
            errors: None,
            tensor,
        }
    }
}
