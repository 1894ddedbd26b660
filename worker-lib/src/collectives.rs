//! Allreduce, broadcast, barrier: in place, blocking or with a handle.
//!
//! All ranks must ask for the same: name, element type, shape, operation, factors, root. An
//! operation without a name is called by its number (`allreduce.#3`), which fits on all ranks if
//! all make their unnamed calls in the same order.

use gradwire_proto::{Collective, Rank, ReduceOp, Request, Shape, TensorName};

use crate::{
    element::Element,
    error::{GradwireError, Result},
    handle::Handle,
    memory::{Buffer, Payload},
    session::Session,
};

/// How an allreduce reduces.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct AllreduceOptions {
    name: Option<String>,
    op: ReduceOp,
    priority: i32,
    prescale: f64,
    postscale: f64,
}

impl Default for AllreduceOptions {
    /// Unnamed, the average, priority 0, no factors.
    fn default() -> Self {
        Self { name: None, op: ReduceOp::Average, priority: 0, prescale: 1.0, postscale: 1.0 }
    }
}

impl AllreduceOptions {
    /// The default under a name.
    pub fn named(name: impl Into<String>) -> Self {
        Self { name: Some(name.into()), ..Self::default() }
    }

    /// How the ranks' tensors become one.
    pub fn op(mut self, op: ReduceOp) -> Self {
        self.op = op;
        self
    }

    /// What has waited goes in the order of priorities, larger ones first.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// A factor for each rank's tensor before it is reduced; floats only.
    pub fn prescale(mut self, factor: f64) -> Self {
        self.prescale = factor;
        self
    }

    /// A factor for the result; floats only.
    pub fn postscale(mut self, factor: f64) -> Self {
        self.postscale = factor;
        self
    }
}

/// Whose tensor a broadcast gives to everybody.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[must_use]
pub struct BroadcastOptions {
    name: Option<String>,
    root: u32,
    priority: i32,
}

impl BroadcastOptions {
    /// Rank `root`'s tensor.
    pub fn from_rank(root: u32) -> Self {
        Self { root, ..Self::default() }
    }

    /// A name of its own.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// As for an allreduce.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }
}

impl Session {
    /// Reduces the ranks' tensors; every rank gets the result in place.
    ///
    /// # Errors
    /// [`GradwireError::Failed`] with the rank and the reason when the operation or the job fails;
    /// the tensor's contents are undefined then. [`GradwireError::Invalid`] and its like if it was
    /// not started.
    pub fn allreduce<P: Payload>(&self, tensor: &mut P, options: AllreduceOptions) -> Result<()> {
        let (ticket, _) = self.start_allreduce(tensor.buffer(), options)?;
        self.finish_blocking(ticket)
    }

    /// As [`Session::allreduce`], without waiting for it.
    ///
    /// # Errors
    /// If it was not started; the tensor is gone then.
    pub fn allreduce_async<P: Payload>(
        &self,
        tensor: P,
        options: AllreduceOptions,
    ) -> Result<Handle<P>> {
        let (ticket, name) = self.start_allreduce(tensor.buffer(), options)?;
        Ok(Handle::new(self.clone(), ticket, name, tensor))
    }

    /// Reduces ordinary memory: copies it into shared memory and the result back.
    ///
    /// # Errors
    /// As [`Session::allreduce`]; the slice is unchanged then.
    pub fn allreduce_slice<T: Element>(
        &self,
        values: &mut [T],
        options: AllreduceOptions,
    ) -> Result<()> {
        let mut tensor = self.tensor(values, &[values.len()])?;
        self.allreduce(&mut tensor, options)?;
        values.copy_from_slice(tensor.as_slice());
        Ok(())
    }

    /// Gives every rank the root's tensor, in place.
    ///
    /// # Errors
    /// As [`Session::allreduce`]; also if there is no rank of that number.
    pub fn broadcast<P: Payload>(&self, tensor: &mut P, options: BroadcastOptions) -> Result<()> {
        let (ticket, _) = self.start_broadcast(tensor.buffer(), options)?;
        self.finish_blocking(ticket)
    }

    /// As [`Session::broadcast`], without waiting for it.
    ///
    /// # Errors
    /// If it was not started; the tensor is gone then.
    pub fn broadcast_async<P: Payload>(
        &self,
        tensor: P,
        options: BroadcastOptions,
    ) -> Result<Handle<P>> {
        let (ticket, name) = self.start_broadcast(tensor.buffer(), options)?;
        Ok(Handle::new(self.clone(), ticket, name, tensor))
    }

    /// As [`Session::broadcast`], for ordinary memory.
    ///
    /// # Errors
    /// As there; the slice is unchanged then.
    pub fn broadcast_slice<T: Element>(
        &self,
        values: &mut [T],
        options: BroadcastOptions,
    ) -> Result<()> {
        let mut tensor = self.tensor(values, &[values.len()])?;
        self.broadcast(&mut tensor, options)?;
        values.copy_from_slice(tensor.as_slice());
        Ok(())
    }

    /// Returns once every rank has called it.
    ///
    /// # Errors
    /// As [`Session::allreduce`].
    pub fn barrier(&self) -> Result<()> {
        self.barrier_async()?.wait()
    }

    /// As [`Session::barrier`], without waiting for it.
    ///
    /// # Errors
    /// If it was not started.
    pub fn barrier_async(&self) -> Result<Handle<()>> {
        let request = Request::barrier();
        let buffer = self.buffer(request.dtype, Shape::new(&[0])?)?;
        let (ticket, name) = self.start(None, request, 0, &buffer)?;
        // The table keeps the empty block, as it keeps every operation's.
        Ok(Handle::new(self.clone(), ticket, name, ()))
    }

    fn start_allreduce(
        &self,
        buffer: &Buffer,
        options: AllreduceOptions,
    ) -> Result<(u64, TensorName)> {
        let AllreduceOptions { name, op, priority, prescale, postscale } = options;
        let request = Request::allreduce(buffer.dtype(), buffer.shape().clone(), op);
        self.start(name, Request { prescale, postscale, ..request }, priority, buffer)
    }

    fn start_broadcast(
        &self,
        buffer: &Buffer,
        options: BroadcastOptions,
    ) -> Result<(u64, TensorName)> {
        let BroadcastOptions { name, root, priority } = options;
        if root >= self.size() {
            let text = format!(
                "there is no rank {root} to broadcast from: the job has {} ranks",
                self.size()
            );
            return Err(GradwireError::Invalid(text));
        }
        let request = Request::broadcast(buffer.dtype(), buffer.shape().clone(), Rank(root));
        self.start(name, request, priority, buffer)
    }

    fn start(
        &self,
        name: Option<String>,
        request: Request,
        priority: i32,
        buffer: &Buffer,
    ) -> Result<(u64, TensorName)> {
        self.check_process()?;
        let name = match name {
            Some(name) => TensorName::new(&name)?,
            None => TensorName::new(&self.unnamed(request.collective))?,
        };
        let submitted = self.shared().submit(name.clone(), request, priority, buffer);
        let ticket = self.shared().noted(submitted)?;
        Ok((ticket, name))
    }

    fn unnamed(&self, collective: Collective) -> String {
        let kind = match collective {
            Collective::Allreduce => 0,
            Collective::Broadcast => 1,
            Collective::Barrier => 2,
        };
        format!("{collective}.#{}", self.next_unnamed(kind))
    }

    fn finish_blocking(&self, ticket: u64) -> Result<()> {
        let outcome = self.shared().wait(ticket, None).unwrap_or(Err(GradwireError::Closed));
        self.shared().noted(outcome)
    }
}
