"""What the operations of a group are called, so that all of its ranks call them the same.

- ``gradwire0.mesh.17``: the 17th operation of the group ``mesh``, whatever kind it is of. So ranks
  that make different calls meet under one name and are told so, by a table of who asked for what,
  instead of waiting for each other until a timeout.
- ``gradwire0.mesh.17>2.1``: the first operation that a callback starts; the callback is the second
  one of the future of operation 17. When a callback runs, and on which thread, is another matter on
  each rank, so callbacks do not take the group's numbers: each counts for itself.
- A call that is refused is not counted: other ranks know nothing of it.
- The numbers come again after as many as can be in flight: coordinator and daemons remember what was
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

from gradwire._names import again

T = TypeVar("T")
# Names of callbacks in callbacks grow with each level; what is longer becomes a digest.
_LONGEST = 200


class Numbers:
    """Names with a number, under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._lock = threading.Lock()
        self.count = 0

    def start(self, call: Callable[[str], T]) -> T:
        """Starts operations by a call that is given the next name."""
        # The lock is held meanwhile: if the call is refused no later one may have a number yet.
        with self._lock:
            started = call(f"{self.prefix}.{again(self.count + 1)}")
            self.count += 1
        return started


class _Here(threading.local):
    """Whose numbers this thread uses instead of those of the group: those of a callback."""

    numbers: Numbers | None = None


_here = _Here()


def current(group: Numbers) -> Numbers:
    """Whose numbers an operation of a group gets."""
    return _here.numbers or group


class _Place:
    """A future's place among the callbacks: its path, and how many callbacks it was given."""

    __slots__ = ("callbacks", "path")

    def __init__(self, path: str) -> None:
        if len(path) > _LONGEST:
            path = hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        self.path, self.callbacks = path, 0

    def next(self) -> Numbers:
        """The numbers of the next callback."""
        self.callbacks += 1
        return Numbers(f"{self.path}>{self.callbacks}")


# The futures of operations, and those that are made of them. A future that can hold an error is made by
# PyTorch's C++ only, and always of PyTorch's own class: neither can it have data of ours, nor a method.
# So the class's methods look here; all other futures are as they were.
_places: weakref.WeakKeyDictionary[Any, _Place] = weakref.WeakKeyDictionary()
_Future: Any = torch._C.Future
_then, _add_done_callback = _Future.then, _Future.add_done_callback


def numbered(future: Any, path: str) -> Any:
    """Sees to it that callbacks of this future have numbers. The path is the same on all ranks."""
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
