"""The exceptions of Gradwire. Each says what happened, where, and what to do.

All of them are a ``GradwireError``, which is a ``RuntimeError``. ``gradwire.torch`` has the same
class under the name ``HorovodInternalError``, so code that was written for Horovod catches it.
"""

from __future__ import annotations

from gradwire import _uncaught


class GradwireError(RuntimeError):
    """An operation or a call failed.

    When an operation fails, all ranks that wait for it get the same cause.

    Attributes:
        kind: The kind of the cause: ``disagreement``, ``invalid``, ``worker-lost``, ``node-lost``,
            ``connection-lost``, ``coordinator-lost``, ``rank-left``, ``not-launched``, ``closed``,
            ``forked``, ``resource``, ``timeout``, ``cancelled``, ``protocol`` or ``internal``.
        rank: The rank that caused it, or None if that is not known.
        host: The host where it happened; may be empty.
        tensor: The name of the tensor concerned; may be empty.

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
        _uncaught.watch()
        self.kind, self.rank, self.host, self.tensor = kind, rank, host, tensor

    def __reduce__(self) -> tuple[object, ...]:
        facts = {"kind": self.kind, "rank": self.rank, "host": self.host, "tensor": self.tensor}
        return _unpickled, (type(self), str(self), facts)


def _unpickled(kind: type[GradwireError], text: str, facts: dict[str, object]) -> GradwireError:
    return kind(text, **facts)  # type: ignore[arg-type]


class NotInitialized(GradwireError, ValueError):
    """``init()`` has not been called, or ``shutdown()`` has been."""


class NotLaunched(GradwireError):
    """This process is not a rank of a job, and no job could be started for it."""


class InvalidRequest(GradwireError, ValueError):
    """A call has an argument that is not usable. Nothing was started."""


class Disagreement(GradwireError):
    """The ranks asked for different things under one name; the text has a table of them."""


class PeerLost(GradwireError):
    """A process or a machine that takes part has died, does not answer, or has left the job."""


class OutOfResources(GradwireError):
    """Memory, file descriptors, ports or threads ran out."""


class WaitTimeout(GradwireError, TimeoutError):
    """Something did not happen in time. The operation itself may still complete."""


class Cancelled(GradwireError):
    """A rank gave up, or the job was ended from outside."""


class Forked(GradwireError):
    """A forked child used its parent's session. A forked child is not a rank."""


# A traceback shows the name under which programs know them.
for _error in (GradwireError, *GradwireError.__subclasses__()):
    _error.__module__ = "gradwire"
