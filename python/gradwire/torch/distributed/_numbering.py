"""The names of a group's operations, which are the same on all of its ranks.

- ``gradwire0.mesh.17``: the 17th operation of the group ``mesh``, of whatever kind. Ranks that make
  different calls meet under one name, and get an error with a table of what each asked for, instead
  of waiting for each other until a timeout.
- ``gradwire0.mesh.17>2.1``: the first operation that a callback starts. The callback is the second
  one of the future of operation 17. Each rank runs callbacks at its own time and in its own thread,
  so callbacks do not use the group's numbers: each counts for itself.
- A call that is refused is not counted: the other ranks do not know of it.
- The numbers repeat after as many as can be in flight: coordinator and daemons remember what was
  agreed under each name.

Messages have names of their own (worker-lib/src/naming.rs).
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
# The names of nested callbacks grow with each level; longer ones become a digest.
_MAX_PATH = 200


class Numbers:
    """Names with a number, under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._lock = threading.Lock()
        self.count = 0

    def start(self, call: Callable[[str], T]) -> T:
        """Starts operations by a call that gets the next name."""
        # The lock is held during the call: if it is refused, no later call may have a number yet.
        with self._lock:
            started = call(f"{self.prefix}.{repeating_number(self.count + 1)}")
            self.count += 1
        return started


class _Here(threading.local):
    """The numbers that this thread uses instead of the group's: those of a callback."""

    numbers: Numbers | None = None


_here = _Here()


def current(group: Numbers) -> Numbers:
    """Returns the numbers for the next operation of a group."""
    return _here.numbers or group


class _Place:
    """A future's place among the callbacks: its path, and the number of its callbacks."""

    __slots__ = ("callbacks", "path")

    def __init__(self, path: str) -> None:
        if len(path) > _MAX_PATH:
            path = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        self.path, self.callbacks = path, 0

    def next(self) -> Numbers:
        """Returns the numbers of the next callback."""
        self.callbacks += 1
        return Numbers(f"{self.path}>{self.callbacks}")


# The places of the futures of operations, and of futures that are made of them. A future that can
# hold an error is created by PyTorch's C++ code only, and has PyTorch's own class, so it can have
# neither data nor methods of ours. The class's methods are replaced and look here; other futures
# are not affected.
_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
_Future: Any = torch._C.Future
_then, _add_done_callback = _Future.then, _Future.add_done_callback


def numbered(future: Any, path: str) -> Any:
    """Gives the callbacks of this future numbers. The path is the same on all ranks."""
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
