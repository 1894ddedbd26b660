//! Starting collectives: each call returns a handle immediately. An operation works in place if its
//! input and its result have the same size; otherwise the handle's result is new memory.
//!
//! A handle's `wait` returns a list of buffers, or of `(buffer, rows from each member)` if ranks
//! may contribute different numbers of rows.

use gradwire_worker::{
    AdasumOptions, AllgatherOptions, AllreduceOptions, AlltoallOptions, BarrierOptions,
    BroadcastOptions, GatherOptions, JoinOptions, ReceiveOptions, ReduceOptions,
    ReduceScatterOptions, ScatterOptions, SendOptions, SharedBuffer,
};
use pyo3::prelude::*;

use crate::{
    buffer::{self, Buffer},
    error::{PythonError, Raise},
    handle::Handle,
    options::{Common, apply, object_kind, reduce_op},
    process_set::ProcessSet,
    session::Session,
};

type Set<'py> = Option<PyRef<'py, ProcessSet>>;

fn common(name: Option<String>, priority: i32, set: &Set<'_>) -> Common {
    Common::new(name, priority, set.as_deref())
}

/// One tensor, or a group of several.
enum Parts {
    One(SharedBuffer),
    Group(Vec<SharedBuffer>),
}

fn parts(mut tensors: Vec<PyRef<'_, Buffer>>) -> Parts {
    match tensors.len() {
        1 => Parts::One(tensors.remove(0).memory.clone()),
        _ => Parts::Group(tensors.iter().map(|tensor| tensor.memory.clone()).collect()),
    }
}

fn sizes(dims: &[u64]) -> Vec<usize> {
    dims.iter().map(|&dim| usize::try_from(dim).unwrap_or(usize::MAX)).collect()
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
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
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
        let common = common(name, priority, &process_set);
        let op = reduce_op(op).or_raise(py)?;
        let options = apply!(common, AllreduceOptions::default());
        let options = options.op(op).prescale(prescale).postscale(postscale);
        let called = common.called("allreduce");
        let parts = parts(tensors);
        py.detach(|| match parts {
            Parts::One(tensor) => {
                self.inner.allreduce_async(tensor, options).map(|h| Handle::new(called, h))
            }
            Parts::Group(all) => {
                self.inner.grouped_allreduce_async(all, options).map(|h| Handle::new(called, h))
            }
        })
        .or_raise(py)
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
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensor, *, name=None, priority=0, process_set=None))]
    fn adasum(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let options = apply!(common, AdasumOptions::default());
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.adasum_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("adasum"), handle))
    }

    /// Starts a reduce to the root, in place on the root.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank that receives the result.
    ///     op: The name of the reduction, such as `sum` or `average`.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     prescale: The factor for each contribution.
    ///     postscale: The factor for the result.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (
        tensor, root, op, *, name=None, priority=0, prescale=1.0, postscale=1.0,
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
        priority: i32,
        prescale: f64,
        postscale: f64,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let op = reduce_op(op).or_raise(py)?;
        let options = apply!(common, ReduceOptions::to_rank(root));
        let options = options.op(op).prescale(prescale).postscale(postscale);
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.reduce_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("reduce"), handle))
    }

    /// Starts an in-place broadcast of the root's tensor.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank whose tensor all ranks receive.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensor, root, *, name=None, priority=0, process_set=None))]
    fn broadcast(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        root: u32,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let options = apply!(common, BroadcastOptions::from_rank(root));
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.broadcast_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("broadcast"), handle))
    }

    /// Starts an allgather. Several buffers form a group.
    ///
    /// Args:
    ///     tensors: The buffers.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     object: The kind of object operation, if the rows are the bytes of objects.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list of pairs: a new buffer, and the members' numbers of
    ///     rows.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensors, *, name=None, object=None, priority=0, process_set=None))]
    fn allgather(
        &self,
        py: Python<'_>,
        tensors: Vec<PyRef<'_, Buffer>>,
        name: Option<String>,
        object: Option<&str>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let mut options = apply!(common, AllgatherOptions::default());
        if let Some(kind) = object {
            options = options.objects(object_kind(kind).or_raise(py)?);
        }
        let called = common.called(object.unwrap_or("allgather"));
        let parts = parts(tensors);
        py.detach(|| match parts {
            Parts::One(tensor) => {
                self.inner.allgather_async(tensor, options).map(|h| Handle::new(called, h))
            }
            Parts::Group(all) => {
                self.inner.grouped_allgather_async(all, options).map(|h| Handle::new(called, h))
            }
        })
        .or_raise(py)
    }

    /// Starts a gather to the root.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     root: The rank that receives the result.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result on the root is like that of an allgather, and None elsewhere.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensor, root, *, name=None, priority=0, process_set=None))]
    fn gather(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        root: u32,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let options = apply!(common, GatherOptions::to_rank(root));
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.gather_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("gather"), handle))
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
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with a new buffer.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (
        tensor, root, *, splits=None, dtype=None, expecting=None, name=None, priority=0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn scatter(
        &self,
        py: Python<'_>,
        tensor: Option<PyRef<'_, Buffer>>,
        root: u32,
        splits: Option<Vec<u64>>,
        dtype: Option<&str>,
        expecting: Option<Vec<u64>>,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let mut options = apply!(common, ScatterOptions::from_rank(root));
        if let Some(splits) = splits {
            options = options.splits(&splits);
        }
        if let Some(name) = dtype {
            options = options.dtype(buffer::dtype(name).or_raise(py)?);
        }
        if let Some(dims) = expecting {
            options = options.expecting(&sizes(&dims));
        }
        let tensor = tensor.map(|tensor| tensor.memory.clone());
        let handle = py.detach(|| self.inner.scatter_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("scatter"), handle))
    }

    /// Starts a reducescatter. Several buffers form a group.
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
    ///     A handle whose result is a list of new buffers.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (
        tensors, op, *, name=None, priority=0, prescale=1.0, postscale=1.0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn reducescatter(
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
        let common = common(name, priority, &process_set);
        let op = reduce_op(op).or_raise(py)?;
        let options = apply!(common, ReduceScatterOptions::default());
        let options = options.op(op).prescale(prescale).postscale(postscale);
        let called = common.called("reducescatter");
        let parts = parts(tensors);
        py.detach(|| match parts {
            Parts::One(tensor) => {
                self.inner.reducescatter_async(tensor, options).map(|h| Handle::new(called, h))
            }
            Parts::Group(all) => {
                self.inner.grouped_reducescatter_async(all, options).map(|h| Handle::new(called, h))
            }
        })
        .or_raise(py)
    }

    /// Starts an alltoall.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     splits: The number of rows for each member; equal by default.
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is like that of an allgather.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensor, *, splits=None, name=None, priority=0, process_set=None))]
    fn alltoall(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        splits: Option<Vec<u64>>,
        name: Option<String>,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, priority, &process_set);
        let mut options = apply!(common, AlltoallOptions::default());
        if let Some(splits) = splits {
            options = options.splits(&splits);
        }
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.alltoall_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(common.called("alltoall"), handle))
    }

    /// Starts a message to a rank.
    ///
    /// Args:
    ///     tensor: The buffer.
    ///     to: The rank that receives it.
    ///     tag: The receiver passes the same tag.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle; its result has no meaning.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (tensor, to, *, tag=0, priority=0, process_set=None))]
    fn send(
        &self,
        py: Python<'_>,
        tensor: PyRef<'_, Buffer>,
        to: u32,
        tag: u32,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let mut options = SendOptions::to_rank(to).tag(tag).priority(priority);
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        let tensor = tensor.memory.clone();
        let handle = py.detach(|| self.inner.send_async(tensor, options)).or_raise(py)?;
        Ok(Handle::new(format!("send to {to}"), handle))
    }

    /// Starts to receive a message from a rank.
    ///
    /// Args:
    ///     source: The rank that sends the message.
    ///     into: The buffer for the message; None allocates a new one.
    ///     dtype: The name of the element type of a new buffer.
    ///     expecting: The expected shape of a new buffer; saves a round trip if correct.
    ///     tag: The sender passes the same tag.
    ///     priority: Operations with a larger number go first.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle whose result is a list with the buffer.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (
        source, *, into=None, dtype=None, expecting=None, tag=0, priority=0,
        process_set=None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "Python's keywords")]
    fn receive(
        &self,
        py: Python<'_>,
        source: u32,
        into: Option<PyRef<'_, Buffer>>,
        dtype: Option<&str>,
        expecting: Option<Vec<u64>>,
        tag: u32,
        priority: i32,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let mut options = ReceiveOptions::from_rank(source).tag(tag).priority(priority);
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        if let Some(dims) = expecting {
            options = options.expecting(&sizes(&dims));
        }
        let called = format!("receive from {source}");
        if let Some(into) = into {
            let into = into.memory.clone();
            let handle = py.detach(|| self.inner.receive_into_async(into, options)).or_raise(py)?;
            return Ok(Handle::new(called, handle));
        }
        let Some(name) = dtype else {
            return Err(PythonError::invalid("receive needs `into` or `dtype`").raise(py));
        };
        let options = options.dtype(buffer::dtype(name).or_raise(py)?);
        let started = py.detach(|| self.inner.receive_async::<SharedBuffer>(options));
        Ok(Handle::new(called, started.or_raise(py)?))
    }

    /// Starts a barrier, which completes once every member has started it.
    ///
    /// Args:
    ///     name: Identifies the call across ranks. Unnamed calls are matched by their order.
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle without a result.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (*, name=None, process_set=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        name: Option<String>,
        process_set: Set<'_>,
    ) -> PyResult<Handle> {
        let common = common(name, 0, &process_set);
        let options = apply!(common, BarrierOptions::default());
        let handle = py.detach(|| self.inner.barrier_with_async(options)).or_raise(py)?;
        Ok(Handle::new(common.called("barrier"), handle))
    }

    /// Declares that this rank has no more data.
    ///
    /// Args:
    ///     process_set: The participating ranks; all by default.
    ///
    /// Returns:
    ///     A handle that completes when all ranks have joined; its result is the last one.
    ///
    /// Raises:
    ///     InvalidRequest: An argument is invalid. Nothing was started.
    ///     GradwireError: The session has ended, or memory is exhausted.
    #[pyo3(signature = (*, process_set=None))]
    fn join(&self, py: Python<'_>, process_set: Set<'_>) -> PyResult<Handle> {
        let mut options = JoinOptions::default();
        if let Some(set) = &process_set {
            options = options.process_set(&set.inner);
        }
        let handle = py.detach(|| self.inner.join_async(options)).or_raise(py)?;
        Ok(Handle::new("join", handle))
    }
}
