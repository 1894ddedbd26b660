"""Random programs, eager and compiled: the same bits as with NumPy."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from launching import AT_NIGHT

import gradwire as gw
import gradwire.tensorflow as hvd

SEED = int(os.environ.get("GWTEST_SEED", "1"))
PROGRAMS = 200 if AT_NIGHT else 16
KINDS = ["f4", "f4", "f2", "f8", "i4", "i8", "u1", "c8", "bfloat16"]


def array(dice: random.Random, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Each rank's own values; all ranks draw the same numbers of values."""
    values = np.random.default_rng([dice.randrange(1 << 30), gw.rank()]).integers(0, 9, shape)
    return np.asarray(tf.cast(values, tf.as_dtype(np.dtype(kind)).name))


class Step:
    """One collective of a program: with TensorFlow, and with NumPy."""

    def __init__(self, dice: random.Random, number: int) -> None:
        self.what = dice.choice(["allreduce", "allgather", "broadcast", "reducescatter", "group"])
        self.name = f"step{number}" if dice.random() < 0.5 else None
        self.op = dice.choice([gw.Sum, gw.Average, gw.Min, gw.Max])
        self.root = dice.randrange(gw.size())
        kind = dice.choice([k for k in KINDS if k != "c8" or self.op in (gw.Sum, gw.Average)])
        rest = tuple(dice.choice([1, 2, 3]) for _ in range(dice.randint(0, 2)))
        rows = [dice.choice([0, 1, 4, 7]) for _ in range(gw.size())]
        own = rows[gw.rank()] if self.what == "allgather" else rows[0]
        count = dice.randint(2, 4) if self.what == "group" else 1
        if self.what == "reducescatter" and self.op not in (gw.Sum, gw.Average):
            self.op = gw.Sum
        self.given = [array(dice, kind, (own, *rest)) for _ in range(count)]

    def run(self, module: Any, given: list[Any]) -> list[Any]:
        if self.what == "allreduce":
            return [module.allreduce(given[0], name=self.name, op=self.op)]
        if self.what == "allgather":
            return [module.allgather(given[0], name=self.name)]
        if self.what == "broadcast":
            return [module.broadcast(given[0], self.root, name=self.name)]
        if self.what == "reducescatter":
            return [module.reducescatter(given[0], name=self.name, op=self.op)]
        return module.grouped_allreduce(given, name=self.name, op=self.op)


@pytest.mark.parametrize("seed", range(SEED, SEED + PROGRAMS))
def test_a_random_program(seed: int) -> None:
    print(f"GWTEST_SEED={seed}")
    dice = random.Random(seed)
    steps = [Step(dice, number) for number in range(dice.randint(1, 8))]
    expected = [step.run(gw, step.given) for step in steps]
    inputs = [[tf.constant(each) for each in step.given] for step in steps]
    compiled = dice.random() < 0.7
    within = dice.random() < 0.3

    def program(given: list[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        def one(step: Step, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
            if not within:
                return step.run(hvd, tensors)
            some = tf.size(tensors[0]) >= 0
            return tf.cond(
                some, lambda: step.run(hvd, tensors), lambda: [tf.identity(t) for t in tensors]
            )

        return [one(step, tensors) for step, tensors in zip(steps, given)]

    run: Callable[..., Any] = tf.function(program) if compiled else program
    for _ in range(2):
        for step, mine, theirs in zip(steps, run(inputs), expected):
            for found, wanted in zip(mine, theirs):
                assert np.asarray(found).dtype == wanted.dtype, (seed, step.what)
                assert np.asarray(found).tobytes() == wanted.tobytes(), (seed, step.what)
