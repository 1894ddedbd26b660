//! Allreduce of ordinary memory: the rank copies it into shared memory and the result back.
//!
//! A large slice goes in pieces, each an operation of its own, a few of them at a time: while the
//! daemon reduces some, the rank copies the next one in and the last one out. They go through the
//! same few pieces of shared memory again and again, which the cache holds, so that all the memory
//! itself sees of the copies is that the slice is read once and written once. (Copied as a whole, a
//! tensor that is larger than the cache crosses the memory bus six more times.)
//!
//! All ranks cut alike, so they have to give slices of one length; they exchange it before the
//! first piece, under the name of the whole: a rank whose slice is not cut asks for something else
//! under that name, and all ranks receive that disagreement at once.

use std::{collections::VecDeque, ops::Range};

use gradwire_proto::{DType, Request, Shape};

use crate::{
    element::Element,
    error::Result,
    exchange::disagreement,
    handle::Handle,
    memory::Tensor,
    options::{AllreduceOptions, Reduction},
    session::Session,
    task::Parts,
};
use gradwire_shm::control::Origin;

/// Bytes of a piece: large enough that agreeing on it is hidden behind the copies of others. The
/// same for all ranks of a job.
const PIECE: usize = 1 << 20;

/// Pieces that are under way at a time. With those of the node's other ranks they should fit the
/// cache.
const AHEAD: usize = 4;

/// A piece under way: which part of the slice it is, and what brings it back.
type UnderWay<T> = (Range<usize>, Handle<Tensor<T>>);

impl Session {
    /// Reduces ordinary memory: copies it into shared memory and the result back. All ranks call
    /// this, with slices of one length: above 1 MiB they are reduced piece by piece while others
    /// are copied, as an operation of several parts, whose name may have 16 bytes less.
    ///
    /// # Errors
    /// As [`Session::allreduce`]; a part of the slice may be reduced already then, the rest is
    /// unchanged.
    pub fn allreduce_slice<T: Element>(
        &self,
        values: &mut [T],
        options: AllreduceOptions,
    ) -> Result<()> {
        if size_of_val(values) <= PIECE {
            let mut tensor = self.tensor(values, &[values.len()])?;
            self.allreduce(&mut tensor, options)?;
            values.copy_from_slice(tensor.as_slice());
            return Ok(());
        }
        let AllreduceOptions { common, reduction } = options;
        let Reduction { op, prescale, postscale } = reduction;
        let shape = Shape::new(&[values.len() as u64])?;
        let whole = Request::allreduce(T::DTYPE, shape, op);
        self.shared()
            .noted(Request { prescale, postscale, ..whole }.validate().map_err(Into::into))?;
        let parts = self.parts(common, "allreduce", Origin::Plain)?;
        // Not one of the parts yet: if this can't be started, no rank waits for what comes after
        // it.
        let own = [u64::from(self.rank()), T::DTYPE as u64, values.len() as u64];
        let all = self.exchange(parts.whole(), own)?;
        self.run_parts(&parts, |session| {
            if all.iter().any(|[_, what @ ..]| what != &own[1..]) {
                return Err(parts.named(disagreement("a slice", all.iter().map(line))).into());
            }
            session.reduce_pieces(&parts, values, reduction)
        })
    }

    fn reduce_pieces<T: Element>(
        &self,
        parts: &Parts,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<()> {
        let each = PIECE / size_of::<T>();
        let mut under_way: VecDeque<UnderWay<T>> = VecDeque::new();
        let result = (0..values.len().div_ceil(each)).try_for_each(|number| {
            let range = number * each..values.len().min((number + 1) * each);
            let free = if under_way.len() < AHEAD { None } else { under_way.pop_front() };
            let free = free.map(|last| bring_back(last, values)).transpose()?;
            let tensor = self.piece(&values[range.clone()], free)?;
            // The name of one that has come back: names are remembered, so there are to be few
            // (BOUND).
            let whole = range.len() == each;
            let ending = if whole { (number % AHEAD).to_string() } else { "last".to_owned() };
            let common = parts.part(&ending);
            let options = AllreduceOptions { common, reduction };
            under_way.push_back((range, self.allreduce_async(tensor, options)?));
            Ok(())
        });
        // All ranks have submitted these, whatever became of the others: each comes to its end, and
        // its name is free then.
        let rest = under_way.into_iter().map(|last| bring_back(last, values).map(drop));
        let rest: Vec<Result<()>> = rest.collect();
        result.and(rest.into_iter().collect())
    }

    /// Shared memory with a copy of these values, what there is already if it is as large.
    fn piece<T: Element>(&self, values: &[T], free: Option<Tensor<T>>) -> Result<Tensor<T>> {
        match free {
            Some(mut tensor) if tensor.as_slice().len() == values.len() => {
                tensor.as_mut_slice().copy_from_slice(values);
                Ok(tensor)
            }
            _ => self.tensor(values, &[values.len()]),
        }
    }
}

/// Waits for a piece, and puts its result where it belongs.
fn bring_back<T: Element>((range, handle): UnderWay<T>, values: &mut [T]) -> Result<Tensor<T>> {
    let tensor = handle.wait()?;
    values[range].copy_from_slice(tensor.as_slice());
    Ok(tensor)
}

/// What a rank gave, for people.
fn line([rank, dtype, elements]: &[u64; 3]) -> String {
    let dtype = i32::try_from(*dtype).ok().and_then(DType::from_wire).map_or("?", DType::name);
    format!("rank {rank}: {dtype} [{elements}]")
}
