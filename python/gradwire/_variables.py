"""Environment variables with a rank's place in the job, for scripts and libraries that read them.

``gradwire run`` sets them for the processes that it starts. In other jobs, Horovod's variables are
set when the rank has attached, and removed when it leaves.

The place of a rank changes with the epochs of an elastic job, and a process that comes later gets
no place from the launcher. So the variables are set in each epoch, also those that
``torch.distributed`` reads. ``MASTER_PORT`` differs in each epoch, because the store of an earlier
epoch may still use its port.
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
    place = {
        "RANK": session.rank,
        "SIZE": session.size,
        "LOCAL_RANK": session.local_rank,
        "LOCAL_SIZE": session.local_size,
        "CROSS_RANK": session.cross_rank,
        "CROSS_SIZE": session.cross_size,
    }
    own = {f"HOROVOD_{name}": str(value) for name, value in place.items()}
    own["HOROVOD_HOSTNAME"] = session.host
    meeting = session.meeting_point
    if meeting is not None:
        own |= {f"GRADWIRE_{name}": str(value) for name, value in place.items()}
    # In the first epoch, all processes have the launcher's values.
    if meeting is not None and session.epoch > 1:
        address, port = meeting
        own |= {
            "RANK": str(session.rank),
            "WORLD_SIZE": str(session.size),
            "LOCAL_RANK": str(session.local_rank),
            "LOCAL_WORLD_SIZE": str(session.local_size),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
    for variable, value in own.items():
        _before[variable] = os.environ.get(variable)
        os.environ[variable] = value


def restore() -> None:
    """Restores the previous values."""
    while _before:
        variable, value = _before.popitem()
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
