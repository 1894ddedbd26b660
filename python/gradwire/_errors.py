"""What can go wrong. Every error says what happened, where, and what to do.

All of them are ``GradwireError`` and with that ``RuntimeError``; code that catches Horovod's
``HorovodInternalError`` catches the same class under that name in ``gradwire.torch``.
"""

from __future__ import annotations


class GradwireError(RuntimeError):
    """An operation or a call failed.

    Where an operation failed, every rank that waits is told the same cause.
    """

    kind: str
    """Whose doing it is: ``disagreement``, ``invalid``, ``worker-lost``, ``node-lost``, …"""
    rank: int | None
    """The rank at fault, where one is known."""
    host: str
    """Where it happened; may be empty."""
    tensor: str
    """The tensor concerned; may be empty."""

    def __init__(
        self,
        text: str,
        *,
        kind: str = "internal",
        rank: int | None = None,
        host: str = "",
        tensor: str = "",
    ) -> None:
        super().__init__(text)
        self.kind, self.rank, self.host, self.tensor = kind, rank, host, tensor

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"kind": self.kind, "rank": self.rank, "host": self.host, "tensor": self.tensor}
        return _again, (type(self), str(self), facts)


def _again(kind: type[GradwireError], text: str, facts: dict[str, object]) -> GradwireError:
    return kind(text, **facts)  # type: ignore[arg-type]


class NotInitialized(GradwireError, ValueError):
    """``init()`` has not been called, or ``shutdown()`` has."""


class NotLaunched(GradwireError):
    """This process is not a rank of a job."""


class InvalidRequest(GradwireError, ValueError):
    """A call asks for something impossible."""


class Disagreement(GradwireError):
    """Ranks asked for different things under one name; the text has a table of them."""


class PeerLost(GradwireError):
    """A process or a machine that is needed died, stopped answering, or has left."""


class OutOfResources(GradwireError):
    """Memory, descriptors, ports or threads ran out."""


class WaitTimeout(GradwireError, TimeoutError):
    """Something did not happen in time. The operation itself may still complete."""


class Cancelled(GradwireError):
    """A rank gave up, or somebody ended the job."""


class Forked(GradwireError):
    """A forked child uses its parent's session: it has none, and has to do without."""
