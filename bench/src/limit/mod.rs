//! The limit: the same work by a plain program, measured in the same run.
//!
//! Within a node the program has one thread for each rank of the node, and tensors in the same kind
//! of shared memory that ranks get. The threads divide the work among them and do it with the same
//! kernels, between barriers at which they spin: no daemon, no rings, no negotiation, no wake-ups.
//! For tensors in ordinary memory each thread has one of its own besides, copied in before and out
//! after.
//!
//! Threads of one process take the place of processes with a mapping in common: the bytes that pass
//! between processor and memory are the same, and a plain program would have no daemon either.
//!
//! - `in_place`: an allreduce; `apart`: everything else
//! - `round`: how they are timed
//!
//! Between nodes the limit is the line, whose rate has to be given.

mod apart;
mod in_place;
mod round;

use std::time::Duration;

use gradwire_launcher::error::CommandError;
use gradwire_proto::{DType, Shape};
use gradwire_worker::{Buffer, Session};

use self::{apart::Apart, in_place::InPlace};
use super::{args::Memory, operation::Operation, rank::Bound, stats::Stats};

/// The largest tensors of the plain program, in bytes; where results are apart from inputs, half of
/// that. Its time grows with the size by then, so that of larger ones is computed.
const LARGEST: usize = 256 << 20;

/// How long the plain program may take for one size (WAIT): the other ranks wait for it.
const LONGEST: Duration = Duration::from_secs(2);

/// The time that a collective of a size of `elements` takes at least, in seconds, where that is
/// known. All ranks call this; the first one measures.
///
/// # Errors
/// [`CommandError`] if there is no memory, or the session fails.
pub fn seconds(
    session: &Session,
    bound: &Bound,
    elements: usize,
) -> Result<Option<f64>, CommandError> {
    let [ranks] = bound.slots[..] else {
        let bytes = (elements * bound.wire.size()) as f64;
        let over_line = bound.operation.line_factor(&bound.slots) * bytes;
        return Ok(bound.line_rate.map(|rate| rate.seconds(over_line)));
    };
    if bound.operation == Operation::Barrier {
        return Ok(None);
    }
    let mut limit = None;
    if session.rank() == 0 {
        limit = Some(in_memory(session, bound, ranks, elements)?);
    }
    session.barrier().map_err(CommandError::failed)?;
    Ok(limit)
}

fn in_memory(
    session: &Session,
    bound: &Bound,
    ranks: u32,
    elements: usize,
) -> Result<f64, CommandError> {
    let &Bound { operation, dtype, memory, .. } = bound;
    let (threads, rounds) = (ranks as usize, bound.iters as usize);
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
        let program = InPlace::new(op, dtype, copies, &mut slices);
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
        let program = Apart::new(operation, dtype, copies, measured, &mut inputs, &mut outputs);
        (measured, round::times(&program, threads, rounds, LONGEST))
    };
    Ok(least(&times) * (elements as f64 / measured.max(1) as f64))
}

fn tensor(session: &Session, dtype: DType, bytes: usize) -> Result<Buffer, CommandError> {
    let shape = Shape::new(&[(bytes / dtype.size()) as u64]).map_err(CommandError::failed)?;
    session.buffer(dtype, shape).map_err(CommandError::failed)
}

/// The best median of three stretches. Others who use the machine for a while only ever add to a
/// limit, and a single round may look shorter than it was.
fn least(times: &[f64]) -> f64 {
    let stretches = times.chunks(times.len().div_ceil(3).max(1));
    stretches.map(|stretch| Stats::of(stretch).median()).reduce(f64::min).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_add_for_a_while_is_not_in_the_limit() {
        let seconds = |us: &[f64]| us.iter().map(|us| us / 1e6).collect::<Vec<_>>();
        let times = seconds(&[9.0, 9.0, 9.0, 2.0, 1.0, 3.0, 8.0, 8.0]);
        assert_eq!(least(&times), 2e-6);
        assert_eq!(least(&seconds(&[5.0])), 5e-6);
        assert_eq!(least(&[]), 0.0);
    }
}
