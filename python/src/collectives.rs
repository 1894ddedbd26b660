//! Starting collectives: each call returns a handle immediately. An operation works in place if its
//! input and its result have the same size; otherwise the handle's result is new memory.
//!
//! A handle's `wait` returns a list of buffers, or of `(buffer, rows from each member)` if ranks
//! may contribute different numbers of rows.

use gradwire_worker::{
    AdasumOptions, AllgatherOptions, AllreduceOptions, AlltoallOptions, BarrierOptions,
    BroadcastOptions, GatherOptions, JoinOptions, ObjectKind, ReceiveOptions, ReduceOp,
    ReduceOptions, ReduceScatterOptions, ScatterOptions, SendOptions, SharedBuffer,
};
use pyo3::prelude::*;

use crate::{
    buffer::{self, Buffer},
    call_site,
    detached::detached,
    error::{PythonError, Raise},
    handle::{Handle, IntoValue},
    options::{Common, Set, apply, parse},
    session::Session,
};

type Started<P, E> = Result<gradwire_worker::Handle<P>, E>;

impl Session {
    /// The worker library's session, for an operation of the program's current line.
    pub(crate) fn here(&self, py: Python<'_>) -> gradwire_worker::Session {
        self.inner.called_at(call_site::here(py))
    }

    /// Starts an operation that is called `name` in messages.
    fn start<P: IntoValue, E: Into<PythonError> + Send>(
        &self,
        py: Python<'_>,
        name: impl Into<String>,
        call: impl FnOnce(&gradwire_worker::Session) -> Started<P, E> + Send,
    ) -> PyResult<Handle> {
        let session = self.here(py);
        Ok(Handle::new(name, detached(py, || call(&session)).or_raise(py)?))
    }

    /// Starts an operation on one tensor, or on several as a group.
    fn start_all<P: IntoValue, Q: IntoValue, E: Into<PythonError> + Send, F>(
        &self,
        py: Python<'_>,
        name: String,
        tensors: &[PyRef<'_, Buffer>],
        one: impl FnOnce(&gradwire_worker::Session, SharedBuffer) -> Started<P, E> + Send,
        group: impl FnOnce(&gradwire_worker::Session, Vec<SharedBuffer>) -> Started<Q, F> + Send,
    ) -> PyResult<Handle>
    where
        F: Into<PythonError> + Send,
    {
        match tensors {
            [tensor] => {
                let tensor = tensor.memory.clone();
                self.start(py, name, |session| one(session, tensor))
            }
            _ => {
                let tensors = tensors.iter().map(|tensor| tensor.memory.clone()).collect();
                self.start(py, name, |session| group(session, tensors))
            }
        }
    }
}

#[pymethods]
impl Session {
    /// Starts an in-place allreduce. Several buffers form a group.
    ///
    /// Args:
    ///     tensors: The buffers.
    ///     op: The name of the reduction, such as `sum` or `average`.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     prescale: The factor for each contribution.
    ///     postscale: The factor for the result.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is the list of buffers.
    #[pyo3(signature = (
        tensors, op, *, name=None, priority=0, prescale=1.0, postscale=1.0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn allreduce(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Buffer>>,
        op: &str,
        name: Option<String>,
        priority: i32,
        prescale: f64,
        postscale: f64,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let op = parse("reduction", op, ReduceOp::NAMES).or_raise(py)?;
        let options = apply!(common, AllreduceOptions::default());
        let options = options.priority(priority).op(op).prescale(prescale).postscale(postscale);
        self.start_all(
            py,
            common.called("allreduce"),
            &tensors,
            |session, tensor| session.allreduce_async(tensor, options.clone()),
            |session, all| session.grouped_allreduce_async(all, options.clone()),
        )
    }

    /// Starts an in-place combination with Adasum.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    #[pyo3(signature = (tensor, *, name=None, priority=0, process_set=None))]
    fn adasum(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let options = apply!(common, AdasumOptions::default()).priority(priority);
        let tensor = tensor.memory.clone();
        self.start(py, common.called("adasum"), |session| session.adasum_async(tensor, options))
    }

    /// Starts a reduce to the root, in place on the root.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank that receives the result.
    ///     op: The name of the reduction, such as `sum` or `average`.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     prescale: The factor for each contribution.
    ///     postscale: The factor for the result.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    #[pyo3(signature = (
        tensor, root, op, *, name=None, prescale=1.0, postscale=1.0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn reduce(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        root: u32,
        op: &str,
        name: Option<String>,
        prescale: f64,
        postscale: f64,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let op = parse("reduction", op, ReduceOp::NAMES).or_raise(py)?;
        let options = apply!(common, ReduceOptions::to_rank(root));
        let options = options.op(op).prescale(prescale).postscale(postscale);
        let tensor = tensor.memory.clone();
        self.start(py, common.called("reduce"), |session| session.reduce_async(tensor, options))
    }

    /// Starts an in-place broadcast of the root's tensor.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank whose tensor all ranks receive.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    #[pyo3(signature = (tensor, root, *, name=None, process_set=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        root: u32,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let options = apply!(common, BroadcastOptions::from_rank(root));
        let tensor = tensor.memory.clone();
        self.start(py, common.called("broadcast"), |session| {
            session.broadcast_async(tensor, options)
        })
    }

    /// Starts an allgather. Several buffers form a group.
    ///
    /// Args:
    ///     tensors: The buffers.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     object: The kind of object operation, if the rows are the bytes of objects.
    ///     op: The name of the reduction, if the caller reduces the rows.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list of pairs: a new buffer, and the members' numbers of
    ///     rows.
    #[pyo3(signature = (tensors, *, name=None, object=None, op=None, process_set=None))]
    fn allgather(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Buffer>>,
        name: Option<String>,
        object: Option<&str>,
        op: Option<&str>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let mut options = apply!(common, AllgatherOptions::default());
        if let Some(kind) = object {
            options =
                options.objects(parse("object operation", kind, ObjectKind::NAMES).or_raise(py)?);
        }
        if let Some(op) = op {
            options =
                options.reduced_by_caller(parse("reduction", op, ReduceOp::NAMES).or_raise(py)?);
        }
        self.start_all(
            py,
            common.called(object.unwrap_or("allgather")),
            &tensors,
            |session, tensor| session.allgather_async(tensor, options.clone()),
            |session, all| session.grouped_allgather_async(all, options.clone()),
        )
    }

    /// Starts a gather to the root.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank that receives the result.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result on the root is like that of an allgather, and None elsewhere.
    #[pyo3(signature = (tensor, root, *, name=None, process_set=None))]
    fn gather(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        root: u32,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let options = apply!(common, GatherOptions::to_rank(root));
        let tensor = tensor.memory.clone();
        self.start(py, common.called("gather"), |session| session.gather_async(tensor, options))
    }

    /// Starts a scatter of the root's tensor.
    ///
    /// Args:
    ///     tensor: The buffer on the root; None elsewhere.
    ///     root: The rank whose tensor is split.
    ///     splits: On the root, the number of rows for each member; equal by default.
    ///     dtype: The name of the element type, except on the root.
    ///     expecting: The expected shape of the result; saves a round trip if correct.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with a new buffer.
    #[pyo3(signature = (
        tensor, root, *, splits=None, dtype=None, expecting=None, name=None,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn scatter(
        &self,
        py: Python<'_>,
        tensor: Option<PyRef<'_, Buffer>>,
        root: u32,
        splits: Option<Vec<usize>>,
        dtype: Option<&str>,
        expecting: Option<Vec<usize>>,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let mut options = apply!(common, ScatterOptions::from_rank(root));
        if let Some(splits) = splits {
            options = options.splits(&splits);
        }
        if let Some(name) = dtype {
            options = options.dtype(buffer::dtype(name).or_raise(py)?);
        }
        if let Some(dims) = expecting {
            options = options.expecting(&dims);
        }
        let tensor = tensor.map(|tensor| tensor.memory.clone());
        self.start(py, common.called("scatter"), |session| session.scatter_async(tensor, options))
    }

    /// Starts a reducescatter. Several buffers form a group.
    ///
    /// Args:
    ///     tensors: The buffers.
    ///     op: The name of the reduction, such as `sum` or `average`.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     prescale: The factor for each contribution.
    ///     postscale: The factor for the result.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list of new buffers.
    #[pyo3(signature = (
        tensors, op, *, name=None, prescale=1.0, postscale=1.0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn reducescatter(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Buffer>>,
        op: &str,
        name: Option<String>,
        prescale: f64,
        postscale: f64,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let op = parse("reduction", op, ReduceOp::NAMES).or_raise(py)?;
        let options = apply!(common, ReduceScatterOptions::default());
        let options = options.op(op).prescale(prescale).postscale(postscale);
        self.start_all(
            py,
            common.called("reducescatter"),
            &tensors,
            |session, tensor| session.reducescatter_async(tensor, options.clone()),
            |session, all| session.grouped_reducescatter_async(all, options.clone()),
        )
    }

    /// Starts an alltoall.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     splits: The number of rows for each member; equal by default.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is like that of an allgather.
    #[pyo3(signature = (tensor, *, splits=None, name=None, process_set=None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        splits: Option<Vec<usize>>,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        // As in Horovod.
        let mut options = apply!(common, AlltoallOptions::default()).leave_rest();
        if let Some(splits) = splits {
            options = options.splits(&splits);
        }
        let tensor = tensor.memory.clone();
        self.start(py, common.called("alltoall"), |session| session.alltoall_async(tensor, options))
    }

    /// Starts a message to a rank.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     to: The rank that receives it.
    ///     tag: The receiver passes the same tag.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle; its result has no meaning.
    #[pyo3(signature = (tensor, to, *, tag=0, process_set=None))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        to: u32,
        tag: u32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let mut options = SendOptions::to_rank(to).tag(tag);
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        let tensor = tensor.memory.clone();
        self.start(py, format!("send to {to}"), |session| session.send_async(tensor, options))
    }

    /// Starts to receive a message from a rank.
    ///
    /// Args:
    ///     source: The rank that sends the message.
    ///     into: The buffer for the message; None allocates a new one.
    ///     dtype: The name of the element type of a new buffer.
    ///     expecting: The expected shape of a new buffer; saves a round trip if correct.
    ///     tag: The sender passes the same tag.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    #[pyo3(signature = (
        source, *, into=None, dtype=None, expecting=None, tag=0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn receive(
        &self,
        py: Python<'_>,
        source: u32,
        into: Option<PyRef<'_, Buffer>>,
        dtype: Option<&str>,
        expecting: Option<Vec<usize>>,
        tag: u32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let mut options = ReceiveOptions::from_rank(source).tag(tag);
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        if let Some(dims) = expecting {
            options = options.expecting(&dims);
        }
        let called = format!("receive from {source}");
        if let Some(into) = into {
            let into = into.memory.clone();
            return self.start(py, called, |session| session.receive_into_async(into, options));
        }
        let Some(name) = dtype else {
            return Err(PythonError::invalid("receive needs `into` or `dtype`").raise(py));
        };
        let options = options.dtype(buffer::dtype(name).or_raise(py)?);
        self.start(py, called, |session| session.receive_async::<SharedBuffer>(options))
    }

    /// Starts a barrier, which completes once every member has started it.
    ///
    /// Args:
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle without a result.
    #[pyo3(signature = (*, name=None, process_set=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = Common::new(name, &process_set);
        let options = apply!(common, BarrierOptions::default());
        self.start(py, common.called("barrier"), |session| session.barrier_with_async(options))
    }

    /// Declares that this rank has no more data.
    ///
    /// Args:
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle that completes when all ranks have joined; its result is the last one.
    #[pyo3(signature = (*, process_set=None))]
    fn join(&self, py: Python<'_>, process_set: Set<'_>) -> PyResult<Handle> {
        let mut options = JoinOptions::default();
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        self.start(py, "join", |session| session.join_async(options))
    }
}
