"""BytePS's interface for TensorFlow 2: ``import gradwire.tensorflow.byteps as bps``.

```python
import tensorflow as tf
import gradwire.tensorflow.byteps as bps

bps.init()


@tf.function
def train_step(images, digits):
    with tf.GradientTape() as tape:
        loss = loss_of(digits, model(images, training=True))
    tape = bps.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss
```

``gradwire run`` starts the processes instead of ``bpslaunch``. docs/byteps.md lists the
differences.
"""

from gradwire import (
    Average,
    Sum,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from gradwire._byteps import init, resume, suspend
from gradwire.tensorflow._compression import Compression
from gradwire.tensorflow.byteps._ops import (
    DistributedGradientTape,
    DistributedOptimizer,
    broadcast,
    broadcast_variables,
    push_pull,
)

__all__ = [
    "Average",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Sum",
    "broadcast",
    "broadcast_variables",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "push_pull",
    "rank",
    "resume",
    "shutdown",
    "size",
    "suspend",
]
