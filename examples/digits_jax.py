"""Handwritten digits with JAX and optax.

gradwire run -np 4 -- python examples/digits_jax.py
"""

import argparse
import gzip
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gradwire.jax as gw

DATA = Path(__file__).parent.parent / "python/gradwire/demo/optdigits.csv.gz"
TEST_IMAGES = 360


def load() -> tuple[np.ndarray, np.ndarray]:
    """1797 images of 64 pixels and their digits, in the same order on all ranks."""
    with gzip.open(DATA, "rt") as lines:
        rows = np.array([[float(cell) for cell in line.split(",")] for line in lines])
    rows = np.random.default_rng(1).permutation(rows)
    return (rows[:, :64] / 16).astype(np.float32), rows[:, 64].astype(np.int32)


def initial(key: jax.Array) -> list[dict[str, jax.Array]]:
    """The parameters of a network with two hidden layers."""
    sizes = [64, 128, 64, 10]
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weights": jax.random.normal(key, pair) / np.sqrt(pair[0]), "bias": jnp.zeros(pair[1])}
        for key, pair in zip(keys, itertools.pairwise(sizes))
    ]


def scores(params: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        images = jax.nn.gelu(images @ layer["weights"] + layer["bias"])
    return images @ params[-1]["weights"] + params[-1]["bias"]


def loss_of(params: list[dict[str, jax.Array]], images: jax.Array, digits: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, images), digits).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=10, help="passes over the images")
    parser.add_argument("--batch", type=int, default=64, help="batch size of all ranks")
    given = parser.parse_args()

    gw.init()
    images, digits = load()
    train = len(images) - TEST_IMAGES
    params = gw.broadcast_parameters(initial(jax.random.key(gw.rank())))
    tx = optax.chain(gw.average_gradients(), optax.adam(2e-3))
    state = tx.init(params)

    @jax.jit
    def step(params, state, images, digits):
        loss, gradients = jax.value_and_grad(loss_of)(params, images, digits)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, gw.allreduce(loss, name="loss")

    for epoch in range(given.epochs):
        order = np.random.default_rng(epoch).permutation(train)
        batches = order[: train // given.batch * given.batch].reshape(-1, given.batch)
        total = 0.0
        for batch in batches:
            own = batch[gw.rank() :: gw.size()]
            params, state, loss = step(params, state, images[own], digits[own])
            total += float(loss) / len(batches)
        if gw.rank() == 0:
            print(f"epoch {epoch + 1}: loss {total:.6f}", flush=True)

    own = slice(train + gw.rank(), None, gw.size())
    right = (scores(params, images[own]).argmax(1) == digits[own]).sum()
    right = gw.allreduce(right, name="right", op=gw.Sum)
    if gw.rank() == 0:
        print(f"accuracy {right / TEST_IMAGES:.3f}")


if __name__ == "__main__":
    main()
