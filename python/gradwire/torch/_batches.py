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

# Copies begin when there are so many bytes or tensors: enough to hide what the driver takes, and
# few enough for the exchange of the first gradients to go on during the backward pass.
BATCH_BYTES = 4 << 20
BATCH_TENSORS = 256

# By device: the copies, and the streams that they come after.
Pairs = dict[torch.device, list[_cuda.Pair]]
Streams = dict[torch.device, set[Any]]


class Loads:
    """Copies of gradients to shared memory, and the gate that their operations wait behind.

    The hooks of a backward pass add to it, on as many threads as there are devices. Each holds
    ``lock`` while it adds a copy and starts its operation.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        _staging.batch_begun(self)
        self._pairs: Pairs = {}
        self._streams: Streams = {}
        self._bytes = self._count = 0
        self._gate: _native.Gate | None = None

    def add(self, buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Adds a copy to ``memory``, the buffer; after what the current stream has to do by now."""
        stage, device = _cuda.stage, tensor.device
        stage.pin(buffer)
        self._pairs.setdefault(device, []).append((memory, tensor.detach()))
        self._streams.setdefault(device, set()).add(stage.driver.current(device))
        self._bytes += buffer.nbytes
        self._count += 1

    def session(self) -> _native.Session:
        """Returns the session for the operations that need these copies."""
        if self._gate is None:
            self._gate = _native.Gate()
            _staging.batch_made(self)
        return _world.session().behind(self._gate)

    def start_if_enough(self) -> None:
        """Begins the copies if there is enough to copy."""
        with self.lock:
            if self._bytes < BATCH_BYTES and self._count < BATCH_TENSORS:
                return
            taken = self._take()
        self._begin(*taken)

    def start(self) -> None:
        """Begins the copies that were added so far.

        If they can't begin, their operations fail.
        """
        with self.lock:
            taken = self._take()
        self._begin(*taken)

    def _take(self) -> tuple[_native.Gate | None, Pairs, Streams]:
        taken = self._gate, self._pairs, self._streams
        self._clear()
        return taken

    def _begin(self, gate: _native.Gate | None, pairs: Pairs, streams: Streams) -> None:
        if gate is None:
            return  # no operation needs the copies: it was refused, or there are none
        waits: list[Callable[[], None]] = []
        try:
            for device, copies in pairs.items():
                waits.append(_cuda.stage.load_all(device, copies, streams[device]))
        except BaseException as error:
            gate.fail(f"its tensors could not be copied to shared memory: {error}")
            raise
        finally:
            # Also if one has failed: the others need their memory until they have arrived.
            _staging.open_after(waits, gate)

    def drop(self, why: str) -> None:
        """Fails the operations whose copies have not begun."""
        with self.lock:
            gate = self._gate
            self._clear()
        if gate is not None:
            gate.fail(why)


class Stores:
    """Copies of results from shared memory to gradients."""

    def __init__(self) -> None:
        self._pairs: Pairs = {}
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
