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

use gradwire_proto::{Collective, DType, Request};
use gradwire_shm::control::Origin;

use super::{Target, reductions::reduced};
use crate::{
    element::Element,
    error::Result,
    handle::Handle,
    memory::{Buffer, Payload},
    options::{AllreduceOptions, Common, Reduction},
    session::Session,
    sizes,
    task::Parts,
};

/// The bytes of a piece: the same on all ranks, and whole elements of every type. The copies of
/// other pieces hide the time to agree on one of this size.
const PIECE: usize = 1 << 20;

/// The number of pieces in flight. Together with those of the node's other ranks they should fit
/// into the cache.
const AHEAD: usize = 4;

/// A piece in flight: its range of the bytes, and its handle.
type UnderWay = (Range<usize>, Handle<Buffer>);

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
        self.allreduce_bytes(T::DTYPE, bytemuck::cast_slice_mut(values), options)
    }

    /// Like [`Session::allreduce_slice`], for an element type that is known only at run time: the
    /// bytes of its elements in the machine's byte order.
    ///
    /// # Errors
    /// As for [`Session::allreduce_slice`]; also if `bytes` are not whole elements.
    #[track_caller]
    pub fn allreduce_bytes(
        &self,
        dtype: DType,
        bytes: &mut [u8],
        options: AllreduceOptions,
    ) -> Result<()> {
        let shape = sizes::elements(dtype, bytes)?;
        if bytes.len() <= PIECE {
            let mut buffer = self.copied(dtype, shape, bytes)?;
            self.allreduce(&mut buffer, options)?;
            bytes.copy_from_slice(buffer.bytes());
            return Ok(());
        }
        let AllreduceOptions { common, reduction } = options;
        let Reduction { op, prescale, postscale } = reduction;
        let whole = Request::allreduce(dtype, shape, op);
        self.shared()
            .noted(Request { prescale, postscale, ..whole }.validate().map_err(Into::into))?;
        let parts = self.parts(common, "allreduce", Origin::Plain)?;
        // Outside of `run_parts`: if this can't be started, no rank waits for the other pieces.
        let first = parts.session(self).reduce_first(&parts, dtype, bytes, reduction)?;
        self.run_parts(&parts, |session| session.reduce_rest(&parts, bytes, first, reduction))
    }

    /// Reduces the first piece. Fails on all ranks if their slices differ in length.
    fn reduce_first(
        &self,
        parts: &Parts,
        dtype: DType,
        bytes: &mut [u8],
        reduction: Reduction,
    ) -> Result<Buffer> {
        let length = (bytes.len() / dtype.size()) as u64;
        let bytes = &mut bytes[..PIECE];
        let buffer = self.piece(dtype, bytes, None)?;
        let common = Common { origin: Origin::Plain, ..parts.whole() };
        let request = reduced(Collective::Allreduce, &[buffer.memory()], reduction)?;
        let call = self.call(common, Request { list: vec![length], ..request })?;
        let started = self.start(call, &[buffer.memory()], Target::InPlace)?;
        self.finish(started)?;
        bytes.copy_from_slice(buffer.bytes());
        Ok(buffer)
    }

    /// Reduces all pieces but the first one. `free` is the memory of a finished piece.
    fn reduce_rest(
        &self,
        parts: &Parts,
        bytes: &mut [u8],
        free: Buffer,
        reduction: Reduction,
    ) -> Result<()> {
        let dtype = free.dtype();
        let mut under_way: VecDeque<UnderWay> = VecDeque::new();
        let mut spare = Some(free);
        let result = (1..bytes.len().div_ceil(PIECE)).try_for_each(|number| {
            let range = number * PIECE..bytes.len().min((number + 1) * PIECE);
            let free = if under_way.len() < AHEAD { None } else { under_way.pop_front() };
            let free = free.map(|last| bring_back(last, bytes)).transpose()?;
            let buffer = self.piece(dtype, &bytes[range.clone()], free.or_else(|| spare.take()))?;
            // Reuses the name of a finished piece: names are remembered, so there must be few of
            // them (BOUND). The '#' marks a counted name: the rounding error of one piece must not
            // be fed back into another.
            let whole = range.len() == PIECE;
            let ending = if whole { format!("#{}", number % AHEAD) } else { "last".to_owned() };
            let common = parts.part(&ending);
            let options = AllreduceOptions { common, reduction };
            under_way.push_back((range, self.allreduce_async(buffer, options)?));
            Ok(())
        });
        // All ranks have submitted these, even if other pieces failed. So each of them ends, and
        // then its name is free.
        let rest = under_way.into_iter().map(|last| bring_back(last, bytes).map(drop));
        let rest: Vec<Result<()>> = rest.collect();
        result.and(rest.into_iter().collect())
    }

    /// Shared memory with a copy of these bytes. Reuses `free` if it has the right size.
    fn piece(&self, dtype: DType, bytes: &[u8], free: Option<Buffer>) -> Result<Buffer> {
        match free {
            Some(mut buffer) if buffer.bytes().len() == bytes.len() => {
                buffer.bytes_mut().copy_from_slice(bytes);
                buffer.memory().mark_copied();
                Ok(buffer)
            }
            _ => self.buffer_from(dtype, bytes),
        }
    }
}

/// Waits for a piece, and copies its result into the bytes.
fn bring_back((range, handle): UnderWay, bytes: &mut [u8]) -> Result<Buffer> {
    let buffer = handle.wait()?;
    bytes[range].copy_from_slice(buffer.bytes());
    Ok(buffer)
}
