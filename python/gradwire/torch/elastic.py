"""Horovod's elastic names, so that scripts can import them.

Gradwire does not support elastic training yet: using these raises ``NotImplementedError``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from gradwire.common.exceptions import HostsUpdatedInterrupt

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]

_LATER = (
    "gradwire does not support elastic training yet, and {name} exists only so that imports work: "
    "restart from a checkpoint"
)


def run(func: Any) -> NoReturn:
    """Raises ``NotImplementedError``: Gradwire does not support elastic training yet.

    Args:
        func: Horovod's training function.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError(_LATER.format(name="elastic.run"))


class _Unsupported:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(_LATER.format(name=f"elastic.{type(self).__name__}"))


class State(_Unsupported):
    """Horovod's state of an elastic training. Its constructor raises ``NotImplementedError``."""


class ObjectState(State):
    """Horovod's state of plain objects. Its constructor raises ``NotImplementedError``."""


class TorchState(State):
    """Horovod's state of models and optimizers. Its constructor raises ``NotImplementedError``."""


class ElasticSampler(_Unsupported):
    """Horovod's elastic sampler. Its constructor raises ``NotImplementedError``."""
