"""Horovod's queries for build features. Gradwire uses none of them: it moves bytes itself."""

from __future__ import annotations


def _not_built() -> bool:
    """Returns False: Gradwire moves bytes itself, those of GPU tensors through CPU memory.

    Returns:
        False.
    """
    return False


mpi_threads_supported = mpi_enabled = mpi_built = _not_built
gloo_enabled = gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = _not_built


def nccl_built() -> int:
    """Returns the version of NCCL that was compiled in. Gradwire does not use NCCL.

    Returns:
        0.
    """
    return 0
