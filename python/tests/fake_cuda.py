"""A simulated GPU with delayed streams, on threads, so that a wrong order gives wrong data.

Its tensors pretend to be on a GPU. Only ``launch`` and copies change them, shortly after their
stream has reached them. So a copy that does not wait for the preceding kernel reads old data. An
operation that starts before its copy is complete exchanges garbage. A kernel that does not wait for
the copy of a result reads old data.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

SEED = 7


class OnGpu(torch.Tensor):
    """A tensor of the simulated GPU. Only copies, casts and ``launch`` are kernels."""

    gpu: FakeCuda
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: torch.device("cuda", 0))

    @classmethod
    def __torch_function__(cls, called: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if called in (torch.Tensor.new_empty, torch.empty_like):
            cls.gpu.allocated += 1
        if called is torch.Tensor.copy_:
            to, what = raw(given[0]), raw(given[1])
            cls.gpu.launch(lambda: to.copy_(what))
            return given[0]
        if called is torch.Tensor.cpu:
            return cls.gpu.read(given[0])
        if called is torch.Tensor.to and isinstance(given[1], torch.dtype):
            made = torch.empty_like(given[0], dtype=given[1])
            return made.copy_(given[0])
        return super().__torch_function__(called, types, given, named or {})


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, for kernels. Autograd has seen the write at launch."""
    return tensor.data.as_subclass(torch.Tensor)


class Stream:
    """Runs its jobs one after another."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._random = random.Random(f"{SEED}{name}")
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"fake-{name}", daemon=True).start()

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            time.sleep(self._random.random() * 0.004)
            with torch.no_grad():
                job()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)


class FakeCuda:
    """The simulated GPU with its driver; see the module."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        # The error of a failed call. The next kernel reports it, unless it is cleared before.
        self.pending: str | None = None
        self.registered: dict[int, int] = {}
        # The number of allocated tensors, without those of ``made``.
        self.allocated = 0
        # Memory that the driver fails to unregister.
        self.lost: set[int] = set()
        # The number of copies in each call.
        self.batches: list[int] = []
        # The number of copies to or from released memory.
        self.freed = 0
        # The shared memory of each unfinished copy.
        self.copying: list[int] = []
        self.streams: list[Stream] = []
        # Threads that have waited on the CPU for a copy.
        self.waited: set[str] = set()
        self._default = self._new("default")
        self._current = threading.local()
        OnGpu.gpu = self

    def _new(self, name: str) -> Stream:
        self.streams.append(Stream(name))
        return self.streams[-1]

    # The driver for staging.

    def register(self, address: int, size: int) -> None:
        if self.refuses:
            self._fail("out of pins")
        assert address not in self.registered, "registered once"
        self.registered[address] = size

    def _fail(self, error: str) -> None:
        self.pending = error
        raise RuntimeError(error)

    def clear_error(self) -> None:
        self.pending = None

    def unregister(self, address: int) -> None:
        if address in self.lost:
            del self.registered[address]
            self._fail("not registered")
        end = address + self.registered.pop(address)
        assert not any(address <= at < end for at in self.copying), "a copy uses the memory"

    def stream(self, device: torch.device) -> Stream:
        assert device == torch.device("cuda", 0)
        return self._new(f"side{len(self.streams)}")

    def current(self, device: torch.device) -> Stream:
        return getattr(self._current, "stream", self._default)

    def record(self, stream: Stream) -> threading.Event:
        event = threading.Event()
        stream.put(event.set)
        return event

    def follow(self, stream: Stream, event: threading.Event) -> None:
        stream.put(lambda: None if event.wait(60) else _hangs())

    def copy(self, stream: Stream, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.batches.append(len(pairs))
        for into, given in pairs:
            self._copy(stream, into, given)

    def _copy(self, stream: Stream, into: torch.Tensor, given: torch.Tensor) -> None:
        assert isinstance(into, OnGpu) != isinstance(given, OnGpu), "to a GPU or from it"
        memory = given if isinstance(into, OnGpu) else into
        at = memory.data_ptr()
        if not self.refuses and memory.numel():
            assert any(start <= at < start + size for start, size in self.registered.items()), (
                "pinned memory"
            )
        to, what = raw(into), raw(given)
        self.copying.append(at)
        # A real copy knows only addresses: the caller must keep the shared memory and the source
        # alive. Later kernels of the stream keep the destination alive.
        kept = [weakref.ref(memory)] if memory is given else [weakref.ref(into), weakref.ref(given)]

        def kernel() -> None:
            if any(each() is None for each in kept):
                self.freed += 1
            to.copy_(what)
            self.copying.remove(at)

        stream.put(kernel)

    def synchronize(self, event: threading.Event) -> None:
        self.waited.add(threading.current_thread().name)
        assert event.wait(60)

    def happened(self, event: threading.Event) -> bool:
        return event.is_set()

    # The interface for programs.

    def launch(self, kernel: Callable[[], Any]) -> None:
        """Starts a kernel on the current stream."""
        error, self.pending = self.pending, None
        if error is not None:
            raise RuntimeError(f"an earlier call failed: {error}")
        self.current(torch.device("cuda", 0)).put(kernel)

    def made(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that a kernel will fill."""
        tensor = torch.full_like(values, 77).as_subclass(OnGpu)
        memory = raw(tensor)
        self.launch(lambda: memory.copy_(values))
        return tensor

    def read(self, tensor: torch.Tensor, within: float = 60) -> torch.Tensor:
        """Returns the value that the current stream reads after its earlier work."""
        assert isinstance(tensor, OnGpu)
        seen: list[torch.Tensor] = []
        memory = raw(tensor)
        self.launch(lambda: seen.append(memory.clone()))
        assert self.record(self.current(torch.device("cuda", 0))).wait(within), "it hangs"
        return seen[0]

    @contextlib.contextmanager
    def on_a_stream(self) -> Iterator[None]:
        """Sets another current stream for this thread."""
        self._current.stream = self._new(f"own{len(self.streams)}")
        try:
            yield
        finally:
            del self._current.stream


def _hangs() -> None:
    raise AssertionError("an event was never recorded")
