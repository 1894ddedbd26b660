"""One rank of ``gradwire demo``."""

from __future__ import annotations

import argparse
import importlib.util
import sys

import gradwire


def main() -> None:
    """Trains on the ranks of the job that this process belongs to."""
    parser = argparse.ArgumentParser(prog="python -m gradwire.demo", description=__doc__)
    parser.add_argument("--kill", type=int, metavar="RANK", help="a rank that dies in epoch 2")
    killed = parser.parse_args().kill
    if importlib.util.find_spec("numpy") is None:
        sys.exit("gradwire demo: NumPy is missing: pip install numpy")
    gradwire.init()
    if importlib.util.find_spec("torch") is None:
        from ._numpy import train

        framework = "NumPy"
    else:
        from ._torch import train

        framework = "PyTorch"
    if gradwire.rank() == 0:
        print(f"{gradwire.size()} ranks train a small network with {framework}", flush=True)
    train(killed)
    gradwire.shutdown()


if __name__ == "__main__":
    main()
