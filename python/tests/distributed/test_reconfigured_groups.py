"""Process groups whose ranks the program chooses again and again, also after losses."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import LIMIT, Job, needs_torch

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
WHY = "older releases have no enable_reconfigure"


def test_groups_are_formed_after_losses(tmp_path: Path) -> None:
    needs_torch(2, 15, why=WHY)
    words = [sys.executable, str(HERE / "reconfigured.py"), str(tmp_path)]
    processes = [
        subprocess.Popen([*words, str(me)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for me in range(4)
    ]
    try:
        said = [process.communicate(timeout=LIMIT)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert processes[0].returncode == -signal.SIGKILL, said[0]
    for me in range(1, 4):
        assert processes[me].returncode == 0 and f"GOOD {me}" in said[me], said[me]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_launchers_ranks_are_not_reconfigured(job: Job, enabled: bool) -> None:
    needs_torch(2, 15, why=WHY)
    done = job(
        f"""
        import torch.distributed as dist
        import gradwire.torch as hvd

        try:
            dist.init_process_group("gradwire", enable_reconfigure={enabled})
        except hvd.InvalidRequest as error:
            assert "--min-np" in str(error), error
            print("REFUSED", flush=True)
        else:
            assert not dist._supports_reconfigure()
            try:
                dist._get_reconfigure_handle()
            except NotImplementedError as error:
                assert "enable_reconfigure=True" in str(error), error
            dist.destroy_process_group()
        """
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("REFUSED") == 2 * enabled, done.stdout
