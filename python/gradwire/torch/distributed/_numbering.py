"""The names of a group's operations, which are the same on all its ranks.

- ``gradwire0.mesh.17``: the 17th operation of the group ``mesh``, of any kind. Ranks that make
  different calls use the same name, so they get an error with a table of all requests instead of
  waiting for each other until a timeout.
- ``gradwire0.mesh.17>2.1``: the first operation started by the second callback of operation 17's
  future. Ranks run callbacks at different times and in different threads, so each callback has its
  own numbers instead of the group's.
- Rejected calls are not counted, because the other ranks do not know of them.
- The numbers repeat after the maximum number of operations in flight, because coordinator and
  daemons remember what was agreed under each name.

Messages have separate names (worker-lib/src/naming.rs).
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gradwire._names import repeating_number

T = TypeVar("T")
# The names of nested callbacks grow with each level; longer paths are replaced by a digest.
_MAX_PATH = 200


class Numbers:
    """Numbered names with a common prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._lock = threading.Lock()
        self.count = 0

    def start(self, call: Callable[[str], T]) -> T:
        """Starts operations with a call that receives the next name."""
        # Holds the lock during the call: if it is rejected, the next call must get the same number.
        with self._lock:
            started = call(f"{self.prefix}.{repeating_number(self.count + 1)}")
            self.count += 1
        return started


class _Here(threading.local):
    """The numbers of the callback that this thread runs, used instead of the group's."""

    numbers: Numbers | None = None


_here = _Here()


def current(group: Numbers) -> Numbers:
    """Returns the numbers for the next operation of a group."""
    return _here.numbers or group


class _Place:
    """A future's path, and the number of its callbacks."""

    __slots__ = ("callbacks", "path")

    def __init__(self, path: str) -> None:
        if len(path) > _MAX_PATH:
            path = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        self.path, self.callbacks = path, 0

    def next(self) -> Numbers:
        """Returns the numbers of the next callback."""
        self.callbacks += 1
        return Numbers(f"{self.path}>{self.callbacks}")


# The places of operations' futures and of futures derived from them. Only PyTorch's C++ code
# creates futures that can hold an error, as objects of its own class, which can't hold our data. So
# the methods of the class are replaced and look up the place here; other futures are not affected.
_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
_Future: Any = torch._C.Future
_then, _add_done_callback = _Future.then, _Future.add_done_callback


def numbered(future: Any, path: str) -> Any:
    """Numbers the callbacks of this future. The path is the same on all ranks."""
    if _Future.then is _then:
        _Future.then, _Future.add_done_callback = _numbered_then, _numbered_done
    _places[future] = _Place(path)
    return future


@functools.wraps(_then)
def _numbered_then(self: Any, callback: Callable[[Any], Any]) -> Any:
    place = _places.get(self)
    if place is None:
        return _then(self, callback)
    numbers = place.next()
    return numbered(_then(self, _counting(numbers, callback)), numbers.prefix)


@functools.wraps(_add_done_callback)
def _numbered_done(self: Any, callback: Callable[[Any], Any]) -> None:
    place = _places.get(self)
    _add_done_callback(self, callback if place is None else _counting(place.next(), callback))


def _counting(numbers: Numbers, callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(future: Any) -> Any:
        before, _here.numbers = _here.numbers, numbers
        try:
            return callback(future)
        finally:
            _here.numbers = before

    return run
