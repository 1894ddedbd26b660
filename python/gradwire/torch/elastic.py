"""Horovod's elastic names. Elastic training comes with a later release: they say so when used."""

from __future__ import annotations

from typing import Any, NoReturn

_LATER = "gradwire has no elastic training yet: {name} is here so that its import works; start again from a checkpoint"


class HostsUpdatedInterrupt(RuntimeError):
    """Horovod raises it where hosts have changed. Nothing here does yet."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts have changed")
        self.skip_sync = skip_sync


def run(func: Any) -> NoReturn:
    """Horovod's decorator of a training function that may begin again."""
    raise NotImplementedError(_LATER.format(name="elastic.run"))


class State:
    """Horovod's state of a training that may begin again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(_LATER.format(name=f"elastic.{type(self).__name__}"))


class ObjectState(State):
    """A state of plain objects."""


class TorchState(State):
    """A state of models and optimizers."""


class ElasticSampler:
    """Horovod's sampler that shares out what has not been seen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(_LATER.format(name="elastic.ElasticSampler"))
