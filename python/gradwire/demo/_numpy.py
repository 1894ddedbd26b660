"""The demo with NumPy: a network with one hidden layer, and its gradients by hand."""

from __future__ import annotations

from time import perf_counter

import numpy as np

import gradwire

from . import _data
from ._data import Array

HIDDEN = 64


def _forward(parameters: list[Array], images: Array) -> tuple[Array, Array]:
    """The hidden layer and the probabilities of the digits."""
    first, second = parameters
    hidden = np.maximum(images @ first[:-1] + first[-1], 0)
    scores = hidden @ second[:-1] + second[-1]
    powers = np.exp(scores - scores.max(1, keepdims=True))
    return hidden, powers / powers.sum(1, keepdims=True)


def _gradients(
    parameters: list[Array], images: Array, digits: Array
) -> tuple[np.floating, list[Array]]:
    """The loss of some images, and its gradients."""
    hidden, probabilities = _forward(parameters, images)
    rows = np.arange(len(digits))
    loss = -np.log(probabilities[rows, digits]).mean()
    wrong = probabilities.copy()
    wrong[rows, digits] -= 1
    wrong /= len(digits)
    back = (wrong @ parameters[1][:-1].T) * (hidden > 0)
    # The last row of each matrix is the bias.
    second = np.vstack([hidden.T @ wrong, wrong.sum(0)])
    return loss, [np.vstack([images.T @ back, back.sum(0)]), second]


def train(killed: int | None) -> None:
    """Trains the network. Rank ``killed`` dies in the middle, if it is given."""
    images, digits = _data.load()
    rest = slice(_data.TEST_IMAGES, None)
    random = np.random.default_rng(42)
    shapes = [(64 + 1, HIDDEN), (HIDDEN + 1, 10)]
    parameters = [
        (random.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32) for shape in shapes
    ]
    motion = [np.zeros_like(parameter) for parameter in parameters]
    start = perf_counter()
    for epoch in range(1, _data.EPOCHS + 1):
        losses = []
        for batch in _data.batches(epoch, len(digits[rest])):
            loss, gradients = _gradients(parameters, images[rest][batch], digits[rest][batch])
            losses.append(loss)
            averages = gradwire.grouped_allreduce(gradients, name="gradients")
            for parameter, speed, average in zip(parameters, motion, averages):
                speed *= 0.9
                speed += average
                parameter -= 0.1 * speed
            _data.die(epoch, killed)
        mean = gradwire.allreduce(np.array([np.mean(losses)]), name="loss")[0]
        _data.say(f"epoch {epoch}: loss {mean:.6f}")
    mine = slice(gradwire.rank(), _data.TEST_IMAGES, gradwire.size())
    right = (_forward(parameters, images[mine])[1].argmax(1) == digits[mine]).sum()
    flat = b"".join(parameter.tobytes() for parameter in parameters)
    _data.finish(int(right), flat, perf_counter() - start)
