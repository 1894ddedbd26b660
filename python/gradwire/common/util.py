"""Horovod's helpers: ``from gradwire.common.util import nccl_built, split_list``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")
_FRAMEWORKS = ("torch", "tensorflow", "keras")


def mpi_built(verbose: bool = False) -> bool:
    """Returns False: Gradwire moves bytes itself.

    Args:
        verbose: Horovod's option; ignored.

    Returns:
        False.
    """
    del verbose
    return False


gloo_built = nccl_built = ddl_built = ccl_built = mpi_built


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Returns whether Gradwire works with a framework.

    Args:
        ext_base_name: The name of the framework, such as ``torch``.
        verbose: Horovod's option; ignored.

    Returns:
        True for ``torch``, ``tensorflow`` and ``keras``.
    """
    del verbose
    return ext_base_name in _FRAMEWORKS


def check_extension(ext_name: str, *args: Any) -> None:
    """Raises an error unless Gradwire works with a framework.

    Args:
        ext_name: The name of the framework, such as ``torch``, or Horovod's variable for it, such
            as ``HOROVOD_WITH_PYTORCH``.
        *args: Horovod's further arguments; ignored.

    Raises:
        ImportError: Gradwire does not work with that framework.
    """
    if not any(framework in ext_name.lower() for framework in _FRAMEWORKS):
        raise ImportError(
            f"gradwire works with PyTorch, TensorFlow, Keras, NumPy and DLPack, not with "
            f"{ext_name!r}"
        )


@contextlib.contextmanager
def env(**kwargs: str | None) -> Iterator[None]:
    """Sets environment variables within a ``with`` statement.

    Args:
        **kwargs: The variables; None removes one.

    Returns:
        A context manager.
    """
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def num_rank_is_power_2(num_rank: int) -> bool:
    """Returns whether a number of ranks is a power of two.

    Args:
        num_rank: The number of ranks.

    Returns:
        True for 1, 2, 4, 8, …
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(big_list: Sequence[T], n: int) -> list[list[T]]:
    """Splits a list into parts of nearly equal lengths.

    Args:
        big_list: The list.
        n: The number of parts.

    Returns:
        The parts; the first ones have one item more if the lengths differ.
    """
    size, more = divmod(len(big_list), n)
    ends = [(at + 1) * size + min(at + 1, more) for at in range(n)]
    return [list(big_list[start:end]) for start, end in zip([0, *ends], ends)]


def is_iterable(x: object) -> bool:
    """Returns whether an object can be iterated over.

    Args:
        x: The object.

    Returns:
        True if it can.
    """
    return isinstance(x, Iterable)
