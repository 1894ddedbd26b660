"""Errors are reported to all ranks, and the job continues if possible."""

from __future__ import annotations

import time

import numpy as np
import pytest

import gradwire as gw


def alone() -> bool:
    return gw.size() == 1


def test_invalid_calls() -> None:
    cases = [
        (lambda: gw.allreduce(np.array(["text"])), "can't be exchanged"),
        (lambda: gw.allreduce(np.zeros(2, ">f4")), "can't be exchanged"),
        (lambda: gw.allreduce(np.ma.array([1.0, 2.0], mask=[True, False])), "mask would be lost"),
        (lambda: gw.allreduce(np.zeros(2), op=17), "is not a reduction"),
        (lambda: gw.allreduce(np.zeros(2), op="sum"), "one of gradwire.Average, gradwire.Sum, "),
        (lambda: gw.broadcast(np.zeros(2), gw.size()), f"rank {gw.size()}, does not exist"),
        (lambda: gw.allreduce(np.zeros(2, bool), op=gw.Max, prescale_factor=0.5), "factor"),
        (lambda: gw.allreduce(np.zeros(2, "i4"), op=gw.BitOr, postscale_factor=0.5), "factor"),
        (lambda: gw.allreduce(np.zeros(2, bool)), "average"),
        (lambda: gw.allreduce(np.zeros(2), op=gw.BitOr), "bit"),
        (lambda: gw.alltoall(np.zeros(2 * gw.size()), [1] * (gw.size() + 1)), "splits"),
        (lambda: gw.allreduce(np.zeros(2), name="bad\nname"), "name"),
        (lambda: gw.reducescatter(np.float64(1)), "dimension"),
        (lambda: gw.alltoall(np.float64(1)), "dimension"),
        (lambda: gw.alltoall(np.float64(1), [1] + [0] * (gw.size() - 1)), "dimension"),
        (lambda: gw.add_process_set([]), "at least one rank"),
        (lambda: gw.allreduce(np.zeros(2), process_set=gw.ProcessSet([0])), "not registered"),
        (lambda: gw.allreduce(np.zeros(2), op=gw.Adasum, prescale_factor=2.0), "Adasum"),
    ]
    for call, text in cases:
        with pytest.raises(gw.InvalidRequest, match=text) as caught:
            call()
        assert (
            isinstance(caught.value, (ValueError, gw.GradwireError))
            and caught.value.kind == "invalid"
        )


def test_invalid_numbers() -> None:
    """Checks all whole-number and factor arguments."""
    two = np.zeros(2)
    roots = [gw.broadcast, gw.broadcast_async, gw.broadcast_, gw.reduce, gw.gather, gw.scatter]
    for odd in (-1, 1.0, 2**32, 2**70, "0", None, np.float32(1), np.zeros(2, int)):
        for call in roots:
            with pytest.raises(gw.InvalidRequest, match="root_rank="):
                call(two, odd)
        with pytest.raises(gw.InvalidRequest, match="root_rank="):
            gw.broadcast_object(1, odd)
        with pytest.raises(gw.InvalidRequest, match="to_rank="):
            gw.send(two, odd)
        with pytest.raises(gw.InvalidRequest, match="from_rank="):
            gw.receive(two, odd)
        for call in (gw.send, gw.receive):
            with pytest.raises(gw.InvalidRequest, match="tag="):
                call(two, 0, odd)
        for make in (gw.ProcessSet, gw.add_process_set):
            with pytest.raises(gw.InvalidRequest, match=r"ranks\[0\]="):
                make([odd])
        if odd is not None:
            with pytest.raises(gw.InvalidRequest, match="process_set="):
                gw.allreduce(two, process_set=odd)
    for odd in ([-1] * gw.size(), [1.0] * gw.size(), [2**64] * gw.size(), 3, 1.5, "1" * gw.size()):
        with pytest.raises(gw.InvalidRequest, match="splits"):
            gw.alltoall(np.zeros(gw.size()), odd)
        with pytest.raises(gw.InvalidRequest, match="splits"):
            gw.scatter(np.zeros(gw.size()), gw.rank(), odd)
    for odd in ("2", None, 1j, [1.0, 2.0], float("nan"), float("inf"), 10**400):
        for call in (gw.allreduce, gw.allreduce_async, gw.allreduce_, gw.reduce, gw.reducescatter):
            for which in ("prescale_factor", "postscale_factor"):
                with pytest.raises(gw.InvalidRequest, match=f"{which}="):
                    call(two, **{which: odd})
        for call in (gw.grouped_allreduce, gw.grouped_allreduce_async, gw.grouped_reducescatter):
            with pytest.raises(gw.InvalidRequest, match="prescale_factor="):
                call([two, two], prescale_factor=odd)
    for odd in (-1, 1.5, [0.5], ["0"]):
        with pytest.raises(gw.InvalidRequest, match="ranks"):
            gw.ProcessSet(odd)
    # Every type of whole number is accepted.
    assert gw.broadcast(np.ones(2), np.int64(0)).tolist() == [1.0, 1.0]
    assert gw.alltoall(np.ones(gw.size()), np.ones(gw.size(), "u1"))[1] == [1] * gw.size()
    assert (
        gw.allreduce(np.ones(2), op=gw.Sum, prescale_factor=np.float32(2)).tolist()
        == [2.0 * gw.size()] * 2
    )


def test_invalid_numbers_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    import gradwire.torch as hvd

    two = torch.zeros(2)
    for odd in (-1, 1.0, 2**32, "0", None, torch.tensor(1.0), torch.zeros(2, dtype=torch.int64)):
        for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
            with pytest.raises(hvd.InvalidRequest, match="root_rank="):
                call(two, odd)
        with pytest.raises(hvd.InvalidRequest, match="root_rank="):
            hvd.broadcast_parameters([two], odd)
        with pytest.raises(hvd.InvalidRequest, match="root_rank="):
            hvd.broadcast_optimizer_state(torch.optim.SGD([two], 0.1), odd)
    for odd in ([-1] * hvd.size(), [1.5] * hvd.size(), torch.full((hvd.size(),), -1), 3):
        for call in (hvd.alltoall, hvd.alltoall_async):
            with pytest.raises(hvd.InvalidRequest, match="splits"):
                call(torch.zeros(hvd.size()), odd)
    for odd in ("2", None, float("nan"), torch.zeros(2)):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            for op in (hvd.Sum, hvd.Max):
                with pytest.raises(hvd.InvalidRequest, match="postscale_factor="):
                    call(two, op=op, postscale_factor=odd)
        for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_reducescatter):
            with pytest.raises(hvd.InvalidRequest, match="prescale_factor="):
                call([two], op=hvd.Sum, prescale_factor=odd)
    assert hvd.broadcast(torch.ones(2), torch.tensor(0)).tolist() == [1.0, 1.0]


def test_values_that_are_not_tensors() -> None:
    """Checks the errors of all functions that take tensors, with and without options."""
    torch = pytest.importorskip("torch")
    import gradwire.torch as hvd

    one = [
        hvd.allreduce,
        hvd.allreduce_,
        hvd.allreduce_async,
        hvd.allgather,
        hvd.alltoall,
        hvd.reducescatter,
        hvd.sparse_allreduce_async,
        lambda odd: hvd.allreduce(odd, op=hvd.Max),
        lambda odd: hvd.allreduce(odd, prescale_factor=2.0),
        lambda odd: hvd.allreduce(odd, compression=hvd.Compression.fp16),
        lambda odd: hvd.broadcast(odd, 0),
        lambda odd: hvd.broadcast_(odd, 0),
    ]
    several = [hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather]
    for odd in (None, "x", [1.0], np.ones(2)):
        for call in one:
            with pytest.raises(gw.InvalidRequest, match="expected a "):
                call(odd)
        for call in several:
            with pytest.raises(gw.InvalidRequest, match="expected a "):
                call([torch.ones(2), odd])
    for odd in (None, "fp16", hvd.Compression):
        for call in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
            with pytest.raises(gw.InvalidRequest, match="must be one of hvd"):
                call([torch.ones(2)], compression=odd)
    for odd in (None, 5, "x"):
        for call in (hvd.synchronize, hvd.poll, gw.synchronize, gw.poll):
            with pytest.raises(gw.InvalidRequest, match="is not a handle"):
                call(odd)


@pytest.mark.usefixtures("several_ranks")
def test_objects_of_several_roots() -> None:
    text = r"root of this broadcast: rank \d+ has root_rank=\d, but rank \d+ has root_rank=\d"
    with pytest.raises(gw.InvalidRequest, match=text):
        gw.broadcast_object(gw.rank(), root_rank=min(gw.rank(), 1))
    assert gw.broadcast_object(gw.rank(), root_rank=1) == 1


class Unsendable:
    def __reduce__(self) -> str:
        raise RuntimeError("it holds a file")


def test_objects_that_can_not_be_pickled() -> None:
    last = gw.size() - 1
    own = Unsendable() if gw.rank() == last else 3
    text = f"can't be pickled on rank {last}: RuntimeError: it holds a file"
    for _ in range(2):
        with pytest.raises(gw.InvalidRequest, match=text) as caught:
            gw.broadcast_object(own, root_rank=last)
        assert (caught.value.__cause__ is None) == (gw.rank() != last)
        with pytest.raises(gw.InvalidRequest, match=text):
            gw.allgather_object(own)
    assert gw.broadcast_object(gw.rank(), root_rank=last) == last


def test_arguments_of_other_types() -> None:
    for odd in (2**70, -1, "x", None):
        with pytest.raises(gw.InvalidRequest, match="must be a ProcessSet"):
            gw.remove_process_set(odd)
    handle = gw.allreduce_async(np.ones(2))
    for odd in (10**400, "x", [1]):
        with pytest.raises(gw.InvalidRequest, match="timeout="):
            handle.wait(odd)
    assert handle.wait(60.0)[0] == 1.0


def test_read_only_outputs() -> None:
    """Checks that an in-place operation is rejected before it starts."""
    torch = pytest.importorskip("torch")
    import gradwire.torch as hvd

    fixed = np.ones(2)
    fixed.flags.writeable = False
    array = [([1.0, 2.0], "list objects"), (np.float32(1), "float32"), (fixed, "read-only")]
    tensor = [(torch.ones(1).expand(4), "share memory"), (torch.ones(3, 1).expand(3, 2), "clone")]
    for module, cases in ((gw, array), (hvd, tensor)):
        for odd, text in cases:
            for call in (module.allreduce_, module.allreduce_async_):
                with pytest.raises(gw.InvalidRequest, match=text):
                    call(odd)
            # The root, rank 0, is not written to and may pass a read-only array, but programs pass
            # the same kind of tensor on all ranks.
            if gw.rank() > 0 or module is hvd:
                with pytest.raises(gw.InvalidRequest, match=text):
                    module.broadcast_(odd, 0)
    # No rank has started anything, so the next calls match.
    assert gw.allreduce(np.ones(1), op=gw.Sum)[0] == gw.size()
    mine = np.full(2, gw.rank())
    mine.flags.writeable = gw.rank() != 0
    assert gw.broadcast_(mine, 0).tolist() == [0, 0]
    assert hvd.allreduce_(torch.ones(3, 1).expand(3, 1)).tolist() == [[1.0]] * 3
    assert hvd.allreduce_(torch.ones(2, 3).t()).tolist() == [[1.0, 1.0]] * 3


def test_options_of_the_optimizer() -> None:
    torch = pytest.importorskip("torch")
    import gradwire.torch as hvd

    model = torch.nn.Linear(2, 2)
    for odd in (None, 5, "x"):
        with pytest.raises(ValueError, match=r"not a torch\.optim\.Optimizer"):
            hvd.DistributedOptimizer(odd)
    for name, odd in (("compression", "fp16"), ("process_set", 3)):
        with pytest.raises(ValueError, match=f"^{name}={odd!r}: it must be "):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters()), **{name: odd})


def test_a_name_is_in_flight_once() -> None:
    if alone():
        pytest.skip("needs two ranks")
    if gw.rank() == 0:
        first = gw.allreduce_async(np.zeros(4), name="twice")
        with pytest.raises(gw.InvalidRequest, match=r"allreduce\.twice"):
            gw.allreduce_async(np.zeros(4), name="twice")
        gw.barrier()
    else:
        gw.barrier()
        first = gw.allreduce_async(np.zeros(4), name="twice")
    first.wait()


def test_disagreeing_ranks_see_all_requests() -> None:
    if alone():
        pytest.skip("needs two ranks")
    mine = np.zeros((2, 3 if gw.rank() else 4), "f4")
    with pytest.raises(gw.Disagreement, match="shape") as caught:
        gw.allreduce(mine, name="differs")
    error = caught.value
    assert error.kind == "disagreement" and error.tensor == "allreduce.differs"
    assert "[2, 4]" in str(error) and "[2, 3]" in str(error)
    with pytest.raises(gw.GradwireError, match="dtype"):
        gw.allreduce(np.zeros(2, "f4" if gw.rank() else "f8"), name="types")
    with pytest.raises(gw.GradwireError, match="root"):
        gw.broadcast(np.zeros(2), 0 if gw.rank() else 1, name="roots")
    # The job continues.
    assert gw.allreduce(np.ones(2), op=gw.Sum)[0] == gw.size()


def test_a_failure_waits_for_other_operations() -> None:
    """Checks that a caller may retry immediately."""
    torch = pytest.importorskip("torch")
    import gradwire.torch as hvd
    from gradwire.torch import _functions

    if alone():
        pytest.skip("needs two ranks")
    parameters = {"bad": torch.zeros(2), "good": torch.zeros(3)}
    if gw.rank() == 0:
        pairs = [(f"parameter.{name}", each) for name, each in parameters.items()]
        with pytest.raises(gw.Disagreement, match="bad"):
            _functions._broadcast(pairs, 0, hvd.global_process_set)
    else:
        with pytest.raises(gw.Disagreement, match="bad"):
            hvd.broadcast(torch.zeros(5), 0, name="parameter.bad")
        time.sleep(0.3)  # rank 0 has failed by now
        hvd.broadcast(torch.zeros(3), 0, name="parameter.good")
    hvd.broadcast_parameters(parameters, 0)


def test_a_wait_has_a_limit() -> None:
    if alone():
        pytest.skip("needs two ranks")
    if gw.rank() == 0:
        handle = gw.allreduce_async(np.ones(2), name="late", op=gw.Sum)
        with pytest.raises(TimeoutError, match="late") as caught:
            handle.wait(timeout=0.2)
        assert isinstance(caught.value, gw.WaitTimeout)
        assert not handle.poll()
        gw.barrier()
        assert handle.wait(timeout=60)[0] == gw.size()
        with pytest.raises(ValueError, match="timeout"):
            gw.allreduce_async(np.ones(2), name="odd").wait(timeout=-1)
        gw.barrier()
    else:
        gw.barrier()
        gw.allreduce(np.ones(2), name="late", op=gw.Sum)
        gw.allreduce(np.ones(2), name="odd")
        gw.barrier()


def test_errors_travel_between_processes() -> None:
    import pickle

    error = gw.PeerLost("gone", kind="worker-lost", rank=3, host="n1", tensor="t")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is gw.PeerLost and str(again) == "gone"
    assert (again.kind, again.rank, again.host, again.tensor) == ("worker-lost", 3, "n1", "t")
