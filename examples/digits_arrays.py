"""The data and the network of the TensorFlow and Keras examples, independent of ranks."""

import gzip
import hashlib

import keras
import numpy as np

from digits_arguments import DATA, TEST_IMAGES


def load() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1797 images of 8 by 8 pixels with their digits, in the same order on all ranks."""
    with gzip.open(DATA, "rt") as lines:
        rows = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    rows = np.random.default_rng(1).permutation(rows)
    images, digits = rows[:, :64].reshape(-1, 8, 8, 1) / 16, rows[:, 64].astype(np.int64)
    return (images[TEST_IMAGES:], digits[TEST_IMAGES:]), (
        images[:TEST_IMAGES],
        digits[:TEST_IMAGES],
    )


def network() -> keras.Model:
    keras.utils.set_random_seed(42)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="gelu"),
            keras.layers.Conv2D(32, 3, padding="same", activation="gelu"),
            keras.layers.AveragePooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="gelu"),
            keras.layers.Dense(10),
        ]
    )


def fingerprint(model: keras.Model) -> str:
    """A hash of the bits of all parameters."""
    sha = hashlib.sha256()
    for weight in model.get_weights():
        sha.update(weight.tobytes())
    return sha.hexdigest()[:16]
