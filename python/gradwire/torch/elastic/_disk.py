"""Commits on disk: a folder for each, with the tensors as safetensors and all else as JSON.

    DIRECTORY/commit-0000000012/tensors.safetensors
    DIRECTORY/commit-0000000012/state.json

A thread writes a commit into a hidden folder, and renames the folder when it is complete. So
whatever ends the job, the newest folder named ``commit-N`` is complete. Neither file can contain
code.

While the thread writes, newer commits replace each other, and the last one is written next. So a
slow disk skips commits in between, but not the last one, and does not slow the training.

A process that is killed leaves its hidden folder. The next process that writes removes it: the name
of the folder says which process has made it (CLEAN).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import shutil
import socket
import threading
from pathlib import Path
from typing import Any

import torch

from gradwire._arguments import whole_number
from gradwire._errors import InvalidRequest

_KEPT = 2
_NAME = re.compile(r"commit-(\d{10})")
# With the host and the id of the process that writes the folder.
_HIDDEN = re.compile(r"\.commit-\d{10}\.(.+)\.(\d+)")
# After this time without a write, a hidden folder of another host counts as abandoned: its process
# can't be checked from here.
_ABANDONED_NS = 3600 * 10**9
# How long the end of a training waits for the disk.
_PATIENCE_SECONDS = 600.0
_log = logging.getLogger("gradwire")
# The names of safetensors.
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
# JSON lacks tensors and some of Python's containers: they become objects with one of these keys.
_TENSOR, _TUPLE, _SET, _PAIRS = "$tensor", "$tuple", "$set", "$pairs"
# Exceptions that damaged files raise.
_DAMAGES = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)


def encoded(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns a value for JSON.

    Args:
        value: The value.
        path: Where it is, for messages and for the names of tensors.
        tensors: Receives the tensors, by the names that stand for them.

    Raises:
        InvalidRequest: It contains more than tensors, numbers, texts and containers.
    """
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.dtype in _NAMES:
            # With a number, because `a.b` may be a key, or a key in `a`, and 0 may be a text.
            name = f"{path}#{len(tensors)}"
            tensors[name] = value
            return {_TENSOR: name}
    elif value is None or type(value) in (bool, int, float, str):
        return value
    elif type(value) is list:
        return [encoded(each, f"{path}.{at}", tensors) for at, each in enumerate(value)]
    elif type(value) is tuple:
        return {_TUPLE: encoded(list(value), path, tensors)}
    elif type(value) is set:
        return {_SET: encoded(list(value), path, tensors)}
    elif isinstance(value, dict):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(each, f"{path}.{key}", tensors) for key, each in value.items()}
        pairs = [
            [encoded(key, path, tensors), encoded(each, f"{path}.{key}", tensors)]
            for key, each in value.items()
        ]
        return {_PAIRS: pairs}
    raise InvalidRequest(
        f"{path} can't be written to disk, because it is a {type(value).__name__}: keep it out of "
        "the state, or leave out directory=",
        kind="invalid",
    )


def decoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Returns the value that ``encoded`` has converted."""
    if isinstance(value, list):
        return [decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(decoded(value[_TUPLE], tensors))
    if _SET in value:
        return set(decoded(value[_SET], tensors))
    if _PAIRS in value:
        return {decoded(key, tensors): decoded(each, tensors) for key, each in value[_PAIRS]}
    return {key: decoded(each, tensors) for key, each in value.items()}


def write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a file of safetensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.flush()
        first = 8 + len(text)
        if end > 0:
            # First, because a write to a mapped page without space on the disk would end the
            # process.
            os.posix_fallocate(target.fileno(), first, end)
            mapped = torch.from_file(str(file), shared=True, size=first + end, dtype=torch.uint8)
            for name, tensor in tensors.items():
                start, stop = header[name]["data_offsets"]
                if stop > start:
                    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                    mapped[first + start : first + stop].copy_(flat)
            del mapped
        os.fsync(target.fileno())


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a file of safetensors."""
    with file.open("rb") as source:
        length = int.from_bytes(source.read(8), "little")
        first, size = 8 + length, file.stat().st_size
        if first > size:
            raise ValueError(f"{file.name} is incomplete")
        header = json.loads(source.read(length))
    mapped = torch.from_file(str(file), shared=False, size=size, dtype=torch.uint8)
    tensors = {}
    for name, about in header.items():
        start, end = about["data_offsets"]
        dtype = _DTYPES[about["dtype"]]
        # A copy, because the file's offsets need not be aligned for the type.
        part = mapped[first + start : first + end].clone()
        tensors[name] = part.view(dtype).view(about["shape"])
    return tensors


def _runs(process: int) -> bool:
    """Returns whether this host has such a process."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _changed_ns(folder: Path) -> int:
    """Returns when a folder or a file in it was last written to."""
    times = [0]
    for path in (folder, *folder.glob("*")):
        with contextlib.suppress(OSError):  # it was removed or renamed meanwhile
            times.append(path.stat().st_mtime_ns)
    return max(times)


class Disk:
    """The commits in a directory.

    Args:
        directory: The directory, which is created.
        every: One of this many commits is written.

    Raises:
        InvalidRequest: It is not a directory, or can't be read, or ``every`` is invalid.
    """

    def __init__(self, directory: str | os.PathLike[str], every: int) -> None:
        self.directory, self.every = Path(directory), whole_number("every", every, least=1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        # What the thread writes next: the number, the JSON, and the tensors.
        self._next: tuple[int, str, dict[str, torch.Tensor]] | None = None
        # The id of the process that has written commits.
        self._process: int | None = None
        self._warned = False
        # Commits that ``read`` has found damaged.
        self._damaged: set[int] = set()
        self.numbers()  # raises now, on all ranks, if it is not a directory

    def numbers(self) -> list[int]:
        """Returns the numbers of the complete commits, the newest first.

        Raises:
            InvalidRequest: The directory can't be read. It need not exist.
        """
        try:
            found = [_NAME.fullmatch(name) for name in os.listdir(self.directory)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise InvalidRequest(
                f"directory={str(self.directory)!r} can't contain commits: {error.strerror}",
                kind="invalid",
            ) from None
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def read(self) -> tuple[Path, dict[str, Any]] | None:
        """Returns the folder and the state of the newest readable commit; None without one."""
        for number in self.numbers():
            folder = self._folder(number)
            try:
                text = json.loads((folder / "state.json").read_text())
                state = decoded(text, read_tensors(folder / "tensors.safetensors"))
                if isinstance(state, dict):
                    return folder, state
                error: Exception = ValueError("state.json does not contain a state")
            except _DAMAGES as caught:
                error = caught
            self._damaged.add(number)
            _log.warning("the commit %s can't be read: %s", folder, error)
        return None

    def write(self, number: int, state: Any) -> None:
        """Writes a commit in the background. Its tensors must not change any more.

        This commit replaces an earlier one that waits for the disk.

        Raises:
            InvalidRequest: The state contains a value that can't be written.
        """
        tensors: dict[str, torch.Tensor] = {}
        text = json.dumps(encoded(state, "state", tensors))
        with self._lock:
            self._next = (number, text, tensors)
            if self._thread is None:
                # A disk that hangs must not keep the process: `finish` waits instead (WAIT).
                self._thread = threading.Thread(
                    target=self._write_all, name="gw-commit", daemon=True
                )
                self._thread.start()
                self._finish_at_exit()

    def finish(self, limit: float = _PATIENCE_SECONDS) -> None:
        """Waits until the last commit is written, for a limited time."""
        thread = self._thread
        if thread is None or self._process != os.getpid():
            return  # a forked child has no such thread
        thread.join(limit)
        if thread.is_alive():
            _log.warning(
                "the last commit is still not in %s after %g s: it is lost if the process ends",
                self.directory,
                limit,
            )

    def _finish_at_exit(self) -> None:
        """Makes this process finish before it ends, once."""
        if self._process is None:
            self._process = os.getpid()
            # `multiprocessing` ends its processes without calling the functions of atexit.
            register = getattr(threading, "_register_atexit", atexit.register)
            with contextlib.suppress(RuntimeError):  # the process is ending already
                register(self.finish)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                commit, self._next = self._next, None
                if commit is None:
                    self._thread = None
                    return
            self._write(*commit)

    def _folder(self, number: int) -> Path:
        return self.directory / f"commit-{number:010}"

    def _write(self, number: int, text: str, tensors: dict[str, torch.Tensor]) -> None:
        folder = self._folder(number)
        hidden = self.directory / f".{folder.name}.{socket.gethostname()}.{os.getpid()}"
        try:
            hidden.mkdir(parents=True, exist_ok=True)
            self._clean(hidden)
            write_tensors(hidden / "tensors.safetensors", tensors)
            with (hidden / "state.json").open("w") as target:
                target.write(text)
                target.flush()
                os.fsync(target.fileno())
            if folder.exists():  # of an earlier run; this one began from an older commit
                shutil.rmtree(folder)
            hidden.rename(folder)
            self._damaged.discard(number)
            self._prune(number)
        except Exception as error:  # whatever it is, it must not end the training
            shutil.rmtree(hidden, ignore_errors=True)
            if not self._warned:
                self._warned = True
                _log.warning(
                    "commit %d can't be written to %s: %s. Training goes on, and later commits try "
                    "it again without a warning",
                    number,
                    self.directory,
                    error,
                )

    def _clean(self, own: Path) -> None:
        """Removes the hidden folders of processes that are gone, except this one's."""
        for other in self.directory.glob(".commit-*"):
            if other == own:
                continue
            match = _HIDDEN.fullmatch(other.name)
            if match and match[1] == socket.gethostname():
                is_gone = not _runs(int(match[2]))
            else:
                # Both times are the file system's: the clocks of hosts differ.
                is_gone = _changed_ns(own) - _changed_ns(other) > _ABANDONED_NS
            if is_gone:
                shutil.rmtree(other, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Removes the commits up to ``newest`` that are older than the last readable ones."""
        found = [number for number in self.numbers() if number <= newest]
        kept = [number for number in found if number not in self._damaged][:_KEPT]
        for old in found:
            if len(kept) == _KEPT and old < kept[-1]:
                shutil.rmtree(self._folder(old), ignore_errors=True)
