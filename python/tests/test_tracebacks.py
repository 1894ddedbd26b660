"""The traceback of an uncaught Gradwire error ends in the user's frame."""

from __future__ import annotations

import re
import subprocess

import pytest
from launching import Job

from gradwire import _uncaught

USES = {
    "numpy": """
        import gradwire as gw, numpy as np
        gw.init()
        gw.allreduce(np.ones(3 + gw.rank()), name="first")
        """,
    "handle": """
        import gradwire as gw, numpy as np
        gw.init()
        gw.synchronize(gw.allreduce_async(np.ones(3 + gw.rank()), name="first"))
        """,
    "torch": """
        import gradwire.torch as hvd, torch
        hvd.init()
        hvd.allreduce(torch.ones(3 + hvd.rank()), name="first")
        """,
    "optimizer": """
        import gradwire.torch as hvd, torch
        hvd.init()
        net = torch.nn.Linear(2 + hvd.rank(), 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        net(torch.ones(1, 2 + hvd.rank())).sum().backward()
        optimizer.step()
        """,
    "group": """
        import gradwire.torch, torch
        import torch.distributed as dist
        dist.init_process_group("gradwire")
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
        """,
    "thread": """
        import threading
        import gradwire as gw, numpy as np
        gw.init()
        def call():
            gw.allreduce(np.ones(3 + gw.rank()), name="first")
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        raise SystemExit(1)
        """,
    "no rank": """
        import gradwire as gw
        def call():
            return gw.rank()
        call()
        """,
}
ERRORS = dict.fromkeys(USES, "Disagreement") | {"no rank": "NotInitialized"}


def traces(said: str) -> list[list[str]]:
    """Returns the files of each traceback's frames, by rank; the ranks' lines may be mixed."""
    found: list[list[str]] = []
    for rank in "01":
        for line in re.findall(rf"^\[(?:{rank}|0-1)\] (.*)", said, re.MULTILINE):
            line = re.sub(r"^\[rank\d\]: ?", "", line)
            if line.startswith(("Traceback (most recent call last)", "Exception in thread")):
                found.append([])
            elif (frame := re.match(r'  File "(.*)", line', line)) and found:
                found[-1].append(frame.group(1))
    return [each for each in found if each]


@pytest.mark.parametrize("use", USES)
def test_it_ends_in_the_users_frame(job: Job, use: str) -> None:
    if "torch" in USES[use]:
        pytest.importorskip("torch")
    done = job(USES[use])
    assert done.returncode != 0, done.stdout
    assert f"gradwire.{ERRORS[use]}: " in done.stdout, done.stdout
    every = traces(done.stdout)
    assert every and all(trace[-1].endswith("program.py") for trace in every), done.stdout
    assert not [file for trace in every for file in trace if "/gradwire/" in file], done.stdout


def test_all_frames_in_development_mode(job: Job) -> None:
    done = job(USES["numpy"], PYTHONDEVMODE="1")
    every = traces(done.stdout)
    assert every and all("/gradwire/" in trace[-1] for trace in every), done.stdout


def test_errors_of_the_program_keep_their_frames(job: Job) -> None:
    done = job(
        """
        import json
        import gradwire as gw
        gw.init()
        json.loads("{")
        """
    )
    every = traces(done.stdout)
    assert every and all(trace[-1].endswith("json/decoder.py") for trace in every), done.stdout


def test_debuggers_see_all_frames(job: Job) -> None:
    done = job(
        """
        import sys, traceback
        import gradwire as gw
        def before(kind, error, trace):
            sys.stdout.write(f"SHOWN {len(traceback.extract_tb(trace))}\\n")
        sys.excepthook = before
        try:
            gw.rank()
        except gw.NotInitialized as error:
            caught = error
            frames = len(traceback.extract_tb(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)
            after = len(traceback.extract_tb(caught.__traceback__))
            print("FRAMES", frames > 1, after == frames, flush=True)
        """,
        ranks=None,
    )
    assert "SHOWN 1\n" in done.stdout and "FRAMES True True" in done.stdout, done.stdout


MESSAGE = """
    import gradwire as gw, numpy as np
    gw.init()
    if gw.rank() == 0:
        raise ValueError({text})
    gw.allreduce(np.ones(3), name="first")
    """


def peers_report(done: subprocess.CompletedProcess[str]) -> str:
    """Returns what the other rank says of the error."""
    lines = re.findall(r"^\[1\] ?(.*)", done.stdout, re.MULTILINE)
    starts = [at for at, line in enumerate(lines) if "PeerLost" in line]
    assert done.returncode != 0 and starts, done.stdout[-5000:]
    return "\n".join(lines[starts[0] :])


def test_a_table_keeps_its_columns(job: Job) -> None:
    table = "bad shapes\\n  rank   shape\\n     0     [3]\\n     1    [12]"
    report = peers_report(job(MESSAGE.format(text=f"'{table}'")))
    assert "ValueError: bad shapes\n  rank   shape\n     0     [3]\n     1    [12]" in report, (
        report
    )


def test_a_long_message_is_cut(job: Job) -> None:
    report = peers_report(job(MESSAGE.format(text="'x' * 5_000_000")))
    assert "cut: 5000000 characters, 1 lines" in report and len(report) < 5000, report[:5000]


def test_messages_of_any_exception() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise LookupError

    assert _uncaught.described(Odd()) == "Odd"
    assert _uncaught.described(ValueError(" \n ")) == "ValueError"
    assert _uncaught.described(ValueError("\n a\n\nb ")) == "ValueError: a\nb"
    assert _uncaught.described(ValueError("\ud800")) == "ValueError: ?"
    many = _uncaught.described(ValueError("\n".join("abc" * 10)))
    assert many.count("\n") == 19 and many.endswith("(cut: 59 characters, 30 lines)")
