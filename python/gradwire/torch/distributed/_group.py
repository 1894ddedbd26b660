"""The process group: PyTorch's calls as Gradwire's operations."""

from __future__ import annotations

from gradwire.torch.distributed._moves import Moves
from gradwire.torch.distributed._reduce import Reductions


class ProcessGroupGradwire(Reductions, Moves):
    """A group of ranks of the backend ``gradwire``. ``torch.distributed`` creates it.

    Programs use the functions of ``torch.distributed``. The methods are what PyTorch calls: each
    starts an operation and returns its ``Work``, and they have PyTorch's signatures. Tensors are
    dense, may have any strides, and may be on any device. Collectives that only move data take any
    dtype; the others those that ``gradwire`` reduces.
    """
