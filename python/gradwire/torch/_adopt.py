"""Moves ordinary CPU tensors into shared memory, so that they need no further copies.

PyTorch can move a storage into a mapped file, in place: all tensors on the storage follow,
including those held by C++ code, such as DDP's buckets. On the way the native session puts sealed
memory, which it shares with the daemon, in the place of the file: it *adopts* the storage. As
usual, PyTorch frees the memory with the storage. Only the tensor's address changes.

This module decides which storages move, and ``_moving`` moves them. A storage moves when it is
exchanged in place for the second time, because it will likely be exchanged again. If it is large,
the second exchange only starts to make the shared memory, in the background, and is copied like the
first. A later one moves the storage. It moves only in an operation that exchanges all of it:
nothing else may use the tensors of that operation, but other threads may compute on the rest of
their storage. It never moves while an operation on it is in flight, which might write to the old
addresses. Memory whose address others may hold does not move: NumPy's, pinned, mapped or shared
memory, and parameters, which a forked child may read at any time.

Ranks move independently. All that they share is the space in PyTorch's folder, which the kernel
reserves for one of them or refuses.

Python's garbage collector lists all parameters, except those that ``gc.freeze()`` has hidden. While
there are frozen objects, only a storage that no other tensor uses moves: it has no parameter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import os
import resource
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gradwire import _native, _world
from gradwire._errors import GradwireError
from gradwire._uses import COPIED, Use
from gradwire.torch import _moving

# Smaller tensors are copied: the rest of their exchange takes longer than the copy.
MIN_BYTES = 64 << 10
# The maximum number of known storages, and the number of calls between two sweeps of them.
_MAX_KNOWN = 1 << 14
_LOOK_EVERY = 64
# The pause after a search for parameters, as a multiple of its duration. Programs create most
# tensors in their first steps, so searches may run ahead of these pauses by LOOK_AHEAD seconds.
LOOK_PAUSE = 20.0
LOOK_AHEAD = 10.0
# Up to this size, the shared memory is made at once: it takes less time than the exchange.
AT_ONCE = 1 << 20
# How many further exchanges may be copied while the memory for a larger storage is made. Then the
# next exchange waits for the memory.
PATIENCE = 5
# How often PyTorch may fail to make a file before a storage is copied for ever.
_MAX_TRIES = 16

_log = logging.getLogger("gradwire")


class _Storage:
    """A storage that was exchanged in place, or was created in shared memory.

    While this object exists, PyTorch does not reuse the storage's address, which therefore
    identifies it.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.weak = StorageWeakRef(storage)
        self.number = next(_numbers)
        self.watched: weakref.ref[torch.UntypedStorage] | None = None
        # Whether it was exchanged before.
        self.again = False
        # Whether it must never move.
        self.refused = False
        # Whether it has moved, possibly in an earlier session.
        self.moved = False
        # The session and the buffer that contain it, and its address and size.
        self.session: _native.Session | None = None
        self.buffer: _native.Buffer | None = None
        self.address = self.nbytes = 0
        # Before the move: the shared memory of this size or its preparation, the number of
        # exchanges copied meanwhile, and the number of files that PyTorch could not make.
        self.preparation: _native.Preparation | None = None
        self.memory: _native.Adoption | None = None
        self.waits = self.tries = 0
        # The number of its last call.
        self.used = 0
        # The byte ranges that in-place operations currently use.
        self.ranges: list[tuple[int, int]] = []

    def watch(self, storage: torch.UntypedStorage) -> None:
        """Notices the end of the storage.

        In older PyTorch releases, the Python object may be destroyed earlier than the storage.
        """
        if self.watched is None or self.watched() is None:
            key = storage._cdata
            self.watched = weakref.ref(storage, lambda _: _ended.append(key))

    def is_shared(self, storage: torch.UntypedStorage, session: _native.Session) -> bool:
        """Returns whether it is shared memory of this session."""
        if self.buffer is None or self.session is not session:
            return False
        if storage.data_ptr() == self.address and storage.nbytes() == self.nbytes:
            return True
        # The program has replaced its memory, for example by ``resize_()``.
        self.forget()
        self.refused = True
        return False

    def share(
        self, storage: torch.UntypedStorage, session: _native.Session, buffer: _native.Buffer
    ) -> None:
        """Remembers that the storage is this shared memory."""
        self.session, self.buffer = session, buffer
        self.address, self.nbytes = storage.data_ptr(), storage.nbytes()

    def forget(self) -> None:
        """Drops the shared memory. The session releases it."""
        self.buffer = self.session = self.preparation = self.memory = None

    def waits_in_vain(self) -> bool:
        """Returns whether it has shared memory to move to, but is not exchanged any more."""
        waits = self.preparation is not None or self.memory is not None
        return waits and _now - self.used > _MAX_KNOWN


class _StorageUse(Use):
    __slots__ = ("_range", "_storage")

    def __init__(self, storage: _Storage, used: tuple[int, int]) -> None:
        super().__init__()
        self._storage, self._range = storage, used
        storage.ranges.append(used)

    def end(self) -> None:
        """Records that the result is in the tensor."""
        used, self._range = self._range, _NOTHING
        if used is not _NOTHING:
            self._storage.ranges.remove(used)

    __del__ = end  # for operations that failed or were never waited for


_NOTHING = (0, 0)
_lock = threading.RLock()
_numbers, _calls = itertools.count(), itertools.count(1)
_known: dict[int, _Storage] = {}
# The storages whose Python objects have been destroyed.
_ended: deque[int] = deque()
# The storages of parameters at the last search, which covered entries with a number below _looked.
_parameters: set[int] = set()
_looked = 0
# When the next search may start.
_look_from = 0.0
# The number of the last call.
_now = 0
_warned: set[str] = set()
# In a forked child, the parent's storages.
_of_parent: list[dict[int, _Storage]] = []


def use(tensor: torch.Tensor, element: str, shape: Sequence[int]) -> Use:
    """Begins an in-place operation on a tensor. The storage of the tensor may move.

    The caller keeps the use until the operation has completed, and calls its ``end`` when the
    result is in the tensor.

    Args:
        tensor: A tensor.
        element: The name of its element type.
        shape: The shape that the caller gives a copy of the tensor. Ranks compare shapes, and some
            may copy while others have moved.

    Returns:
        A use with the tensor's memory, if it is shared; otherwise the tensor must be copied.
    """
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes < MIN_BYTES or not tensor.is_cpu or not _is_plain(tensor):
        return COPIED
    storage, session = tensor.untyped_storage(), _world.session()
    first = int(tensor.storage_offset()) * tensor.element_size()
    used = (first, first + nbytes)
    with _lock:
        entry = _entry(storage, session.adopt_max_bytes > 0)
        if entry is None:
            return COPIED
        shared = entry.is_shared(storage, session)
        if not shared and entry.again and nbytes == storage.nbytes():
            shared = _may_move(entry, storage, session) and _move(entry, storage, session)
        entry.again = True
        # A copy, because other threads may end their uses concurrently.
        free = all(end <= used[0] or used[1] <= start for start, end in tuple(entry.ranges))
        result = _StorageUse(entry, used)
        if shared and free and entry.buffer is not None:
            whole = entry.buffer.view(first, "u8", [nbytes])
            result.buffer = whole.part(0, element, list(shape), storage)
        return result


def find(tensor: torch.Tensor, element: str) -> _native.Buffer | None:
    """Returns the memory of a tensor that an operation reads, if it is already shared."""
    if not tensor.is_cpu or not _is_plain(tensor):
        return None
    storage = tensor.untyped_storage()
    with _lock:
        entry = _known.get(storage._cdata)
        if not is_shared(tensor) or entry is None or entry.buffer is None:
            return None
        first, nbytes = tensor.storage_offset() * tensor.element_size(), tensor.nbytes
        whole = entry.buffer.view(first, "u8", [nbytes])
        return whole.part(0, element, list(tensor.shape), storage)


def is_shared(tensor: torch.Tensor) -> bool:
    """Returns whether the memory of a tensor is currently shared with the daemon."""
    storage = tensor.untyped_storage()
    with _lock:
        entry = _known.get(storage._cdata)
        return entry is not None and entry.is_shared(storage, _world.session())


def made(tensor: torch.Tensor, buffer: _native.Buffer) -> None:
    """Records that a tensor was created in shared memory and covers its storage."""
    storage = tensor.untyped_storage()
    with _lock:
        entry = _entry(storage, new=True)
        if entry is not None:
            entry.refused = True  # it is already in shared memory
            entry.share(storage, _world.session(), buffer)


def written(tensor: torch.Tensor) -> None:
    """Tells autograd that an operation has written to the memory of a tensor."""
    if not tensor.is_inference():
        tensor.detach()[:0].zero_()  # the detached tensor shares the version counter


def _is_plain(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous, not a special view and not a trainable leaf."""
    return (
        type(tensor) is torch.Tensor
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not (tensor.requires_grad and tensor.is_leaf)
    )


def _entry(storage: torch.UntypedStorage, new: bool) -> _Storage | None:
    """Returns the entry of a storage, which is created if ``new`` is True."""
    global _now
    _now = next(_calls)
    if _ended or _now % _LOOK_EVERY == 0:
        sweep()
    key = storage._cdata
    entry = _known.get(key)
    if entry is None:
        if not new or len(_known) >= _MAX_KNOWN:
            return None
        entry = _known[key] = _Storage(storage)
    entry.watch(storage)
    entry.used = _now
    return entry


def sweep() -> None:
    """Forgets destroyed storages, and memory for storages that are not exchanged any more.

    The session releases their memory.
    """
    with _lock:
        _ended.clear()
        for key in [key for key, entry in _known.items() if entry.weak.expired()]:
            del _known[key]
        for entry in filter(_Storage.waits_in_vain, _known.values()):
            entry.forget()


# Whether it may move


def _may_move(entry: _Storage, storage: torch.UntypedStorage, session: _native.Session) -> bool:
    if entry.refused or entry.ranges or not 0 < storage.nbytes() <= session.adopt_max_bytes:
        return False
    waits = entry.preparation is not None or entry.memory is not None
    if not waits and not _numbers_left(session):
        return False
    if entry.moved:  # in an earlier session
        return (storage.data_ptr(), storage.nbytes()) == (entry.address, entry.nbytes)
    if not _is_ordinary(storage):
        entry.refused = True
        return False
    if gc.get_freeze_count() > 0 and not _is_of_one_tensor(storage):
        return False
    parameter = _is_parameter(entry, storage)
    entry.refused = parameter is True
    return parameter is False and (waits or _descriptors_left())


def _is_ordinary(storage: torch.UntypedStorage) -> bool:
    """Returns whether only PyTorch uses the memory of a storage."""
    # Storages of NumPy, DLPack or files, and those with NumPy views, can't be resized.
    resizable = getattr(storage, "resizable", None)
    if resizable is None or not resizable() or not hasattr(storage, "_share_fd_cpu_"):
        return False
    if not _has_numpy():
        return False  # see _moving
    return not storage.is_shared() and not (torch.cuda.is_initialized() and storage.is_pinned())


@functools.cache
def _has_numpy() -> bool:
    try:
        torch.zeros(1, device="cpu").numpy()
    except RuntimeError:
        return False
    return True


def _is_of_one_tensor(storage: torch.UntypedStorage) -> bool:
    """Returns whether at most one tensor uses a storage; False if that is not known."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) <= 2  # also used by the Python object


def _is_parameter(entry: _Storage, storage: torch.UntypedStorage) -> bool | None:
    """Returns whether a storage belongs to a parameter, possibly through its ``.data``.

    Searching all objects takes tens of milliseconds. One search covers all storages that are known
    by then. Returns None if there were too many recent searches.
    """
    global _looked, _look_from
    if entry.number >= _looked or storage._cdata in _parameters:
        began = time.monotonic()
        if began < _look_from - LOOK_AHEAD:
            return None
        _looked = next(_numbers)
        _parameters.clear()
        _parameters.update(_storages_of_parameters())
        ended = time.monotonic()
        _look_from = max(_look_from, ended) + LOOK_PAUSE * (ended - began)
    return storage._cdata in _parameters


def _storages_of_parameters() -> Iterator[int]:
    kinds: dict[type, bool] = {}
    for item in gc.get_objects():
        kind = type(item)
        known = kinds.get(kind)
        if known is None:
            known = kinds[kind] = issubclass(kind, torch.Tensor)
        # A parameter may have another subclass of tensors as its class.
        if known and isinstance(item, torch.nn.Parameter):
            # Some kinds of parameters have no storage, at least not yet.
            with contextlib.suppress(Exception):
                yield item.untyped_storage()._cdata


def _descriptors_left() -> bool:
    """Returns whether another storage may use a descriptor; storages may use a quarter of them."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    moved = sum(entry.moved or entry.preparation is not None for entry in _known.values())
    if limit == resource.RLIM_INFINITY or 4 * (moved + 1) <= limit:
        return True
    _warn(
        "descriptors",
        f"{moved} tensors have moved into shared memory, each with a file descriptor, and the "
        f"limit is {limit}: further tensors will be copied. Raise the limit (ulimit -n)",
    )
    return False


def _numbers_left(session: _native.Session) -> bool:
    """Returns whether the session can adopt another storage; they may use half of its segments."""
    if session.may_adopt:
        return True
    _warn(
        "segments",
        "half of a rank's memory segments are tensors that have moved into shared memory: "
        "further tensors will be copied. Raise worker.max_segments (GRADWIRE_WORKER__MAX_SEGMENTS)",
    )
    return False


def _fits(nbytes: int) -> bool:
    """Returns whether PyTorch's folder, which may be small, has space for a storage."""
    missing = _moving.lacks_space(nbytes)
    if missing is not None:
        _warn(
            "space",
            f"a tensor of {nbytes} bytes is copied for each exchange: moving it needs twice its "
            f"size in {_moving.FOLDER} ({missing}). Enlarge it, or set GRADWIRE_WORKER__ADOPT=off",
        )
    return missing is None


# The move


def _move(entry: _Storage, storage: torch.UntypedStorage, session: _native.Session) -> bool:
    """Moves a storage into shared memory of the session; returns whether that worked."""
    try:
        if not _moving.way().intercepted:
            raise RuntimeError("this release of PyTorch does not support it")
        if not entry.moved and not _fits(storage.nbytes()):
            return False
        # This comes first: it may fail or take time, and nothing has changed yet.
        if not _has_memory(entry, storage.nbytes(), session) or entry.memory is None:
            return False
        if entry.moved:
            buffer = _moving.again(storage, storage._share_fd_cpu_()[0], entry.memory)
        else:
            buffer = _moving.move(storage, entry.memory)
            entry.moved = True
    except _moving.NoFile as error:
        # Other ranks that move at the same time may have used the space: the next exchange tries it
        # again.
        entry.tries += 1
        entry.refused = entry.tries >= _MAX_TRIES
        failure: Exception = error
    except (GradwireError, RuntimeError, OSError) as error:
        entry.refused = True
        failure = error
    else:
        entry.memory = None
        entry.share(storage, session, buffer)
        return True
    if entry.refused:
        entry.forget()
        _warn("failure", f"a tensor can't move into shared memory and will be copied: {failure}")
    return False


def _has_memory(entry: _Storage, nbytes: int, session: _native.Session) -> bool:
    """Returns whether there is shared memory for a storage. If not, the memory is being made."""
    if entry.nbytes != nbytes:
        entry.forget()
        entry.nbytes = nbytes
    if entry.memory is not None:
        return True
    if nbytes <= AT_ONCE:
        entry.memory = session.adoption(nbytes)
        return True
    if entry.preparation is None:
        entry.preparation, entry.waits = session.prepare_adoption(nbytes), 0
        return False
    entry.waits += 1
    if entry.waits <= PATIENCE and not entry.preparation.is_done:
        return False
    preparation, entry.preparation = entry.preparation, None
    entry.memory = preparation.wait()
    return True


def _warn(what: str, text: str) -> None:
    """Logs a warning once."""
    if what not in _warned:
        _warned.add(what)
        _log.warning(text)


# Its end


def _close() -> None:
    """Releases the shared memory before the session ends. The tensors keep their memory."""
    with _lock:
        for entry in _known.values():
            entry.forget()


def _forked() -> None:
    """Forgets everything: a forked child has no session, and has memory of its own."""
    global _lock, _known
    _lock = threading.RLock()
    # Freeing these storages takes a lock that another thread may have held during the fork.
    _of_parent.append(_known)
    _known = {}
    _ended.clear()


_world.before_shutdown.append(_close)
os.register_at_fork(after_in_child=_forked)
