"""The commands and programs of the book work, and print what it shows; `book.py` says how."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import book
import pytest
from launching import LAUNCHER, LIMIT, needs_torch, running, until

HERE = Path(__file__).parent
EVERY = [block for page in book.pages() for block in book.blocks(page)]
# What a reader can run.
RUN = [block for block in EVERY if block.language in book.LANGUAGES]
LEFT_OUT = [block for block in RUN if block.word("no-run")]
# The program of pages that show none.
TRAIN = """\
import gradwire as gw, numpy as np
gw.init()
for step in range(3):
    gw.allreduce(np.ones(8, np.float32), name="gradient")
    gw.mark_step()
"""
TRAINS = {
    "docs/horovod.md": "import horovod.torch as hvd\nhvd.init()\nhvd.barrier()\nhvd.shutdown()\n",
}
# The job beside which commands run.
ENDLESS = """\
import time
import gradwire as gw, numpy as np
gw.init()
while gw.allreduce(np.ones(1), name="gradient")[0]:
    gw.mark_step()
    time.sleep(0.3 if gw.rank() == 3 else 0.01)
"""


def pages_with(*languages: str) -> list[Path]:
    """The pages with commands to run."""
    found = [
        block.page
        for block in RUN
        if block.language in languages and not block.word("no-run") and not block.word("tested-by")
    ]
    return list(dict.fromkeys(found))


def name_of(page: Path) -> str:
    return str(page.relative_to(book.ROOT))


def test_every_block_says_what_it_is() -> None:
    assert len(RUN) > 60
    unmarked = [block.place for block in EVERY if not block.language]
    assert not unmarked, unmarked
    # Markdown would not take such a line for the start of a block.
    ticks = [block.place for block in EVERY if "`" in block.words]
    assert not ticks, ticks


def test_few_blocks_are_not_run() -> None:
    assert len(LEFT_OUT) <= len(RUN) / 10, [block.place for block in LEFT_OUT]


def test_the_other_tests_exist() -> None:
    for block in RUN:
        if other := block.word("tested-by"):
            assert (book.ROOT / other).exists(), block.place


@pytest.fixture
def folder(tmp_path: Path) -> book.Folder:
    inner = tmp_path / "page"
    inner.mkdir()
    script = inner / "hosts.sh"
    script.write_text("#!/bin/sh\necho 127.0.0.1:8\n")
    script.chmod(0o755)
    return book.Folder(inner)


def straggling(folder: book.Folder) -> re.Match[str] | None:
    """What `gradwire status` says about the page, once it knows a straggler."""
    # Without a job of its own, the command finds those of other tests on this host.
    if not any(Path(folder.variables["XDG_RUNTIME_DIR"]).glob("gradwire/*.json")):
        return None
    said = folder.run("gradwire status")[1]
    return re.search(r"(?s)page: http://[\d.]+:(\d+)/.*\nstraggler: rank 3", said)


@contextlib.contextmanager
def beside(folder: book.Folder, wanted: bool) -> Iterator[None]:
    """A job of four ranks on two hosts, if one is wanted."""
    if not wanted:
        yield
        return
    (folder.folder / "endless.py").write_text(ENDLESS)
    recordings = folder.folder / "recordings"
    words = [LAUNCHER, "run", "-H", "127.0.0.1:2,127.0.0.2:2"]
    words += ["--set", f"recorder.directory={recordings}", "--", sys.executable]
    log = folder.folder / "log"
    variables = {name: folder.variables[name] for name in ("XDG_RUNTIME_DIR", "OMP_NUM_THREADS")}
    with running([*words, str(folder.folder / "endless.py")], log, **variables) as job:
        seen = until("a rank is slow", lambda: straggling(folder), LIMIT, job)
        folder.port = int(seen[1])
        yield
        assert job.poll() is None, log.read_text()


@pytest.mark.parametrize("page", pages_with("console", "sh"), ids=name_of)
def test_commands(page: Path, folder: book.Folder) -> None:
    every = [block for block in RUN if block.page == page]
    shown_files = {file: block.text for block in every if (file := block.word("file"))}
    files = {"train.py": TRAINS.get(name_of(page), TRAIN), **shown_files}
    if any("torch" in text for text in files.values()):
        needs_torch(2, 2, why="its program imports torch")
    with beside(folder, any(block.has("job") for block in every)):
        for block in every:
            for file, text in files.items():
                (folder.folder / file).write_text(text)
            skipped = block.language == "python" or block.word("no-run") or block.word("tested-by")
            for command, shown in [] if skipped else book.commands(block):
                how = next((word for word in ("dry", "quick") if block.has(word)), "")
                code, said = folder.run(command, how)
                if shown:
                    assert book.is_shown(shown, said), f"{block.place}: {command} printed\n{said}"
                else:
                    assert code == 0, f"{block.place}: {command} exited with {code}\n{said}"


def programs() -> list[book.Block]:
    """The blocks of Python that are not a file."""
    return [
        block
        for block in RUN
        if block.language == "python"
        and not (block.word("file") or block.word("no-run") or block.word("tested-by"))
    ]


FRAMEWORKS = ["torch", "keras", "jax", "lightning", "accelerate", "transformers"]


@pytest.mark.parametrize("needed", FRAMEWORKS)
def test_programs(needed: str, tmp_path: Path) -> None:
    """Runs them one after the other on two ranks, with the names of `book_names.py`."""
    if not importlib.util.find_spec(needed):
        pytest.skip(f"{needed} is not installed")
    chosen = [block for block in programs() if (block.word("needs") or "torch") == needed]
    assert chosen
    for number, block in enumerate(chosen):
        text = f"# {block.place}\n" + textwrap.dedent(block.text)
        (tmp_path / f"{number:02}.py").write_text(text)
    words = [LAUNCHER, "run", "-np", "2", "--", sys.executable, str(HERE / "book_names.py"), needed]
    done = subprocess.run(
        [*words, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("works") == 2 * len(chosen), done.stdout


def test_the_notebook() -> None:
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    path = book.ROOT / "examples" / "notebook.ipynb"
    notebook = nbformat.read(path, as_version=4)
    kept = [cell for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")]
    assert not kept, "clear all outputs of the notebook"
    nbclient.NotebookClient(notebook, timeout=LIMIT, kernel_name="python3").execute()
    last = notebook.cells[-1]["outputs"]
    assert "True" in last[-1]["text"], last
