"""The state of a training with PyTorch: models, optimizers, samplers, and what else has a state.

A handler saves, restores and synchronizes one value. The first entry that fits in a registry of
types decides which handler it is.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch

from gradwire._errors import InvalidRequest
from gradwire._objects import allgather_object, broadcast_object
from gradwire._world import rank
from gradwire.elastic import ObjectState
from gradwire.torch._functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    load_optimizer_state,
)
from gradwire.torch.elastic._disk import Disk, encoded
from gradwire.torch.elastic.sampler import ElasticSampler

__all__ = ["StateHandler", "TorchState", "get_handler_registry", "set_handler_registry"]


@runtime_checkable
class _Stateful(Protocol):
    """Anything with a state, such as schedulers, scalers and torchdata's ``StatefulDataLoader``."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class StateHandler:
    """Saves, restores and synchronizes one value of a ``TorchState``.

    Subclasses define ``save``, ``restore`` and ``sync``.

    Args:
        value: The value.

    Attributes:
        value: The value.
        root: The rank whose value the others receive in ``sync``.
    """

    root = 0

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        """Saves the state of the value."""
        raise NotImplementedError

    def restore(self) -> None:
        """Returns to the saved state."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state of the value the same on all ranks. ``TorchState`` then saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the value to new ranks."""

    def set_value(self, value: Any) -> None:
        """Replaces the value, and saves its state.

        Args:
            value: The new value.
        """
        self.value = value
        self.save()

    def stored(self) -> Any:
        """Returns the saved state, to be written to disk. It must not change any more.

        Returns:
            Numbers, texts, tensors, and containers of them.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no stored(), so commits can't be written to disk: leave "
            "out directory="
        )

    def load(self, stored: Any) -> None:
        """Continues with a state that was read from disk.

        Args:
            stored: What ``stored`` has returned.
        """
        raise NotImplementedError(f"{type(self).__name__} has no load(): leave out directory=")

    def news(self) -> Any:
        """Returns what the other ranks receive with each agreement on changes.

        Returns:
            An object that can be pickled.
        """

    def learn(self, news: list[Any]) -> None:
        """Receives the ``news`` of all ranks.

        Args:
            news: What the handlers of all ranks have returned.
        """


def _kept(value: Any, before: Any = None) -> Any:
    """Returns a copy of a state, in the memory of an earlier copy where that is possible."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(before, torch.Tensor) and _layout(before) == _layout(value)
        return before.copy_(value.detach()) if fits else value.detach().clone()
    if isinstance(value, dict):
        earlier = before if isinstance(before, dict) else {}
        made = copy.copy(value)  # also the attributes of a module's state
        made.update({key: _kept(inner, earlier.get(key)) for key, inner in value.items()})
        return made
    if type(value) in (list, tuple):
        return type(value)(_kept(inner) for inner in value)
    return copy.deepcopy(value)


def _layout(tensor: torch.Tensor) -> Any:
    strides = tensor.stride() if tensor.layout == torch.strided else object()
    return tensor.shape, tensor.dtype, tensor.device, strides


class _Copies(StateHandler):
    """A handler that saves a copy of ``state_dict()``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved: Any = None
        # Whether the copy is being written to disk, so that the next one needs its own memory.
        self._is_lent = False
        self.save()

    def save(self) -> None:
        """Copies the state."""
        self._saved = _kept(self.value.state_dict(), None if self._is_lent else self._saved)
        self._is_lent = False

    def restore(self) -> None:
        """Returns to the copy."""
        # A copy of the copy, because the value may keep using the state that it loads.
        self.value.load_state_dict(_kept(self._saved))

    def stored(self) -> Any:
        """Returns the copy."""
        self._is_lent = True
        return self._saved

    def load(self, stored: Any) -> None:
        """Continues with a state that was read from disk."""
        self._saved, self._is_lent = stored, False
        self.restore()


class ModelStateHandler(_Copies):
    """The handler of models."""

    def restore(self) -> None:
        """Copies the state back, and clears the gradients."""
        self.value.load_state_dict(self._saved)
        self.value.zero_grad()

    def sync(self) -> None:
        """Sends parameters and buffers of the root to all ranks."""
        state = self.value.state_dict()
        tensors = {name: each for name, each in state.items() if isinstance(each, torch.Tensor)}
        broadcast_parameters(tensors, self.root)
        others = {name: each for name, each in state.items() if name not in tensors}
        if others:
            state.update(broadcast_object(others, self.root, "elastic.extra_state"))
            self.value.load_state_dict(state)


class OptimizerStateHandler(_Copies):
    """The handler of optimizers, also of distributed ones."""

    def restore(self) -> None:
        """Copies the state back, and clears the gradients."""
        try:
            self.value.zero_grad()
        except AssertionError:
            raise AssertionError(
                "restore() was called after backward() but before step() or synchronize(), while "
                "the gradients are still being exchanged: call one of these first, on all ranks"
            ) from None  # nothing has changed
        load_optimizer_state(self.value, _kept(self._saved))

    def sync(self) -> None:
        """Sends the root's state to all ranks."""
        broadcast_optimizer_state(self.value, self.root)


class SamplerStateHandler(_Copies):
    """The handler of ``ElasticSampler``.

    With each agreement on changes, the ranks share which samples they have processed. So a commit
    contains the samples of all ranks, also of ranks that are lost later.
    """

    def sync(self) -> None:
        """Gives all ranks the root's epoch, and the samples that any rank has processed in it."""
        sampler, at_root = self.value, rank() == self.root
        own = sampler.processed_indices if at_root else sampler.unshared
        told = allgather_object((sampler.epoch, own), "elastic.sampler")
        epoch = told[self.root][0]
        processed = {at for of, indices in told if of == epoch for at in indices}
        sampler.load_state_dict({"epoch": epoch, "processed_indices": processed})

    def reset(self) -> None:
        """Divides the samples among the present ranks."""
        self.value.reset()

    def news(self) -> Any:
        """Returns the samples that this rank has processed since the last agreement."""
        return self.value.epoch, list(self.value.unshared)

    def learn(self, news: list[Any]) -> None:
        """Adds the samples that the other ranks have processed."""
        for epoch, indices in news:
            if epoch == self.value.epoch:
                self.value.record_indices(indices)
        self.value.unshared.clear()


class StateDictHandler(_Copies):
    """The handler of anything else with ``state_dict`` and ``load_state_dict``."""

    def sync(self) -> None:
        """Sends the root's state to all ranks."""
        name = "elastic.state_dict"
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), self.root, name))


_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (_Stateful, StateDictHandler),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], StateHandler]]]:
    """Returns the handlers that ``TorchState`` chooses from.

    Returns:
        Pairs of a type and the handler for its objects. The first type that fits is chosen.
    """
    return _registry


def set_handler_registry(registry: Iterable[tuple[type, Callable[[Any], StateHandler]]]) -> None:
    """Replaces the handlers that ``TorchState`` chooses from.

    Args:
        registry: Pairs of a type and the handler for its objects, in the order of the choice.
    """
    global _registry
    _registry = list(registry)


def _handler_of(value: Any) -> StateHandler | None:
    return next((make(value) for kind, make in _registry if isinstance(value, kind)), None)


class TorchState(ObjectState):
    """The state of a training with PyTorch.

    Models, optimizers, an ``ElasticSampler``, and objects with ``state_dict`` and
    ``load_state_dict``, such as schedulers, scalers and data loaders, are saved and sent with their
    state. All others are saved and sent as objects. A commit is a copy in the memory of each rank.

    Args:
        model: The model, or None.
        optimizer: The optimizer, or None. It may be a ``DistributedOptimizer``.
        directory: Where rank 0 also writes commits, in the background. A new job continues with the
            newest one there; the state then consists of tensors, numbers, texts and containers. If
            the disk is slower than the training, commits before the last one are left out, and
            copies of up to three are in memory.
        every: One of this many commits is written to the directory.
        **kwargs: Further attributes and their first values.

    Example:
        ```python
        state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, batch=0)
        ```
    """

    # The number of commits, also in earlier jobs; with ``directory`` only.
    _commits: int

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        directory: str | os.PathLike[str] | None = None,
        every: int = 1,
        **kwargs: Any,
    ) -> None:
        values = {"model": model, "optimizer": optimizer, **kwargs}
        handlers = {name: _handler_of(value) for name, value in values.items()}
        self._handlers = {name: one for name, one in handlers.items() if one is not None}
        for name, handler in self._handlers.items():
            super().__setattr__(name, handler.value)
        others = {name: value for name, value in values.items() if name not in self._handlers}
        self._disk = None if directory is None else Disk(directory, every)
        if self._disk is not None:
            others["_commits"] = 0  # saved, so that later jobs continue to count
        super().__init__(**others)
        if self._disk is not None:
            encoded(self._all_saved(), "state", {})

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and handler.value is not value:
            handler.set_value(value)

    def save(self) -> None:
        """Saves copies of all attributes and their states."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Returns to the saved attributes and states.

        Raises:
            AssertionError: A distributed optimizer is exchanging gradients. Nothing has changed.
        """
        # Optimizers first: they may refuse, while gradients are being exchanged.
        for is_optimizer in (True, False):
            for handler in self._handlers.values():
                if isinstance(handler, OptimizerStateHandler) == is_optimizer:
                    handler.restore()
        super().restore()

    def sync(self) -> None:
        """Copies the attributes and states of one rank to all ranks, and saves them."""
        for handler in self._handlers.values():
            handler.root = self._root
            handler.sync()
        super().sync()  # saves all of them at once: a loss must not leave a part of a state

    def reset(self) -> None:
        """Adapts samplers to the new ranks."""
        for handler in self._handlers.values():
            handler.reset()

    def _all_saved(self) -> Any:
        handled = {name: handler.stored() for name, handler in self._handlers.items()}
        return {"handled": handled, "others": self._saved_state}

    def _save_commit(self) -> None:
        if self._disk is None:
            self.save()
            return
        self._commits += 1
        self.save()
        if self._commits % self._disk.every == 0 and rank() == 0:
            self._disk.write(self._commits, self._all_saved())

    def _end(self) -> None:
        if self._disk is not None:
            self._disk.finish()

    def _stored(self) -> int:
        return next(iter(self._disk.numbers()), 0) if self._disk is not None else 0

    def _load_stored(self) -> None:
        assert self._disk is not None, "it has found a commit"
        # Later commits get larger numbers than all that are there, also those that are damaged.
        self._commits = self._stored()
        found = self._disk.read()
        if found is None:
            return
        folder, state = found
        handled, others = state.get("handled", {}), state.get("others", {})
        for name in (*self._handlers, *self._saved_state):
            if name not in (handled if name in self._handlers else others):
                raise InvalidRequest(
                    f"the commit {folder} lacks the attribute {name} of this state: remove the "
                    "attribute, or use another directory=",
                    kind="invalid",
                )
        for name, handler in self._handlers.items():
            handler.load(handled[name])
        # Attributes that the state no longer has are dropped.
        kept = {name: others[name] for name in self._saved_state}
        self._saved_state = {**kept, "_commits": self._commits}
        super().restore()

    def _news(self) -> Any:
        return {name: handler.news() for name, handler in self._handlers.items()}

    def _learn(self, news: list[Any]) -> None:
        for name, handler in self._handlers.items():
            handler.learn([one[name] for one in news])
