"""How and when an ordinary CPU tensor moves into shared memory."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from exchanged import N, exchange, fresh, moves_later, total
from torch.utils._python_dispatch import TorchDispatchMode

import gradwire.torch as hvd
from gradwire.torch import _adopt
from gradwire.torch._adopt import is_shared as adopted

if not hasattr(torch.UntypedStorage, "resizable"):
    pytest.skip("tensors of this PyTorch do not move", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("storages_move_soon")


def test_a_large_storage_moves_by_the_tenth_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is made in the background. The exchanges until then are copied."""
    monkeypatch.setattr(_adopt, "AT_ONCE", 0)
    tensors = [torch.zeros(40 * N + at) for at in range(5)]
    copied = hvd.stats()["copied_bytes"]
    for tensor in tensors:
        exchange(exchange(tensor))
    assert hvd.stats()["copied_bytes"] == copied + 2 * sum(each.nbytes for each in tensors)
    for tensor in tensors:
        moves_later(tensor)
    copied = hvd.stats()["copied_bytes"]
    for tensor in tensors:
        exchange(tensor)
    assert hvd.stats()["copied_bytes"] == copied


def test_threads_compute_while_a_storage_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_adopt, "AT_ONCE", 0)
    added, stop = [0, 0], threading.Event()
    others = [torch.zeros(N) for _ in added]

    def add(at: int) -> None:
        while not stop.is_set():
            others[at].add_(1)
            added[at] += 1
            if added[at] % 10 == 0:
                # A thread that never waits keeps the GIL from the ranks for most of the test.
                time.sleep(0.001)

    threads = [threading.Thread(target=add, args=(at,)) for at in range(len(added))]
    for thread in threads:
        thread.start()
    try:
        for at in range(3):
            tensor = torch.zeros(60 * N + at)
            exchange(tensor)
            moves_later(tensor, 9)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert [int(other.min()) for other in others] == added == [int(o.max()) for o in others]


def test_what_changes_before_a_storage_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_adopt, "AT_ONCE", 0)
    resized, seen = torch.zeros(5 * N), torch.zeros(5 * N)
    for tensor in (resized, seen):
        exchange(exchange(tensor))
    resized.resize_(6 * N)
    view = seen.numpy()
    moves_later(resized, 9)
    for _ in range(8):
        exchange(seen)
    assert not adopted(seen) and np.shares_memory(view, seen.numpy())


def test_memory_for_unused_storages_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """BOUND: a storage that is exchanged no more does not keep twice its size."""
    monkeypatch.setattr(_adopt, "AT_ONCE", 0)
    tensor = torch.zeros(5 * N)
    exchange(exchange(tensor))
    entry = _adopt._known[tensor.untyped_storage()._cdata]
    assert entry.preparation is not None
    _adopt.sweep()
    assert entry.preparation is not None
    monkeypatch.setattr(_adopt, "_now", entry.used + _adopt._MAX_KNOWN + 1)
    _adopt.sweep()
    assert entry.preparation is None
    moves_later(tensor)


class Seen(TorchDispatchMode):
    """Notes the operations of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_sees_no_move() -> None:
    tensors = [torch.zeros(N), torch.zeros(N)]
    names = []
    for tensor in tensors:
        exchange(tensor)
    for tensor, turns in zip(tensors, (1, 2)):
        for _ in range(turns):
            tensor.copy_(fresh())
            with Seen() as seen:
                hvd.allreduce_(tensor, name="mode", op=hvd.Sum)
            assert torch.equal(tensor, total())
            names.append([name for name in seen.names if "copy" in name or "set_" in name])
    assert all(map(adopted, tensors)) and names[0] == names[1], names


def test_a_program_may_turn_interception_off() -> None:
    """Then PyTorch itself copies the storage to its file."""
    tensor = exchange(torch.zeros(N))
    tensor.copy_(fresh())
    with torch._C._DisableTorchDispatch():
        hvd.allreduce_(tensor, name="off", op=hvd.Sum)
    assert torch.equal(tensor, total()) and adopted(tensor)
    exchange(tensor)


def test_a_file_that_can_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have taken the space. It moves as soon as there is a file."""
    tensor, real = exchange(torch.zeros(N)), torch.UntypedStorage._share_fd_cpu_

    def full(self: torch.UntypedStorage) -> tuple[int, int]:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
        for _ in range(5):
            exchange(tensor)
            assert not adopted(tensor)
    assert torch.UntypedStorage._share_fd_cpu_ is real
    assert adopted(exchange(tensor))
