"""Copies GPU tensors to and from shared memory without synchronizing the whole device.

Each mapping of shared memory is registered with the driver (pinned memory), so that the GPU copies
asynchronously. A GPU has a copy engine for each direction. So each device has two streams, and
results are copied out while the next tensors are copied in:

- in: the copy follows the current work of the current stream, which computes the tensor. The
  operation starts when the copy is complete (``_staging``); the caller does not wait.
- out: the copy follows the current work of the current stream, which may still use the tensor's
  memory. Later work of that stream follows the copy. The CPU does not wait. The shared memory stays
  in use until the copy has read it. A copy in to the same memory follows the copy out, whatever
  streams the program uses.

If the driver can't register the memory, copies are slower, but in the same order.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from gradwire import _native, _staging

# An event, and the device of its stream.
Mark = tuple[torch.device, Any]
# A copy's destination and source.
Pair = tuple[torch.Tensor, torch.Tensor]


class Driver(Protocol):
    """The CUDA calls used here: few, so that tests can replace them."""

    def register(self, address: int, size: int) -> None:
        """Pins memory; raises a RuntimeError if that is not possible."""

    def unregister(self, address: int) -> None:
        """Unpins memory; raises a RuntimeError if that is not possible."""

    def clear_error(self) -> None:
        """Clears the error that a failed call has left for the next kernel of this thread."""

    def stream(self, device: torch.device) -> Any:
        """Returns a new stream."""

    def current(self, device: torch.device) -> Any:
        """Returns the stream that this thread uses."""

    def record(self, stream: Any) -> Any:
        """Returns an event that follows the stream's current work."""

    def follow(self, stream: Any, event: Any) -> None:
        """Makes the stream's later work wait for the event."""

    def copy(self, stream: Any, pairs: Sequence[Pair]) -> None:
        """Copies in the order of the stream."""

    def synchronize(self, event: Any) -> None:
        """Blocks until an event, without holding the GIL."""

    def happened(self, event: Any) -> bool:
        """Returns whether ``synchronize`` would return immediately."""


class Cuda:
    """The driver that uses PyTorch's CUDA."""

    _PORTABLE = 1  # pinned for all devices

    def register(self, address: int, size: int) -> None:
        """Pins memory for all devices."""
        self._check(torch.cuda.cudart().cudaHostRegister(address, size, self._PORTABLE))

    def unregister(self, address: int) -> None:
        self._check(torch.cuda.cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Clears the last error of the CUDA runtime by running a kernel that reports it.

        PyTorch does not expose ``cudaGetLastError``, but calls it after each kernel.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")

    def _check(self, code: Any) -> None:
        if int(code) != 0:
            raise RuntimeError(f"CUDA error {int(code)}")

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Returns an event of the stream, which only records events of its own device."""
        with torch.cuda.device(stream.device):
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return event

    def follow(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> None:
        with torch.cuda.stream(stream):
            for into, given in pairs:
                # PyTorch would resolve the sign on the CPU, before the copy is complete.
                if given.is_neg() or given.is_conj():
                    given = given.resolve_neg().resolve_conj()
                into.copy_(given, non_blocking=True)

    def synchronize(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def happened(self, event: torch.cuda.Event) -> bool:
        return event.query()


class Way(Enum):
    """The direction of a copy."""

    IN = 0  # to shared memory
    OUT = 1  # from shared memory


def _range(memory: torch.Tensor) -> tuple[int, int]:
    """Returns the start and end addresses of a contiguous tensor."""
    first = memory.data_ptr()
    return first, first + memory.numel() * memory.element_size()


class Stage:
    """The streams, the registered memory, and the copies that are in flight."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        # One per device and direction.
        self._streams: dict[tuple[torch.device, Way], Any] = {}
        # By address, whether a mapping could be registered.
        self._mappings: dict[int, bool] = {}
        # The events of unfinished copies, and their shared memory.
        self._copies_in: deque[tuple[Any, list[torch.Tensor]]] = deque()
        self._copies_out: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def _stream(self, device: torch.device, way: Way) -> Any:
        with self._lock:
            if (device, way) not in self._streams:
                self._streams[device, way] = self.driver.stream(device)
            return self._streams[device, way]

    def pin(self, buffer: _native.Buffer) -> None:
        """Registers the mapping of a buffer with the driver, once."""
        address, size = buffer.mapping
        with self._lock:
            if address in self._mappings:
                return
            if not self._mappings:
                _staging.at_close(self.close)
            try:
                self.driver.register(address, size)
                self._mappings[address] = True
            except RuntimeError as error:
                self._mappings[address] = False
                self.driver.clear_error()
                warnings.warn(
                    f"{size >> 20} MiB of shared memory could not be registered with the GPU "
                    f"driver ({error}): copies to and from it will be slower",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _after_all(
        self, device: torch.device, way: Way, pairs: Sequence[Pair], streams: Iterable[Any]
    ) -> Any:
        """Copies after the streams' current work; returns the event of the copies."""
        driver, stream = self.driver, self._stream(device, way)
        for other in streams:
            driver.follow(stream, driver.record(other))
        if way is Way.IN:
            for event in self._readers([into for into, _ in pairs]):
                driver.follow(stream, event)
        try:
            driver.copy(stream, pairs)
        except BaseException:
            # The copies before the failed one still use their memory.
            with contextlib.suppress(RuntimeError):
                driver.synchronize(driver.record(stream))
            raise
        return driver.record(stream)

    def _readers(self, written: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the events of copies out that read any of this shared memory."""
        with self._lock:
            copies = list(self._copies_out)
        if not copies:
            return []
        ranges = [_range(memory) for memory in written]
        return [
            event
            for event, read in copies
            if any(
                start < end and first < stop
                for start, stop in map(_range, read)
                for first, end in ranges
            )
        ]

    def load(self, buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies a tensor to shared memory.

        The next operation that this thread starts waits for the copy.
        """
        self.pin(buffer)
        current = self.driver.current(tensor.device)
        _staging.copy_started(self.load_all(tensor.device, [(memory, tensor)], [current]))

    def load_all(
        self, device: torch.device, pairs: Sequence[Pair], streams: Iterable[Any]
    ) -> Callable[[], None]:
        """Copies tensors to pinned memory, after the streams' current work.

        Returns:
            A function that blocks until the copies are complete, and keeps the tensors alive until
            then.
        """
        self._reap()
        done = self._after_all(device, Way.IN, pairs, streams)
        with self._lock:
            self._copies_in.append((done, [memory for memory, _ in pairs]))

        def arrived() -> None:
            self.driver.synchronize(done)
            _ = pairs  # keeps the memory from being reused earlier

        return arrived

    def store(self, buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies shared memory to a tensor; later work of the current stream follows the copy.

        ``memory`` is the buffer or a part of it. Its mapping may not be registered yet.
        """
        self.pin(buffer)
        self.store_all(tensor.device, [(tensor, memory)])

    def store_all(self, device: torch.device, pairs: Sequence[Pair]) -> None:
        """Copies pinned memory to tensors; later work of the current stream follows the copies."""
        self._reap()
        current = self.driver.current(device)
        done = self._after_all(device, Way.OUT, pairs, [current])
        self.driver.follow(current, done)
        with self._lock:
            self._copies_out.append((done, [memory for _, memory in pairs]))

    def marks(self, devices: Iterable[torch.device]) -> list[Mark]:
        """Returns events of this thread's streams, for other threads' streams to wait for."""
        gpus = [device for device in devices if device.type == "cuda"]
        return [(gpu, self.driver.record(self.driver.current(gpu))) for gpu in gpus]

    def follow(self, marks: Iterable[Mark]) -> None:
        """Makes this thread's streams wait for these events."""
        for device, event in marks:
            self.driver.follow(self.driver.current(device), event)

    def _reap(self) -> None:
        with self._lock:
            for copies in (self._copies_in, self._copies_out):
                while copies and self.driver.happened(copies[0][0]):
                    copies.popleft()

    def settle(self) -> None:
        """Waits for the copies out before the CPU writes to shared memory."""
        self._wait_for(self._copies_out)

    def _wait_for(self, copies: deque[tuple[Any, list[torch.Tensor]]]) -> None:
        while True:
            with self._lock:
                if not copies:
                    return
                event, memory = copies[0]
            self.driver.synchronize(event)
            del memory
            self._reap()

    def close(self) -> None:
        """Unpins all memory at the end of the session, after the last copy.

        It also waits for copies in: some gates may still be closed, and threads may have started
        copies without an operation.
        """
        self._wait_for(self._copies_in)
        self.settle()
        with self._lock:
            for address, pinned in self._mappings.items():
                if pinned:
                    try:
                        self.driver.unregister(address)
                    except RuntimeError:
                        # The session unmaps the memory anyway.
                        self.driver.clear_error()
            self._mappings.clear()


stage = Stage(Cuda())


def use(driver: Driver) -> None:
    """Replaces the driver, for tests."""
    global stage
    stage.close()
    stage = Stage(driver)


def _forked() -> None:
    """Resets the module: a forked child can't use the GPU."""
    global stage
    stage = Stage(stage.driver)


os.register_at_fork(after_in_child=_forked)
