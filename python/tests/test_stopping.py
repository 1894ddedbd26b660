"""Ranks that are asked to stop with a signal stop at the same step."""

from __future__ import annotations

import pytest
from launching import Job

PROGRAM = """
import os
import signal
import threading

import gradwire as gw

gw.init()
wrong = []


def elsewhere():
    try:
        gw.should_stop()
    except gw.InvalidRequest as error:
        wrong.append(str(error))


thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
assert "main thread" in wrong[0], wrong
for bad in (signal.SIGKILL, 2**70, 10.0, [10]):
    try:
        gw.should_stop(bad)
        raise AssertionError(bad)
    except gw.InvalidRequest as error:
        assert "can't be noted" in str(error), error
step = 0
while not gw.should_stop(signal.SIGUSR1):
    if step == 5 and gw.rank() == gw.size() - 1:
        os.kill(os.getpid(), {signal})
    step += 1
assert gw.should_stop()
assert set(gw.allgather_object(step)) == {{6}}, step
print("STOPPED")
"""


@pytest.mark.parametrize("signal", ["signal.SIGTERM", "signal.SIGUSR1"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_all_ranks_stop_at_the_same_step(job: Job, signal: str, ranks: int) -> None:
    done = job(PROGRAM.format(signal=signal), ranks=ranks)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("STOPPED") == ranks, done.stdout


def test_a_second_signal_ends_the_process(job: Job) -> None:
    text = """
        import os
        import signal

        import gradwire as gw

        gw.init()
        assert not gw.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert gw.should_stop()
        os.kill(os.getpid(), signal.SIGTERM)
        print("STILL THERE")
    """
    done = job(text, ranks=1)
    assert done.returncode != 0 and "STILL THERE" not in done.stdout, done.stdout


# The forked children of a rank, such as the workers of a data loader, and the script that has
# started it don't handle the signal. They must not end before the rank.
ASKED = """
import os
import signal
import subprocess
import sys
import time

if len(sys.argv) == 1:
    # A script that starts the rank.
    done = subprocess.call([sys.executable, sys.argv[0], "rank"])
    print("SCRIPT", done, flush=True)
    sys.exit(done)

import gradwire as gw

gw.init()
child = os.fork()
if child == 0:
    time.sleep(250)
    os._exit(0)
step = 0
while not gw.should_stop():
    step += 1
    if step == 5 and gw.rank() == 0:
        launcher = os.getppid()
        while "run" not in open(f"/proc/{launcher}/cmdline").read().split("\\0"):
            launcher = int(open(f"/proc/{launcher}/stat").read().rsplit(")", 1)[1].split()[1])
        os.kill(launcher, signal.SIGTERM)
assert os.waitpid(child, os.WNOHANG) == (0, 0), "the child has ended"
time.sleep(1)
gw.barrier()
print("SAVED", gw.rank(), flush=True)
os.kill(child, signal.SIGKILL)
"""


def test_a_checkpoint_precedes_the_others_end(job: Job) -> None:
    done = job(ASKED, hosts="127.0.0.1:2,127.0.0.2:1")
    assert done.returncode == 143, done.stdout
    assert done.stdout.count("SAVED") == 3 and done.stdout.count("SCRIPT 0") == 3, done.stdout
