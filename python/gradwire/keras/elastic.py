"""Horovod's elastic interface for Keras.

```python
import gradwire.keras as hvd

hvd.init()  # under `gradwire run -np 4 --min-np 2 -- python train.py`
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), "mse")


@hvd.elastic.run
def train(state):
    callbacks = [
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=10),
    ]
    model.fit(data, steps_per_epoch=100, epochs=20 - state.epoch, callbacks=callbacks)


train(hvd.elastic.KerasState(model, batch=0, epoch=0))
```

``gradwire.elastic`` tells how it works.
"""

from __future__ import annotations

from typing import Any

import keras

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest
from gradwire._variable_states import VariablesState
from gradwire.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from gradwire.keras._models import state_of

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
    "run_fn",
]


class KerasState(VariablesState):
    """The state of a training with Keras: a model, its optimizer, and plain attributes.

    Metrics and the states of random seeds stay those of each rank.

    Args:
        model: The model. It must be built.
        optimizer: Its optimizer. The default is the optimizer with which the model is compiled.
        backend: Ignored; exists for Horovod scripts.
        **kwargs: The attributes and their first values, such as ``batch=0, epoch=0``. They can be
            copied and pickled.

    Attributes:
        model: The model.
        optimizer: The optimizer; None if there is none.

    Raises:
        InvalidRequest: The model is not built, or an argument has another type.
    """

    def __init__(
        self, model: keras.Model, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        del backend
        if not isinstance(model, keras.Model):
            raise InvalidRequest(
                f"model is a {type(model).__name__}, not a model of Keras 3", kind="invalid"
            )
        if not model.built:
            raise InvalidRequest(
                "the model has no weights yet: call model.build(input_shape), or begin it with "
                "keras.Input(shape)",
                kind="invalid",
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(
            lambda: state_of(self.model, self.optimizer), keras.ops.convert_to_numpy, **kwargs
        )

    def reset(self) -> None:
        """Makes the next ``fit`` compile the training again, for another number of ranks."""
        self.model.train_function = None


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state after each epoch, and after a number of batches.

    Put it after the callbacks that change the state.

    Args:
        state: The state.
        batches_per_commit: The number of batches between two commits.

    Raises:
        InvalidRequest: ``batches_per_commit`` is not a whole number, or less than 1.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = whole_number("batches_per_commit", batches_per_commit, least=1)
        self._since = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to count: all ranks commit after the same batches.

        Args:
            logs: Ignored.
        """
        self._since = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits the state if it is time.

        Args:
            batch: The number of the batch, from 0.
            logs: Ignored.
        """
        self._since += 1
        steps = (self.params or {}).get("steps")
        # The last batch is committed with its epoch. Otherwise, after a change of the ranks in
        # between, the epoch would begin again without a batch left.
        is_last = batch + 1 == steps or isinstance(self.model.stop_training, _EndOfEpoch)
        if self._since >= self.batches_per_commit and not is_last:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits the state.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self._commit()

    def _commit(self) -> None:
        self._since = 0
        self.state.commit()


class _EndOfEpoch:
    """A value of ``stop_training`` that is true, but ends only the epoch."""

    def __bool__(self) -> bool:
        return True


def _with(state: Any, name: str) -> Any:
    """Returns a state, which must have an attribute."""
    if not hasattr(state, name):
        raise InvalidRequest(
            f"the state has no attribute {name}: make it with KerasState(model, {name}=0)",
            kind="invalid",
        )
    return state


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Counts the batches of the present epoch in ``state.batch``.

    The first epoch after a change of the ranks omits the number of batches that it already had. For
    that, Keras must know the number of batches of an epoch: from the data, or from
    ``steps_per_epoch``.

    Args:
        state: The state, which has an attribute ``batch``.

    Raises:
        InvalidRequest: The state has no such attribute.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = _with(state, "batch")
        self._before = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes how many batches the epoch had before.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self._before = self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the batch, and ends the epoch if it was the last one.

        Args:
            batch: The number of the batch since the epoch was begun again, from 0.
            logs: Ignored.
        """
        self.state.batch = self._before + batch + 1
        steps = (self.params or {}).get("steps")
        if self._before > 0 and steps is not None and self.state.batch >= steps:
            self.model.stop_training = self.model.stop_training or _EndOfEpoch()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count again.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self.state.batch = 0
        if isinstance(self.model.stop_training, _EndOfEpoch):
            self.model.stop_training = False


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Counts the epochs in ``state.epoch``, also those before a change of the ranks.

    Args:
        state: The state, which has an attribute ``epoch``.

    Raises:
        InvalidRequest: The state has no such attribute.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = _with(state, "epoch")
        self._before = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Notes the epochs before this call of ``fit``, which counts from 0.

        Args:
            logs: Ignored.
        """
        self._before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts the epoch.

        Args:
            epoch: The number of the epoch in this call of ``fit``, from 0.
            logs: Ignored.
        """
        self.state.epoch = self._before + epoch + 1
