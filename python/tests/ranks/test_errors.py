"""What goes wrong is said to everybody, and the job goes on where it can."""

from __future__ import annotations

import numpy as np
import pytest

import gradwire as gw


def alone() -> bool:
    return gw.size() == 1


def test_what_can_not_be_asked_for() -> None:
    cases = [
        (lambda: gw.allreduce(np.array(["text"])), "can't be exchanged"),
        (lambda: gw.allreduce(np.zeros(2, ">f4")), "can't be exchanged"),
        (lambda: gw.allreduce(np.zeros(2), op=17), "is no reduction"),
        (lambda: gw.allreduce(np.zeros(2), op="sum"), "give gradwire.Average, gradwire.Sum, "),
        (lambda: gw.broadcast(np.zeros(2), gw.size()), f"no rank {gw.size()}"),
        (lambda: gw.allreduce(np.zeros(2, "i4"), prescale_factor=0.5), "factor"),
        (lambda: gw.allreduce(np.zeros(2, bool)), "average"),
        (lambda: gw.allreduce(np.zeros(2), op=gw.BitOr), "bit"),
        (lambda: gw.alltoall(np.zeros(2 * gw.size()), [1] * (gw.size() + 1)), "splits"),
        (lambda: gw.allreduce(np.zeros(2), name="bad\nname"), "name"),
        (lambda: gw.reducescatter(np.float64(1)), "dimension"),
        (lambda: gw.add_process_set([]), "at least one rank"),
        (lambda: gw.allreduce(np.zeros(2), process_set=gw.ProcessSet([0])), "not registered"),
        (lambda: gw.allreduce(np.zeros(2), op=gw.Adasum, prescale_factor=2.0), "Adasum"),
    ]
    for call, text in cases:
        with pytest.raises(gw.InvalidRequest, match=text) as caught:
            call()
        assert isinstance(caught.value, (ValueError, gw.GradwireError)) and caught.value.kind == "invalid"


def test_a_name_is_in_flight_once() -> None:
    if alone():
        pytest.skip("alone it is done at once")
    if gw.rank() == 0:
        first = gw.allreduce_async(np.zeros(4), name="twice")
        with pytest.raises(gw.InvalidRequest, match=r"allreduce\.twice"):
            gw.allreduce_async(np.zeros(4), name="twice")
        gw.barrier()
    else:
        gw.barrier()
        first = gw.allreduce_async(np.zeros(4), name="twice")
    first.wait()


def test_ranks_that_disagree_are_told_who_wanted_what() -> None:
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
    # The job goes on.
    assert gw.allreduce(np.ones(2), op=gw.Sum)[0] == gw.size()


def test_a_wait_has_a_limit() -> None:
    if alone():
        pytest.skip("alone it is done at once")
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
