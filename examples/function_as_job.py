"""Runs a function as a job, from a script or a notebook: python examples/function_as_job.py

It needs NumPy, and cloudpickle to send functions that are not defined in a module.
"""

import numpy as np

import gradwire as gw


def estimate(samples: int) -> float:
    """Pi, by throwing darts on every rank."""
    gw.init()
    darts = np.random.default_rng(gw.rank()).random((samples, 2))
    inside = np.array([(np.square(darts).sum(axis=1) < 1).mean()])
    return float(4 * gw.allreduce(inside, name="inside")[0])


if __name__ == "__main__":
    results = gw.run(estimate, args=(100_000,), np=4)
    print("every rank says", results)
