"""Horovod's callbacks for ``model.fit``.

```python
model.fit(
    images,
    digits,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1 * hvd.size(), warmup_epochs=3),
    ],
)
```
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

from gradwire import _world
from gradwire._array_move_ops import allgather
from gradwire._array_reduce_ops import allreduce
from gradwire._errors import InvalidRequest
from gradwire._ops import join
from gradwire._process_sets import ProcessSet, global_process_set
from gradwire.keras._models import broadcast_model, broadcast_variables, state_of

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "JoinCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Copies the root's model and optimizer to every rank before the first step of each ``fit``.

    A model that is not built yet is copied after its first step.

    Args:
        root_rank: The global rank whose model all ranks receive.
        device: Ignored; exists for Horovod scripts.

    Attributes:
        broadcast_done: Whether the model has been copied in this ``fit``.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Copies the model if it is built.

        Args:
            logs: Ignored.
        """
        self.broadcast_done = False
        model, optimizer = self.model, self.model.optimizer
        built = model.built and bool(model.variables)
        # All ranks decide alike: one of them may have loaded a model.
        if not allreduce(np.array([built]), op=3)[0]:
            return
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self._broadcast()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Copies the model unless it has been copied.

        Args:
            batch: Ignored.
            logs: Ignored.
        """
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank)
        self.broadcast_done = True


class JoinCallback(keras.callbacks.Callback):
    """Lets the ranks have different numbers of batches.

    At the end of an epoch, a rank with fewer batches joins: it waits, while the others go on with
    averages over the ranks that still have batches. Then all ranks receive the weights and the
    state of the optimizer from one that had the most batches.

    Put it before all other callbacks that exchange something at the end of an epoch, such as
    ``MetricAverageCallback``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._batches = 0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins to count batches.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Counts a batch.

        Args:
            batch: Its number within the epoch, from 0.
            logs: Ignored.
        """
        self._batches = batch + 1

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Waits for the ranks that have more batches.

        Args:
            epoch: Ignored.
            logs: Ignored.
        """
        join()
        batches = allgather(np.array([self._batches]), "epoch.batches")
        if batches.min() < batches.max():
            state = state_of(self.model, self.model.optimizer)
            broadcast_variables(state, int(batches.argmax()))


class MetricAverageCallback(keras.callbacks.Callback):
    """Replaces the metrics of an epoch by their averages over all ranks.

    Put it before callbacks that use the metrics, such as ``ReduceLROnPlateau``.

    Args:
        device: Ignored; exists for Horovod scripts.
        process_set: The participating ranks. The default is all ranks.
    """

    def __init__(self, device: str = "", process_set: ProcessSet = global_process_set) -> None:
        super().__init__()
        del device
        self._process_set = process_set

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Averages the metrics.

        Args:
            epoch: Ignored.
            logs: The metrics, which are changed.
        """
        names = sorted(logs or {})
        if logs is None or not names or _world.members(self._process_set) == 1:
            return
        values = np.array([float(logs[name]) for name in names])
        for name, value in zip(names, allreduce(values, "metrics", process_set=self._process_set)):
            logs[name] = float(value)


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Multiplies the initial learning rate by a factor that depends on the epoch.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A factor, or a function of the epoch. If ``staircase`` is False, the function is
            called for each batch, with fractions of epochs.
        start_epoch: The first epoch of the schedule.
        end_epoch: The epoch after the last one of the schedule; None if the schedule does not end.
        staircase: Whether the rate changes at the beginning of an epoch only.
        momentum_correction: Whether the momentum of SGD is scaled with the rate when it changes.
        steps_per_epoch: The number of batches of an epoch, if Keras does not know it.

    Raises:
        InvalidRequest: ``initial_lr`` is None.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidRequest("initial_lr is required", kind="invalid")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0
        self._multiplier = multiplier

    def multiplier(self, epoch: float) -> float:
        """Returns the factor for an epoch.

        Args:
            epoch: The epoch, from 0, with fractions for its batches.

        Returns:
            The factor.
        """
        given = self._multiplier
        return float(given(epoch) if callable(given) else given)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds out the number of batches of an epoch.

        Args:
            logs: Ignored.

        Raises:
            InvalidRequest: Keras does not know it.
        """
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise InvalidRequest(
                f"{type(self).__name__} needs steps_per_epoch: Keras does not know the number of "
                "batches",
                kind="invalid",
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch.

        Args:
            epoch: The epoch, from 0.
            logs: Ignored.
        """
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the learning rate.

        Args:
            batch: The number of the batch within the epoch, from 0.
            logs: Ignored.
        """
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(self.multiplier(epoch + batch / (self.steps_per_epoch or 1)))
        elif batch == 0:
            self._set(self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the metrics.

        Args:
            epoch: Ignored.
            logs: The metrics, which are changed.
        """
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, factor: float) -> None:
        optimizer, before = self.model.optimizer, self._rate()
        after = self.initial_lr * factor
        optimizer.learning_rate = after
        # SGD's velocity contains the old rate. Horovod changes the momentum for one batch, which a
        # compiled function would not notice. Scaling the velocity once has the same effect.
        if self.momentum_correction and before > 0 and after != before and optimizer.built:
            for velocity in getattr(optimizer, "momentums", None) or []:
                velocity.assign(velocity * (after / before))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from that of one rank to that of all ranks.

    It starts with ``initial_lr / size()`` and ends with ``initial_lr``, after Goyal et al. (2017).

    Args:
        initial_lr: The learning rate for all ranks: usually that of one rank times ``size()``.
        warmup_epochs: The number of epochs until this rate is reached.
        momentum_correction: Whether the momentum of SGD is scaled with the rate when it changes.
        steps_per_epoch: The number of batches of an epoch, if Keras does not know it.
        verbose: Whether rank 0 prints the rate at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warm,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs, self.verbose = warmup_epochs, verbose

    def _warm(self, epoch: float) -> float:
        # The last batch of the warmup has the full rate.
        epoch += 1.0 / (self.steps_per_epoch or 1)
        size = _world.size()
        return 1.0 / size * (epoch * (size - 1) / self.warmup_epochs + 1)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the learning rate to the metrics, and reports the end of the warmup.

        Args:
            epoch: The epoch, from 0.
            logs: The metrics, which are changed.
        """
        super().on_epoch_end(epoch, logs)
        if epoch == self.warmup_epochs - 1 and self.verbose and _world.rank() == 0:
            print(f"epoch {epoch + 1}: finished the warmup to a learning rate of {self._rate():g}")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Saves the model on rank 0 whenever a metric has improved.

    Put it after ``MetricAverageCallback``, so that the metric is the average over all ranks.

    Args:
        filepath: The file of the model.
        monitor: The metric.
        verbose: Whether a line is printed for each saved model.
        mode: ``min``, ``max`` or ``auto``: which values are better.
        save_freq: ``epoch``, or the number of batches between two checks of the metric.
        **kwargs: Further arguments of ``keras.callbacks.ModelCheckpoint``.
    """

    def __init__(
        self,
        filepath: str | Path = "best.keras",
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            mode=mode,
            save_freq=save_freq,
            **kwargs,
        )

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        if _world.rank() == 0:
            super()._save_model(*args, **kwargs)
