"""Process groups for torchft: its ``Manager``, ``LocalSGD`` and ``DiLoCo`` run over Gradwire.

```python
from gradwire.torch.torchft import ProcessGroupGradwire
from torchft import Manager

manager = Manager(pg=ProcessGroupGradwire(), min_replica_size=2, ...)
```

Install it with ``gradwire[torchft]``. Whenever torchft chooses other replicas, their processes meet
in the store that it names, and form a new job with new daemons.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gradwire.torch.distributed._reconfigure import FormedGroup

try:
    import torchft.process_group as base  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    if error.name != "torchft":
        raise
    raise ModuleNotFoundError(
        "gradwire.torch.torchft needs torchft: pip install 'gradwire[torchft]'", name="torchft"
    ) from None

__all__ = ["ProcessGroupBabyGradwire", "ProcessGroupGradwire"]

_NAME = "torchft"
_DEFAULT = timedelta(seconds=60)
# Any, because torchft need not be installed where types are checked.
_Wrapper: Any = base.ProcessGroupWrapper
_Baby: Any = base.ProcessGroupBaby


class ProcessGroupGradwire(_Wrapper):  # type: ignore[misc]
    """A process group of torchft, in this process.

    A process is a rank of one job, so it can use one such group at a time.
    ``ProcessGroupBabyGradwire`` has a process of its own.

    Args:
        timeout: The maximum time to wait for the other replicas, and for operations.
    """

    def __init__(self, timeout: timedelta = _DEFAULT) -> None:
        super().__init__(timeout)
        self._pg: Any

    def _create_pg(self, store: Any, rank: int, world_size: int) -> FormedGroup:
        return FormedGroup(store, rank, world_size, _NAME, self._timeout)

    def getBackendName(self) -> str:
        """Returns the name of the backend.

        Returns:
            ``torchft-gradwire``.
        """
        return "torchft-gradwire"

    def abort(self, errored: bool = True) -> None:
        """Leaves the replicas; after an error, the operations of all of them fail.

        Args:
            errored: Whether there was an error. torchft passes False before it chooses other
                replicas.
        """
        if not errored:
            self.shutdown()
        super().abort(errored)

    def shutdown(self) -> None:
        """Leaves the replicas, without waiting for them."""
        group: Any = self._pg
        self._pg = None
        if group is not None:
            group.shutdown()

    def errored(self) -> Exception | None:
        """Returns the last error of an operation since torchft has chosen the replicas.

        Returns:
            The error; None if no operation has failed.
        """
        error = None if self._pg is None else self._pg.error()
        return error if isinstance(error, Exception) else None

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets the timeout of later operations.

        Args:
            timeout: The maximum time to wait for a result.
        """
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)


class ProcessGroupBabyGradwire(_Baby):  # type: ignore[misc]
    """A process group of torchft in a separate process. A program may have several.

    Tensors are moved to that process through shared memory.

    Args:
        timeout: The maximum time to wait for the other replicas, and for operations.
    """

    @classmethod
    def _create_pg(cls, store: Any, rank: int, world_size: int) -> FormedGroup:
        return FormedGroup(store, rank, world_size, _NAME, _DEFAULT)

    def getBackendName(self) -> str:
        """Returns the name of the backend.

        Returns:
            ``torchft-baby-gradwire``.
        """
        return "torchft-baby-gradwire"
