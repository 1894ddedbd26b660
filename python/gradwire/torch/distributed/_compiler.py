"""Keeps PyTorch's compiler out of the calls of process groups.

The compiler ends the program when it follows a call of DDP into a group that is written in Python.
It does not follow functions that it is asked to skip. That is possible only once it is loaded, and
loading it takes a second, so it is not loaded for this. A program that compiles DDP has created DDP
before, and DDP's constructor both loads the compiler and makes calls.
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
