"""Shared memory held by other libraries, and calls from several threads."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import gradwire as gw
from gradwire import _world


def test_views_share_the_memory() -> None:
    buffer = _world.session().buffer("f32", [4, 3])
    assert (buffer.dtype, buffer.shape, buffer.nbytes) == ("f32", (4, 3), 48)
    # Before NumPy 2, arrays from DLPack are read-only.
    first, second = np.asarray(buffer), np.from_dlpack(buffer)
    first[...] = np.arange(12).reshape(4, 3)
    assert first.flags.writeable and np.array_equal(first, second)
    assert second.ctypes.data == buffer.address
    row = np.asarray(buffer.view(3, "f32", [3]))
    assert row.tolist() == [3, 4, 5]
    assert buffer.view(6, "u16", [2]).address == buffer.address + 12
    assert buffer.read() == first.tobytes()
    buffer.write(bytes(48))
    assert not second.any()


def test_the_mapping_that_memory_lies_in() -> None:
    """All memory of one segment reports the same mapping."""
    session = _world.session()
    buffers = [session.buffer("f32", [1000]) for _ in range(3)]
    for buffer in buffers:
        start, size = buffer.mapping
        assert (
            start % 4096 == 0
            and start <= buffer.address
            and buffer.address + buffer.nbytes <= start + size
        )
    assert buffers[0].view(10, "f32", [2]).mapping == buffers[0].mapping


def test_memory_stays_while_it_is_viewed() -> None:
    buffer = _world.session().buffer("i64", [100])
    array = np.from_dlpack(buffer)
    np.asarray(buffer)[...] = 7
    del buffer
    gc.collect()
    for _ in range(20):  # free memory would be reused
        other = np.asarray(_world.session().buffer("i64", [100]))
        other[...] = 1
        assert (array == 7).all()


def test_invalid_memory_accesses() -> None:
    session = _world.session()
    buffer = session.buffer("f32", [8])
    cases = [
        (lambda: session.buffer("f31", [8]), 'unknown element type "f31"'),
        (lambda: session.buffer("f32", [1 << 62]), "invalid shape"),
        (lambda: buffer.view(1, "f64", [4]), "exceeds"),
        (lambda: buffer.view(1 << 63, "f64", [4]), "exceeds"),
        (lambda: buffer.view(1, "f32", [2]).view(0, "f64", [1]), "multiple of 8"),
        (lambda: buffer.write(bytes(31)), "another size than 31 bytes"),
        (lambda: session.receive(0), "needs `into` or `dtype`"),
        (lambda: session.allreduce([buffer], "mean"), 'unknown reduction "mean"'),
    ]
    for call, text in cases:
        with pytest.raises(gw.InvalidRequest) as caught:
            call()
        assert text in str(caught.value)
    with pytest.raises(gw.OutOfResources, match="does not fit") as caught:
        session.buffer("f32", [1 << 35])
    assert isinstance(caught.value, gw.GradwireError)
    for wrong in [{"copy": True}, {"dl_device": (2, 0)}]:
        with pytest.raises(BufferError):
            buffer.__dlpack__(**wrong)
    # Capsules without a consumer, old and new ones.
    for version in [None, (1, 0)]:
        assert "dltensor" in repr(buffer.__dlpack__(max_version=version))


def test_several_threads() -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for at in range(20):
                result = gw.allreduce(np.full(100, number, "f8"), name=f"t{number}.{at}", op=gw.Sum)
                assert (result == number * gw.size()).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    gw.barrier()
