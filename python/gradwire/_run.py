"""``gradwire.run``: runs a function as a job on this machine, from a script or a notebook."""

from __future__ import annotations

import importlib.util
import operator
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire import _start, _uncaught
from gradwire._errors import Cancelled, GradwireError, InvalidRequest
from gradwire._objects import dumps
from gradwire._programs import find

# How the launcher begins the line with its own error.
_ERROR = "error: "
# The launcher's report about the rank at fault.
_AT_FAULT = re.compile(r"gradwire: (?:the job failed: )?(rank (\d+) on host .*)")


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    *,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    executable: str | None = None,
    verbose: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    spares: int | None = None,
    host_discovery_script: str | os.PathLike[str] | None = None,
    slots_per_host: int | None = None,
    elastic_timeout: float | None = None,
    reset_limit: int | None = None,
    blacklist_cooldown_range: tuple[float, float] | None = None,
    stop_signal: str | int | None = None,
) -> list[Any]:
    """Runs a function on the ranks of a new job on this machine.

    Each rank is a new process. The function calls ``init()`` itself, as a script does. It is sent
    pickled, so it must be importable, unless the package ``cloudpickle`` is installed. The ranks'
    output is printed here.

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        np: The number of ranks.
        hosts: Hosts and slots as in ``gradwire run -H``. All names must be names of this machine;
            to use several machines, start a script with ``gradwire run``.
        env: Environment variables of the ranks, in addition to those of this process.
        executable: The ranks' Python interpreter. The default is the current one.
        verbose: Whether the launcher prints its log.
        min_np: Makes the job elastic: after a loss it continues with at least this many ranks.
        max_np: The job grows to at most this many ranks. The default is ``np``.
        spares: How many more processes are kept ready to replace lost ranks.
        host_discovery_script: A program that prints the hosts of an elastic job.
        slots_per_host: The slots of a host that the program prints without a number.
        elastic_timeout: How many seconds an elastic job may take to continue.
        reset_limit: How often an elastic job may continue.
        blacklist_cooldown_range: The first and the longest quarantine of a slot, in seconds.
        stop_signal: The signal that makes ``should_stop()`` true, besides SIGTERM: ``"SIGUSR1"`` or
            ``signal.SIGUSR1``, or SIGUSR2.

    Returns:
        The results of all ranks, in rank order. In an elastic job these are the ranks that have
        returned; lost ones have no result.

    Raises:
        InvalidRequest: An argument is invalid, or the function can't be pickled.
        NotLaunched: The program ``gradwire`` is not installed.
        Cancelled: A rank raised, or the job failed. The message contains the rank's traceback.
        GradwireError: All failed ranks only noticed a failure of another rank. This is the error of
            the first of them, such as ``PeerLost``, with the ``rank`` and ``host`` at fault.

    Example:
        ```python
        def mean_of(value):
            gw.init()
            return float(gw.allreduce(np.array([value]))[0])

        means = gw.run(mean_of, args=(3.0,), np=4)
        ```
    """
    np = _checked(func, args, np)
    with tempfile.TemporaryDirectory(prefix="gradwire-run-") as name:
        folder = Path(name)
        try:
            call = dumps((func, tuple(args), dict(kwargs or {})))
        except Exception as error:
            text = f"{_name(func)} or one of its arguments can't be pickled: {error}"
            raise InvalidRequest(text, kind="invalid") from error
        (folder / "call").write_bytes(call)
        gradwire = find("gradwire")
        # If this process is killed, the launcher is asked to end the job (CLEAN).
        words = [gradwire, "exec-child", "--gently", str(os.getpid())]
        words += [gradwire, "run", "-np", str(np), "--folder-of-caller", name]
        words += ["-H", hosts] if hosts is not None else []
        words += ["--verbose"] if verbose else []
        options = {
            "--min-np": min_np,
            "--max-np": max_np,
            "--spares": spares,
            "--host-discovery-script": host_discovery_script,
            "--slots-per-host": slots_per_host,
            "--elastic-timeout": elastic_timeout,
            "--reset-limit": reset_limit,
            "--stop-signal": _name_of(stop_signal),
        }
        for flag, value in options.items():
            words += [flag, os.fspath(value) if isinstance(value, os.PathLike) else str(value)] * (
                value is not None
            )
        if blacklist_cooldown_range is not None:
            words += ["--blacklist-cooldown-range", *map(str, blacklist_cooldown_range)]
        is_elastic = any(it is not None for it in (min_np, max_np, host_discovery_script))
        words += [
            "--",
            executable or sys.executable,
            "-c",
            "import gradwire._run as job; job.rank()",
            name,
        ]
        # The ranks must be able to import what the pickled call refers to by name.
        paths = os.pathsep.join([path for path in sys.path if path] + [os.getcwd()])
        variables = {**_start.environment_outside(), "PYTHONPATH": paths, **(env or {})}
        with subprocess.Popen(
            words,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as job:
            assert job.stdout is not None
            why, at_fault = "", None
            try:
                # sys.stdout, because in a notebook it differs from the process's stdout.
                for line in job.stdout:
                    sys.stdout.write(line)
                    if line.startswith(_ERROR):
                        why = line.removeprefix(_ERROR).strip()
                    elif (report := _AT_FAULT.match(line)) is not None:
                        why, at_fault = report[1], int(report[2])
                code = job.wait()
            except BaseException:
                # A notebook interrupts only this process; the launcher ends its ranks (CLEAN).
                job.terminate()
                job.communicate()
                raise
        return _results(folder, None if is_elastic else np, code, why, at_fault)


def _name_of(number: str | int | None) -> str | None:
    """Returns the name of a signal; the launcher checks it."""
    if number is None or isinstance(number, str):
        return number
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _name(func: Any) -> str:
    return getattr(func, "__qualname__", None) or repr(func)


def _checked(func: Any, args: Any, np: Any) -> int:
    """Checks the arguments and returns the number of ranks."""
    if not callable(func):
        raise InvalidRequest(f"func={func!r}: it must be a function", kind="invalid")
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        text = f"args={args!r}: it must be a sequence of arguments, (x,) for a single one"
        raise InvalidRequest(text, kind="invalid")
    try:
        ranks = operator.index(np)
    except TypeError:
        raise InvalidRequest(f"np={np!r}: it must be a whole number", kind="invalid") from None
    if ranks < 1:
        raise InvalidRequest(f"np={np}: a job needs at least one rank", kind="invalid")
    if (
        getattr(func, "__module__", None) == "__main__"
        and importlib.util.find_spec("cloudpickle") is None
    ):
        text = (
            f"{_name(func)} is defined in __main__, which other processes can't import: install "
            "cloudpickle (pip install cloudpickle), or move the function into a module"
        )
        raise InvalidRequest(text, kind="invalid")
    return ranks


def _results(
    folder: Path, size: int | None, code: int, why: str, at_fault: int | None
) -> list[Any]:
    """Returns the results of all ranks; of an elastic job (``size`` is None), those that exist.

    ``why`` is the error of the launcher, if it has printed one, and ``at_fault`` the rank that it
    names.
    """
    if size is None and code == 0:
        found = [pickle.loads(path.read_bytes()) for path in folder.glob("result.*")]
        return [result for _, result in sorted(found, key=lambda one: one[0])]
    errors: list[Path] = []
    # The error of the rank at fault says more than the errors of ranks that noticed it.
    for kind in ("error", "noticed"):
        errors += sorted(folder.glob(f"{kind}.*"), key=lambda path: path.stat().st_mtime_ns)
    if errors:
        rank = int(errors[0].suffix[1:])
        text, noticed = pickle.loads(errors[0].read_bytes())
        if noticed is None:
            text = f"rank {rank} of the job raised:\n{text}"
            raise Cancelled(text, kind="cancelled", rank=rank)
        text = f"{noticed}\nThis is what rank {rank} noticed:\n{text}"
        facts = {name: getattr(noticed, name) for name in ("kind", "rank", "host", "tensor")}
        raise type(noticed)(text, **facts)
    files = [folder / f"result.{rank}" for rank in range(size or 0)]
    missing = [rank for rank, path in enumerate(files) if not path.exists()]
    if code != 0 or missing:
        why = f"{why or 'see the output above'} (exit code {code})"
        if len(missing) == 1:
            text = f"rank {missing[0]} of the job returned no result; {why}"
            at_fault = missing[0] if at_fault is None else at_fault
        elif missing:
            text = f"{len(missing)} ranks of the job returned no result; {why}"
        else:
            text = f"the job failed; {why}"
        raise Cancelled(text, kind="cancelled", rank=at_fault)
    return [pickle.loads(path.read_bytes())[1] for path in files]


def rank() -> None:
    """Runs on each rank: calls the function, and writes its result or its error to a file."""
    import traceback

    # In an elastic job the rank may change; the worker id does not.
    own = os.environ.get("GRADWIRE_WORKER") or os.environ["GRADWIRE_RANK"]
    folder = Path(sys.argv[1])
    try:
        func, args, kwargs = pickle.loads((folder / "call").read_bytes())
        returned = func(*args, **kwargs)
        result = _dumped(func, (_rank_or(int(own)), returned))
    except SystemExit as error:
        text = f"SystemExit: {error.code}\nThe function ended its process, so it has no result."
        (folder / f"error.{own}").write_bytes(pickle.dumps((text, None)))
        raise
    except Exception as error:
        others = isinstance(error, GradwireError) and error.rank not in (None, int(own))
        with _uncaught.shortened(error):
            text = traceback.format_exc()
        name = f"{'noticed' if others else 'error'}.{own}"
        is_ours = type(error).__module__.partition(".")[0] == "gradwire"
        told = error if others and is_ours else None
        (folder / name).write_bytes(pickle.dumps((text, told)))
        raise
    (folder / f"result.{own}").write_bytes(result)


def _dumped(func: Any, result: Any) -> bytes:
    try:
        return dumps(result)
    except Exception as error:
        text = f"the result of {_name(func)} can't be pickled: {error}"
        raise InvalidRequest(text, kind="invalid") from error


def _rank_or(number: int) -> int:
    """Returns the rank of this process, or ``number`` if it has left the job."""
    from gradwire import _world

    return _world.rank() if _world.is_initialized() else number
