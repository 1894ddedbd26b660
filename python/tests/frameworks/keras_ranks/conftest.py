"""These tests run on all ranks of a job at once, in the same order: each is a collective."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import gradwire


@pytest.fixture(scope="session", autouse=True)
def job() -> Iterator[None]:
    gradwire.init()
    yield
    gradwire.shutdown()
    assert not gradwire.is_initialized()


@pytest.fixture
def several_ranks() -> None:
    if gradwire.size() == 1:
        pytest.skip("one rank exchanges nothing")
