//! Allreduce of ordinary memory: the rank copies it into shared memory, and the result back.
//!
//! A large slice is cut into pieces. Each piece is a separate operation, and a few are in flight at
//! a time: while the daemon reduces some, the rank copies the next one in and a finished one out.
//! All pieces use the same few blocks of shared memory, which stay in the cache. So main memory is
//! only used to read the slice once and to write it once. (Copied as a whole, a tensor that is
//! larger than the cache crosses the memory bus six more times.)
//!
//! All ranks must cut in the same way, so they must give slices of the same length. The request of
//! the first piece contains the length, and has the name of the whole operation, like the request
//! of a slice that is not cut. So all ranks receive a disagreement before the other pieces begin.

use std::{collections::VecDeque, ops::Range};

use gradwire_proto::{Collective, Request, Shape};
use gradwire_shm::control::Origin;

use super::{Target, reductions::reduced};
use crate::{
    element::Element,
    error::Result,
    handle::Handle,
    memory::{Payload, Tensor},
    options::{AllreduceOptions, Common, Reduction},
    session::Session,
    task::Parts,
};

/// The bytes of a piece, the same on all ranks. The copies of other pieces hide the time to agree
/// on one of this size.
const PIECE: usize = 1 << 20;

/// The number of pieces in flight. Together with those of the node's other ranks they should fit
/// into the cache.
const AHEAD: usize = 4;

/// A piece in flight: its range of the slice, and its handle.
type UnderWay<T> = (Range<usize>, Handle<Tensor<T>>);

impl Session {
    /// Reduces ordinary memory: copies it into shared memory and the result back. All ranks must
    /// give slices of the same length. A slice above 1 MiB is reduced piece by piece, while other
    /// pieces are copied. This is an operation of several parts, with names up to 16 bytes shorter.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]. A part of the slice may have been reduced already; the rest
    /// is unchanged.
    #[track_caller]
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
        // Outside of `run_parts`: if this can't be started, no rank waits for the other pieces.
        let first = parts.session(self).reduce_first(&parts, values, reduction)?;
        self.run_parts(&parts, |session| session.reduce_rest(&parts, values, first, reduction))
    }

    /// Reduces the first piece. Fails on all ranks if their slices differ in length.
    fn reduce_first<T: Element>(
        &self,
        parts: &Parts,
        values: &mut [T],
        reduction: Reduction,
    ) -> Result<Tensor<T>> {
        let length = values.len() as u64;
        let values = &mut values[..PIECE / size_of::<T>()];
        let tensor = self.piece(values, None)?;
        let common = Common { origin: Origin::Plain, ..parts.whole() };
        let request = reduced(Collective::Allreduce, &[tensor.memory()], reduction)?;
        let call = self.call(common, Request { list: vec![length], ..request })?;
        let started = self.start(call, &[tensor.memory()], Target::InPlace)?;
        self.finish(started)?;
        values.copy_from_slice(tensor.as_slice());
        Ok(tensor)
    }

    /// Reduces all pieces but the first one. `free` is the memory of a finished piece.
    fn reduce_rest<T: Element>(
        &self,
        parts: &Parts,
        values: &mut [T],
        free: Tensor<T>,
        reduction: Reduction,
    ) -> Result<()> {
        let each = PIECE / size_of::<T>();
        let mut under_way: VecDeque<UnderWay<T>> = VecDeque::new();
        let mut spare = Some(free);
        let result = (1..values.len().div_ceil(each)).try_for_each(|number| {
            let range = number * each..values.len().min((number + 1) * each);
            let free = if under_way.len() < AHEAD { None } else { under_way.pop_front() };
            let free = free.map(|last| bring_back(last, values)).transpose()?;
            let tensor = self.piece(&values[range.clone()], free.or_else(|| spare.take()))?;
            // Reuses the name of a finished piece: names are remembered, so there must be few of
            // them (BOUND). The '#' marks a counted name: the rounding error of one piece must not
            // be fed back into another.
            let whole = range.len() == each;
            let ending = if whole { format!("#{}", number % AHEAD) } else { "last".to_owned() };
            let common = parts.part(&ending);
            let options = AllreduceOptions { common, reduction };
            under_way.push_back((range, self.allreduce_async(tensor, options)?));
            Ok(())
        });
        // All ranks have submitted these, even if other pieces failed. So each of them ends, and
        // then its name is free.
        let rest = under_way.into_iter().map(|last| bring_back(last, values).map(drop));
        let rest: Vec<Result<()>> = rest.collect();
        result.and(rest.into_iter().collect())
    }

    /// Shared memory with a copy of these values. Reuses `free` if it has the right size.
    fn piece<T: Element>(&self, values: &[T], free: Option<Tensor<T>>) -> Result<Tensor<T>> {
        match free {
            Some(mut tensor) if tensor.as_slice().len() == values.len() => {
                tensor.as_mut_slice().copy_from_slice(values);
                tensor.memory().mark_copied();
                Ok(tensor)
            }
            _ => self.tensor(values, &[values.len()]),
        }
    }
}

/// Waits for a piece, and copies its result into the slice.
fn bring_back<T: Element>((range, handle): UnderWay<T>, values: &mut [T]) -> Result<Tensor<T>> {
    let tensor = handle.wait()?;
    values[range].copy_from_slice(tensor.as_slice());
    Ok(tensor)
}
