"""The base class of optimizers that exchange nothing before ``step()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradwire.torch._wrapping import Wrapped


class Stepping(Wrapped):
    """An optimizer whose ``step()`` makes all exchanges."""

    def synchronize(self) -> None:
        """Does nothing: gradients are exchanged in ``step()``, or not at all."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Returns a context that changes nothing; see ``synchronize``."""
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: any number of backward passes may precede ``step()``.

        Args:
            passes: Ignored.
        """
