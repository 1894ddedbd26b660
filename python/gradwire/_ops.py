"""All collectives, for any type of array. An adapter copies arrays to and from shared memory.

The result of an operation is a view of shared memory. An in-place operation copies the result into
the given array.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from gradwire import _native
from gradwire._arguments import factor, rows, seconds, whole_number
from gradwire._errors import InvalidRequest
from gradwire._process_sets import ProcessSet, global_process_set, native_set, note_join
from gradwire._staging import session
from gradwire._uses import COPIED, Use

Array = TypeVar("Array")
Result = TypeVar("Result")


class ReduceOp:
    """A reduction: how the contributions of all ranks are combined.

    The reductions are ``Average``, ``Sum``, ``Adasum``, ``Min``, ``Max``, ``Product``, ``BitAnd``,
    ``BitOr`` and ``BitXor``. ``int(op)`` is Horovod's number for it.

    Args:
        name: The name of the reduction in messages.
        number: Horovod's number for the reduction.

    Example:
        >>> import gradwire as gw
        >>> gw.Sum, int(gw.Sum), gw.Sum == 1
        (sum, 1, True)
    """

    __slots__ = ("name", "number")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number

    def __repr__(self) -> str:
        return self.name

    def __int__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ReduceOp):
            return self.number == other.number
        return self.number == other if isinstance(other, int) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.number)

    def __reduce__(self) -> tuple[object, ...]:
        return ReduceOp, (self.name, self.number)


Average = ReduceOp("average", 0)
Sum = ReduceOp("sum", 1)
Adasum = ReduceOp("adasum", 2)
Min = ReduceOp("min", 3)
Max = ReduceOp("max", 4)
Product = ReduceOp("product", 5)
BitAnd = ReduceOp("bit-and", 6)
BitOr = ReduceOp("bit-or", 7)
BitXor = ReduceOp("bit-xor", 8)
OPS = (Average, Sum, Adasum, Min, Max, Product, BitAnd, BitOr, BitXor)


def reduce_op(op: ReduceOp | int | None) -> ReduceOp:
    """Returns the reduction with that number; ``Average`` for None.

    Raises:
        InvalidRequest: The reduction is unknown.
    """
    if op is None:
        return Average
    for known in OPS:
        if known == op:
            return known
    names = ", ".join(f"gradwire.{each.name.title().replace('-', '')}" for each in OPS)
    raise InvalidRequest(f"op={op!r} is not a reduction: use one of {names}", kind="invalid")


def handle_average(op: ReduceOp | int | None, average: bool | None) -> ReduceOp:
    """Returns the reduction selected by ``op`` or Horovod's deprecated argument ``average``.

    Raises:
        ValueError: Both were given.
    """
    if average is None:
        return reduce_op(op)
    if op is not None:
        raise ValueError("pass either op or average, not both: op replaces average")
    warnings.warn("average is deprecated: use op", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


class Handle(Generic[Result]):
    """An operation in flight, as returned by functions whose names end in ``_async``.

    Args:
        native: The handle of the native module.
        finish: Converts the native handle's result.

    Example:
        ```python
        handle = gw.allreduce_async(gradient)
        mean = handle.wait()
        ```
    """

    __slots__ = ("_finish", "_native", "_result")

    def __init__(self, native: _native.Handle, finish: Callable[[Any], Result]) -> None:
        self._native, self._finish = native, finish

    def poll(self) -> bool:
        """Returns whether ``wait`` would return or raise immediately.

        Returns:
            True if the operation has completed.
        """
        return self._native.poll()

    def wait(self, timeout: float | None = None) -> Result:
        """Waits for the operation to complete. Ctrl-C interrupts the wait.

        Args:
            timeout: The maximum time to wait, in seconds. None waits forever.

        Returns:
            The result of the operation. A second call returns the same object.

        Raises:
            WaitTimeout: The operation did not complete within ``timeout``. It continues.
            InvalidRequest: ``timeout`` is invalid, or the request of a rank was invalid.
            GradwireError: The operation failed; the subclass and ``kind`` tell why.
        """
        if not hasattr(self, "_result"):
            limit = None if timeout is None else seconds("timeout", timeout)
            self._result = self._finish(self._native.wait(limit))
        return self._result

    def _map(self, convert: Callable[[Result], Any]) -> Handle[Any]:
        """Returns a handle of the same operation with a converted result."""
        finish = self._finish
        return Handle(self._native, lambda result: convert(finish(result)))

    def __repr__(self) -> str:
        return f"Handle({self._native.name})"


def poll(handle: Handle[Any]) -> bool:
    """Returns whether ``synchronize`` would return or raise immediately.

    Args:
        handle: The result of an ``_async`` function.

    Returns:
        True if the operation has completed.

    Raises:
        InvalidRequest: ``handle`` is not a handle.
    """
    return _handle(handle).poll()


def synchronize(handle: Handle[Result]) -> Result:
    """Waits for an operation to complete.

    Args:
        handle: The result of an ``_async`` function.

    Returns:
        The result of the operation.

    Raises:
        InvalidRequest: ``handle`` is not a handle, or a rank's request was invalid.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    return _handle(handle).wait()


def _handle(handle: Handle[Result]) -> Handle[Result]:
    if not isinstance(handle, Handle):
        raise InvalidRequest(
            f"{handle!r} is not a handle: pass the result of an _async function", kind="invalid"
        )
    return handle


class Adapter(Protocol[Array]):
    """What the collectives need from a type of array."""

    def describe(self, array: Array) -> tuple[str, tuple[int, ...]]:
        """Returns the element type and the dimensions."""

    def load(self, array: Array, buffer: _native.Buffer) -> None:
        """Copies an array to shared memory of the same size."""

    def check_writable(self, array: Array) -> None:
        """Raises InvalidRequest if an array is not writable."""

    def use(self, array: Array) -> Use:
        """Begins an in-place operation. The use has a buffer if the array is shared memory.

        Raises:
            InvalidRequest: The array is not writable.
        """

    def written(self, array: Array) -> None:
        """Records that an operation has written to an array that is shared memory."""

    def view(self, buffer: _native.Buffer, like: Array) -> Array:
        """Returns shared memory as an array of the type of ``like``."""

    def store(self, buffer: _native.Buffer, into: Array) -> None:
        """Copies shared memory to an array of the same size."""


class Collectives(Generic[Array]):
    """The collectives for one type of array. Each method returns the handle of an operation.

    The arguments are those of the functions in ``gradwire._array_reduce_ops`` and
    ``gradwire._array_move_ops``.
    """

    def __init__(self, adapter: Adapter[Array]) -> None:
        self.adapter = adapter

    def place(self, array: Array) -> _native.Buffer:
        """Copies an array to shared memory. The copy may still be in progress.

        The caller calls ``session()`` afterwards, so that its operation waits for the copy.
        """
        dtype, shape = self.adapter.describe(array)
        buffer = session().buffer(dtype, list(shape))
        self.adapter.load(array, buffer)
        buffer.mark_copied()
        return buffer

    def _begin(
        self, arrays: Sequence[Array], in_place: bool
    ) -> tuple[list[_native.Buffer], list[Use]]:
        """Returns the arrays in shared memory, and their uses by an in-place operation."""
        if not in_place:
            return [self.place(array) for array in arrays], []
        uses = [self.adapter.use(array) for array in arrays]
        pairs = zip(uses, arrays)
        return [use.buffer or self.place(array) for use, array in pairs], uses

    def _view(self, like: Array) -> Callable[[list[_native.Buffer]], Array]:
        return lambda result: self.adapter.view(result[0], like)

    def _views(self, like: Sequence[Array]) -> Callable[[list[_native.Buffer]], list[Array]]:
        return lambda result: [self.adapter.view(*pair) for pair in zip(result, like)]

    def _back(
        self, into: Sequence[Array], uses: Sequence[Use] = ()
    ) -> Callable[[list[_native.Buffer]], list[Array]]:
        def finish(result: list[_native.Buffer]) -> list[Array]:
            for buffer, array, use in zip(result, into, uses or [COPIED] * len(into)):
                if use.buffer is None:
                    self.adapter.store(buffer, array)
                else:
                    self.adapter.written(array)
                use.end()
            return list(into)

        return finish

    def reduced(
        self,
        buffers: list[_native.Buffer],
        name: str | None,
        op: ReduceOp | int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        priority: int = 0,
    ) -> _native.Handle:
        """Starts an allreduce of buffers, in place."""
        op = reduce_op(op)
        before, after = factors(prescale_factor, postscale_factor)
        called = None if name is None else f"allreduce.{name}"
        set_ = native_set(process_set)
        if op == Adasum:
            if len(buffers) != 1 or (before, after) != (1.0, 1.0):
                raise InvalidRequest(
                    "Adasum takes one tensor, and no scale factors", kind="invalid"
                )
            return session().adasum(buffers[0], name=called, priority=priority, process_set=set_)
        return session().allreduce(
            buffers,
            op.name,
            name=called,
            priority=priority,
            prescale=before,
            postscale=after,
            process_set=set_,
        )

    def allreduce(
        self,
        array: Array,
        name: str | None,
        op: ReduceOp | int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        in_place: bool = False,
        priority: int = 0,
    ) -> Handle[Array]:
        """Starts an allreduce of one array."""
        buffers, uses = self._begin([array], in_place)
        scales = prescale_factor, postscale_factor
        handle = self.reduced(buffers, name, op, *scales, process_set, priority)
        if not in_place:
            return Handle(handle, self._view(array))
        back = self._back([array], uses)
        return Handle(handle, lambda result: back(result)[0])

    def grouped_allreduce(
        self,
        arrays: Sequence[Array],
        name: str | None,
        op: ReduceOp | int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        in_place: bool = False,
    ) -> Handle[list[Array]]:
        """Starts an allreduce of several arrays in one request."""
        buffers, uses = self._begin(not_empty(arrays), in_place)
        handle = self.reduced(buffers, name, op, prescale_factor, postscale_factor, process_set)
        return Handle(handle, self._back(arrays, uses) if in_place else self._views(arrays))

    def reduce(
        self,
        array: Array,
        root_rank: int,
        name: str | None,
        op: ReduceOp | int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Handle[Array | None]:
        """Starts a reduce; its result is None except on the root."""
        root_rank = whole_number("root_rank", root_rank)
        before, after = factors(prescale_factor, postscale_factor)
        buffer = self.place(array)
        handle = session().reduce(
            buffer,
            root_rank,
            reduce_op(op).name,
            prescale=before,
            postscale=after,
            **_common("reduce", name, process_set),
        )
        view = self._view(array)
        at_root = session().rank == root_rank
        return Handle(handle, lambda result: view(result) if at_root else None)

    def broadcast(
        self,
        array: Array,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        in_place: bool = False,
    ) -> Handle[Array]:
        """Starts a broadcast."""
        root_rank = whole_number("root_rank", root_rank)
        # The root already has the elements.
        is_written = in_place and session().rank != root_rank
        buffer = self.place(array)
        if is_written:
            self.adapter.check_writable(array)
        handle = session().broadcast(buffer, root_rank, **_common("broadcast", name, process_set))
        if not in_place:
            return Handle(handle, self._view(array))
        back = self._back([array])
        return Handle(handle, lambda result: back(result)[0] if is_written else array)

    def allgather(
        self,
        arrays: Sequence[Array],
        name: str | None,
        process_set: ProcessSet,
        kind: str = "allgather",
        op: ReduceOp | None = None,
    ) -> Handle[list[tuple[Array, list[int]]]]:
        """Starts an allgather; returns each result with the number of rows of each member.

        ``kind`` is the prefix of the operation's name. ``op`` is the reduction that the caller
        applies to the rows; the operation fails if the ranks disagree about it.
        """
        buffers = [self.place(array) for array in not_empty(arrays)]
        common = _common(kind, name, process_set)
        handle = session().allgather(buffers, op=None if op is None else op.name, **common)
        return Handle(
            handle,
            lambda result: [
                (self.adapter.view(buffer, like), rows)
                for (buffer, rows), like in zip(result, arrays)
            ],
        )

    def gather(
        self, array: Array, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Handle[tuple[Array, list[int]] | None]:
        """Starts a gather; its result is None except on the root."""
        root_rank = whole_number("root_rank", root_rank)
        buffer = self.place(array)
        handle = session().gather(buffer, root_rank, **_common("gather", name, process_set))

        def finish(
            result: list[tuple[_native.Buffer, list[int]]] | None,
        ) -> tuple[Array, list[int]] | None:
            if result is None:
                return None
            return self.adapter.view(result[0][0], array), result[0][1]

        return Handle(handle, finish)

    def scatter(
        self,
        array: Array,
        root_rank: int,
        splits: Sequence[int] | None,
        name: str | None,
        process_set: ProcessSet,
    ) -> Handle[Array]:
        """Starts a scatter. Except on the root, only the type and dtype of ``array`` matter."""
        root_rank = whole_number("root_rank", root_rank)
        at_root = session().rank == root_rank
        given = rows("splits", splits) if at_root else None
        buffer = self.place(array) if at_root else None
        handle = session().scatter(
            buffer,
            root_rank,
            splits=given,
            dtype=self.adapter.describe(array)[0],
            **_common("scatter", name, process_set),
        )
        return Handle(handle, self._view(array))

    def reducescatter(
        self,
        arrays: Sequence[Array],
        name: str | None,
        op: ReduceOp | int | None,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
    ) -> Handle[list[Array]]:
        """Starts a reducescatter of several arrays in one request."""
        before, after = factors(prescale_factor, postscale_factor)
        buffers = [self.place(array) for array in not_empty(arrays)]
        handle = session().reducescatter(
            buffers,
            reduce_op(op).name,
            prescale=before,
            postscale=after,
            **_common("reducescatter", name, process_set),
        )
        return Handle(handle, self._views(arrays))

    def alltoall(
        self, array: Array, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
    ) -> Handle[tuple[Array, list[int]]]:
        """Starts an alltoall; returns the result with the number of rows from each member."""
        given = rows("splits", splits)
        buffer = self.place(array)
        handle = session().alltoall(buffer, splits=given, **_common("alltoall", name, process_set))
        return Handle(handle, lambda result: (self.adapter.view(result[0][0], array), result[0][1]))

    def send(self, array: Array, to_rank: int, tag: int, process_set: ProcessSet) -> Handle[None]:
        """Starts a send."""
        to_rank, tag = whole_number("to_rank", to_rank), whole_number("tag", tag)
        buffer = self.place(array)
        handle = session().send(buffer, to_rank, tag=tag, process_set=native_set(process_set))
        return Handle(handle, lambda _: None)

    def receive(
        self, like: Array, from_rank: int, tag: int, process_set: ProcessSet
    ) -> Handle[Array]:
        """Starts a receive; the result has the sender's shape and the type of ``like``."""
        from_rank, tag = whole_number("from_rank", from_rank), whole_number("tag", tag)
        dtype, shape = self.adapter.describe(like)
        handle = session().receive(
            from_rank,
            dtype=dtype,
            expecting=list(shape),
            tag=tag,
            process_set=native_set(process_set),
        )
        return Handle(handle, self._view(like))


def _common(kind: str, name: str | None, process_set: ProcessSet) -> dict[str, Any]:
    """Returns the options that all collectives have."""
    name = None if name is None else f"{kind}.{name}"
    return {"name": name, "process_set": native_set(process_set)}


def factors(prescale_factor: float, postscale_factor: float) -> tuple[float, float]:
    """Returns the finite scale factors of a reduction."""
    return factor("prescale_factor", prescale_factor), factor("postscale_factor", postscale_factor)


def not_empty(arrays: Sequence[Array]) -> Sequence[Array]:
    """Returns the arrays; rejects an empty group."""
    if len(arrays) == 0:
        raise InvalidRequest("a group needs at least one tensor", kind="invalid")
    return arrays


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Waits until every rank of the process set has called it.

    Args:
        process_set: The participating ranks. The default is all ranks.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.
    """
    session().barrier(process_set=native_set(process_set)).wait()


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declares that this rank has no more data, and waits until all ranks have done so.

    Until then, this rank contributes nothing to the collectives of the others. Averages are over
    the ranks that still contribute.

    Args:
        device: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.

    Returns:
        The last rank that called ``join``.

    Raises:
        InvalidRequest: An argument is invalid. Nothing was started.
        GradwireError: The operation failed; the subclass and ``kind`` tell why.

    Example:
        ```python
        for batch in own_batches:  # their number differs between the ranks
            train(batch)
        last = gw.join()
        ```
    """
    del device
    last = int(session().join(process_set=native_set(process_set)).wait())
    note_join(process_set)
    return last
