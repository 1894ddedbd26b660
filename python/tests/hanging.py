"""A rank that hangs in one of many ways, while the others wait for it. Started with the way."""

import contextlib
import ctypes
import os
import pdb
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np

import gradwire as gw


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


def hold_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def pipe() -> None:
    os.read(os.pipe()[0], 1)


def socket_pair() -> None:
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def network() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).recv(1)


def child() -> None:
    subprocess.run(["sleep", "1000"], check=True)


def debugger() -> None:
    pdb.Pdb(stdin=os.fdopen(os.pipe()[0]), stdout=sys.stderr).set_trace()
    time.sleep(1000)


def evaluate() -> None:
    while True:
        sum(range(1000))


def swallowed() -> None:
    with contextlib.suppress(ZeroDivisionError):
        1 / 0  # noqa: B018
        reduce("step.2")
    reduce("step.3")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_set() -> None:
    gw.allreduce(np.ones(1), name="alone", process_set=pairs)
    time.sleep(1000)


def other_name() -> None:
    reduce("other")


def other_shape() -> None:
    gw.allreduce(np.ones(5, np.float32), name="step.2")


def reduce(name: str) -> None:
    gw.allreduce(np.ones(4, np.float32), name=name)


def never_joins() -> None:
    time.sleep(1000)


hang = globals()[sys.argv[1]]
if hang is never_joins and os.environ["GRADWIRE_RANK"] == "2":
    hang()
gw.init()
pairs = gw.add_process_set([0, gw.size() - 1])
reduce("step.0")
reduce("step.1")
if gw.rank() == gw.size() - 1:
    hang()
if hang is other_set:
    threading.Thread(target=reduce, args=("step.2",), daemon=True).start()
    time.sleep(1000)
reduce("step.2")
