"""Horovod's elastic interface for PyTorch.

```python
import gradwire.torch as hvd

hvd.init()  # under `gradwire run -np 4 --min-np 2 -- python train.py`
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))


@hvd.elastic.run
def train(state):
    while state.batch < 1000:
        step_of(model, optimizer, state.batch)
        state.batch += 1
        if state.batch % 10 == 0:
            state.commit()


train(hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0))
```

``gradwire.elastic`` tells how it works.
"""

from gradwire.elastic import HostsUpdatedInterrupt, ObjectState, State, run, run_fn
from gradwire.torch.elastic.sampler import ElasticSampler
from gradwire.torch.elastic.state import (
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
]
