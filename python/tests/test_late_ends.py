"""Ends that others notice late: after `shutdown()`, between epochs, and behind a child."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

from launching import LIMIT, Job

TRAINING = """
    import os, sys, time
    import gradwire as gw, numpy as np
    from gradwire import elastic

    gw.init()

    @elastic.run
    def train(state):
        while state.step < 8:
            gw.allreduce(np.ones(10, np.float32), name="gradients")
            state.step += 1
            if state.step == 5 and "LEAVES" in os.environ and gw.rank() == 1:
                sys.exit(0)
            if state.step % 4 == 0:
                state.commit()

    rank = gw.rank()
    train(elastic.ObjectState(step=0))
    gw.shutdown()
    print("LEFT", flush=True)
    if rank == 1:
        os.kill(os.getpid(), 9)
    # The last work of a rank: evaluation, writing the model. It waits until the launcher knows.
    time.sleep(4)
    print("WORKED", flush=True)
"""


def test_a_loss_after_the_training_ends_nobody(job: Job) -> None:
    done = job(TRAINING, ranks=3, options=["--min-np", "2"])
    assert done.returncode == 128 + signal.SIGKILL, done.stdout
    assert done.stdout.count("LEFT") == 3 and done.stdout.count("WORKED") == 2, done.stdout
    assert "so the others end by themselves" in done.stdout, done.stdout
    assert "epoch 2" not in done.stdout, done.stdout
    report = [line for line in done.stdout.splitlines() if line.startswith("gradwire: rank")]
    assert all("rank 1 " in line and "was killed by SIGKILL" in line for line in report), report


def test_a_rank_that_leaves_is_reported(job: Job) -> None:
    done = job(TRAINING, ranks=3, options=["--min-np", "2"], LEAVES="1")
    assert done.returncode == 1, done.stdout
    [headline] = [line for line in done.stdout.splitlines() if "the job failed: " in line]
    assert "rank 1 " in headline and "it has left the job" in headline, done.stdout
    # Where the others waited: for the gradients, or in the next commit.
    assert "submitted at " in headline and "in train" in headline, headline


NEWCOMER = """
    import os, time
    if os.environ["GRADWIRE_WORKER"] == "2":
        # As a script that redirects it. The launcher hears of this rank all the same.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    import gradwire as gw, numpy as np
    from gradwire import elastic

    gw.init()

    @elastic.run
    def train(state):
        while state.step < 10 or gw.size() < 2 and state.step < 3000:
            if state.step == 5 and os.environ["GRADWIRE_WORKER"] == "1":
                os.kill(os.getpid(), 9)
            gw.allreduce(np.ones(10, np.float32), name="gradients")
            time.sleep(0.005)
            state.step += 1
            state.commit()
        print("END", gw.size(), flush=True)

    train(elastic.ObjectState(step=0))
"""


def test_a_newcomer_with_redirected_errors_joins(job: Job) -> None:
    done = job(NEWCOMER, hosts="127.0.0.1:3", options=["-np", "2", "--min-np", "1"])
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("END 2") == 2, done.stdout


def test_a_death_behind_a_child_is_noticed(tmp_path: Path) -> None:
    """Without `gradwire run` nobody says that a rank has ended, and its child has its socket."""
    program = tmp_path / "program.py"
    text = """
        import multiprocessing, os, signal, time
        import gradwire as gw, numpy as np

        gw.init()
        gw.barrier()
        if gw.rank() == 1:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
            child.start()
            print("CHILD", child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            gw.allreduce(np.ones(3), name="waits")
        except gw.PeerLost as error:
            print("TOLD", error.rank, error, flush=True)
    """
    program.write_text(textwrap.dedent(text))
    host = socket.gethostname()
    common = {"JOB_ID": str(os.getpid()), "STEP_ID": "0", "NODEID": "0", "NNODES": "1"}
    common |= {"NTASKS": "2", "STEP_NUM_TASKS": "2", "STEP_TASKS_PER_NODE": "2"}
    common |= {"STEP_NUM_NODES": "1", "STEP_NODELIST": host, "JOB_NODELIST": host}
    ranks = []
    for rank in ("0", "1"):
        variables = {f"SLURM_{name}": value for name, value in common.items()}
        variables |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
        words = [sys.executable, str(program)]
        out = (tmp_path / rank).open("w")
        # The child keeps its standard output, so that is not a pipe.
        ranks.append(subprocess.Popen(words, env={**os.environ, **variables}, stdout=out))
        out.close()
    try:
        assert ranks[0].wait(timeout=LIMIT) == 0
        told = (tmp_path / "0").read_text()
        assert "TOLD 1 rank 1 " in told and "ended without leaving the job" in told, told
        assert "no heartbeat" not in told, told
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for line in (tmp_path / "1").read_text().splitlines():
            if line.startswith("CHILD "):
                os.kill(int(line.split()[1]), signal.SIGKILL)
