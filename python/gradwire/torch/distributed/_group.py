"""The process group, which maps PyTorch's calls to Gradwire's operations."""

from __future__ import annotations

from gradwire.torch.distributed._moves import Moves
from gradwire.torch.distributed._reduce import Reductions


class ProcessGroupGradwire(Reductions, Moves):
    """A process group of the backend ``gradwire``. ``torch.distributed`` creates it.

    Programs use the functions of ``torch.distributed``, which call these methods. Each method has
    PyTorch's signature, starts an operation and returns its ``Work``. Tensors must be dense, with
    any strides and on any device. Collectives that only move data accept any dtype; reductions
    accept the dtypes that ``gradwire`` reduces. Invalid tensors or ranks raise ``InvalidRequest``
    before anything is started.
    """
