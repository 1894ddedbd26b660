//! The baseline: the same work by a program without Gradwire, measured in the same run.
//!
//! Within a node, that program has one thread for each rank, and for large tensors up to one for
//! each core. Its tensors are in the same kind of shared memory as those of ranks. The threads
//! divide the work and use the same kernels. Between steps they spin at barriers. It has neither
//! daemon, ring, negotiation nor wake-ups. With tensors in ordinary memory, each rank also has its
//! own tensor, which one thread copies in before and out after.
//!
//! Threads of one process represent processes that share a mapping: they move the same bytes
//! between processor and memory.
//!
//! - `in_place`: an allreduce; `apart`: all other operations
//! - `round`: the timing
//!
//! Between nodes, the baseline is the time that the line needs, if its rate is given.

mod apart;
mod in_place;
mod round;

use std::time::Duration;

use gradwire_kernels::{Combine, is_a_sum};
use gradwire_launcher::error::CommandError;
use gradwire_proto::DType;
use gradwire_worker::{Buffer, Session};

use self::{apart::Apart, in_place::InPlace};
use super::{
    args::Data,
    machine,
    operation::{Memory, Operation},
    size::Rate,
    stats::Stats,
};

/// The parameters of the baseline.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The collective.
    pub operation: Operation,
    /// The ranks of each node.
    pub slots: Vec<u32>,
    /// The element type.
    pub dtype: DType,
    /// The memory of tensors.
    pub memory: Memory,
    /// The rate of the line between nodes, if known.
    pub line_rate: Option<Rate>,
    /// The number of iterations.
    pub iters: u32,
}

impl Setup {
    /// The setup of this job.
    pub fn of(session: &Session, operation: Operation, data: &Data) -> Self {
        Self {
            operation,
            slots: session.nodes().iter().map(|node| node.slots).collect(),
            dtype: data.dtype,
            memory: data.memory,
            line_rate: data.line_rate,
            iters: data.common.iters,
        }
    }
}

/// The largest tensors of the program, in bytes; half of that if results are separate from inputs.
/// At this size its time is proportional to the size, so times of larger tensors are extrapolated.
const LARGEST: usize = 256 << 20;

/// The least bytes of a tensor for each thread beyond one for each rank: less work takes no longer
/// than the barrier.
const EACH: usize = 16 << 10;

/// The time limit of the program for one size (WAIT), because the other ranks wait.
const LONGEST: Duration = Duration::from_secs(2);

/// The baseline of a collective of `elements` elements in seconds, if there is one. All ranks call
/// this function; the first rank measures.
///
/// # Errors
/// [`CommandError`] if memory runs out or the session fails.
pub fn seconds(
    session: &Session,
    setup: &Setup,
    elements: usize,
) -> Result<Option<f64>, CommandError> {
    let [ranks] = setup.slots[..] else {
        let bytes = setup.operation.wire_bytes(session, setup.dtype, elements);
        let over_line = setup.operation.line_factor(&setup.slots) * bytes;
        return Ok(setup.line_rate.map(|rate| rate.seconds(over_line)));
    };
    if !has_program(setup.operation, setup.dtype) {
        return Ok(None);
    }
    let mut baseline = None;
    if session.rank() == 0 {
        baseline = Some(in_memory(session, setup, ranks, elements)?);
    }
    session.barrier().map_err(CommandError::failed)?;
    Ok(baseline)
}

/// Whether the program has the work of this operation: it moves anything, and adds floats. Kernels
/// for everything else would be a sixth of the size of `gradwire`.
pub fn has_program(operation: Operation, dtype: DType) -> bool {
    let can_reduce = |op| is_a_sum(Combine { dtype, op });
    operation != Operation::Barrier && operation.reduction().is_none_or(can_reduce)
}

fn in_memory(
    session: &Session,
    setup: &Setup,
    ranks: u32,
    elements: usize,
) -> Result<f64, CommandError> {
    let &Setup { operation, dtype, memory, .. } = setup;
    let bytes = elements.saturating_mul(dtype.size());
    let (threads, rounds) = (threads(ranks, bytes, machine::cores()), setup.iters as usize);
    let copies = memory == Memory::Ordinary;
    let most = |bytes: usize| {
        let granule = operation.granule(ranks);
        elements.min((bytes / dtype.size() / granule).max(1) * granule)
    };
    let (measured, times) = if let Operation::Allreduce(op) = operation {
        let measured = most(LARGEST);
        let mut tensors = (0..ranks)
            .map(|_| tensor(session, dtype, measured * dtype.size()))
            .collect::<Result<Vec<_>, _>>()?;
        let mut slices: Vec<&mut [u8]> = tensors.iter_mut().map(|t| t.bytes_mut()).collect();
        let program = InPlace::new(op, dtype, copies, threads, &mut slices);
        (measured, round::times(&program, threads, rounds, LONGEST))
    } else {
        let measured = most(LARGEST / 2);
        let room = |which: usize| {
            let bytes = |rank| apart::bytes(operation, dtype, (rank, ranks), measured)[which];
            let tensors = (0..ranks).map(|rank| tensor(session, dtype, bytes(rank)));
            tensors.collect::<Result<Vec<_>, _>>()
        };
        let (mut inputs, mut outputs) = (room(0)?, room(1)?);
        let mut inputs: Vec<&mut [u8]> = inputs.iter_mut().map(|t| t.bytes_mut()).collect();
        let mut outputs: Vec<&mut [u8]> = outputs.iter_mut().map(|t| t.bytes_mut()).collect();
        let program =
            Apart::new(operation, dtype, copies, threads, measured, &mut inputs, &mut outputs);
        (measured, round::times(&program, threads, rounds, LONGEST))
    };
    Ok(least(&times) * (elements as f64 / measured.max(1) as f64))
}

/// The threads of the program for tensors of this size: one for each rank, and up to one for each
/// core where each has enough to do.
fn threads(ranks: u32, bytes: usize, cores: usize) -> usize {
    cores.min(bytes / EACH).max(ranks as usize)
}

fn tensor(session: &Session, dtype: DType, bytes: usize) -> Result<Buffer, CommandError> {
    session.buffer(dtype, &[bytes / dtype.size()]).map_err(CommandError::failed)
}

/// The lowest median of three parts of the measurement. Other programs only make a part slower. A
/// single round would not do: it may seem shorter than it was.
fn least(times: &[f64]) -> f64 {
    let stretches = times.chunks(times.len().div_ceil(3).max(1));
    stretches.map(|stretch| Stats::of(stretch).median()).reduce(f64::min).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use gradwire_proto::ReduceOp;

    use super::*;

    #[test]
    fn the_program_uses_the_whole_machine() {
        let of = |ranks, bytes| threads(ranks, bytes, 16);
        assert_eq!([of(4, 4), of(4, 64 << 10), of(4, 128 << 10), of(4, 1 << 20)], [4, 4, 8, 16]);
        assert_eq!([of(32, 1 << 20), threads(4, 64 << 20, 2)], [32, 4]);
    }

    #[test]
    fn the_program_moves_anything_and_adds_floats() {
        let sum = |dtype| has_program(Operation::Allreduce(ReduceOp::Sum), dtype);
        assert_eq!([sum(DType::Bf16), sum(DType::I32), sum(DType::C64)], [true, false, false]);
        assert!(has_program(Operation::ReduceScatter(ReduceOp::Average), DType::F64));
        assert!(!has_program(Operation::Allreduce(ReduceOp::Max), DType::F32));
        assert!(has_program(Operation::Allgather, DType::Bool));
        assert!(!has_program(Operation::Barrier, DType::F32));
    }

    #[test]
    fn temporary_load_is_not_in_the_baseline() {
        let seconds = |us: &[f64]| us.iter().map(|us| us / 1e6).collect::<Vec<_>>();
        let times = seconds(&[9.0, 9.0, 9.0, 2.0, 1.0, 3.0, 8.0, 8.0]);
        assert_eq!(least(&times), 2e-6);
        assert_eq!(least(&seconds(&[5.0])), 5e-6);
        assert_eq!(least(&[]), 0.0);
    }
}
