"""Horovod's elastic interface for TensorFlow.

```python
import gradwire.tensorflow as hvd

hvd.init()  # under `gradwire run -np 4 --min-np 2 -- python train.py`
weights = tf.Variable(tf.zeros([8, 1]))


@hvd.elastic.run
def train(state):
    while state.batch < 1000:
        step_of(weights, state.batch)
        state.batch += 1
        if state.batch % 10 == 0:
            state.commit()


train(hvd.elastic.TensorFlowState([weights], batch=0))
```

``gradwire.elastic`` tells how it works. In a ``tf.function``, ``hvd.size()`` and ``hvd.rank()`` are
those of the time when it was traced; ``hvd.size_op()`` and ``hvd.rank_op()`` follow the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from gradwire._errors import InvalidRequest
from gradwire._variable_states import VariablesState
from gradwire.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn

if TYPE_CHECKING:
    from gradwire.keras.elastic import KerasState as TensorFlowKerasState

__all__ = [
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
    "run_fn",
]


class TensorFlowState(VariablesState):
    """The state of a training with TensorFlow: variables and plain attributes.

    Args:
        variables: The variables. All ranks pass the same number, with the same dtypes and shapes.
        session: Ignored; exists for Horovod scripts.
        **kwargs: The attributes and their first values, which can be copied and pickled.

    Attributes:
        variables: The variables.

    Raises:
        InvalidRequest: ``variables`` is missing, or contains something else.
    """

    def __init__(
        self, variables: Sequence[tf.Variable] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        del session
        self.variables = list(variables or ())
        for each in self.variables:
            if not isinstance(each, tf.Variable):
                raise InvalidRequest(
                    f"variables contains a {type(each).__name__}, not a tf.Variable: for a model "
                    "of Keras, use TensorFlowKerasState",
                    kind="invalid",
                )
        if not self.variables:
            raise InvalidRequest(
                "variables is empty: pass those of the model and of the optimizer", kind="invalid"
            )
        super().__init__(lambda: self.variables, lambda each: each.numpy(), **kwargs)


def __getattr__(name: str) -> Any:
    """Returns ``TensorFlowKerasState``, which needs Keras, when a program first asks."""
    if name == "TensorFlowKerasState":
        from gradwire.keras.elastic import KerasState

        return KerasState
    raise AttributeError(f"module 'gradwire.tensorflow.elastic' has no attribute {name!r}")
