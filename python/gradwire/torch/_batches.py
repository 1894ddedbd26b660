"""Copies of gradients between a GPU and shared memory, many at a time.

A copy of its own takes a dozen calls of the driver and a thread's turn, as long as it takes to copy
a megabyte. An optimizer has hundreds of gradients, most of them smaller. So their copies begin
together, when there is enough to copy, and their operations wait behind one gate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native, _staging, _world
from gradwire.torch import _cuda

# Copies begin when there are so many bytes: enough to hide what the driver takes, and few enough
# for the exchange of the first gradients to go on during the backward pass.
BATCH_BYTES = 4 << 20


class Loads:
    """Copies of gradients to shared memory, and the gate that their operations wait behind.

    A hook of the backward pass adds to it (``with loads:``), on the thread of its device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.forget()

    def forget(self) -> None:
        """Drops what has not begun: the session of its operations has ended."""
        self._pairs: dict[torch.device, list[_cuda.Pair]] = {}
        self._streams: dict[torch.device, set[Any]] = {}
        self._bytes = 0
        self._gate: _native.Gate | None = None

    def __enter__(self) -> Loads:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._bytes >= BATCH_BYTES:
                self._start()
        finally:
            self._lock.release()

    def add(self, buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Adds a copy to ``memory``, the buffer; after what the current stream has to do by now."""
        stage, device = _cuda.stage, tensor.device
        stage.pin(buffer)
        self._pairs.setdefault(device, []).append((memory, tensor.detach()))
        self._streams.setdefault(device, set()).add(stage.driver.current(device))
        self._bytes += buffer.nbytes

    def session(self) -> _native.Session:
        """Returns the session for the operations that need these copies."""
        if self._gate is None:
            self._gate = _native.Gate()
        return _world.session().behind(self._gate)

    def start(self) -> None:
        """Begins the copies that were added so far."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        gate, pairs, streams = self._gate, self._pairs, self._streams
        self.forget()
        waits = [_cuda.stage.load_all(at, pairs[at], streams[at]) for at in pairs]
        if gate is not None:
            _staging.open_after(waits, gate)


class Stores:
    """Copies of results from shared memory to gradients."""

    def __init__(self) -> None:
        self._pairs: dict[torch.device, list[_cuda.Pair]] = {}
        self._afterwards: list[Callable[[], object]] = []
        self._bytes = 0

    def add(
        self,
        buffer: _native.Buffer,
        memory: torch.Tensor,
        tensor: torch.Tensor,
        afterwards: Callable[[], object],
    ) -> None:
        """Adds a copy of ``memory``, the buffer.

        ``afterwards`` then uses the tensor, on the current stream.
        """
        _cuda.stage.pin(buffer)
        self._pairs.setdefault(tensor.device, []).append((tensor.detach(), memory))
        self._afterwards.append(afterwards)
        self._bytes += buffer.nbytes
        if self._bytes >= BATCH_BYTES:
            self.start()

    def start(self) -> None:
        """Begins the copies that were added so far."""
        pairs, afterwards = self._pairs, self._afterwards
        self._pairs, self._afterwards, self._bytes = {}, [], 0
        for device, copies in pairs.items():
            _cuda.stage.store_all(device, copies)
        for use in afterwards:
            use()
