"""The agreement of the ranks, before a step, on the existing gradients and their kinds.

Each rank contributes a word of bits for each parameter, and receives the union of all ranks' words.
This is one small allreduce, which runs concurrently with the submitted gradients. Then all ranks
act alike: if any rank has a gradient for a parameter, all ranks exchange it; otherwise none does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradwire import _native
from gradwire._staging import session
from gradwire._world import ProcessSet, native_set
from gradwire.torch._adapter import as_tensor

# What a rank reports about a parameter.
USED = 1 << 0  # this rank has a gradient of its own, or one in flight
LEARNS = 1 << 1  # it requires a gradient
FROZEN = 1 << 2  # it does not require a gradient
DENSE = 1 << 3  # its gradients are exchanged as dense ones
SPARSE = 1 << 4  # this rank's gradient is sparse, and has not been exchanged before
ALWAYS_SPARSE = 1 << 5  # its gradients are exchanged as sparse ones
WRITTEN = 1 << 6  # the program has written to the result of the last exchange
_SPARSE_DIM = 8  # the first of eight bits, one of which is the number of sparse dimensions
_MARK = 16  # sixteen bits of the layout, and sixteen of its complement


def sparse_dim_bits(sparse_dim: int) -> int:
    """Returns the bit for this number of sparse dimensions."""
    return 1 << (_SPARSE_DIM + min(sparse_dim, 8) - 1)


def sparse_dim_of(word: int) -> int:
    """Returns the largest number of sparse dimensions in a word."""
    return max(((word >> _SPARSE_DIM) & 0xFF).bit_length(), 1)


def mark_bits(mark: int) -> int:
    """Returns the bits for a layout. A union shows whether layouts differ."""
    return (mark << _MARK) | ((mark ^ 0xFFFF) << (_MARK + 16))


def marks_differ(word: int) -> bool:
    """Returns whether a union contains different layouts."""
    return (word >> _MARK) & (word >> (_MARK + 16)) & 0xFFFF != 0


class Agreement:
    """Exchanges words under one name."""

    def __init__(self, name: str, process_set: ProcessSet, priority: int) -> None:
        self.name, self.process_set, self.priority = name, process_set, priority
        self._memory: tuple[_native.Buffer, torch.Tensor] | None = None

    def forget(self) -> None:
        """Drops the memory of an ended session."""
        self._memory = None

    def exchange(self, words: Iterable[int]) -> list[int]:
        """Exchanges the words; returns the union of all ranks' words."""
        own = torch.tensor(list(words), dtype=torch.int64, device="cpu")
        if self._memory is None or self._memory[1].numel() != own.numel():
            buffer = session().buffer("i64", [own.numel()])
            self._memory = buffer, as_tensor(buffer)
        buffer, memory = self._memory
        memory.copy_(own)
        handle: Any = session().allreduce(
            [buffer],
            "bit-or",
            name=self.name,
            priority=self.priority,
            process_set=native_set(self.process_set),
        )
        handle.wait()
        return memory.tolist()
