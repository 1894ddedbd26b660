"""Keeps PyTorch's compiler out of the calls of process groups.

It takes a group for something opaque, and ends the program where it follows a call of DDP into one that is
written in Python. What it is told to skip is called as it is. It can be told only once it is there, and it is not
loaded for that: loading it takes a second. Whoever compiles DDP has made it before, and DDP's constructor both
loads it and makes calls.
"""

from __future__ import annotations

import sys

kept_out = False


def keep_out() -> None:
    """Tells the compiler, if it is there by now."""
    global kept_out
    for name in ("trace_rules", "skipfiles"):  # as releases call it
        add = getattr(sys.modules.get(f"torch._dynamo.{name}"), "add", None)
        if add is not None:
            add("gradwire")
            kept_out = True
            return
