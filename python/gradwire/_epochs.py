"""The epochs of an elastic job: what a rank does when the ranks of its job change.

A loss of a rank, or a wanted change, ends an epoch. ``rejoin`` then makes this process a rank of
the next one. Its tensors, models and optimizers stay. But a process that has just started takes
part as well, and operations are paired by their names. So whatever depends on earlier calls, such
as a counter in a name or an agreement of the ranks, starts over as in a new process. Modules with
such a state register a callback with ``on_change``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from gradwire import _agent, _native, _staging, _world


class Rejoined(NamedTuple):
    """The epoch that this rank has joined."""

    epoch: int
    # Whether some rank is new: it has none of the job's state.
    newcomers: bool
    # The outcome of the vote that a loss has interrupted, the same on all ranks; None if this rank
    # was not in a vote.
    vote: bool | None


_lock = threading.Lock()
# References to the callbacks, in the order of their registration.
_callbacks: list[Callable[[], Callable[[], object] | None]] = []


def on_change(callback: Callable[[], object]) -> None:
    """Calls a function in each later epoch, before the first operation of this rank.

    Args:
        callback: The function. It is held weakly: a method only while its object exists, a function
            while its module does.
    """
    known: Callable[[], Callable[[], object] | None]
    known = weakref.WeakMethod(callback) if hasattr(callback, "__self__") else weakref.ref(callback)
    with _lock:
        _callbacks[:] = [each for each in _callbacks if each() is not None]
        _callbacks.append(known)


def rejoin(loss: _native.Failure | None = None) -> Rejoined:
    """Leaves this epoch, waits for the next one that includes this rank, and joins it.

    Args:
        loss: The failure that has ended this epoch for this rank; None for a wanted change.

    Returns:
        What has changed.

    Raises:
        InvalidRequest: The job is not elastic.
        GradwireError: There is no further epoch, or it does not begin in time.
    """
    session = _world.session()
    # If no further epoch forms, the launcher says for which call this rank waited.
    if loss is not None:
        _agent.is_consequence(loss.fields())
    # Waits for copies to shared memory: the operations that need them are about to end.
    _staging.end_epoch()
    rejoined = Rejoined(*session.rejoin())
    _world.renew()
    start_over()
    return rejoined


def start_over() -> None:
    """Starts names and numbers over, as in a new process: this process has joined other ranks."""
    with _lock:
        callbacks = [each() for each in _callbacks]
    for callback in callbacks:
        if callback is not None:
            callback()
