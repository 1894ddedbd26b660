//! Adasum: combines the gradients of several ranks into one, depending on how much they agree. See
//! [`tree`] for the arithmetic. It consists of other collectives:
//!
//! - an allgather of the tensors' shapes, on which all ranks must agree: later parts do not check
//!   them
//! - an alltoall: each rank gets its share of all ranks' tensors
//! - for each level of the tree, an allreduce of a few dot products
//! - an allgather of the combined shares
//!
//! SAME: one rank combines each share. The weights come from an allreduce, so they are the same on
//! all ranks.

mod tree;

use gradwire_proto::{Collective, DType, Failure, FailureKind, ReduceOp, Request, Shape, agreed};
use gradwire_shm::control::Origin;
use half::{bf16, f16};

use crate::{
    collectives::{Call, Target},
    element::Element,
    error::{GradwireError, Result},
    exchange::{disagreement, dtype_name},
    handle::Handle,
    memory::{Buffer, Memory, Payload},
    options::{AdasumOptions, AllreduceOptions},
    session::Session,
    task::Parts,
};

/// The length of a rank's report on its tensor: the rank, the element type, the number of
/// dimensions, and the dimensions.
const NUMBERS: usize = 3 + Shape::MAX_DIMS;

fn report(rank: u32, dtype: DType, shape: &Shape) -> [u64; NUMBERS] {
    let mut numbers = [0; NUMBERS];
    let dims = shape.dims();
    numbers[..3].copy_from_slice(&[u64::from(rank), dtype as u64, dims.len() as u64]);
    numbers[3..][..dims.len()].copy_from_slice(dims);
    numbers
}

/// Checks that all members took part, with tensors of the same type and shape; otherwise all ranks
/// that took part get this failure.
fn agree(all: &[[u64; NUMBERS]], members: &[u32]) -> Result<(), Failure> {
    let is_absent = |rank: u32| !all.iter().any(|[number, ..]| *number == u64::from(rank));
    if let Some(rank) = members.iter().find(|rank| is_absent(**rank)) {
        let what = format!("rank {rank} has joined, but an Adasum needs all ranks");
        return Err(Failure::new(FailureKind::Invalid, what).hint(
            "call join only after all Adasum operations, or use an average or a sum, which \
             work without ranks that have joined",
        ));
    }
    if all.windows(2).all(|pair| pair[0][1..] == pair[1][1..]) {
        return Ok(());
    }
    let line = |[rank, dtype, dims, shape @ ..]: &[u64; NUMBERS]| {
        let shape = &shape[..shape.len().min(*dims as usize)];
        format!("rank {rank}: {} {shape:?}", dtype_name(*dtype))
    };
    Err(disagreement("an Adasum", all.iter().map(line)))
}

impl Session {
    /// Combines the ranks' tensors by Adasum, an operator of Horovod; every rank gets the result in
    /// place. It works with any number of ranks, in rank order. Elements are floats of 16, 32 or 64
    /// bits. Products and sums are kept in f64, so the squares of the elements must fit f64. Use
    /// one tensor per layer, because agreement is measured over the whole tensor.
    ///
    /// # Errors
    /// As for [`Session::allreduce`], the same on all ranks; also for other element types, or if a
    /// rank has joined.
    #[track_caller]
    pub fn adasum<P: Payload>(&self, tensor: &mut P, options: AdasumOptions) -> Result<()> {
        let parts = self.adasum_parts(tensor.memory(), options)?;
        self.run_parts(&parts, |session| session.combine(&parts, tensor.memory()))
    }

    /// Starts [`Session::adasum`] without waiting for it.
    #[track_caller]
    pub fn adasum_async<P: Payload>(&self, tensor: P, options: AdasumOptions) -> Result<Handle<P>> {
        let parts = self.adasum_parts(tensor.memory(), options)?;
        let own = parts.clone();
        self.spawn_parts(parts, move |session| {
            session.combine(&own, tensor.memory())?;
            Ok(tensor)
        })
    }

    #[track_caller]
    fn adasum_parts(&self, memory: &Memory, options: AdasumOptions) -> Result<Parts> {
        let dtype = memory.dtype();
        if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64) {
            let text = format!("adasum of {dtype} is not possible: use f16, bf16, f32 or f64");
            return Err(GradwireError::Invalid(text));
        }
        self.parts(options.common, "adasum", Origin::Adasum)
    }

    fn combine(&self, parts: &Parts, memory: &Memory) -> Result<()> {
        let (dtype, elements) = (memory.dtype(), memory.shape().elements());
        let all =
            self.exchange(parts.counts("shapes"), report(self.rank(), dtype, memory.shape()))?;
        agree(&all, parts.set.ranks()).map_err(|failure| parts.named(failure))?;
        let members = parts.set.len();
        // All tensors are split in the same way, so this rank's shares have the same size.
        let share = |at: usize| agreed::share(elements, members, at);
        let flat = Request::plain(Collective::Alltoall, dtype, Shape::new(&[elements])?);
        let request = Request { list: (0..members).map(share).collect(), ..flat };
        let call = self.call(parts.part("shares"), request)?;
        let started = self.start(call, &[memory], Target::New)?;
        let all = self.finish(started)?.gathered::<Buffer>()?;
        let own = all.rows.first().copied().unwrap_or_default();
        let values = widened(&all.tensor);
        let mut shares: Vec<Vec<f64>> =
            (0..members).map(|from| values[from * own..][..own].to_vec()).collect();
        drop((all, values));

        for level in 0..tree::levels(shares.len()) {
            let products = tree::products(&shares);
            let mut sums = self.tensor(&products, &[products.len()])?;
            let common = parts.part(&format!("products.{level}"));
            let options = AllreduceOptions { common, ..Default::default() }.op(ReduceOp::Sum);
            self.allreduce(&mut sums, options)?;
            shares = tree::combine(shares, sums.as_slice());
        }

        let share = shares.pop().unwrap_or_default();
        let mut result = self.buffer_unfilled(dtype, &[own])?;
        narrow(&share, &mut result);
        let request = Request::plain(Collective::Allgather, dtype, result.memory().shape().clone());
        let call: Call = self.call(parts.part("result"), request)?;
        let started = self.start(call, &[result.memory()], Target::New)?;
        let gathered = self.finish(started)?.one::<Buffer>()?;
        let (given, due) = (gathered.memory().shape().elements(), elements);
        if given != due {
            let text = format!("a result has {given} elements instead of {due}");
            return Err(GradwireError::Protocol(text));
        }
        memory.write(gathered.bytes());
        Ok(())
    }
}

fn widened(buffer: &Buffer) -> Vec<f64> {
    fn read<T: Element + Into<f64>>(bytes: &[u8]) -> Vec<f64> {
        bytemuck::cast_slice::<u8, T>(bytes).iter().map(|&value| value.into()).collect()
    }
    match buffer.dtype() {
        DType::F16 => read::<f16>(buffer.bytes()),
        DType::Bf16 => read::<bf16>(buffer.bytes()),
        DType::F32 => read::<f32>(buffer.bytes()),
        // The only other type that `adasum_parts` accepts.
        _ => read::<f64>(buffer.bytes()),
    }
}

fn narrow(values: &[f64], buffer: &mut Buffer) {
    fn write<T: Element>(bytes: &mut [u8], values: &[f64], from_f64: impl Fn(f64) -> T) {
        let elements = bytemuck::cast_slice_mut::<u8, T>(bytes);
        elements.iter_mut().zip(values).for_each(|(to, &value)| *to = from_f64(value));
    }
    match buffer.dtype() {
        DType::F16 => write(buffer.bytes_mut(), values, f16::from_f64),
        DType::Bf16 => write(buffer.bytes_mut(), values, bf16::from_f64),
        DType::F32 => write(buffer.bytes_mut(), values, |value| value as f32),
        _ => write(buffer.bytes_mut(), values, |value| value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disagreements_list_what_each_rank_gave() {
        let shape = |dims: &[u64]| Shape::new(dims).unwrap();
        let same = |rank| report(rank, DType::F32, &shape(&[2, 3]));
        assert_eq!(agree(&[same(0), same(1), same(4)], &[0, 1, 4]), Ok(()));
        let most = shape(&[1; Shape::MAX_DIMS]);
        for other in [
            report(1, DType::F32, &shape(&[3, 2])),
            report(1, DType::F32, &shape(&[2, 3, 0])),
            report(1, DType::F64, &shape(&[2, 3])),
            report(1, DType::F32, &most),
        ] {
            let failure = agree(&[same(0), other], &[0, 1]).unwrap_err();
            assert_eq!(failure.kind, FailureKind::Disagreement);
            assert_eq!(failure.details.lines[0], "rank 0: f32 [2, 3]");
            assert!(failure.details.lines[1].starts_with("rank 1: f"), "{failure}");
        }
        let failure = agree(&[same(0), report(1, DType::F16, &shape(&[]))], &[0, 1]).unwrap_err();
        assert_eq!(failure.details.lines[1], "rank 1: f16 []");
        let failure = agree(&[same(0), same(4)], &[0, 1, 4]).unwrap_err();
        assert_eq!(failure.what, "rank 1 has joined, but an Adasum needs all ranks");
    }
}
