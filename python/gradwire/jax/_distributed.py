"""Starts JAX's own runtime for several processes, with the ranks of the Gradwire job."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import jax

from gradwire import _world
from gradwire._objects import broadcast_object


def initialize_distributed(**options: Any) -> None:
    """Calls ``jax.distributed.initialize`` with the address and the ranks of this job.

    All ranks call it after ``init()`` and before anything that uses a device. Then
    ``jax.process_index()`` is the rank, and ``jax.devices()`` has the devices of all ranks.

    Args:
        **options: Further arguments of ``jax.distributed.initialize``.

    Raises:
        NotInitialized: ``init()`` has not been called.
        RuntimeError: JAX has used a device before, or its processes don't find each other.

    Example:
        ```python
        gw.init()
        gw.initialize_distributed()
        ```
    """
    session = _world.session()
    address = None
    if session.rank == 0:
        # Rank 0 runs on the host of the coordinator.
        host = session.coordinator.rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    address = broadcast_object(address, root_rank=0, name="jax.distributed")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=session.size,
        process_id=session.rank,
        **options,
    )
