"""Horovod's queries for build features. Gradwire uses none of them: it moves bytes itself."""

from __future__ import annotations


def mpi_threads_supported() -> bool:
    """Returns whether MPI supports threads. Gradwire does not use MPI.

    Returns:
        False.
    """
    return False


def mpi_enabled() -> bool:
    """Returns whether MPI is in use. Gradwire does not use MPI.

    Returns:
        False.
    """
    return False


def mpi_built() -> bool:
    """Returns whether MPI was compiled in. Gradwire does not use MPI.

    Returns:
        False.
    """
    return False


def gloo_enabled() -> bool:
    """Returns whether Gloo is in use. Gradwire does not use Gloo.

    Returns:
        False.
    """
    return False


def gloo_built() -> bool:
    """Returns whether Gloo was compiled in. Gradwire does not use Gloo.

    Returns:
        False.
    """
    return False


def nccl_built() -> int:
    """Returns the version of NCCL that was compiled in. Gradwire does not use NCCL.

    Returns:
        0.
    """
    return 0


def ddl_built() -> bool:
    """Returns whether DDL was compiled in. Gradwire does not use DDL.

    Returns:
        False.
    """
    return False


def ccl_built() -> bool:
    """Returns whether oneCCL was compiled in. Gradwire does not use oneCCL.

    Returns:
        False.
    """
    return False


def cuda_built() -> bool:
    """Returns whether anything was compiled against CUDA.

    GPU tensors are still supported, through CPU memory.

    Returns:
        False.
    """
    return False


def rocm_built() -> bool:
    """Returns whether anything was compiled against ROCm.

    Returns:
        False.
    """
    return False
