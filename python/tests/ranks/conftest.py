"""These tests run on every rank of a job at once: each is a collective, in the same order everywhere."""

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
