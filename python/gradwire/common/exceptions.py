"""Horovod's exceptions: ``from gradwire.common.exceptions import HorovodInternalError``."""

from __future__ import annotations

from gradwire._errors import GradwireError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """``commit`` of an elastic state raises this on all ranks when the hosts will change.

    ``gradwire.elastic.run`` catches it, and calls the training function again.

    Args:
        skip_sync: Whether the state need not be synchronized, because no rank is new.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(
            "the hosts of the job change: decorate the training function with gradwire.elastic.run"
        )
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod raises this if it was built for another version. Gradwire never raises it."""
