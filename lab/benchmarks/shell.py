"""Runs programs with a time limit, in their own group, and shows their output if they fail.

All processes of this benchmark are started here, so that all of them can be ended here.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import IO

Words = Sequence[str | os.PathLike[str]]


class Trouble(Exception):
    """An error that stops the benchmark or a system; its text says what to do."""

    # All output of the program, if known.
    output = ""


def say(text: str) -> None:
    """Prints a line about the progress."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def tail(text: str, lines: int = 8) -> str:
    """Returns the last lines of a program's output."""
    return "\n  ".join(text.strip().splitlines()[-lines:])


def call(words: Words, limit: float = 60, **options: object) -> str:
    """Runs a program to its end and returns its standard output."""
    command = " ".join(map(str, words))
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            words, capture_output=True, text=True, timeout=limit, **options
        )
    except FileNotFoundError as error:
        raise Trouble(f"{words[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Trouble(f"`{command}` took more than {limit:g} s") from error
    if done.returncode:
        raise Trouble(
            f"`{command}` ended with {done.returncode}:\n  {tail(done.stderr or done.stdout)}"
        )
    return str(done.stdout)


@dataclass
class Process:
    """One process of a job."""

    words: list[str]
    environment: dict[str, str] = field(default_factory=dict)


# A process with the files of its standard output and error.
Started = tuple["subprocess.Popen[bytes]", IO[bytes], IO[bytes]]


def clean_environment() -> dict[str, str]:
    """Returns our environment, without the variables that would make a program a rank."""
    unwanted = ("GRADWIRE_", "OMPI_", "PMI_", "PMIX_", "I_MPI_", "CCL_", "GLOO_", "FI_", "MALLOC_")
    names = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = os.environ.items()
    return {
        name: value for name, value in kept if name not in names and not name.startswith(unwanted)
    }


def run_job(processes: list[Process], limit: float) -> str:
    """Runs processes side by side until all have ended; returns the first one's standard output.

    If one fails or the time is up, all are ended, and `Trouble` has the output of the first to
    fail.
    """
    started: list[Started] = []
    with ExitStack() as held:
        held.callback(lambda: end([child for child, _, _ in started]))
        for process in processes:
            out = held.enter_context(tempfile.TemporaryFile())
            err = held.enter_context(tempfile.TemporaryFile())
            child = subprocess.Popen(
                process.words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=clean_environment() | process.environment,
                start_new_session=True,
            )
            started.append((child, out, err))
        deadline = time.monotonic() + limit
        while any(child.poll() is None for child, _, _ in started):
            failed = [entry for entry in started if entry[0].poll()]
            if failed:
                raise _failed(failed[0], processes[started.index(failed[0])])
            if time.monotonic() > deadline:
                trouble = Trouble(f"`{_command(processes[0])}` took more than {limit:.0f} s")
                trouble.output = _written(started[0])
                raise trouble
            time.sleep(0.02)
        for entry, process in zip(started, processes, strict=True):
            if entry[0].returncode:
                raise _failed(entry, process)
        return _text(started[0][1])


def end(children: list[subprocess.Popen[bytes]]) -> None:
    """Ends processes with their groups: first by asking, then by killing them."""
    living = [child for child in children if child.poll() is None]
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for child in living:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, number)
        deadline = time.monotonic() + patience
        while living and time.monotonic() < deadline:
            living = [child for child in living if child.poll() is None]
            time.sleep(0.01)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _command(process: Process) -> str:
    return " ".join(process.words)


def _written(entry: Started) -> str:
    _, out, err = entry
    return _text(out) + _text(err)


def _failed(entry: Started, process: Process) -> Trouble:
    child, out, err = entry
    words = _text(err) or _text(out)
    trouble = Trouble(f"`{_command(process)}` ended with {child.returncode}:\n  {tail(words)}")
    trouble.output = _written(entry)
    return trouble
