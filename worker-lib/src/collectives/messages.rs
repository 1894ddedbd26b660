//! Messages from one rank to another: send and receive.

use gradwire_proto::{Collective, DType, Rank, Request, Shape};

use super::{Call, Finished, Started, Target, moves::untyped};
use crate::{
    error::{GradwireError, Result},
    handle::{Handle, Start},
    memory::{FromBuffer, Memory, Payload},
    options::{Common, ReceiveOptions, SendOptions},
    session::Session,
};

impl Session {
    /// Sends a tensor to another rank, which receives it. Returns once the tensor may be changed.
    ///
    /// # Errors
    /// As for [`Session::allreduce`]; also if the peer is this rank.
    #[track_caller]
    pub fn send<P: Payload>(&self, tensor: &P, options: SendOptions) -> Result<()> {
        let started = self.start_send(tensor.memory(), options)?;
        self.finish(started).map(drop)
    }

    /// Starts [`Session::send`] without waiting for it.
    #[track_caller]
    pub fn send_async<P: Payload>(&self, tensor: P, options: SendOptions) -> Start<P, P> {
        let started = self.start_send(tensor.memory(), options);
        self.handle_with(started, tensor, |tensor, _| Ok(tensor))
    }

    /// Receives a tensor of any shape from another rank. Both ranks must use the same element type.
    #[track_caller]
    pub fn receive<P: FromBuffer>(&self, options: ReceiveOptions) -> Result<P> {
        self.receive_async(options)?.wait()
    }

    /// Starts [`Session::receive`] without waiting for it.
    #[track_caller]
    pub fn receive_async<P: FromBuffer>(&self, options: ReceiveOptions) -> Result<Handle<P>> {
        let ReceiveOptions { common, peer, tag, dtype, expecting } = options;
        let dtype = P::DTYPE.or(dtype).ok_or_else(untyped)?;
        let shape = expecting.unwrap_or_else(|| Shape::new(&[0]))?;
        let session = self.pinned();
        let call = session.message(common, (peer, session.rank(), tag), dtype, shape)?;
        let started = session.start(call, &[], Target::New)?;
        Ok(session.handle(started, Finished::one))
    }

    /// Receives into a given tensor with the shape and element type of the message. The shape and
    /// element type in the options are ignored.
    ///
    /// # Errors
    /// As for [`Session::receive`]; also for a message of another shape, which is received and
    /// dropped; the tensor is unchanged.
    #[track_caller]
    pub fn receive_into<P: Payload>(&self, tensor: &mut P, options: ReceiveOptions) -> Result<()> {
        let (from, shape) = (options.peer, tensor.memory().shape().clone());
        let started = self.start_receive_into(tensor.memory(), options)?;
        fitted(&self.finish(started)?, from, &shape)
    }

    /// Starts [`Session::receive_into`] without waiting for it.
    #[track_caller]
    pub fn receive_into_async<P: Payload>(
        &self,
        tensor: P,
        options: ReceiveOptions,
    ) -> Start<P, P> {
        let (from, shape) = (options.peer, tensor.memory().shape().clone());
        let started = self.start_receive_into(tensor.memory(), options);
        self.handle_with(started, tensor, move |tensor, finished| {
            fitted(&finished, from, &shape)?;
            Ok(tensor)
        })
    }

    #[track_caller]
    fn start_send(&self, memory: &Memory, options: SendOptions) -> Result<Started> {
        let SendOptions { common, peer, tag } = options;
        let (dtype, shape) = (memory.dtype(), memory.shape().clone());
        let session = self.pinned();
        let call = session.message(common, (session.rank(), peer, tag), dtype, shape)?;
        session.start(call, &[memory], Target::New)
    }

    #[track_caller]
    fn start_receive_into(&self, memory: &Memory, options: ReceiveOptions) -> Result<Started> {
        let ReceiveOptions { common, peer, tag, .. } = options;
        let (dtype, shape) = (memory.dtype(), memory.shape().clone());
        let session = self.pinned();
        let call = session.message(common, (peer, session.rank(), tag), dtype, shape)?;
        session.start(call, &[], Target::Given(memory))
    }

    #[track_caller]
    fn message(
        &self,
        common: Common,
        (from, to, tag): (u32, u32, u32),
        dtype: DType,
        shape: Shape,
    ) -> Result<Call> {
        let request = Request::plain(Collective::SendReceive, dtype, shape);
        let request = Request { root: Rank(from), list: vec![u64::from(to)], ..request };
        let mut call = self.call(common, request)?;
        call.set.check_peer("sender", from)?;
        call.set.check_peer("receiver", to)?;
        if from == to {
            let text = format!("rank {from} would send to itself; copy the tensor instead");
            return Err(GradwireError::Invalid(text));
        }
        call.way = Some((from, to, tag));
        Ok(call)
    }
}

/// An error if the message went to other memory because the given tensor has another shape.
fn fitted(finished: &Finished, from: u32, shape: &Shape) -> Result<()> {
    match finished.outputs.first() {
        Some(Some(output)) if output.buffer.memory().shape() != shape => {
            Err(GradwireError::Invalid(format!(
                "rank {from} sent a tensor of shape {}, which does not fit the given one of shape \
                 {shape}; receive it as a new tensor",
                output.buffer.memory().shape()
            )))
        }
        _ => Ok(()),
    }
}
