"""Makes Gradwire's exceptions also exceptions of TensorFlow, even in a ``tf.function``.

Scripts catch what Horovod's operations raise: subclasses of ``tf.errors.OpError``. So an exception
of an operation also has such a class.

TensorFlow turns an exception of a Python function in a graph into a status with its text, and the
caller of the ``tf.function`` gets an error of ``tf.errors``. The caller needs Gradwire's own
exception: its type and attributes tell what to do, and the other ranks learn from it why this rank
ends. So this module wraps the method with which TensorFlow calls a function, and looks there for
the exception with this text. If a release calls functions otherwise, the caller gets TensorFlow's
error, with Gradwire's text in it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf
from tensorflow.python.eager import context

from gradwire._errors import Disagreement, GradwireError, InvalidRequest, PeerLost

Result = TypeVar("Result")
# As in Horovod: the exceptions of TensorFlow and their codes.
_COUNTERPARTS: dict[type[GradwireError], tuple[type[tf.errors.OpError], int]] = {
    Disagreement: (tf.errors.FailedPreconditionError, tf.errors.FAILED_PRECONDITION),
    InvalidRequest: (tf.errors.InvalidArgumentError, tf.errors.INVALID_ARGUMENT),
    PeerLost: (tf.errors.AbortedError, tf.errors.ABORTED),
}
# The last exceptions in graphs. After the one with which a function fails, others may follow.
_last: deque[GradwireError] = deque(maxlen=64)
_lock = threading.Lock()
_installed = False
# AutoGraph otherwise replaces an exception that is raised while a function is traced.
GradwireError.ag_pass_through = True  # type: ignore[attr-defined]


@functools.cache
def _of_both(kind: Any) -> Any:
    """Returns a subclass that is also one of ``tf.errors``, and otherwise like the class."""
    other, code = _COUNTERPARTS.get(kind, (tf.errors.UnknownError, tf.errors.UNKNOWN))

    def made(error: Any, *given: Any, **facts: Any) -> None:
        if len(given) < 3:
            kind.__init__(error, *given, **facts)
            return
        # A caught exception is made again with another message, and the arguments of an OpError.
        kind.__init__(error, given[2])
        caught = sys.exc_info()[1]
        if isinstance(caught, kind):
            error.__dict__.update(caught.__dict__)
        error._node_def, error._op = given[:2]

    def pickled(error: GradwireError) -> tuple[object, ...]:
        function, (_, text, facts) = kind.__reduce__(error)
        return function, (kind, text, facts)

    attributes: dict[str, Any] = {
        "__module__": kind.__module__,
        "__doc__": kind.__doc__,
        "__init__": made,
        "__str__": RuntimeError.__str__,
        "__reduce__": pickled,
        # What the properties of an OpError return.
        "_node_def": None,
        "_op": None,
        "_message": property(str),
        "_error_code": code,
        "_experimental_payloads": {},
    }
    return type(kind.__name__, (kind, other), attributes)


def raising(call: Callable[[], Result]) -> Result:
    """Calls a function. Gradwire's exceptions in it become exceptions of TensorFlow as well."""
    try:
        return call()
    except GradwireError as error:
        if not isinstance(error, tf.errors.OpError):
            kind: Any = type(error)
            error.__class__ = _of_both(kind)
        raise


def noted(call: Callable[[], Result]) -> Result:
    """Calls a function in a graph, and notes the exception that it raises."""
    try:
        return raising(call)
    except GradwireError as error:
        with _lock:
            _last.append(error)
        raise


def _find(message: str) -> GradwireError | None:
    with _lock:
        return next((error for error in reversed(_last) if str(error) in message), None)


def install() -> None:
    """Makes functions of TensorFlow raise the noted exceptions. Further calls do nothing."""
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
