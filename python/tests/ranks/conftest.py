"""These tests run on all ranks of a job at once, in the same order: each is a collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import gradwire


@pytest.fixture(scope="session", autouse=True)
def job() -> Iterator[None]:
    gradwire.init()
    yield
    gradwire.shutdown()
    assert not gradwire.is_initialized()


@pytest.fixture
def gpu() -> Iterator[Any]:
    from on_fake_gpu import simulated  # needs PyTorch

    yield from simulated()


@pytest.fixture
def several_ranks() -> None:
    if gradwire.size() == 1:
        pytest.skip("one rank exchanges nothing")


@pytest.fixture
def storages_move_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses, because the tests create tensors more often than programs do."""
    from gradwire.torch import _adopt

    monkeypatch.setattr(_adopt, "LOOK_PAUSE", 0.0)
    # Tests in other files may have started a pause.
    monkeypatch.setattr(_adopt, "_look_from", 0.0)
    # Large storages move as soon as small ones.
    monkeypatch.setattr(_adopt, "AT_ONCE", 1 << 40)


@pytest.fixture(params=["early", "late"])
def sent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether gradients are sent in the backward pass, or later and compared by value."""
    from gradwire.torch import _checks

    monkeypatch.setattr(_checks, "is_due", lambda *_: request.param == "late")
    kind: str = request.param
    return kind
