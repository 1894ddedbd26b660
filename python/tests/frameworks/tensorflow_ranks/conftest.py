"""These tests run on all ranks of a job at once, in the same order: each is a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import gradwire

# Ranks share the processors.
tf.config.threading.set_intra_op_parallelism_threads(1)


@pytest.fixture(scope="session", autouse=True)
def job() -> Iterator[None]:
    gradwire.init()
    yield
    gradwire.shutdown()
    assert not gradwire.is_initialized()


@pytest.fixture(params=["eager", "compiled"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Calls a function, eagerly or in a ``tf.function``."""

    def run(function: Callable[..., Any], *given: Any) -> Any:
        return (tf.function(function) if request.param == "compiled" else function)(*given)

    return run


@pytest.fixture
def several_ranks() -> None:
    if gradwire.size() == 1:
        pytest.skip("one rank exchanges nothing")
