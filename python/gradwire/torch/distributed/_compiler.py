"""Keeps PyTorch's compiler from tracing calls of process groups.

The compiler crashes the program when it traces a call of DDP into a process group written in
Python. It can be told to skip functions, but only once it is loaded, and loading it takes a second,
so this module does not load it. A program that compiles DDP has created DDP before, and DDP's
constructor loads the compiler and then calls process groups.
"""

from __future__ import annotations

import sys

kept_out = False


def keep_out() -> None:
    """Tells the compiler to skip this package, if the compiler is loaded."""
    global kept_out
    for name in ("trace_rules", "skipfiles"):  # its names in different releases
        add = getattr(sys.modules.get(f"torch._dynamo.{name}"), "add", None)
        if add is not None:
            add("gradwire")
            kept_out = True
            return
