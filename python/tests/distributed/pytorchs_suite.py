"""Runs PyTorch's own distributed test suite on a backend and writes a report.

    python python/tests/distributed/pytorchs_suite.py --ranks 4 --as gloo --report report.json

The suite is part of PyTorch's wheel (``torch.testing._internal.distributed.distributed_test``) and
needs the package ``expecttest``. It starts the ranks of each test itself; here they are forked, so
that they need not import PyTorch. Many tests run only for known backend names; with ``--as gloo``,
Gradwire uses that name. Tests for GPUs are not applicable.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", default="gradwire", help="gloo, to compare")
    parser.add_argument("--as", dest="name", help="the name under which the tests find it")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", default="", help="a regular expression for the tests' names")
    parser.add_argument("--seconds", type=int, default=120, help="how long one test may take")
    parser.add_argument("--report", type=Path, help="where to write all results, as JSON")
    return parser.parse_args()


class Late(Exception):
    """A test has timed out."""


def suite(given: argparse.Namespace) -> type[unittest.TestCase]:
    """Returns the class with all of the suite's tests."""
    os.environ.update(
        BACKEND=given.name or given.backend,
        WORLD_SIZE=str(given.ranks),
        TEMP_DIR=tempfile.mkdtemp(),
        OMP_NUM_THREADS="1",
    )
    import torch
    from torch.testing._internal import common_distributed as common

    if given.name:
        backend = torch.distributed.Backend
        backend._ensure_backend_registered(given.backend)
        backend._plugins[given.name.upper()] = backend._plugins[given.backend.upper()]
    # The suite decides these by the backend's name.
    for feature in ("ddp", "subgroup"):
        common.DistTestCases.backend_feature[feature].add(given.backend)
    if given.backend == "gradwire":
        common.DistTestCases.skip_collective["sendrecv anysource"].add(given.name or given.backend)
    from torch.testing._internal.distributed import distributed_test as theirs

    if given.name:
        # It has that backend's name, but not its profiler events.
        theirs.PROFILING_SUPPORTED_BACKENDS.clear()
        theirs.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()

    class Suite(theirs.TestDistBackend, theirs.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Suite


def kill(test: Any) -> None:
    for process in getattr(test, "processes", []):
        process.kill()


def run(test: unittest.TestCase, seconds: int) -> tuple[str, str]:
    """Returns the outcome and its reason."""

    def late(*_: Any) -> None:
        raise Late(f"it took more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    result = unittest.TestResult()
    try:
        test.run(result)
    except Late as error:
        kill(test)
        return "failed", str(error)
    finally:
        signal.alarm(0)
        kill(test)
    if result.skipped:
        return "not applicable", result.skipped[0][1]
    for _, text in result.failures + result.errors:
        return "failed", text.strip()[-1500:]
    return "passed", ""


def main() -> None:
    given = arguments()
    kind = suite(given)
    names = [
        name for name in unittest.TestLoader().getTestCaseNames(kind) if re.search(given.only, name)
    ]
    results: dict[str, dict[str, str]] = {}
    for at, name in enumerate(names):
        started = time.monotonic()
        outcome, reason = run(kind(name), given.seconds)
        results[name] = {"outcome": outcome, "reason": reason}
        last = reason.splitlines()[-1] if reason else ""
        print(
            f"[{at + 1}/{len(names)}] {outcome:14} {name} {time.monotonic() - started:.1f} s "
            f"{last[:160]}",
            flush=True,
        )
        if given.report:
            given.report.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    print(dict(collections.Counter(result["outcome"] for result in results.values())))
    sys.exit(any(result["outcome"] == "failed" for result in results.values()))


if __name__ == "__main__":
    main()
