"""The program of docs/hangs.md: rank 3 never ends one of its batches."""

import numpy as np

import gradwire


def count_tokens() -> None:
    while True:
        sum(range(1000))


def load_batch(step: int) -> None:
    if step % 100 == 0:
        print("step", step, flush=True)
    if step == 811 and gradwire.rank() == 3:
        count_tokens()


gradwire.init()
gradients = np.ones(2000, np.float32)
for step in range(1000):
    load_batch(step)
    gradwire.allreduce(gradients, name=f"step.{step}")
