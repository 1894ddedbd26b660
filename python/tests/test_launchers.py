"""Jobs that srun and mpirun start, without ``gradwire run``."""

from __future__ import annotations

import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from launchers import MPI, Tasks, install, slurm
from launching import LAUNCHER, LIMIT, PLACES, free_ports, remains, until

# The ranks form a second job after the first.
TWICE = f"{PLACES}\ngw.shutdown(){PLACES.replace('RANK', 'AGAIN')}"
# The ranks of the first node are still in the first job when those of the second form another one.
LATE = f"""
import os, time
{PLACES}
if os.environ["SLURM_NODEID"] == "0":
    time.sleep(5)
gw.shutdown(){PLACES.replace("RANK", "AGAIN")}
"""
ENDS = """
import os, signal, sys
import gradwire as gw
gw.init()
gw.barrier()
if gw.rank() == 1:
    eval(sys.argv[1])
try:
    gw.barrier()
except gw.GradwireError as error:
    os.write(1, f"TOLD {error.rank} {error}\\n".encode())
    sys.exit(8)
"""
NO_MEMBER = """
import os
import gradwire as gw
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    import time
    time.sleep(8)
else:
    gw.init()
"""
GROUP = """
import torch
import torch.distributed as dist
import gradwire.torch.distributed
dist.init_process_group("gradwire")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"RANK {dist.get_rank()} of {dist.get_world_size()} sum {total.item()}", flush=True)
dist.destroy_process_group()
"""


# The second rank of a job with a pause comes after the ranks of another job.
OWN = """
import os, sys, time
import numpy as np
if os.environ["PMI_RANK"] == "1":
    time.sleep(float(sys.argv[2]))
import gradwire as gw
gw.init()
total = gw.allreduce(np.ones(1) * int(sys.argv[1]), op=gw.Sum)
os.write(1, f"JOB {sys.argv[1]} {total}\\n".encode())
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Tasks:
    """Tasks of launchers that are installed."""
    install()
    return Tasks(tmp_path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The variables of a running Slurm."""
    with slurm() as variables:
        yield variables


@pytest.fixture
def on_slurm(cluster: dict[str, str], tmp_path: Path) -> Tasks:
    """Tasks of srun on two nodes, with a secret and a place to meet."""
    secret = tmp_path / "secret"
    subprocess.run([LAUNCHER, "secret", str(secret)], check=True)
    [port] = free_ports(1)
    given = {"GRADWIRE_SECRET_FILE": str(secret), "GRADWIRE_RENDEZVOUS": f"localhost:{port}"}
    return Tasks(tmp_path, cluster | given)


@pytest.mark.parametrize("mpi", MPI)
def test_mpirun_starts_a_job(mpi: str, tasks: Tasks) -> None:
    done = tasks.run([*MPI[mpi], "3"], TWICE)
    assert done.code == 0, done.text
    for rank in range(3):
        for word in ("RANK", "AGAIN"):
            assert f"{word} {rank} of 3 local {rank} of 3 sum 6.0" in done.text, done.text


@pytest.mark.parametrize(
    ("how", "says"),
    [("os.kill(os.getpid(), 9)", "ended without leaving"), ("sys.exit(3)", "exit code 3")],
)
def test_mpirun_names_who_ended(how: str, says: str, tasks: Tasks) -> None:
    # Open MPI 5 kills the other ranks before they can say anything.
    done = tasks.run([*MPI["Open MPI"], "2"], ENDS, how)
    assert done.code != 0 and "TOLD 1 rank 1" in done.text and says in done.text, done.text


def test_jobs_of_a_host_share_a_rendezvous(tasks: Tasks) -> None:
    [port] = free_ports(1)
    place = {"GRADWIRE_RENDEZVOUS": f"127.0.0.1:{port}"}
    words = [*MPI["MPICH"], "2"]
    with ThreadPoolExecutor() as threads:
        late = threads.submit(tasks.run, words, OWN, "1", "3", **place)
        early = tasks.run(words, OWN, "10", "0", **place)
        assert early.code == 0 and early.text.count("JOB 10 [20.]") == 2, early.text
        done = late.result()
    assert done.code == 0 and done.text.count("JOB 1 [2.]") == 2, done.text


def test_a_settings_file_reaches_the_ranks(tasks: Tasks) -> None:
    file = tasks.folder / "settings.toml"
    file.write_text('[checks]\nfinite = "fail"\n')
    words, text = [*MPI["MPICH"], "2"], OWN.replace("np.ones(1)", "np.array([np.nan])")
    for given in ({"GRADWIRE_CONFIG": str(file)}, {"GRADWIRE_CHECKS__FINITE": "fail"}):
        done = tasks.run(words, text, "1", "0", **given)
        assert done.code != 0 and "contributes NaN" in done.text, done.text


def test_mpirun_names_a_rank_without_init(tasks: Tasks) -> None:
    words = [*MPI["Open MPI"], "2"]
    done = tasks.run(words, NO_MEMBER, GRADWIRE_LAUNCH__START_TIMEOUT_MS="2000")
    assert done.code != 0 and "rank 1" in done.text and "has not joined" in done.text, done.text


def test_a_program_joins_under_mpirun(tasks: Tasks) -> None:
    pytest.importorskip("torch")
    done = tasks.run([*MPI["Open MPI"], "2", LAUNCHER, "join", "--"], GROUP)
    assert done.code == 0, done.text
    assert all(f"RANK {rank} of 2 sum 3.0" in done.text for rank in range(2)), done.text
    done = tasks.start([*MPI["Open MPI"], "2", LAUNCHER, "join", "--", "no-such-program"])
    assert done.code == 127 and "can't run no-such-program" in done.text, done.text


def test_tasks_that_are_dealt_out_are_refused(tasks: Tasks) -> None:
    # As on the second of two hosts, with --map-by node.
    numbers = {"RANK": 1, "SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}
    given = " ".join(f"OMPI_COMM_WORLD_{name}={number}" for name, number in numbers.items())
    program = ["sh", "-c", f"{given} exec {sys.executable} -c '{PLACES}'"]
    done = tasks.start([*MPI["Open MPI"], "2", *program])
    assert done.code != 0 and "OMPI_COMM_WORLD_LOCAL_RANK=0" in done.text, done.text
    assert "must follow each other" in done.text, done.text


def test_srun_starts_jobs_on_two_nodes(on_slurm: Tasks) -> None:
    # Three tasks on the first node, and two on the second.
    done = on_slurm.run(["srun", "-N2", "-n5", "--ntasks-per-node=3"], TWICE)
    assert done.code == 0, done.text
    for rank in range(5):
        for word in ("RANK", "AGAIN"):
            assert f"{word} {rank} of 5 local " in done.text, done.text
    assert done.text.count("sum 15.0") == 10, done.text


def test_a_second_job_waits_for_the_first(on_slurm: Tasks) -> None:
    done = on_slurm.run(["srun", "-N2", "-n2"], LATE)
    assert done.code == 0, done.text
    assert all(f"AGAIN {rank} of 2 local 0 of 1 sum 3.0" in done.text for rank in range(2))
    assert "WARN" not in done.text and "gradwired: " not in done.text, done.text


def test_srun_names_a_killed_rank(on_slurm: Tasks) -> None:
    done = on_slurm.run(["srun", "-N2", "-n2"], ENDS, "os.kill(os.getpid(), 9)")
    assert done.code != 0 and "TOLD 1 rank 1" in done.text, done.text


def test_srun_without_a_secret(on_slurm: Tasks) -> None:
    done = on_slurm.run(["srun", "-N2", "-n2"], PLACES, GRADWIRE_SECRET_FILE="")
    assert done.code != 0 and "which needs a secret" in done.text, done.text
    assert "gradwire secret" in done.text and "Traceback" in done.text, done.text


def test_srun_with_two_secrets(on_slurm: Tasks) -> None:
    for node in range(2):
        subprocess.run([LAUNCHER, "secret", str(on_slurm.folder / f"secret.{node}")], check=True)
    command = 'GRADWIRE_SECRET_FILE="$0.$SLURM_NODEID" exec "$@"'
    done = on_slurm.run(
        ["srun", "-N2", "-n2", "sh", "-c", command, str(on_slurm.folder / "secret")],
        PLACES,
        GRADWIRE_LAUNCH__START_TIMEOUT_MS="3000",
    )
    assert done.code != 0 and "the job secret of this node differs" in done.text, done.text


def test_srun_deals_tasks_out(on_slurm: Tasks) -> None:
    done = on_slurm.run(["srun", "-N2", "-n4", "--distribution=cyclic"], PLACES)
    assert done.code != 0 and "as with --distribution=block" in done.text, done.text


def test_a_batch_script_runs_one_process(on_slurm: Tasks) -> None:
    """Inside an allocation for several tasks, a process without srun is a job of its own."""
    program, output = on_slurm.folder / "alone.py", on_slurm.folder / "output"
    program.write_text(PLACES)
    words = ["sbatch", "--wait", "-N2", "-n4", f"--output={output}", "--wrap"]
    done = on_slurm.start([*words, f"{sys.executable} {program}"])
    assert done.code == 0 and "RANK 0 of 1" in output.read_text(), done.text + output.read_text()


# A rank whose job ends from outside, with and without `gradwire run`.
ENDLESS = """
import os, time
import gradwire as gw
gw.init()
again = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"BEGUN {gw.rank()} of {gw.size()}, start {again}", flush=True)
while again == "0":
    gw.barrier()
    time.sleep(0.1)
"""
STARTS = {"srun": ["srun"], "gradwire run": [LAUNCHER, "run", "--"]}


@pytest.fixture
def submit(on_slurm: Tasks) -> Iterator[Callable[..., Path]]:
    """Submits a batch job of two ranks on two nodes; returns the file with its output. Nothing of
    the job must be left behind."""
    mark = uuid.uuid4().hex

    def sbatch(*words: str) -> Path:
        program, output = on_slurm.folder / "endless.py", on_slurm.folder / "output"
        program.write_text(ENDLESS)
        command = shlex.join([*words, sys.executable, str(program)])
        options = ["--parsable", "--requeue", "--open-mode=append", f"--output={output}"]
        done = on_slurm.start(
            ["sbatch", *options, "-N2", "-n2", "--wrap", f"MARK={mark} {command}"]
        )
        assert done.code == 0, done.text
        on_slurm.variables["JOB"] = done.text.strip()
        until("both ranks run", lambda: output.exists() and output.read_text().count("BEGUN") == 2)
        return output

    yield sbatch
    until("all processes have ended", lambda: not remains(mark.encode()))


@pytest.mark.parametrize("how", STARTS)
def test_scancel_ends_a_job(how: str, submit: Callable[..., Path], on_slurm: Tasks) -> None:
    output = submit(*STARTS[how])
    job = on_slurm.variables["JOB"]
    done = on_slurm.start(["scancel", job])
    assert done.code == 0, done.text
    state = ["scontrol", "show", "job", job]
    until("the job is over", lambda: "JobState=CANCELLED" in on_slurm.start(state).text)
    assert "panicked" not in output.read_text(), output.read_text()


@pytest.mark.parametrize("how", STARTS)
def test_a_requeued_job_is_a_new_one(
    how: str, submit: Callable[..., Path], on_slurm: Tasks
) -> None:
    output = submit(*STARTS[how])
    job = on_slurm.variables["JOB"]
    done = on_slurm.start(["scontrol", "requeue", job])
    assert done.code == 0, done.text
    state = ["scontrol", "show", "job", job]
    until("it waits", lambda: "JobState=PENDING" in on_slurm.start(state).text)
    # Slurm would wait for minutes.
    done = on_slurm.start(["scontrol", "update", f"JobId={job}", "StartTime=now"])
    assert done.code == 0, done.text
    until("it has run again", lambda: "JobState=COMPLETED" in on_slurm.start(state).text, LIMIT)
    for rank in range(2):
        assert f"BEGUN {rank} of 2, start 1" in output.read_text(), output.read_text()


def test_gradwire_run_uses_the_allocation(on_slurm: Tasks) -> None:
    """Without a list of hosts, `gradwire run` takes those of Slurm, and srun starts its helpers."""
    words = ["salloc", "--quiet", "-N2", "-n5", LAUNCHER, "run", "--"]
    done = on_slurm.run(words, PLACES)
    assert done.code == 0, done.text
    assert "the hosts are n1:4,n2:1, by SLURM_JOB_NODELIST" in done.text, done.text
    for rank in range(5):
        local = f"{rank % 4} of {4 if rank < 4 else 1}"
        assert f"RANK {rank} of 5 local {local} sum 15.0" in done.text, done.text


def test_a_killed_rank_under_slurm_is_named(on_slurm: Tasks) -> None:
    words = ["salloc", "--quiet", "-N2", "-n2", LAUNCHER, "run", "--"]
    done = on_slurm.run(words, ENDS, "os.kill(os.getpid(), 9)")
    assert done.code == 137, done.text
    assert "rank 1 on host n2 (pid" in done.text and "SIGKILL" in done.text, done.text


def test_gradwire_run_without_srun_says_so(on_slurm: Tasks) -> None:
    words = [LAUNCHER, "run", "-np", "2", "-H", "n1,n2", "--set", "launch.starter=srun", "--"]
    done = on_slurm.run(words, PLACES, PATH="/nowhere")
    assert done.code == 1 and "srun can't be run" in done.text, done.text
