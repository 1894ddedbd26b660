"""Jobs of a notebook train as others do, and each misfortune is an error of its cell."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, remains, until

TRAIN = """
import os, signal
import gradwire

def train():
    from gradwire.demo import _numpy
    gradwire.init()
    _numpy.train(None)
    gradwire.shutdown()
"""
MEET = """
def meet(event):
    victim = os.environ["GRADWIRE_RANK"] == "1"
    if victim and event == "killed before":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim and event == "secret":
        os.environ["GRADWIRE_SECRET"] = "a" * 64
    if victim and event == "variable":
        del os.environ["GRADWIRE_SECRET"]
    gradwire.init()
    gradwire.barrier()
    if victim and event == "killed after":
        os.kill(os.getpid(), signal.SIGKILL)
    gradwire.barrier()
    return gradwire.rank()

def told(event):
    try:
        hosts = "nobody.invalid:2" if event == "name" else None
        print(event, gradwire.run(meet, (event,), np=2, hosts=hosts))
    except gradwire.GradwireError as error:
        print("TOLD", event, type(error).__name__, error.rank, error)
"""
# Each in a cell of its own.
EVENTS = {
    "killed before": "PeerLost 1 .*rank 1 on host localhost: its process was killed by SIGKILL",
    "killed after": r"PeerLost 1 rank 1 on host localhost: its process \(pid \d+\) was killed by",
    "secret": "Cancelled 1 rank 1 of the job raised:.*InvalidRequest: .*the worker's secret is not",
    "variable": "Cancelled 1 rank 1 of the job raised:.*InvalidRequest: GRADWIRE_SECRET: it",
    "port": r"Cancelled None 2 ranks .* no result; .*can't listen .*Address already in use.*code 1",
    "name": r"Cancelled None 2 ranks .* no result; .*nobody.invalid",
}


def test_jobs_of_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    mark, temporary = uuid.uuid4().hex, tmp_path / "temporary"
    temporary.mkdir()
    for name, text in (
        ("GWTEST_MARK", mark),
        ("TMPDIR", str(temporary)),
        ("JUPYTER_RUNTIME_DIR", str(tmp_path / "jupyter")),
        ("IPYTHONDIR", str(tmp_path / "ipython")),
    ):
        monkeypatch.setenv(name, text)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        cells = [f"{TRAIN}\ngradwire.run(train, np=4)", MEET]
        cells += [f"told({event!r})" for event in EVENTS if event not in ("port", "name")]
        cells += [f"os.environ['GRADWIRE_COORDINATOR__LISTEN'] = {place!r}\ntold('port')"]
        cells += ["del os.environ['GRADWIRE_COORDINATOR__LISTEN']\ntold('name')", "told('nothing')"]
        notebook = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in cells]
        )
        nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute()
    said = [
        "".join(output.get("text", "") for output in cell["outputs"]) for cell in notebook.cells
    ]
    for event, text in zip(EVENTS, said[2:]):
        assert re.search(f"^TOLD {event} {EVENTS[event]}", text, re.MULTILINE | re.DOTALL), text
    assert "nothing [0, 1]" in said[-1], said[-1]
    until("all processes have ended", lambda: not remains(mark.encode()))
    assert not list(temporary.glob("*gradwire*")), list(temporary.iterdir())
    program = tmp_path / "train.py"
    program.write_text(f"{TRAIN}\ntrain()\n")
    done = subprocess.run(
        [LAUNCHER, "run", "-np", "4", "--", sys.executable, str(program)],
        env=os.environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    trained = [
        re.search(r"parameters \w+: the same bits on 4 of 4", text)
        for text in (said[0], done.stdout)
    ]
    assert all(trained) and len({one[0] for one in trained if one}) == 1, (said[0], done.stdout)
