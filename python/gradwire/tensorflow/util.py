"""The module ``horovod.tensorflow.util``: helpers that scripts import."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from gradwire.tensorflow._running import as_python

_has_eager = True


def _executing_eagerly() -> bool:
    """Returns whether operations run at once, outside of a ``tf.function``."""
    return bool(tf.executing_eagerly())


def _make_subgraph(function: Callable[..., Any]) -> Any:
    """Returns the function as a ``tf.function``."""
    return tf.function(function)


def vars_to_refs(variables: Any) -> Any:
    """Returns references of variables, which can be keys of dicts and members of sets.

    Args:
        variables: A variable, or a list or tuple of them.

    Returns:
        The reference of the variable, or a tuple of references.
    """
    if isinstance(variables, (list, tuple)):
        return tuple(vars_to_refs(each) for each in variables)
    return variables.ref()


@as_python
def refs_to_vars(refs: Iterable[Any]) -> list[Any]:
    """Returns the variables of references.

    Args:
        refs: References from ``vars_to_refs``.

    Returns:
        The variables.
    """
    return [each.deref() if hasattr(each, "deref") else each for each in refs]
