"""torchft's own tests of process groups, which are in its wheel, over Gradwire's.

In a group with several ranks, each rank has a process of its own, as in torchft's tests of Gloo: a
process is a rank of one job. The tests expect Gloo's error texts, which are replaced.
"""

from __future__ import annotations

import re
import unittest
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchft", reason="torchft is not installed: pip install gradwire[torchft]")
pytest.importorskip("parameterized", reason="torchft's tests need parameterized")

from torch import nn  # noqa: E402
from torch.distributed import TCPStore  # noqa: E402
from torchft import process_group_test as own  # noqa: E402

from gradwire.torch.torchft import (  # noqa: E402
    ProcessGroupBabyGradwire,
    ProcessGroupGradwire,
)

# What Gloo's error of a lost rank says, and what Gradwire's does.
GLOOS, OURS = "Connection closed by peer", r"rank \d"


class TestThreeReplicas(own.MultiPgBaseTest):  # type: ignore[misc, name-defined]
    WORLD_SIZE = 3

    @classmethod
    def _create_pg(cls, backend: str) -> Any:
        return ProcessGroupBabyGradwire(timeout=timedelta(seconds=60))

    def assertRaisesRegex(self, kind: Any, text: Any, *args: Any, **kwargs: Any) -> Any:
        text = str(text).replace(GLOOS, f"{GLOOS}|{OURS}")
        return super().assertRaisesRegex(kind, text, *args, **kwargs)

    def test_collectives(self) -> None:
        for collective in own._ALL_COLLECTIVES:
            with self.subTest(collective):
                self._run_parallel(collective)

    def test_collectives_outlive_a_lost_replica(self) -> None:
        # The loss of a third rank doesn't disturb a send over Gloo, but it ends our group.
        for collective in ("allreduce", "alltoall_base", "barrier"):
            with self.subTest(collective):
                self._run_with_resiliency(collective)


class TestOneReplica(unittest.TestCase):
    def setUp(self) -> None:
        self.store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def address(self, prefix: str = "prefix") -> str:
        return f"localhost:{self.store.port}/{prefix}"

    def test_apis(self) -> None:
        group = ProcessGroupGradwire(timeout=timedelta(seconds=60))
        try:
            for prefix in ("first", "second"):
                group.configure(self.address(prefix), "0", 0, 1)
                assert group.size() == 1
                own._test_pg(group, torch.tensor([2]))
                model = nn.parallel.DistributedDataParallel(nn.Linear(3, 4), process_group=group)
                model(torch.rand(2, 3)).sum().backward()
        finally:
            group.shutdown()

    def test_apis_in_a_process_of_its_own(self) -> None:
        group = ProcessGroupBabyGradwire(timeout=timedelta(seconds=60))
        try:
            group.configure(self.address(), "0", 0, 1)
            own._test_pg(group)
        finally:
            group.shutdown()
        with self.assertRaisesRegex(OSError, "handle is closed"):
            group.allreduce([torch.zeros(10)], own.AllreduceOptions()).wait()

    def test_timeouts(self) -> None:
        short = timedelta(seconds=0.01)
        with self.assertRaises(Exception) as caught:
            ProcessGroupGradwire(timeout=short).configure(self.address(), "0", 0, 2)
        assert re.search("within|time", str(caught.exception)), caught.exception
        with self.assertRaisesRegex(TimeoutError, "timed out after 0.01 seconds"):
            ProcessGroupBabyGradwire(timeout=short).configure(self.address(), "0", 0, 2)
