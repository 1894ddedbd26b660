"""Code shared by the test programs of process groups."""

from __future__ import annotations

START = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from torch import nn
import gradwire.torch as gw
from gradwire.torch.distributed import last_error

def start(**options):
    dist.init_process_group("gradwire", **options)
    return dist.get_rank()

# For programs that restart. PyTorch's default store always uses the same port, so a fast rank
# would connect to the store that rank 0 is about to close.
def start_turn(backend, turn):
    place = "file://" + os.environ["TEST_FOLDER"] + "/store-" + str(turn)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=size)
    return rank, size

def reported(error):
    print("TOLD", dist.get_rank(), type(error).__name__, " ".join(str(error).split()), flush=True)
"""
