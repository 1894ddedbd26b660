"""Horovod's exceptions: ``from gradwire.common.exceptions import HorovodInternalError``."""

from __future__ import annotations

from gradwire._errors import GradwireError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod raises this when hosts have changed. Gradwire never raises it.

    Args:
        skip_sync: Horovod's option.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod raises this if it was built for another version. Gradwire never raises it."""
