"""The images of the demo, and what its ranks print."""

from __future__ import annotations

import gzip
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import gradwire

Array = np.ndarray[Any, np.dtype[Any]]

EPOCHS = 5
BATCH = 64
TEST_IMAGES = 360
# With --kill, a rank dies in the middle of this epoch.
LAST_EPOCH = 2


def load() -> tuple[Array, Array]:
    """Reads the images in a random order, the same on all ranks.

    Returns:
        The images, with shape ``(1797, 64)`` and values from 0 to 1, and their digits. The first
        ``TEST_IMAGES`` of them are for the test.
    """
    with gzip.open(Path(__file__).with_name("optdigits.csv.gz"), "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(1).permutation(rows)
    return rows[:, :64] / np.float32(16), rows[:, 64].astype(np.int64)


def batches(epoch: int, images: int) -> list[Array]:
    """The images of this rank in each batch of an epoch, as indices."""
    order = np.random.default_rng(epoch).permutation(images)
    whole = order[: images - images % BATCH].reshape(-1, BATCH)
    return [batch[gradwire.rank() :: gradwire.size()] for batch in whole]


def die(epoch: int, rank: int | None) -> None:
    """Kills this process in ``LAST_EPOCH`` if its rank is the given one."""
    if rank == gradwire.rank() and epoch == LAST_EPOCH:
        os.kill(os.getpid(), signal.SIGKILL)


def say(text: str) -> None:
    """Prints a line on rank 0."""
    if gradwire.rank() == 0:
        print(text, flush=True)


def finish(right: int, parameters: bytes, seconds: float) -> None:
    """Prints the accuracy, and whether all ranks have the same parameters.

    Args:
        right: How many of its test images this rank has recognized.
        parameters: The bytes of its parameters.
        seconds: How long the training took.
    """
    total = gradwire.allreduce(np.array([right]), op=gradwire.Sum, name="right")[0]
    hashes = gradwire.allgather_object(hashlib.sha256(parameters).hexdigest()[:16])
    same = hashes.count(hashes[0])
    say(f"accuracy {total / TEST_IMAGES:.3f} of {TEST_IMAGES} images, after {seconds:.1f} s")
    say(f"parameters {hashes[0]}: the same bits on {same} of {gradwire.size()} ranks")
