//! Collectives that move rows unchanged: broadcast, allgather, gather, scatter, alltoall.

use gradwire_proto::{Collective, DType, Part, Rank, Request, Shape, agreed};

use super::{Gathered, Started, Target, as_rows, buffers, parts};
use crate::{
    element::Element,
    error::{GradwireError, Result},
    handle::Start,
    memory::{FromBuffer, Memory, Payload},
    options::{AllgatherOptions, AlltoallOptions, BroadcastOptions, GatherOptions, ScatterOptions},
    process_set::Members,
    session::Session,
};

impl Session {
    /// Gives every rank the root's tensor, in place.
    #[track_caller]
    pub fn broadcast<P: Payload>(&self, tensor: &mut P, options: BroadcastOptions) -> Result<()> {
        let started = self.start_broadcast(tensor.memory(), options)?;
        self.finish(started).map(drop)
    }

    /// Starts [`Session::broadcast`] without waiting for it.
    #[track_caller]
    pub fn broadcast_async<P: Payload>(&self, tensor: P, options: BroadcastOptions) -> Start<P, P> {
        let started = self.start_broadcast(tensor.memory(), options);
        self.handle_with(started, tensor, |tensor, _| Ok(tensor))
    }

    /// Like [`Session::broadcast`], for ordinary memory, which an error leaves unchanged.
    #[track_caller]
    pub fn broadcast_slice<T: Element>(
        &self,
        values: &mut [T],
        options: BroadcastOptions,
    ) -> Result<()> {
        self.broadcast_bytes(T::DTYPE, bytemuck::cast_slice_mut(values), options)
    }

    /// Like [`Session::broadcast_slice`], for an element type that is known only at run time: the
    /// bytes of its elements in the machine's byte order.
    ///
    /// # Errors
    /// As for [`Session::broadcast`]; also if `bytes` are not whole elements.
    #[track_caller]
    pub fn broadcast_bytes(
        &self,
        dtype: DType,
        bytes: &mut [u8],
        options: BroadcastOptions,
    ) -> Result<()> {
        let mut buffer = self.buffer_from(dtype, bytes)?;
        self.broadcast(&mut buffer, options)?;
        bytes.copy_from_slice(buffer.bytes());
        Ok(())
    }

    /// Gives every rank the tensors of all ranks, concatenated along the first dimension, which may
    /// differ between ranks and may be zero. A single number counts as one row.
    #[track_caller]
    pub fn allgather<P: FromBuffer>(
        &self,
        tensor: &P,
        options: AllgatherOptions,
    ) -> Result<Gathered<P>> {
        let started = self.start_allgather(&[tensor.memory()], options)?;
        self.finish(started)?.gathered()
    }

    /// Starts [`Session::allgather`] without waiting for it. The handle returns the tensor and
    /// the result.
    #[track_caller]
    pub fn allgather_async<P: FromBuffer>(
        &self,
        tensor: P,
        options: AllgatherOptions,
    ) -> Start<(P, Gathered<P>), P> {
        let started = self.start_allgather(&[tensor.memory()], options);
        self.handle_with(started, tensor, |tensor, finished| Ok((tensor, finished.gathered()?)))
    }

    /// Like [`Session::allgather`] for several tensors as one operation: all of them succeed, or
    /// none. [`Buffer`](crate::Buffer)s may have different element types.
    #[track_caller]
    pub fn grouped_allgather<P: FromBuffer>(
        &self,
        tensors: &[P],
        options: AllgatherOptions,
    ) -> Result<Vec<Gathered<P>>> {
        let started = self.start_allgather(&buffers(tensors), options)?;
        self.finish(started)?.gathered_many()
    }

    /// Starts [`Session::grouped_allgather`] without waiting for it. The handle returns the
    /// tensors and the results.
    #[expect(clippy::type_complexity, reason = "the tensors and a result for each")]
    #[track_caller]
    pub fn grouped_allgather_async<P: FromBuffer>(
        &self,
        tensors: Vec<P>,
        options: AllgatherOptions,
    ) -> Start<(Vec<P>, Vec<Gathered<P>>), Vec<P>> {
        let started = self.start_allgather(&buffers(&tensors), options);
        self.handle_with(started, tensors, |tensors, finished| {
            Ok((tensors, finished.gathered_many()?))
        })
    }

    /// Like [`Session::allgather`], but only the root gets the result. Other ranks get `None`.
    #[track_caller]
    pub fn gather<P: FromBuffer>(
        &self,
        tensor: &P,
        options: GatherOptions,
    ) -> Result<Option<Gathered<P>>> {
        let root = options.root;
        let started = self.start_gather(tensor.memory(), options)?;
        let is_root = started.is_rank(root);
        let finished = self.finish(started)?;
        if is_root { finished.gathered().map(Some) } else { Ok(None) }
    }

    /// Starts [`Session::gather`] without waiting for it. The handle returns the tensor and the
    /// result.
    #[track_caller]
    pub fn gather_async<P: FromBuffer>(
        &self,
        tensor: P,
        options: GatherOptions,
    ) -> Start<(P, Option<Gathered<P>>), P> {
        let root = options.root;
        let started = self.start_gather(tensor.memory(), options);
        let is_root = started.as_ref().is_ok_and(|started| started.is_rank(root));
        self.handle_with(started, tensor, move |tensor, finished| {
            let gathered = if is_root { Some(finished.gathered()?) } else { None };
            Ok((tensor, gathered))
        })
    }

    /// Gives each member its rows of the root's tensor, in rank order. If another rank gives a
    /// tensor, only its element type is used.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if the root gives no tensor, or if its splits don't fit
    /// the rows.
    #[track_caller]
    pub fn scatter<P: FromBuffer>(&self, tensor: Option<&P>, options: ScatterOptions) -> Result<P> {
        let started = self.start_scatter(tensor, options)?;
        self.finish(started)?.one()
    }

    /// Starts [`Session::scatter`] without waiting for it. The handle returns the tensor and the
    /// result.
    #[track_caller]
    pub fn scatter_async<P: FromBuffer>(
        &self,
        tensor: Option<P>,
        options: ScatterOptions,
    ) -> Start<(Option<P>, P), Option<P>> {
        let started = self.start_scatter(tensor.as_ref(), options);
        self.handle_with(started, tensor, |tensor, finished| Ok((tensor, finished.one()?)))
    }

    /// Gives each member its rows of every member's tensor. The result has the rows in rank order,
    /// with the number of rows from each member.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if the splits don't fit the rows or the number of
    /// members.
    #[track_caller]
    pub fn alltoall<P: FromBuffer>(
        &self,
        tensor: &P,
        options: AlltoallOptions,
    ) -> Result<Gathered<P>> {
        let started = self.start_alltoall(tensor.memory(), options)?;
        self.finish(started)?.gathered()
    }

    /// Starts [`Session::alltoall`] without waiting for it. The handle returns the tensor and the
    /// result.
    #[track_caller]
    pub fn alltoall_async<P: FromBuffer>(
        &self,
        tensor: P,
        options: AlltoallOptions,
    ) -> Start<(P, Gathered<P>), P> {
        let started = self.start_alltoall(tensor.memory(), options);
        self.handle_with(started, tensor, |tensor, finished| Ok((tensor, finished.gathered()?)))
    }

    #[track_caller]
    fn start_broadcast(&self, memory: &Memory, options: BroadcastOptions) -> Result<Started> {
        let BroadcastOptions { common, root } = options;
        let request = Request::broadcast(memory.dtype(), memory.shape().clone(), Rank(root));
        let call = self.call(common, request)?;
        call.check_root()?;
        self.start(call, &[memory], Target::InPlace)
    }

    #[track_caller]
    fn start_allgather(&self, buffers: &[&Memory], options: AllgatherOptions) -> Result<Started> {
        let (first, more) = parts(buffers.iter().copied())?;
        let Part { dtype, shape } = as_rows(first)?;
        let more = more.into_iter().map(as_rows).collect::<Result<_>>()?;
        let mut request = Request::plain(Collective::Allgather, dtype, shape);
        request.reduce_op = options.op.unwrap_or(request.reduce_op);
        let call = self.call(options.common, Request { more, ..request })?;
        self.start(call, buffers, Target::New)
    }

    #[track_caller]
    fn start_gather(&self, memory: &Memory, options: GatherOptions) -> Result<Started> {
        let GatherOptions { common, root } = options;
        let part = Part { dtype: memory.dtype(), shape: memory.shape().clone() };
        let Part { dtype, shape } = as_rows(part)?;
        let request = Request::plain(Collective::Gather, dtype, shape);
        let call = self.call(common, Request { root: Rank(root), ..request })?;
        call.check_root()?;
        self.start(call, &[memory], Target::New)
    }

    #[track_caller]
    fn start_scatter<P: FromBuffer>(
        &self,
        tensor: Option<&P>,
        options: ScatterOptions,
    ) -> Result<Started> {
        let ScatterOptions { common, root, splits, dtype, expecting } = options;
        let session = self.pinned();
        let given = tensor.map(Payload::memory);
        let dtype = given.map(Memory::dtype).or(P::DTYPE).or(dtype).ok_or_else(untyped)?;
        let root_tensor = given.filter(|_| root == session.rank());
        let shape = match root_tensor {
            Some(memory) => memory.shape().clone(),
            None if root == session.rank() => {
                let text = format!("rank {root} is the root of a scatter but gives no tensor");
                return Err(GradwireError::Invalid(text));
            }
            None => expecting.unwrap_or_else(|| Shape::new(&[0]))?,
        };
        let list = if root_tensor.is_some() { splits } else { Vec::new() };
        let request = Request::plain(Collective::Scatter, dtype, shape);
        let call = session.call(common, Request { root: Rank(root), list, ..request })?;
        call.check_root()?;
        if root_tensor.is_some() {
            session.check_splits(&call.set, &call.request)?;
        }
        session.start(call, root_tensor.as_slice(), Target::New)
    }

    #[track_caller]
    fn start_alltoall(&self, memory: &Memory, options: AlltoallOptions) -> Result<Started> {
        let AlltoallOptions { common, splits, leaves_rest } = options;
        let session = self.pinned();
        let request = Request::plain(Collective::Alltoall, memory.dtype(), memory.shape().clone());
        let call = session.call(common, Request { list: splits, ..request })?;
        session.check_splits(&call.set, &call.request)?;
        let (rows, list) = (call.request.shape.rows(), &call.request.list);
        let sum: u64 = list.iter().sum(); // at most the rows, as checked above
        if sum < rows && !list.is_empty() && !leaves_rest {
            let rank = session.rank();
            return Err(GradwireError::Invalid(format!(
                "the splits of rank {rank} add up to {sum} rows, but its tensor has {rows}"
            )));
        }
        session.start(call, &[memory], Target::New)
    }

    /// Refuses splits that don't fit this rank's tensor.
    fn check_splits(&self, set: &Members, request: &Request) -> Result<()> {
        request.validate()?;
        let splits = agreed::splits(Rank(self.rank()), request, set.len());
        splits.map(drop).map_err(|wrong| GradwireError::Invalid(wrong.to_string()))
    }
}

/// The error if the element type of the result is unknown.
pub(super) fn untyped() -> GradwireError {
    let types: Vec<_> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
    GradwireError::Invalid(format!(
        "the element type of the result is unknown: set it with .dtype(…), or receive a \
         Tensor of {}",
        types.join(", ")
    ))
}
