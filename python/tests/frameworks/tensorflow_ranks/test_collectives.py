"""The collectives on tensors: the same bits as on NumPy arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import gradwire as gw
import gradwire.tensorflow as hvd

Call = Callable[..., Any]
KINDS = ["f2", "f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "c8", "c16"]
SHORT = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


def of_rank(rank: int, kind: Any, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 4 + rank + 1).astype(kind)


def own(kind: Any, shape: tuple[int, ...] = (3, 5)) -> np.ndarray:
    return of_rank(gw.rank(), kind, shape)


def same(found: Any, expected: np.ndarray) -> None:
    assert isinstance(found, tf.Tensor)
    array = np.asarray(found.numpy())
    assert array.dtype == expected.dtype and array.shape == expected.shape
    assert array.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", [*KINDS, *SHORT])
def test_every_dtype_is_as_with_numpy(kind: Any, call: Call) -> None:
    given = own(kind)
    tensor = tf.constant(given)
    same(call(lambda t: hvd.allreduce(t, op=hvd.Sum), tensor), gw.allreduce(given, op=gw.Sum))
    same(call(hvd.allgather, tensor), gw.allgather(given))
    root = gw.size() - 1
    same(call(lambda t: hvd.broadcast(t, root), tensor), gw.broadcast(given, root))
    same(
        call(lambda t: hvd.reducescatter(t, op=hvd.Sum), tensor),
        gw.reducescatter(given, op=gw.Sum),
    )
    same(tensor, given)


@pytest.mark.parametrize("kind", ["f4", *SHORT])
def test_tensors_without_dimensions(kind: Any, call: Call) -> None:
    given, root = own(kind, ()), gw.size() - 1
    tensor, variable = tf.constant(given), tf.Variable(given)
    same(call(lambda t: hvd.allreduce(t, op=hvd.Sum), tensor), gw.allreduce(given, op=gw.Sum))
    same(call(lambda t: hvd.grouped_allreduce([t], op=hvd.Max), tensor)[0], of_rank(root, kind, ()))
    same(call(hvd.allgather, tensor), gw.allgather(given))
    same(call(lambda t: hvd.broadcast(t, root), tensor), of_rank(root, kind, ()))
    call(lambda: hvd.broadcast_variables([variable], root))
    same(variable.read_value(), of_rank(root, kind, ()))
    if kind == "f4":
        packed = call(lambda t: hvd.allreduce(t, compression=hvd.Compression.bf16), tensor)
        assert packed.numpy() == (gw.size() + 1) / 2


def test_booleans(call: Call) -> None:
    given = np.array([gw.rank() == 0, True, False])
    for op in (gw.Min, gw.Max):
        same(call(lambda t, op=op: hvd.allreduce(t, op=op), given), gw.allreduce(given, op=op))
    same(call(hvd.allgather, tf.constant(given)), gw.allgather(given))
    same(call(lambda t: hvd.broadcast(t, 0), tf.constant(given)), gw.broadcast(given, 0))


@pytest.mark.parametrize("op", [gw.Average, gw.Sum, gw.Min, gw.Max, gw.Product, gw.BitXor])
@pytest.mark.parametrize("kind", ["f4", "f2", "i4"])
def test_every_reduction(kind: str, op: gw.ReduceOp, call: Call) -> None:
    if op is gw.BitXor and kind != "i4":
        pytest.skip("floats have no such reduction")
    given = own(kind)
    scales = (1.0, 1.0) if kind == "i4" or op in (gw.Min, gw.Max) else (0.5, 3.0)
    found = call(lambda t: hvd.allreduce(t, None, "", "", hvd.Compression.none, op, *scales), given)
    same(found, gw.allreduce(given, None, op, *scales))


def test_groups(call: Call) -> None:
    given = [own("f4"), own("i8", (7,)), own("f8", ())]
    tensors = [tf.constant(each) for each in given]
    found = call(lambda *t: hvd.grouped_allreduce(list(t), op=hvd.Sum), *tensors)
    for mine, theirs in zip(found, gw.grouped_allreduce(given, op=gw.Sum)):
        same(mine, theirs)
    found = call(lambda *t: hvd.grouped_allgather(list(t)), *tensors)
    for mine, theirs in zip(found, gw.grouped_allgather(given)):
        same(mine, theirs)
    found = call(lambda *t: hvd.grouped_reducescatter(list(t), op=hvd.Sum), *tensors[:2])
    for mine, theirs in zip(found, gw.grouped_reducescatter(given[:2], op=gw.Sum)):
        same(mine, theirs)


def test_rows_may_differ(call: Call) -> None:
    given = np.full((gw.rank(), 2), gw.rank(), np.int32)
    same(call(hvd.allgather, tf.constant(given)), gw.allgather(given))
    splits = [to % 2 for to in range(gw.size())]
    rows = own("f4", (gw.size(), 2))
    found, received = call(lambda t: hvd.alltoall(t, splits), tf.constant(rows))
    expected, numbers = gw.alltoall(rows, splits)
    same(found, expected)
    assert received.dtype == tf.int32 and received.numpy().tolist() == numbers
    same(call(hvd.alltoall, tf.constant(rows)), gw.alltoall(rows))


def test_shapes_without_elements(call: Call) -> None:
    for shape in [(0,), (2, 0), (0, 3)]:
        given = own("f4", shape)
        same(call(hvd.allreduce, tf.constant(given)), given)
    scalar = tf.constant(float(gw.rank()))
    assert call(hvd.allreduce, scalar).shape == ()


def test_indexed_slices(call: Call) -> None:
    values, rows = own("f4", (2, 3)), np.array([gw.rank(), 0], np.int64)

    def reduced(v: tf.Tensor, r: tf.Tensor) -> Any:
        found = hvd.allreduce(tf.IndexedSlices(v, r, tf.constant([8, 3], tf.int64)))
        return found.values, found.indices, tf.convert_to_tensor(found)

    found, indices, dense = call(reduced, tf.constant(values), tf.constant(rows))
    same(found, gw.allgather(values) / np.float32(gw.size()))
    same(indices, gw.allgather(rows))
    assert dense.shape == (8, 3)
    with pytest.raises(gw.InvalidRequest, match="Average or Sum"):
        hvd.allreduce(tf.IndexedSlices(values, rows), op=hvd.Max)


def test_compression(call: Call) -> None:
    given = own("f4")
    for kind, dtype in [(hvd.Compression.fp16, "f2"), (hvd.Compression.bf16, SHORT[0])]:
        found = call(lambda t, kind=kind: hvd.allreduce(t, compression=kind), tf.constant(given))
        same(found, gw.allreduce(given.astype(dtype)).astype("f4"))


def test_variables(call: Call) -> None:
    first, second = tf.Variable(own("f4")), tf.Variable(own("i4", (2,)))
    call(lambda: hvd.broadcast_variables([first, second], gw.size() - 1))
    same(tf.convert_to_tensor(first), of_rank(gw.size() - 1, "f4"))
    same(tf.convert_to_tensor(second), of_rank(gw.size() - 1, "i4", (2,)))
    [again] = hvd.broadcast_([second], 0, name="again")
    assert again is second
    same(call(hvd.allreduce, second), gw.allreduce(second.numpy()))
    hvd.broadcast_variables([], 0)


def test_objects() -> None:
    theirs = {"rank": gw.rank()}
    assert hvd.broadcast_object(theirs, 0, name="o") == {"rank": 0}
    assert hvd.broadcast_object_fn(gw.size() - 1)(theirs) == {"rank": gw.size() - 1}
    assert hvd.allgather_object(gw.rank()) == list(range(gw.size()))


def test_rank_and_size_operations(call: Call) -> None:
    def numbers() -> tf.Tensor:
        world = [hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()]
        return tf.stack([*world, hvd.process_set_included_op(0)])

    world = [gw.rank(), gw.size(), gw.local_rank(), gw.local_size()]
    assert call(numbers).numpy().tolist() == [*world, 1]
    with pytest.raises(gw.InvalidRequest, match="unknown process set 77"):
        hvd.size_op(77)


def test_process_sets(call: Call) -> None:
    last = hvd.add_process_set([gw.size() - 1])
    evens = hvd.add_process_set(range(0, gw.size(), 2))
    if evens.included():
        found = call(lambda t: hvd.allreduce(t, op=hvd.Sum, process_set=evens), own("f4"))
        same(found, gw.allreduce(own("f4"), op=gw.Sum, process_set=evens))
        assert int(hvd.size_op(evens.process_set_id)) == len(evens.ranks)
    if last.included():
        same(call(lambda t: hvd.allgather(t, process_set=last), own("i4")), own("i4"))
    hvd.remove_process_set(last)
    hvd.remove_process_set(evens)


def test_joins(call: Call) -> None:
    for round_ in range(gw.rank() + 1):
        given = own("f4")
        left = range(round_, gw.size())
        found = call(lambda t: hvd.allreduce(t, op=hvd.Sum, name="joining"), given)
        same(found, sum((of_rank(r, "f4") for r in left), np.zeros((3, 5), "f4")))
    assert 0 <= int(call(hvd.join)) < gw.size()
    call(lambda: hvd.barrier())


def test_arguments_are_refused() -> None:
    for wrong in [
        lambda: hvd.allreduce(tf.constant(["text"])),
        lambda: hvd.allreduce(tf.zeros(3), op=99),
        lambda: hvd.broadcast(tf.zeros(3), root_rank=-1),
        lambda: hvd.grouped_allreduce([]),
        lambda: hvd.grouped_allgather(tf.zeros(3)),
        lambda: hvd.allreduce(tf.zeros(3), prescale_factor=float("nan")),
        lambda: hvd.allreduce(tf.zeros(3), process_set=hvd.ProcessSet([0])),
    ]:
        with pytest.raises(gw.InvalidRequest):
            wrong()


def test_results_are_not_copied() -> None:
    """A result is on shared memory, and stays valid without its operation."""
    before = gw.stats()["copied_bytes"]
    results = [hvd.allreduce(tf.fill([1 << 16], float(at)), name=f"r{at}") for at in range(20)]
    copied = gw.stats()["copied_bytes"] - before
    assert copied == (20 << 18), "one copy of each tensor"
    for at, result in enumerate(results):
        assert (result.numpy() == at).all()
        assert tf.reduce_sum(result + 1) == (at + 1) * (1 << 16)


def test_errors_are_those_of_tensorflow(several_ranks: None, call: Call) -> None:
    """As with Horovod. Other ranks and processes get the exception as it was."""
    with pytest.raises(tf.errors.FailedPreconditionError, match="shape") as caught:
        call(lambda: hvd.allreduce(tf.zeros([3 + hvd.rank()]), name="differs"))
    error = caught.value
    assert isinstance(error, hvd.Disagreement) and error.kind == "disagreement"
    assert error.message == str(error) and error.error_code == 9 and error.op is None
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is hvd.Disagreement and str(again) == str(error)
    assert again.tensor == error.tensor == "allreduce.differs"


def test_states_need_variables() -> None:
    with pytest.raises(gw.InvalidRequest, match="variables is empty"):
        hvd.elastic.TensorFlowState()
    with pytest.raises(gw.InvalidRequest, match="variables contains a int"):
        hvd.elastic.TensorFlowState([3])  # type: ignore[list-item]
