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
