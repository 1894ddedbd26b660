"""What the programs of the tests of process groups have in common."""

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

def reported(error):
    print("TOLD", dist.get_rank(), type(error).__name__, " ".join(str(error).split()), flush=True)
"""
