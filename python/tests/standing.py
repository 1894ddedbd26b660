"""A job that makes a few steps and then stands still in one of many ways. Started with the way."""

import sys
import time

import numpy as np

import gradwire as gw


def step() -> None:
    gw.allreduce(np.ones(4, np.float32), name="w")
    time.sleep(0.05)
    gw.mark_step()


def stand() -> None:
    time.sleep(1000)


def pause() -> None:
    with gw.paused("evaluation"):
        time.sleep(float(sys.argv[2]))


def first_step() -> None:
    """A long time before the second step."""


way = globals()[sys.argv[1]]
gw.init()
if way is first_step:
    gw.mark_step()
    time.sleep(float(sys.argv[2]))
for _ in range(40):
    step()
print("begins", flush=True)
if way is pause and gw.rank() == 1:
    gw.barrier()  # rank 0 evaluates, and this rank waits for it
else:
    way()
    if way is pause:
        gw.barrier()
step()
print("goes on", flush=True)
