"""Horovod's module: ``from gradwire.common.elastic import ObjectState, State, run_fn``."""

from __future__ import annotations

from gradwire.elastic import ObjectState, State, run_fn

__all__ = ["ObjectState", "State", "run_fn"]
