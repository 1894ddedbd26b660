"""The process group: PyTorch's calls as Gradwire's operations."""

from __future__ import annotations

from gradwire.torch.distributed._moves import Moves
from gradwire.torch.distributed._reduce import Reductions


class ProcessGroupGradwire(Reductions, Moves):
    """A group of ranks; ``torch.distributed`` makes it."""
