"""`gradwire top` in tmux, as users see it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import LAUNCHER, LIMIT, until
from slow_job import job


class Terminal:
    """A terminal on a separate tmux server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self.folder / "tmux"), "-f", "/dev/null", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=True,
        )
        return done.stdout

    def text(self) -> str:
        """The text on the screen, with wrapped lines joined."""
        return self.tmux("capture-pane", "-p", "-J")

    def shows(self, *words: str) -> None:
        """Waits until all texts are on the screen."""
        until(f"{words} on the screen", lambda: all(word in self.text() for word in words))


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed (Debian's package tmux)")
    found = Terminal(tmp_path)
    # The shell remains when top exits.
    found.tmux("new-session", "-d", "-x", "150", "-y", "50", "env PS1= sh")
    yield found
    found.tmux("kill-server")


# Sets a text or background colour.
COLOUR = re.compile("\x1b\\[(?:[0-9;]*;)?(?:3|4|9|10)[0-8](?:;[0-9;]*)?m")


def test_nothing_has_a_colour_with_no_color(terminal: Terminal, tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, port):
        for no_color, is_coloured in (("", True), ("1", False)):
            command = f"NO_COLOR={no_color} {LAUNCHER} top http://127.0.0.1:{port}/; echo ended $?"
            terminal.tmux("send-keys", command, "Enter")
            terminal.shows("straggler: rank 3", "hosts (2)")
            screen = terminal.tmux("capture-pane", "-p", "-e")
            assert bool(COLOUR.search(screen)) == is_coloured, screen
            terminal.tmux("send-keys", "q")
            terminal.shows("ended 0")
            terminal.tmux("send-keys", "clear", "Enter")
        (tmp_path / "end").touch()
        assert launcher.wait(LIMIT) == 0


def test_top_names_the_straggler_and_the_failure(terminal: Terminal, tmp_path: Path) -> None:
    with job(tmp_path) as (launcher, port):
        command = f"{LAUNCHER} top http://127.0.0.1:{port}/; echo ended $?"
        terminal.tmux("send-keys", command, "Enter")
        terminal.shows(
            "straggler: rank 3: the others wait for it ",
            "hosts (2)",
            "127.0.0.2",
            "ranks (4)",
            "links: share of the sender's line",
            "predicted",
            "the world is complete",
        )
        os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
        terminal.shows(
            "the job failed: rank 2 on host 127.0.0.2", "was killed by SIGKILL", "ended 1"
        )
        assert launcher.wait(LIMIT) != 0
