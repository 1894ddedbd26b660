"""Horovod's environment variables, such as ``HOROVOD_RANK``, for scripts that read them.

``gradwire run`` sets them for the processes that it starts. In other jobs, they are set when the
rank has attached, and removed when it leaves.
"""

from __future__ import annotations

import os

from gradwire import _native

_before: dict[str, str | None] = {}


def set_for(session: _native.Session) -> None:
    """Sets the variables of this rank."""
    own = {
        "RANK": session.rank,
        "SIZE": session.size,
        "LOCAL_RANK": session.local_rank,
        "LOCAL_SIZE": session.local_size,
        "CROSS_RANK": session.cross_rank,
        "CROSS_SIZE": session.cross_size,
        "HOSTNAME": session.host,
    }
    for name, value in own.items():
        variable = f"HOROVOD_{name}"
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
