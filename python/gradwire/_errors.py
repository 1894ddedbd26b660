"""Gradwire's exceptions. Each says what happened, where, and what to do.

All of them derive from ``GradwireError``, which is a ``RuntimeError``. ``gradwire.torch`` exports
it as ``HorovodInternalError`` as well, so code written for Horovod catches it.
"""

from __future__ import annotations

from gradwire import _native, _uncaught


class GradwireError(RuntimeError):
    """An operation or a call failed.

    When an operation fails, all ranks that wait for it receive the same cause.

    Attributes:
        kind: The kind of failure: ``disagreement``, ``invalid``, ``worker-lost``, ``node-lost``,
            ``connection-lost``, ``coordinator-lost``, ``rank-left``, ``not-launched``, ``closed``,
            ``forked``, ``resource``, ``timeout``, ``cancelled``, ``protocol`` or ``internal``.
        rank: The rank that caused the failure, or None if unknown.
        host: The host where the failure occurred; may be empty.
        tensor: The name of the affected tensor; may be empty.
        recoverable: Whether the job is elastic and goes on without what was lost: see
            ``gradwire.elastic``.

    Example:
        ```python
        try:
            mean = gw.allreduce(gradient)
        except gw.GradwireError as error:
            print(error.kind, error.rank, error.host)
            raise
        ```
    """

    kind: str
    rank: int | None
    host: str
    tensor: str
    recoverable: bool

    def __init__(
        self,
        text: str,
        *,
        kind: str = "internal",
        rank: int | None = None,
        host: str = "",
        tensor: str = "",
        recoverable: bool = False,
    ) -> None:
        super().__init__(text)
        _uncaught.watch()
        self.kind, self.rank, self.host, self.tensor = kind, rank, host, tensor
        self.recoverable = recoverable
        # For the other ranks, if this rank ends with this error.
        self._failure: _native.Failure | None = None

    def __reduce__(self) -> tuple[object, ...]:
        names = ("kind", "rank", "host", "tensor", "recoverable")
        facts = {name: getattr(self, name) for name in names}
        return _unpickled, (type(self), str(self), facts)


def _unpickled(kind: type[GradwireError], text: str, facts: dict[str, object]) -> GradwireError:
    return kind(text, **facts)  # type: ignore[arg-type]


class NotInitialized(GradwireError, ValueError):
    """``init()`` has not been called, or ``shutdown()`` has been."""


class NotLaunched(GradwireError):
    """This process is not a rank of a job, and no job could be started for it."""


class InvalidRequest(GradwireError, ValueError):
    """A call has an invalid argument. Nothing was started."""


class Disagreement(GradwireError):
    """The ranks made different requests under the same name, or wait for different operations.

    The message lists them in a table.
    """


class PeerLost(GradwireError):
    """A participating process or host has exited, does not respond, or has left the job."""


class OutOfResources(GradwireError):
    """Memory, file descriptors, ports or threads are exhausted."""


class WaitTimeout(GradwireError, TimeoutError):
    """Something did not happen in time. The operation itself may still complete."""


class Cancelled(GradwireError):
    """A rank aborted the job, or the job was stopped externally."""


class Forked(GradwireError):
    """A forked child, which is not a rank, used its parent's session."""


# Tracebacks show the public module name.
for _error in (GradwireError, *GradwireError.__subclasses__()):
    _error.__module__ = "gradwire"
