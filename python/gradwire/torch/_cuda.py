"""Copies of tensors on a GPU to and from shared memory, without a wait for the whole device.

Shared memory is registered with the driver, once for each mapping, so that the GPU copies by itself
(pinned memory). A GPU has a copy engine for each direction. So each device has two streams, and
results come out while the next tensors go in:

- in: the copy comes after what the current stream has to do by now, which computes the tensor. The
  operation starts when the copy has arrived (``_staging``), and the caller goes on.
- out: the copy comes after what the current stream has to do by now, which may still use the
  tensor's memory. What the current stream does from then on comes after the copy. Nothing waits on
  the processor. The shared memory stays in use until the copy has read it. A copy in to that memory
  comes after it, whatever streams the program uses.

If the driver does not register the memory the copies are slower, and in the same order.
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
# What a copy writes, and what it reads.
Pair = tuple[torch.Tensor, torch.Tensor]


class Driver(Protocol):
    """What is needed of CUDA: few calls, so that tests can replace it."""

    def register(self, address: int, size: int) -> None:
        """Pins memory; raises a RuntimeError if that is not possible."""

    def unregister(self, address: int) -> None:
        """Unpins memory; raises a RuntimeError if that is not possible."""

    def clear_error(self) -> None:
        """Takes the error that a failed call has left for the next kernel of this thread."""

    def stream(self, device: torch.device) -> Any:
        """Returns a new stream."""

    def current(self, device: torch.device) -> Any:
        """Returns the stream that this thread uses."""

    def record(self, stream: Any) -> Any:
        """Returns an event: what the stream has been given by now."""

    def follow(self, stream: Any, event: Any) -> None:
        """Makes what the stream is given from now on wait for the event."""

    def copy(self, stream: Any, pairs: Sequence[Pair]) -> None:
        """Copies in the order of the stream."""

    def synchronize(self, event: Any) -> None:
        """Waits on the processor for an event, without the interpreter's lock."""

    def happened(self, event: Any) -> bool:
        """Returns whether ``synchronize`` would return at once."""


class Cuda:
    """The driver of PyTorch's CUDA."""

    _PORTABLE = 1  # pinned for all devices

    def register(self, address: int, size: int) -> None:
        """Pins memory for all devices."""
        self._check(torch.cuda.cudart().cudaHostRegister(address, size, self._PORTABLE))

    def unregister(self, address: int) -> None:
        """Unpins memory."""
        self._check(torch.cuda.cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Takes the last error of the CUDA runtime, by a kernel that reports it.

        PyTorch has no binding of ``cudaGetLastError``, but asks it after each kernel.
        """
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")

    def _check(self, code: Any) -> None:
        if int(code) != 0:
            raise RuntimeError(f"CUDA's error {int(code)}")

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns a new stream."""
        return torch.cuda.Stream(device)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream that this thread uses."""
        return torch.cuda.current_stream(device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        # A stream records events of its own device only.
        """Returns an event of the stream."""
        with torch.cuda.device(stream.device):
            event = torch.cuda.Event(blocking=True)
            event.record(stream)
        return event

    def follow(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Makes the stream wait for the event."""
        stream.wait_event(event)

    def copy(self, stream: torch.cuda.Stream, pairs: Sequence[Pair]) -> None:
        """Copies in the order of the stream."""
        with torch.cuda.stream(stream):
            for into, given in pairs:
                # PyTorch would change the sign after the copy, on the processor and too early.
                if given.is_neg() or given.is_conj():
                    given = given.resolve_neg().resolve_conj()
                into.copy_(given, non_blocking=True)

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Waits on the processor for an event."""
        event.synchronize()

    def happened(self, event: torch.cuda.Event) -> bool:
        """Returns whether the event has happened."""
        return event.query()


class Way(Enum):
    """The direction of a copy."""

    IN = 0  # to shared memory
    OUT = 1  # from shared memory


def _range(memory: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses of a tensor without gaps: the first one, and the end."""
    first = memory.data_ptr()
    return first, first + memory.numel() * memory.element_size()


class Stage:
    """The streams, the registered memory, and the copies that are in flight."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._lock = threading.Lock()
        # One for each device and direction.
        self._streams: dict[tuple[torch.device, Way], Any] = {}
        # Whether each mapping that was seen could be registered.
        self._mappings: dict[int, bool] = {}
        # The events of copies, and their shared memory, until they are done.
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
                    f"{size >> 20} MiB of shared memory could not be registered with the GPU's "
                    "driver "
                    f"({error}): copies to and from it are slower",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def _after_all(
        self, device: torch.device, way: Way, pairs: Sequence[Pair], streams: Iterable[Any]
    ) -> Any:
        """Copies after what the streams have been given; returns the event of the copies."""
        driver, stream = self.driver, self._stream(device, way)
        for other in streams:
            driver.follow(stream, driver.record(other))
        if way is Way.IN:
            for event in self._readers([into for into, _ in pairs]):
                driver.follow(stream, event)
        try:
            driver.copy(stream, pairs)
        except BaseException:
            # The copies before the one that has failed still use their memory.
            with contextlib.suppress(RuntimeError):
                driver.synchronize(driver.record(stream))
            raise
        return driver.record(stream)

    def _readers(self, written: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the events of the copies out that read a part of this shared memory."""
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
        """Copies tensors to pinned memory, after what the streams have been given.

        Returns:
            Waits on the processor until they have arrived. Until then it keeps the tensors.
        """
        self._reap()
        done = self._after_all(device, Way.IN, pairs, streams)
        with self._lock:
            self._copies_in.append((done, [memory for memory, _ in pairs]))

        def arrived() -> None:
            self.driver.synchronize(done)
            _ = pairs  # no memory may be reused before

        return arrived

    def store(self, buffer: _native.Buffer, memory: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copies shared memory to a tensor; the current stream goes on after that.

        ``memory`` is the buffer or a part of it. A result may be in a mapping from which nothing
        was loaded yet.
        """
        self.pin(buffer)
        self.store_all(tensor.device, [(tensor, memory)])

    def store_all(self, device: torch.device, pairs: Sequence[Pair]) -> None:
        """Copies pinned memory to tensors; the current stream goes on after that."""
        self._reap()
        current = self.driver.current(device)
        done = self._after_all(device, Way.OUT, pairs, [current])
        self.driver.follow(current, done)
        with self._lock:
            self._copies_out.append((done, [memory for _, memory in pairs]))

    def marks(self, devices: Iterable[torch.device]) -> list[Mark]:
        """Returns events of this thread's streams, for streams of other threads to wait for."""
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
        """Waits for the copies out, before the processor writes to shared memory."""
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

        The gates may not all have been opened, and a thread may have started a copy without an
        operation. So the copies in are waited for here, too.
        """
        self._wait_for(self._copies_in)
        self.settle()
        with self._lock:
            for address, pinned in self._mappings.items():
                if pinned:
                    try:
                        self.driver.unregister(address)
                    except RuntimeError:
                        # The session ends all the same, and unmaps the memory.
                        self.driver.clear_error()
            self._mappings.clear()


stage = Stage(Cuda())


def use(driver: Driver) -> None:
    """Replaces the driver, for tests."""
    global stage
    stage.close()
    stage = Stage(driver)


def _forked() -> None:
    """Resets the module: a forked child has no GPU."""
    global stage
    stage = Stage(stage.driver)


os.register_at_fork(after_in_child=_forked)
