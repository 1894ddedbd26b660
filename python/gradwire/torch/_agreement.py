"""What the ranks agree on before a step: which gradients there are, of which kind, on any rank.

Each rank says a word of bits about each parameter, and learns the union of what all ranks say. It is one small
exchange, which travels beside the gradients that are on their way already. From then on all ranks do the
same: what no rank has a gradient for is left alone, and what any rank has one for is exchanged by all.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradwire import _native
from gradwire._staging import session
from gradwire._world import ProcessSet, native_set
from gradwire.torch._adapter import as_tensor

# What a rank says of a parameter.
USED = 1 << 0  # there is a gradient of this rank's own, or one under way
LEARNS = 1 << 1  # it requires a gradient
FROZEN = 1 << 2  # it does not
DENSE = 1 << 3  # its gradients travel as dense ones
SPARSE = 1 << 4  # this rank's gradient is sparse, and has not travelled before
ALWAYS_SPARSE = 1 << 5  # its gradients travel as sparse ones
_SPARSE_DIM = 8  # the first of eight bits, of which one says the number of sparse dimensions
_MARK = 16  # sixteen bits that say the layout, and sixteen that say its complement


def sparse_dim_bits(sparse_dim: int) -> int:
    """Says how many dimensions are sparse."""
    return 1 << (_SPARSE_DIM + min(sparse_dim, 8) - 1)


def sparse_dim_of(word: int) -> int:
    """How many dimensions are sparse, by those who know."""
    return max(((word >> _SPARSE_DIM) & 0xFF).bit_length(), 1)


def mark_bits(mark: int) -> int:
    """Says a layout, so that two different ones are seen to be different in the union."""
    return (mark << _MARK) | ((mark ^ 0xFFFF) << (_MARK + 16))


def marks_differ(word: int) -> bool:
    """Whether ranks have said different layouts."""
    return (word >> _MARK) & (word >> (_MARK + 16)) & 0xFFFF != 0


class Agreement:
    """The union of all ranks' words, under one name."""

    def __init__(self, name: str, process_set: ProcessSet, priority: int) -> None:
        self.name, self.process_set, self.priority = name, process_set, priority
        self._memory: tuple[_native.Buffer, torch.Tensor] | None = None

    def forget(self) -> None:
        """The memory's session has ended."""
        self._memory = None

    def reach(self, words: Iterable[int]) -> list[int]:
        """Says this rank's words, and waits for all ranks'."""
        said = torch.tensor(list(words), dtype=torch.int64)
        if self._memory is None or self._memory[1].numel() != said.numel():
            buffer = session().buffer("i64", [said.numel()])
            self._memory = buffer, as_tensor(buffer)
        buffer, memory = self._memory
        memory.copy_(said)
        handle: Any = session().allreduce(
            [buffer], "bit-or", name=self.name, priority=self.priority, process_set=native_set(self.process_set)
        )
        handle.wait()
        return memory.tolist()
