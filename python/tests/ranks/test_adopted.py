"""Ordinary CPU tensors that move into shared memory when they are exchanged again."""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from exchanged import N, exchange, fresh, moved, total

import gradwire as gw
import gradwire.torch as hvd
from gradwire.torch import _adopt
from gradwire.torch._adopt import is_shared as adopted

if not hasattr(torch.UntypedStorage, "resizable"):
    pytest.skip("tensors of this PyTorch do not move", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("storages_move_soon")


def test_looks_for_parameters_may_come_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the first steps do not wait for each other; later ones do."""
    monkeypatch.setattr(_adopt, "LOOK_PAUSE", 20.0)
    monkeypatch.setattr(_adopt, "LOOK_AHEAD", 1e6)
    assert all([adopted(exchange(exchange(torch.zeros(N)))) for _ in range(3)])
    # The pauses after these searches have not passed.
    monkeypatch.setattr(_adopt, "LOOK_PAUSE", 1e6)
    assert adopted(exchange(exchange(torch.zeros(N))))
    monkeypatch.setattr(_adopt, "LOOK_AHEAD", 0.0)
    assert not adopted(exchange(exchange(torch.zeros(N))))


def test_the_second_exchange_moves_it() -> None:
    tensor = torch.zeros(N)
    before, view = tensor.data_ptr(), tensor[10:20]
    exchange(tensor)
    assert not adopted(tensor) and tensor.data_ptr() == before
    copied = hvd.stats()["copied_bytes"]
    exchange(tensor)
    assert adopted(tensor) and tensor.data_ptr() != before
    for _ in range(3):
        exchange(tensor)
    # Only the first exchange was copied.
    assert hvd.stats()["copied_bytes"] == copied
    assert hvd.stats()["adopted_bytes"] >= 4 * N
    # Views follow, and see the results.
    assert torch.equal(view, tensor[10:20])
    view.zero_()
    assert tensor[10:20].sum() == 0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
)
def test_element_types(dtype: torch.dtype) -> None:
    tensor = torch.zeros(200_000, dtype=dtype)
    for _ in range(3):
        tensor.copy_(torch.arange(200_000) % 3 == 0)
        hvd.allreduce_(tensor, name=f"type.{dtype}", op=hvd.Max)
        assert torch.equal(tensor, (torch.arange(200_000) % 3 == 0).to(dtype))
    assert adopted(tensor)


def test_forms_of_the_call() -> None:
    tensors = [torch.zeros(N), torch.zeros(N // 2, dtype=torch.float64), torch.zeros(5)]
    for step in range(4):
        for tensor in tensors:
            tensor.copy_(fresh(tensor.numel(), tensor.dtype))
        if step % 2:
            hvd.grouped_allreduce_(tensors, name="group", op=hvd.Sum)
        else:
            handles = [
                hvd.allreduce_async_(tensor, name=f"each.{at}", op=hvd.Sum)
                for at, tensor in enumerate(tensors)
            ]
            for handle in handles:
                hvd.synchronize(handle)
        for tensor in tensors:
            assert torch.equal(tensor, total(tensor.numel(), tensor.dtype))
    assert [adopted(tensor) for tensor in tensors] == [True, True, False]


def test_average_and_factors() -> None:
    tensor = moved()
    tensor.copy_(fresh())
    hvd.allreduce_(tensor, name="mean", prescale_factor=2.0, postscale_factor=0.5)
    assert torch.allclose(tensor, total() / hvd.size())


def test_offsets_and_parts() -> None:
    whole = torch.zeros(2 * N + 16)
    most, tail = whole[16 : 16 + 3 * N // 2], whole[-N // 2 :]
    for _ in range(3):
        exchange(most)
    # Another thread may compute on the rest.
    assert not adopted(whole)
    exchange(whole)
    assert adopted(whole)
    whole[:16] = 7
    # A part is exchanged in place.
    copied = hvd.stats()["copied_bytes"]
    exchange(tail)
    exchange(most)
    assert hvd.stats()["copied_bytes"] == copied
    assert (whole[:16] == 7).all() and adopted(whole)


def test_a_thread_uses_the_rest_of_a_storage() -> None:
    added: list[int] = []

    def add(rest: torch.Tensor, stop: threading.Event) -> None:
        times = 0
        while not stop.is_set():
            rest.add_(1)
            times += 1
        added.append(times)

    for turn in range(10):
        whole, stop = torch.zeros(20 * N), threading.Event()
        part, rest = whole[: 10 * N], whole[10 * N :]
        thread = threading.Thread(target=add, args=(rest, stop), daemon=True)
        thread.start()
        for _ in range(3):
            exchange(part)
        stop.set()
        thread.join()
        assert (rest == added[turn]).all(), turn


def test_a_default_device() -> None:
    tensor = torch.zeros(N)
    with torch.device("meta"):
        for _ in range(3):
            hvd.allreduce_(tensor, name="device", op=hvd.Sum)
    assert adopted(tensor)
    with pytest.raises(RuntimeError, match="resiz"):
        tensor.resize_(3 * N)
    empty = torch.zeros(0)
    with torch.device("meta"):
        assert hvd.allreduce(empty, name="empty").device == empty.device


def test_strides_are_copied() -> None:
    square = torch.zeros(300, 300)
    for _ in range(3):
        exchange(square.t())
    assert not adopted(square)
    exchange(square)
    exchange(square)
    assert adopted(square)
    exchange(square.t())
    exchange(square[:, ::2])


def test_one_tensor_twice_in_a_call() -> None:
    tensor = moved()
    for _ in range(3):
        tensor.copy_(fresh())
        hvd.grouped_allreduce_([tensor, tensor, tensor[: N // 2]], name="twice", op=hvd.Sum)
        assert torch.equal(tensor, total())


def test_never_moved() -> None:
    parameter = torch.nn.Parameter(torch.zeros(N))
    by_data = torch.nn.Linear(200, 200)
    array = np.zeros(N, "f4")
    seen_by_numpy = torch.zeros(N)
    view = seen_by_numpy.numpy()
    shared = torch.zeros(N).share_memory_()
    mapped = torch.from_file(
        f"/dev/shm/gradwire-test-{os.getpid()}", shared=True, size=N, dtype=torch.float32
    )
    os.unlink(f"/dev/shm/gradwire-test-{os.getpid()}")
    candidates = [
        parameter.data,
        by_data.weight.data,
        torch.from_numpy(array),
        seen_by_numpy,
        shared,
        mapped,
    ]
    addresses = [tensor.data_ptr() for tensor in candidates]
    for _ in range(3):
        for tensor in candidates:
            exchange(tensor)
        with torch.no_grad():
            hvd.allreduce_(parameter, name="parameter", op=hvd.Max)
    for at, (tensor, address) in enumerate(zip(candidates, addresses)):
        assert not adopted(tensor) and tensor.data_ptr() == address, at
    assert np.shares_memory(view, seen_by_numpy.numpy())
    assert (view == total().numpy()).all() and (array == total().numpy()).all()


def test_inference_tensors() -> None:
    with torch.inference_mode():
        tensor = torch.zeros(N)
        for _ in range(3):
            exchange(tensor)
        assert adopted(tensor)


def test_autograd_sees_the_change() -> None:
    for tensor in [moved(), torch.zeros(3)]:
        weight = torch.ones_like(tensor, requires_grad=True)
        product = (weight * tensor).sum()
        hvd.allreduce_(tensor, name=f"saved.{tensor.numel()}")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


def test_gradients_follow() -> None:
    layer = torch.nn.Linear(300, 100)
    for _ in range(4):
        layer.zero_grad(set_to_none=False)
        layer(torch.ones(2, 300) * (hvd.rank() + 1)).sum().backward()
        hvd.allreduce_(layer.weight.grad, name="grad", op=hvd.Sum)
        expected = 2.0 * hvd.size() * (hvd.size() + 1) / 2
        assert torch.equal(layer.weight.grad, torch.full((100, 300), expected))
    assert adopted(layer.weight.grad) and not adopted(layer.weight.data)


def test_it_is_released_when_it_ends() -> None:
    gc.collect()
    _adopt.sweep()
    before = hvd.stats()["adopted_bytes"]
    known = set(_adopt._known)
    tensor = moved()
    view = tensor[5:6]
    assert hvd.stats()["adopted_bytes"] > before
    del tensor
    exchange(torch.zeros(N))
    assert hvd.stats()["adopted_bytes"] > before, "a view has it"
    del view
    exchange(torch.zeros(N))
    assert hvd.stats()["adopted_bytes"] == before
    _adopt.sweep()
    assert set(_adopt._known) <= known


def test_addresses_and_segments_are_used_again() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    keep = moved()
    for at in range(20):
        tensor = moved(N + at % 3)
        exchange(tensor)
        exchange(keep)
        del tensor
    _adopt.sweep()
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_resize_and_set() -> None:
    tensor = moved()
    for wrong in [
        lambda: tensor.resize_(3 * N),
        lambda: tensor.untyped_storage().resize_(0),
        lambda: tensor.untyped_storage().resize_(12 * N),
    ]:
        with pytest.raises(RuntimeError, match="resiz"):
            wrong()
    tensor.resize_(N - 3)
    exchange(tensor)
    tensor.resize_(N)
    exchange(tensor)
    assert adopted(tensor)
    other = moved()
    other.set_(torch.zeros(N))
    exchange(other)
    third = moved()
    third.data = torch.zeros(N)
    exchange(third)


def test_it_can_not_be_truncated() -> None:
    """TRUST: the daemon's pages can't be removed, neither before, during nor after a call."""
    tensor = moved()
    fd, _ = tensor.untyped_storage()._share_fd_cpu_()

    def refused() -> None:
        for call in [
            lambda: os.ftruncate(fd, 0),
            lambda: os.ftruncate(fd, 1 << 30),
            lambda: os.posix_fallocate(fd, 1 << 30, 4096),
        ]:
            with pytest.raises(OSError) as caught:
                call()
            assert caught.value.errno in (errno.EPERM, errno.EINVAL)

    refused()
    stop = threading.Event()

    def all_the_time() -> None:
        while not stop.is_set():
            refused()

    thread = threading.Thread(target=all_the_time)
    thread.start()
    for _ in range(20):
        exchange(tensor)
    stop.set()
    thread.join()
    refused()


def test_copies_of_it_are_ordinary() -> None:
    tensor = moved()
    file = io.BytesIO()
    torch.save({"whole": tensor, "part": tensor[3:7]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["whole"], tensor) and torch.equal(loaded["part"], tensor[3:7])
    twin = copy.deepcopy(tensor)
    assert not twin.untyped_storage().is_shared()
    exchange(twin)
    assert torch.equal(tensor.clone(), tensor)


class OwnTensor(torch.Tensor):
    """A parameter made of it is an instance of this class."""


@pytest.mark.parametrize("collects", [True, False])
def test_parameters_among_frozen_objects(collects: bool) -> None:
    """Parameters that the garbage collector lists do not move, nor those that it hides."""

    def held() -> Iterator[torch.Tensor]:
        inner = torch.nn.Linear(200, 200)
        while True:
            yield inner.weight.data

    old, in_generator = torch.nn.Linear(200, 200), held()
    special = torch.nn.Parameter(torch.zeros(N).as_subclass(OwnTensor))
    assert type(special) is OwnTensor
    next(in_generator)
    if not collects:
        gc.disable()
    gc.freeze()
    try:
        new = torch.nn.Linear(200, 200)
        flat = torch.zeros(2 * N)
        late = torch.nn.Parameter(torch.zeros(0))
        late.data = flat[:N]  # memory made after the frozen objects, used by a parameter
        candidates = [old.weight.data, new.weight.data, next(in_generator), flat]
        candidates.append(special.data.as_subclass(torch.Tensor))
        addresses = [tensor.data_ptr() for tensor in candidates]
        for _ in range(3):
            for tensor in candidates:
                exchange(tensor)
        for at, (tensor, address) in enumerate(zip(candidates, addresses)):
            assert not adopted(tensor) and tensor.data_ptr() == address, at
        assert adopted(moved())  # no other tensor uses it
    finally:
        gc.unfreeze()
        gc.enable()
    plain = torch.zeros(2 * N)
    part = plain[:N]
    exchange(exchange(plain))
    assert adopted(plain) and adopted(part)
    for tensor in candidates:
        assert not adopted(exchange(tensor))


def test_a_forked_child_has_its_own() -> None:
    tensor, parameter = moved(), torch.nn.Parameter(torch.zeros(N))
    exchange(parameter.data)
    before = float(tensor[0])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not _adopt._known
            assert tensor[0] == before
            tensor[0] = -1.0
            parameter.data[0] = -1.0
            del tensor
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor[0] == before and parameter.data[0] != -1.0
    exchange(tensor)
    assert adopted(tensor)


def test_several_threads() -> None:
    failures: list[BaseException] = []
    tensors = [torch.zeros(N) for _ in range(4)]

    def work(number: int) -> None:
        try:
            tensor = tensors[number]
            for at in range(10):
                tensor.copy_(fresh())
                hvd.allreduce_(tensor, name=f"thread.{number}.{at}", op=hvd.Sum)
                assert torch.equal(tensor, total())
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(adopted(tensor) for tensor in tensors)


def test_nothing_moves_during_an_operation() -> None:
    tensor = fresh()
    address = tensor.data_ptr()
    handles = [
        hvd.allreduce_async_(part, name=f"under-way.{at}", op=hvd.Sum)
        for at, part in enumerate([tensor, tensor, tensor[: N // 2 + 9], tensor])
    ]
    assert tensor.data_ptr() == address and not adopted(tensor)
    for handle in reversed(handles):
        handle.wait()
    assert torch.equal(tensor, total())
    exchange(tensor)
    assert adopted(tensor)


def test_handles_that_are_never_waited_for() -> None:
    tensor = moved()
    for at in range(5):
        hvd.allreduce_async_(tensor, name=f"dropped.{at}", op=hvd.Max)
    while hvd.stats()["in_flight"] > 0:
        time.sleep(0.001)
    exchange(tensor)
    del tensor
    gc.collect()
    exchange(torch.zeros(N))


def test_numpy_arrays_in_shared_memory() -> None:
    array = gw.empty((100, 500))
    address, copied = array.ctypes.data, hvd.stats()["copied_bytes"]
    for number, part in enumerate([array, array[10:20], array.reshape(-1), array[3]]):
        array[...] = hvd.rank() + 1
        gw.allreduce_(part, name=f"array.{number}", op=gw.Sum)
        assert (part == hvd.size() * (hvd.size() + 1) / 2).all()
    assert array.ctypes.data == address and hvd.stats()["copied_bytes"] == copied
    # Arrays with gaps are copied.
    array[...] = hvd.rank() + 1
    gw.allreduce_(array[:, :3], name="gaps", op=gw.Sum)
    assert (array[:, :3] == hvd.size() * (hvd.size() + 1) / 2).all()
    assert (array[:, 3:] == hvd.rank() + 1).all() and hvd.stats()["copied_bytes"] > copied
    assert gw.empty(7, "i8").dtype == np.dtype("i8")
    with pytest.raises(hvd.InvalidRequest, match="can't be exchanged"):
        gw.empty(7, "U3")
