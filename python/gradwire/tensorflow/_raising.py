"""Gradwire's exceptions out of a ``tf.function``.

TensorFlow turns an exception of a Python function in a graph into a status with its text, and the
caller of the ``tf.function`` gets an error of ``tf.errors``. The caller needs Gradwire's own
exception: its type and attributes tell what to do, and the other ranks learn from it why this rank
ends. So the method with which TensorFlow calls a function looks for the exception that has this
text. If a release calls functions otherwise, the caller gets TensorFlow's error, with Gradwire's
text in it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

from gradwire._errors import GradwireError

Result = TypeVar("Result")
# The last exceptions in graphs. A function fails with one of them; others may follow it.
_last: deque[GradwireError] = deque(maxlen=64)
_lock = threading.Lock()
_installed = False
# AutoGraph otherwise replaces an exception that is raised while a function is traced.
GradwireError.ag_pass_through = True  # type: ignore[attr-defined]


def noted(call: Callable[[], Result]) -> Result:
    """Calls a function in a graph, and notes the exception that it raises."""
    try:
        return call()
    except GradwireError as error:
        with _lock:
            _last.append(error)
        raise


def _find(message: str) -> GradwireError | None:
    with _lock:
        return next((error for error in reversed(_last) if str(error) in message), None)


def install() -> None:
    """Lets functions raise the noted exceptions. Further calls do nothing."""
    global _installed
    if _installed or not hasattr(context.Context, "call_function"):
        return
    _installed = True
    call = context.Context.call_function

    @functools.wraps(call)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except tf.errors.OpError as error:
            found = _find(error.message)
            if found is None:
                raise
            raise found from None

    context.Context.call_function = call_function
