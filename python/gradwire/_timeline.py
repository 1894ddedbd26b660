"""A trace of the job that the program itself starts and stops, like Horovod's timeline.

The command ``gradwire trace`` writes it, as a child of rank 0. It exits when its standard input is
closed, even if this process dies, and leaves a valid file.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
import warnings
from typing import IO, Any

from gradwire import _epochs, _world
from gradwire._errors import InvalidRequest, NotLaunched
from gradwire._programs import find

# The timeout for the command to start tracing, and to write the rest.
_SECONDS = 20.0
# Horovod's variable, and its value for a timeline that the program starts itself.
_VARIABLE, _LATER = "HOROVOD_TIMELINE", "DYNAMIC"

_trace: _Trace | None = None


class _Trace:
    """The running command."""

    def __init__(self, address: str, file: str) -> None:
        self.file = file
        # Not a pipe, which would fill up because nobody reads it.
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (it stays open)
        words = [find("gradwire"), "trace", address, "--output", file, "--until-eof"]
        self._child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            # Ctrl-C should reach only the training process.
            start_new_session=True,
        )
        if not self._begins():
            raise InvalidRequest(f"start_timeline({file!r}): {self._ended()}", kind="invalid")

    def _begins(self) -> bool:
        """Returns whether the command has started tracing; it then prints a line."""
        assert self._child.stdout is not None
        deadline = time.monotonic() + _SECONDS
        # A signal may interrupt the wait.
        while time.monotonic() < deadline:
            rest = max(0.0, deadline - time.monotonic())
            if select.select([self._child.stdout], [], [], rest)[0]:
                return self._child.stdout.readline() != b""
        return False

    def _ended(self) -> str:
        """Stops the command if it is still running. Returns its error output."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        # A process forked from this one may also hold the pipe.
        self._child.terminate()
        try:
            self._child.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return f"gradwire trace did not answer within {_SECONDS:.0f} s"
        self._said.seek(0)
        text = self._said.read().decode(errors="replace").strip()
        self._said.close()
        return text or f"gradwire trace exited with code {self._child.returncode}"

    def end(self) -> str | None:
        """Lets the command write the rest. Returns the error if the file is incomplete."""
        said = self._ended()
        return None if self._child.returncode == 0 else said


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Starts recording the activity of all ranks and nodes of the job to a file.

    In an elastic job, the recording ends with the epoch.

    Call it on all ranks or only on rank 0: rank 0 writes the file on its host, and the call does
    nothing on the others. ``stop_timeline()`` or ``shutdown()`` stops it. The file is in the Trace
    Event Format, which Perfetto and ``chrome://tracing`` open; ``gradwire trace`` writes the same
    format. With Horovod's variable ``HOROVOD_TIMELINE=FILE``, ``init()`` calls this function.

    Args:
        file_path: The file, which is overwritten if it exists.
        mark_cycles: Horovod's option; ignored, because Gradwire has no cycles.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: The file can't be written, or another timeline is still running.

    Example:
        ```python
        hvd.start_timeline("/tmp/steps.json")
        train(steps=10)
        hvd.stop_timeline()
        ```
    """
    global _trace
    session = _world.session()
    file = os.fspath(file_path)
    if session.rank != 0:
        return
    if _trace is not None:
        raise InvalidRequest(
            f"start_timeline({file!r}): {_trace.file} is still being written: call "
            "stop_timeline() first",
            kind="invalid",
        )
    _trace = _Trace(session.coordinator, file)


def stop_timeline() -> None:
    """Stops the timeline, and returns once the file is complete.

    Without a running timeline, it does nothing.

    Raises:
        NotInitialized: ``init()`` has not been called.
        InvalidRequest: The file is incomplete; the message says why.
    """
    global _trace
    _world.session()
    if _trace is None:
        return
    ended, _trace = _trace, None
    wrong = ended.end()
    if wrong is not None:
        raise InvalidRequest(f"stop_timeline(): {wrong}", kind="invalid")


def _begin() -> None:
    """Starts the timeline if Horovod's variable requests one."""
    file = os.environ.get(_VARIABLE, "").strip()
    if file and file.upper() != _LATER:
        _warn(start_timeline, file)


def _end() -> None:
    """Stops a timeline that the program has not stopped."""
    if _trace is not None:
        _warn(stop_timeline)


def _warn(call: Any, *arguments: str) -> None:
    """Calls a function, and turns its failure into a warning."""
    try:
        call(*arguments)
    except (InvalidRequest, NotLaunched, OSError) as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


_world.after_init.append(_begin)
_world.before_shutdown.append(_end)
_epochs.on_change(_end)
