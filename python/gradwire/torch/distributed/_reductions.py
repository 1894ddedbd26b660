"""Maps PyTorch's reductions to Gradwire's."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from gradwire._errors import InvalidRequest

_NAMES: list[tuple[Any, str]] = [
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "average"),
    (ReduceOp.MIN, "min"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.PRODUCT, "product"),
    (ReduceOp.BAND, "bit-and"),
    (ReduceOp.BOR, "bit-or"),
    (ReduceOp.BXOR, "bit-xor"),
]


class Reduction:
    """The name of a reduction, and the factor for contributions."""

    __slots__ = ("factor", "name")

    def __init__(self, op: Any) -> None:
        self.factor: float | torch.Tensor | None = None
        for theirs, name in _NAMES:
            if op == theirs:
                self.name = name
                return
        if op == ReduceOp.PREMUL_SUM:
            self.name = "sum"
            self.factor = factor_of(op)
            return
        raise InvalidRequest(f"the gradwire backend does not support {op}", kind="invalid")

    def prepare(self, memory: torch.Tensor) -> None:
        """Multiplies a contribution by the factor, in place."""
        if self.factor is not None:
            factor = self.factor
            memory.mul_(factor.to(memory.device) if isinstance(factor, torch.Tensor) else factor)


def factor_of(op: Any) -> float | torch.Tensor:
    """Returns the factor of a PREMUL_SUM.

    Older PyTorch releases expose it only in the pickled form.
    """
    factor = getattr(op, "factor", None)
    if factor is None:
        state = op.__getstate__()
        factor = state[1] if isinstance(state, tuple) and len(state) > 1 else None
    if factor is None:
        raise InvalidRequest(
            "PREMUL_SUM needs its factor: make it with _make_nccl_premul_sum", kind="invalid"
        )
    return factor
