//! Collectives that reduce: allreduce, reduce, reducescatter.

use gradwire_proto::{Collective, Rank, Request};

use super::{Call, Started, Target, buffers, parts};
use crate::{
    error::Result,
    handle::Start,
    memory::{FromBuffer, Memory, Payload},
    options::{AllreduceOptions, ReduceOptions, ReduceScatterOptions, Reduction},
    session::Session,
};

impl Session {
    /// Reduces the ranks' tensors; every rank gets the result in place. An average is over the
    /// ranks that have not joined.
    ///
    /// # Errors
    /// [`GradwireError::Failed`](crate::GradwireError::Failed) with the rank and the reason if the
    /// operation or the job fails; then the tensor's contents are undefined.
    /// [`GradwireError::Invalid`](crate::GradwireError::Invalid) or a similar error if nothing was
    /// started.
    #[track_caller]
    pub fn allreduce<P: Payload>(&self, tensor: &mut P, options: AllreduceOptions) -> Result<()> {
        let started = self.start_allreduce(&[tensor.memory()], options, Target::InPlace)?;
        self.finish(started).map(drop)
    }

    /// Starts [`Session::allreduce`] without waiting for it.
    #[track_caller]
    pub fn allreduce_async<P: Payload>(&self, tensor: P, options: AllreduceOptions) -> Start<P, P> {
        let started = self.start_allreduce(&[tensor.memory()], options, Target::InPlace);
        self.handle_with(started, tensor, |tensor, _| Ok(tensor))
    }

    /// Like [`Session::allreduce`], with the result in a new tensor. `tensor` is unchanged.
    #[track_caller]
    pub fn allreduce_to<P: FromBuffer>(&self, tensor: &P, options: AllreduceOptions) -> Result<P> {
        let started = self.start_allreduce(&[tensor.memory()], options, Target::New)?;
        self.finish(started)?.one()
    }

    /// Starts [`Session::allreduce_to`] without waiting for it. The handle returns the tensor and
    /// the result.
    #[track_caller]
    pub fn allreduce_to_async<P: FromBuffer>(
        &self,
        tensor: P,
        options: AllreduceOptions,
    ) -> Start<(P, P), P> {
        let started = self.start_allreduce(&[tensor.memory()], options, Target::New);
        self.handle_with(started, tensor, |tensor, finished| Ok((tensor, finished.one()?)))
    }

    /// Reduces several tensors as one operation: all of them succeed, or none. They may have
    /// different shapes; [`Buffer`](crate::Buffer)s may also have different element types. All
    /// ranks must give the same number of tensors.
    #[track_caller]
    pub fn grouped_allreduce<P: Payload>(
        &self,
        tensors: &mut [P],
        options: AllreduceOptions,
    ) -> Result<()> {
        let started = self.start_allreduce(&buffers(tensors), options, Target::InPlace)?;
        self.finish(started).map(drop)
    }

    /// Starts [`Session::grouped_allreduce`] without waiting for it.
    #[track_caller]
    pub fn grouped_allreduce_async<P: Payload>(
        &self,
        tensors: Vec<P>,
        options: AllreduceOptions,
    ) -> Start<Vec<P>, Vec<P>> {
        let started = self.start_allreduce(&buffers(&tensors), options, Target::InPlace);
        self.handle_with(started, tensors, |tensors, _| Ok(tensors))
    }

    /// Like [`Session::grouped_allreduce`], with the results in new tensors.
    #[track_caller]
    pub fn grouped_allreduce_to<P: FromBuffer>(
        &self,
        tensors: &[P],
        options: AllreduceOptions,
    ) -> Result<Vec<P>> {
        let started = self.start_allreduce(&buffers(tensors), options, Target::New)?;
        self.finish(started)?.many()
    }

    /// Starts [`Session::grouped_allreduce_to`] without waiting for it. The handle returns the
    /// tensors and the results.
    #[track_caller]
    pub fn grouped_allreduce_to_async<P: FromBuffer>(
        &self,
        tensors: Vec<P>,
        options: AllreduceOptions,
    ) -> Start<(Vec<P>, Vec<P>), Vec<P>> {
        let started = self.start_allreduce(&buffers(&tensors), options, Target::New);
        self.handle_with(started, tensors, |tensors, finished| Ok((tensors, finished.many()?)))
    }

    /// Reduces the ranks' tensors. The root gets the result in place; the tensors of other ranks
    /// are unchanged.
    #[track_caller]
    pub fn reduce<P: Payload>(&self, tensor: &mut P, options: ReduceOptions) -> Result<()> {
        let started = self.start_reduce(tensor.memory(), options)?;
        self.finish(started).map(drop)
    }

    /// Starts [`Session::reduce`] without waiting for it.
    #[track_caller]
    pub fn reduce_async<P: Payload>(&self, tensor: P, options: ReduceOptions) -> Start<P, P> {
        let started = self.start_reduce(tensor.memory(), options);
        self.handle_with(started, tensor, |tensor, _| Ok(tensor))
    }

    /// Reduces the ranks' tensors and gives each member its rows of the result, in rank order. If
    /// the rows can't be split evenly, the first members get one more.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also for a tensor without dimensions.
    #[track_caller]
    pub fn reducescatter<P: FromBuffer>(
        &self,
        tensor: &P,
        options: ReduceScatterOptions,
    ) -> Result<P> {
        let started = self.start_reducescatter(&[tensor.memory()], options)?;
        self.finish(started)?.one()
    }

    /// Starts [`Session::reducescatter`] without waiting for it. The handle returns the tensor
    /// and the result.
    #[track_caller]
    pub fn reducescatter_async<P: FromBuffer>(
        &self,
        tensor: P,
        options: ReduceScatterOptions,
    ) -> Start<(P, P), P> {
        let started = self.start_reducescatter(&[tensor.memory()], options);
        self.handle_with(started, tensor, |tensor, finished| Ok((tensor, finished.one()?)))
    }

    /// Like [`Session::reducescatter`] for several tensors as one operation: all of them succeed,
    /// or none.
    #[track_caller]
    pub fn grouped_reducescatter<P: FromBuffer>(
        &self,
        tensors: &[P],
        options: ReduceScatterOptions,
    ) -> Result<Vec<P>> {
        let started = self.start_reducescatter(&buffers(tensors), options)?;
        self.finish(started)?.many()
    }

    /// Starts [`Session::grouped_reducescatter`] without waiting for it. The handle returns the
    /// tensors and the results.
    #[track_caller]
    pub fn grouped_reducescatter_async<P: FromBuffer>(
        &self,
        tensors: Vec<P>,
        options: ReduceScatterOptions,
    ) -> Start<(Vec<P>, Vec<P>), Vec<P>> {
        let started = self.start_reducescatter(&buffers(&tensors), options);
        self.handle_with(started, tensors, |tensors, finished| Ok((tensors, finished.many()?)))
    }

    #[track_caller]
    fn start_allreduce(
        &self,
        buffers: &[&Memory],
        options: AllreduceOptions,
        into: Target<'_>,
    ) -> Result<Started> {
        let AllreduceOptions { common, reduction } = options;
        let request = reduced(Collective::Allreduce, buffers, reduction)?;
        self.start(self.call(common, request)?, buffers, into)
    }

    #[track_caller]
    fn start_reduce(&self, memory: &Memory, options: ReduceOptions) -> Result<Started> {
        let ReduceOptions { common, reduction, root } = options;
        let request = reduced(Collective::Reduce, &[memory], reduction)?;
        let call = self.call(common, Request { root: Rank(root), ..request })?;
        call.check_root()?;
        self.start(call, &[memory], Target::InPlace)
    }

    #[track_caller]
    fn start_reducescatter(
        &self,
        buffers: &[&Memory],
        options: ReduceScatterOptions,
    ) -> Result<Started> {
        let ReduceScatterOptions { common, reduction } = options;
        let request = reduced(Collective::ReduceScatter, buffers, reduction)?;
        self.start(self.call(common, request)?, buffers, Target::New)
    }
}

impl Call {
    /// Refuses a root that is not a member.
    pub(super) fn check_root(&self) -> Result<()> {
        self.set.check_peer("root", self.request.root.0)
    }
}

pub(crate) fn reduced(
    collective: Collective,
    buffers: &[&Memory],
    reduction: Reduction,
) -> Result<Request> {
    let (first, more) = parts(buffers.iter().copied())?;
    let Reduction { op, prescale, postscale } = reduction;
    let request = Request::allreduce(first.dtype, first.shape, op);
    Ok(Request { collective, prescale, postscale, more, ..request })
}
