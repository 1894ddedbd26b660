"""Horovod's environment variables, such as ``HOROVOD_RANK``, for scripts that read them.

``gradwire run`` sets them for the processes that it starts. In other jobs, they are set when the
rank has attached, and removed when it leaves.
"""

from __future__ import annotations

import os

from gradwire import _native

NAMES = tuple(
    f"HOROVOD_{name}"
    for name in ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
)
_before: dict[str, str | None] = {}


def set_for(session: _native.Session) -> None:
    """Sets the variables of this rank."""
    own = (
        session.rank,
        session.size,
        session.local_rank,
        session.local_size,
        session.cross_rank,
        session.cross_size,
        session.host,
    )
    for variable, value in zip(NAMES, own):
        _before[variable] = os.environ.get(variable)
        os.environ[variable] = str(value)


def restore() -> None:
    """Restores the previous values."""
    while _before:
        variable, value = _before.popitem()
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
