"""Batched copies of gradients between a GPU and shared memory.

A separate copy costs a dozen driver calls and a thread switch, as much time as copying a megabyte.
An optimizer has hundreds of mostly smaller gradients. So copies start together once there are
enough bytes, and their operations wait behind one gate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native, _staging, _world
from gradwire.torch import _cuda

# Copies start at this number of bytes or tensors: enough to amortize the driver calls, but few
# enough for the first gradients to be exchanged during the backward pass.
BATCH_BYTES = 4 << 20
BATCH_TENSORS = 256

# By device: the copies, and the streams that they follow.
Pairs = dict[torch.device, list[_cuda.Pair]]
Streams = dict[torch.device, set[Any]]


class Loads:
    """Copies of gradients to shared memory, and the gate of their operations.

    The hooks of a backward pass add copies, from one thread per device. Each holds ``lock`` while
    it adds a copy and starts its operation.
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
        """Adds a copy to the buffer's ``memory``, after the current work of the current stream."""
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

    def start(self, if_enough: bool = False) -> None:
        """Starts the copies that were added so far, optionally only if there are enough.

        If that fails, their operations fail.
        """
        with self.lock:
            if if_enough and self._bytes < BATCH_BYTES and self._count < BATCH_TENSORS:
                return
            gate, pairs, streams = self._gate, self._pairs, self._streams
            self._clear()
        if gate is None:
            return  # there are no copies, or their operation was rejected
        waits: list[Callable[[], None]] = []
        try:
            for device, copies in pairs.items():
                waits.append(_cuda.stage.load_all(device, copies, streams[device]))
        except BaseException as error:
            gate.fail(f"its tensors could not be copied to shared memory: {error}")
            raise
        finally:
            # Even after a failure: started copies need their memory until they complete.
            _staging.open_after(waits, gate)

    def drop(self, why: str) -> None:
        """Fails the operations whose copies have not started."""
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
        """Adds a copy of the buffer's ``memory``, and a call on the current stream afterwards."""
        _cuda.stage.pin(buffer)
        self._pairs.setdefault(tensor.device, []).append((tensor.detach(), memory))
        self._afterwards.append(afterwards)
        self._bytes += buffer.nbytes
        if self._bytes >= BATCH_BYTES:
            self.start()

    def start(self) -> None:
        """Starts the copies that were added so far."""
        pairs, afterwards = self._pairs, self._afterwards
        self._pairs, self._afterwards, self._bytes = {}, [], 0
        for device, copies in pairs.items():
            _cuda.stage.store_all(device, copies)
        for use in afterwards:
            use()
