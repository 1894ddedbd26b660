"""The backend ``gradwire`` of ``torch.distributed``.

```python
import torch.distributed as dist

dist.init_process_group("gradwire")  # under gradwire run or torchrun
```

PyTorch 2.15 finds the backend by itself; older releases need ``import gradwire.torch`` first.
Everything built on process groups works unchanged: DDP, FSDP2, HSDP, DTensor, functional
collectives, distributed checkpoints. With ``ddp_hook``, programs keep another backend and use
Gradwire only for DDP's gradients.
"""

from __future__ import annotations

import functools
import inspect
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from gradwire import _start
from gradwire.torch.distributed import _replayed, _world
from gradwire.torch.distributed._base import DEVICES, NAME
from gradwire.torch.distributed._group import ProcessGroupGradwire
from gradwire.torch.distributed._hook import DdpHookState, ddp_hook
from gradwire.torch.distributed._reconfigure import ReconfigurableGroup, check_can_form
from gradwire.torch.distributed._work import Work, last_error

__all__ = [
    "DdpHookState",
    "ProcessGroupGradwire",
    "Work",
    "ddp_hook",
    "last_error",
    "prepare",
    "register",
]

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _create(opts: Any, backend_options: Any = None) -> ProcessGroupGradwire:
    if backend_options is not None:
        raise NotImplementedError("the gradwire backend has no options: pg_options must be None")
    members = list(opts.global_ranks_in_group)
    if getattr(opts, "enable_reconfigure", False):
        if members:
            raise NotImplementedError("only the group of all ranks can have enable_reconfigure")
        check_can_form()
        return ReconfigurableGroup(opts.store, opts.group_id, opts.timeout)
    if not members:  # the group of all ranks
        world = _world.open_world(opts.store, opts.group_rank, opts.group_size, opts.timeout)
        members = list(range(opts.group_size))
    else:
        everybody = c10d._get_default_group()
        if isinstance(everybody, ProcessGroupGradwire):
            world = everybody.world
        else:
            world = _world.world_beside(everybody, c10d._get_default_store(), opts.timeout)
    return ProcessGroupGradwire(
        opts.store, opts.group_rank, world, members, opts.group_id, opts.timeout
    )


_helper: Any = c10d._new_process_group_helper


@functools.wraps(_helper)
def _noting_helper(*args: Any, **named: Any) -> Any:
    """Creates a group as PyTorch does, and notes groups of which this rank is not a member."""
    made = _helper(*args, **named)
    everybody = c10d.GroupMember.WORLD
    if made[0] is c10d.GroupMember.NON_GROUP_MEMBER and isinstance(everybody, ProcessGroupGradwire):
        given = inspect.signature(_helper).bind(*args, **named).arguments
        if NAME in str(given["backend"]).lower():
            everybody.world.note(tuple(sorted(given["global_ranks_in_group"])))
    return made


def register() -> None:
    """Registers the backend with ``torch.distributed``.

    Importing this module does this already. PyTorch's entry point calls it.
    """
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=DEVICES)
        c10d._new_process_group_helper = _noting_helper
    _replayed.register()


def prepare(timeout: timedelta | None = None) -> None:
    """Creates the process group of all ranks, for libraries with a fixed list of backends.

    Accelerate and the ``Trainer`` of Transformers keep a process group that exists already. Without
    a launcher, a program trains alone, and this function does nothing.

    Args:
        timeout: The limit of each operation; None stands for PyTorch's own limit.

    Raises:
        RuntimeError: There is a process group with another backend.
        NotLaunched: The variables of the launcher are incomplete, or the launcher is not supported.

    Example:
        ```python
        import gradwire.torch.distributed
        from accelerate import Accelerator

        gradwire.torch.distributed.prepare()
        accelerator = Accelerator(cpu=True)
        ```
    """
    if dist.is_initialized():
        backend = str(dist.get_backend())
        if NAME not in backend:
            raise RuntimeError(
                f"a process group with the backend {backend} exists already: call prepare() before "
                "another library creates one"
            )
    elif all(name in os.environ for name in _RENDEZVOUS):
        dist.init_process_group(NAME, timeout=timeout)
    else:
        _start.check_alone()


register()
