"""What Horovod can be asked about how it was built. Gradwire moves bytes itself, so most answers are no."""

from __future__ import annotations


def mpi_threads_supported() -> bool:
    """There is no MPI here."""
    return False


def mpi_enabled() -> bool:
    """There is no MPI here."""
    return False


def mpi_built() -> bool:
    """There is no MPI here."""
    return False


def gloo_enabled() -> bool:
    """There is no Gloo here."""
    return False


def gloo_built() -> bool:
    """There is no Gloo here."""
    return False


def nccl_built() -> int:
    """There is no NCCL here; Horovod gives its version."""
    return 0


def ddl_built() -> bool:
    """There is no DDL here."""
    return False


def ccl_built() -> bool:
    """There is no oneCCL here."""
    return False


def cuda_built() -> bool:
    """Nothing was compiled against CUDA; tensors on a GPU work all the same, through the processor's memory."""
    return False


def rocm_built() -> bool:
    """Nothing was compiled against ROCm."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Timelines come with a later release."""
    raise NotImplementedError("gradwire has no timeline yet: its daemons serve Prometheus metrics")


def stop_timeline() -> None:
    """Timelines come with a later release."""
    raise NotImplementedError("gradwire has no timeline yet: its daemons serve Prometheus metrics")
