"""Epochs of a job that is not elastic, for tests of what follows from a change of its ranks.

The ranks stay, and so do the names of the native session.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gradwire as gw
from gradwire import _world


class Session:
    """A native session with the methods of an elastic one."""

    elastic = True

    def __init__(self, native: Any) -> None:
        self._native, self.epoch = native, 1
        # What ``rejoin`` and ``pending_change`` return.
        self.newcomers, self.outcome, self.change = False, None, None
        self.votes: list[bool] = []
        self.rejoins = 0
        # Vote number at which this rank fails instead.
        self.fail_at: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def rejoin(self) -> tuple[int, bool, bool | None]:
        """Begins the next epoch on all ranks."""
        self._native.barrier(name="fake-epoch").wait()
        self.epoch += 1
        self.rejoins += 1
        self.change = None
        return self.epoch, self.newcomers, self.outcome

    def vote(self, yes: bool) -> bool:
        """Returns whether all ranks have voted yes."""
        self.votes.append(yes)
        if self.fail_at == len(self.votes):
            raise lost()
        buffer = self._native.buffer("u8", [1])
        buffer.write(bytes([yes]))
        self._native.allreduce([buffer], "min", name="fake-vote").wait()
        return buffer.read() == b"\1"

    def pending_change(self) -> tuple[bool, bool] | None:
        """Returns whether hosts were added and removed."""
        return self.change


def lost() -> gw.GradwireError:
    """The error of a loss."""
    return gw.PeerLost("rank 7 was killed", kind="worker-lost", rank=7, recoverable=True)


@contextlib.contextmanager
def elastic() -> Iterator[Session]:
    """Makes the job of this process elastic, as far as Python can tell."""
    real = _world._session
    fake = Session(real)
    _world._session = fake  # type: ignore[assignment]
    try:
        yield fake
    finally:
        _world._session = real
