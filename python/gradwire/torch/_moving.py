"""Puts sealed memory under a storage of PyTorch, with one copy.

``_share_fd_cpu_`` makes a file in a folder in memory, maps it, copies the storage there with an
ordinary operation, and then gives the mapping to the storage. All tensors on the storage follow.
Here the operation is intercepted: sealed memory with the contents takes the place of the mapping,
so that nothing is copied into the file. Nothing touches its pages either: if the folder is full,
PyTorch raises an error and no signal ends the process.

Releases from 2.10 on reserve the space of the file, for the time of the copy. Before that, the file
takes one page.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire import _native

# The folder of PyTorch's files.
FOLDER = "/dev/shm"
# The size of the storage that shows how PyTorch makes its files: many pages.
_SAMPLE = 64 << 10


class NoFile(Exception):
    """PyTorch could not make its file, perhaps because of a lack of space. Nothing has changed."""


class Way(NamedTuple):
    """How this PyTorch shares a storage."""

    # Whether its copy can be intercepted.
    intercepted: bool
    # Whether it reserves the space of the file.
    reserves: bool


class _Copy(TorchDispatchMode):
    """Replaces the first copy, which is into the storage of a new file."""

    def __init__(self, put: Callable[[torch.UntypedStorage, int], None]) -> None:
        super().__init__()
        self._put = put
        self.begun = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the first operation would import PyTorch's compiler, which takes seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Other modes of the program must not see these operations.
        with torch._C._DisableTorchDispatch():
            if self.begun or func is not torch.ops.aten.copy_.default:
                return func(*args, **(kwargs or {}))
            self.begun = True
            file = args[0].untyped_storage()
            self._put(file, file._share_fd_cpu_()[0])
            return args[0]


def _share(
    storage: torch.UntypedStorage, put: Callable[[torch.UntypedStorage, int], None]
) -> tuple[int, bool]:
    """Shares a storage; ``put`` gets its new memory and the file's descriptor.

    Returns the descriptor, and whether ``put`` was called.
    """
    # If space can't be reserved, PyTorch 2.10 and 2.11 read an old ``errno``, and try again for
    # ever if that is EINTR. So this sets another one.
    with contextlib.suppress(OSError):
        os.close(-1)
    copy = _Copy(put)
    try:
        with copy:
            fd = storage._share_fd_cpu_()[0]
    except RuntimeError as error:
        if copy.begun:
            raise
        raise NoFile(str(error).partition("\n")[0]) from error
    return fd, copy.begun


@functools.cache
def way() -> Way:
    """Returns how this PyTorch shares a storage."""
    blocks = 0

    def look(_: torch.UntypedStorage, fd: int) -> None:
        nonlocal blocks
        blocks = os.fstat(fd).st_blocks

    sample = torch.zeros(_SAMPLE, dtype=torch.uint8, device="cpu")
    _, intercepted = _share(sample.untyped_storage(), look)
    return Way(intercepted, 512 * blocks >= _SAMPLE)


def lacks_space(nbytes: int) -> str | None:
    """Returns what is missing for the file of a storage, or None if there is enough space.

    The same amount must remain free for other users of the folder, such as the workers of a
    ``DataLoader``. Another rank may use the space before PyTorch reserves it.
    """
    if not way().reserves:
        return None
    system = os.statvfs(FOLDER)
    free = system.f_bavail * system.f_frsize
    # A folder without a limit has no blocks.
    return f"{free} bytes are free" if system.f_blocks and free < 2 * nbytes else None


def move(storage: torch.UntypedStorage, memory: _native.Adoption) -> _native.Buffer:
    """Puts shared memory under a storage that is not shared. Its contents stay the same.

    Other threads of Python continue meanwhile. Nothing may use the storage.

    Args:
        storage: A storage in ordinary memory.
        memory: Shared memory of the same size.

    Returns:
        The storage's memory.

    Raises:
        NoFile: PyTorch could not make its file. The storage is unchanged, ``memory`` unused.
        GradwireError: ``memory`` could not take the place of the file. The storage is unchanged.
    """
    buffers = []

    def put(file: torch.UntypedStorage, fd: int) -> None:
        if file.nbytes() != storage.nbytes():
            raise RuntimeError(f"PyTorch made {file.nbytes()} bytes for {storage.nbytes()}")
        buffers.append(memory.take_place(file.data_ptr(), fd, storage.data_ptr()))

    fd, _ = _share(storage, put)
    _keep_size(storage)
    # If the program has turned interception off, PyTorch itself has copied to the file.
    return buffers[0] if buffers else again(storage, fd, memory)


def again(storage: torch.UntypedStorage, fd: int, memory: _native.Adoption) -> _native.Buffer:
    """Puts shared memory under a storage that is the mapping of a file."""
    return memory.take_place(storage.data_ptr(), fd, storage.data_ptr())


def _keep_size(storage: torch.UntypedStorage) -> None:
    """Makes PyTorch reject resizing of a moved storage, instead of crashing.

    A shared storage has no allocator. PyTorch rejects resizing only for storages that NumPy has had
    a view of.
    """
    torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).numpy()
