"""The names of a group's operations, which are the same on all its ranks.

An operation belongs to the order of its own group, wherever it is started. Ranks run callbacks at
different times and in different threads, and a callback may belong to an operation of another
group. So the calls of a group have several independent orders: one of the program, and one of each
callback.

- ``gradwire0.mesh.17``: the 17th operation of the group ``mesh``, of any kind. Ranks that make
  different calls use the same name, so they get an error with a table of all requests instead of
  waiting for each other until a timeout.
- ``gradwire0.mesh.17>2.1``: the first operation started by the second callback of operation 17's
  future. All ranks of ``mesh`` know operation 17, so its callbacks can be called at any time, in
  any order. The same holds for groups of some of these ranks.
- ``gradwire0.cross>more3.1``: the first operation in ``cross`` that the third callback ``more``
  started; the future is one of a message, or of a group to which some ranks of ``cross`` do not
  belong. These ranks have different futures, whose operations complete in any order. So callbacks
  are paired by the order in which the program requests them. Each thread, and each callback, has
  its own count of the callbacks that it requests.
- Rejected calls are not counted, because the other ranks do not know of them.
- In each epoch of an elastic job, the numbers start over: a loss may have come before an operation
  of some ranks and after the same operation of others.
- The numbers repeat after the maximum number of operations in flight, because coordinator and
  daemons remember what was agreed under each name.

Gloo numbers the operations of a group as they are started, wherever that is. So with Gloo two
callbacks in flight mix up their results if they run in different orders. Here they never do, but an
operation started by a callback never pairs with one started outside of callbacks.

Messages have separate names (worker-lib/src/naming.rs).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from gradwire import _epochs
from gradwire._names import repeating_number

T = TypeVar("T")
# The names of nested callbacks grow with each level; longer ones are replaced by a digest.
_MAX_PATH = 200
# The ranks that share an operation; None for all ranks of the job.
Members = frozenset[int] | None
# The ranks that share a message: two ranks rarely pair the callbacks of the same message.
NOBODY: Members = frozenset()
# The number of epochs that have ended.
_ended = 0


def _end_epoch() -> None:
    global _ended
    _ended += 1


_epochs.on_change(_end_epoch)


class Numbers:
    """Numbered names with a common prefix, for the operations of a group with these members."""

    def __init__(self, prefix: str, members: Members = None) -> None:
        self.prefix, self.members = prefix, members
        self._lock = threading.Lock()
        self.count, self._epoch = 0, _ended

    def start(self, call: Callable[[str], T]) -> T:
        """Starts operations with a call that receives the next name."""
        # Holds the lock during the call: if it is rejected, the next call must get the same number.
        with self._lock:
            if self._epoch != _ended:
                self.count, self._epoch = 0, _ended
            started = call(f"{self.prefix}.{repeating_number(self.count + 1)}")
            self.count += 1
        return started


class Line:
    """Calls that all ranks make in the same order: those of a thread or of one callback.

    The line of a callback knows the prefixes of names that the ranks of some groups share, and a
    trail for the other groups: which callback of which callback it is, by their order in the
    program.
    """

    def __init__(self, shared: list[tuple[Members, str]] | None = None, trail: str = "") -> None:
        self._shared, self._trail = shared or [], trail
        self._numbers: dict[str, Numbers] = {}
        self._callbacks: dict[str, int] = {}

    def numbers(self, group: Numbers) -> Numbers:
        """Returns the numbers for the next operation of a group in this line."""
        if not self._trail:
            return group
        made = self._numbers.get(group.prefix)
        if made is None:
            paths = (path for members, path in self._shared if _within(group.members, members))
            path = next(paths, f"{group.prefix}>{self._trail}")
            made = self._numbers[group.prefix] = Numbers(_short(path), group.members)
        return made

    def of_callback(self, callback: Any, path: str, members: Members) -> Line:
        """Returns the line of a callback that this line requests.

        Args:
            callback: The callback.
            path: Its path, which is the same on all members.
            members: The ranks that share the operation of its future.
        """
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        count = self._callbacks[name] = self._callbacks.get(name, 0) + 1
        label = f"{name}{repeating_number(count)}"
        # Also this line's paths, for groups that the new one does not cover.
        wider = [
            (also, _short(f"{outer}>{label}"))
            for also, outer in self._shared
            if not _within(also, members)
        ]
        trail = f"{self._trail}>{label}" if self._trail else label
        return Line([(members, path), *wider], _short(trail))


def _within(some: Members, members: Members) -> bool:
    """Returns whether members contains some."""
    return members is None or (some is not None and some <= members)


def _short(path: str) -> str:
    if len(path) <= _MAX_PATH:
        return path
    return hashlib.blake2b(path.encode(), digest_size=16).hexdigest()


def note(name: str) -> str:
    """Returns a remark about an operation that the callback of a future has started, or ''."""
    path = name.rpartition(".")[0]
    if ">" not in path or ".tag" in path:  # the names of messages contain both
        return ""
    return (
        f"; the operation '{name}' was started by a callback of a future, so it is paired with "
        "the same callback on the other ranks, in the order in which they requested it"
    )


class Place:
    """The path of a future, which is the same on all members, and the number of its callbacks."""

    __slots__ = ("callbacks", "members", "path")

    def __init__(self, path: str, members: Members) -> None:
        self.path, self.members, self.callbacks = _short(path), members, 0

    def next(self) -> str:
        """Returns the path of the next callback."""
        self.callbacks += 1
        return f"{self.path}>{self.callbacks}"


class _Here(threading.local):
    """The line that this thread runs."""

    def __init__(self) -> None:
        self.line = Line()


here = _Here()
